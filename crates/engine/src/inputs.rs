//! Checks micro-batches and copies them to the device.

use lockstep_device::{Queue, View};
use lockstep_plan::{GenerationBounds, PhaseKind};

use crate::driver::{DecodeBatch, MicroBatch};
use crate::engine::Shared;
use crate::error::EngineError;

/// The size of the current micro-batch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BatchSize {
    pub(crate) tokens: usize,
    pub(crate) docs: usize,
    /// Tokens without padding. Padding fills the last block and does not affect any result.
    pub(crate) real_tokens: usize,
}

/// A device with its own memory gets multiples of this many tokens.
const BLOCK_TOKENS: usize = 256;

impl BatchSize {
    /// The size with the last block padded by one more document, whose coefficients and gradients are zero.
    fn padded(&self) -> BatchSize {
        let tokens = self.tokens.next_multiple_of(BLOCK_TOKENS);
        BatchSize {
            tokens,
            docs: self.docs + usize::from(tokens > self.tokens),
            real_tokens: self.real_tokens,
        }
    }
}

/// The parts of the inputs buffer, with the lengths of a batch.
pub(crate) struct InputViews<'m> {
    pub(crate) tokens: View<'m>,
    pub(crate) targets: View<'m>,
    pub(crate) positions: View<'m>,
    pub(crate) cu_seqlens: View<'m>,
    /// Page tables and the rows to sample from; in the generate phase only.
    pub(crate) decode: Option<[View<'m>; 2]>,
    /// The data set index of each document; in training with dropout only.
    pub(crate) samples: Option<View<'m>>,
}

impl Shared {
    /// The inputs on the device.
    pub(crate) fn input_views(&self, batch: BatchSize) -> InputViews<'_> {
        self.parts_of(self.prepared_phase().addresses.inputs.view(&self.memories), batch)
    }

    /// The parts of an inputs buffer, wherever it is.
    pub(crate) fn parts_of<'m>(&self, all: View<'m>, batch: BatchSize) -> InputViews<'m> {
        let BatchSize { tokens, docs, .. } = batch;
        let model = self.model();
        let (max_tokens, decode_docs) = (model.bounds.tokens, model.max_decode_docs());
        let is_generating = self.schedule_phase().kind == PhaseKind::Generate;
        let tables_start =
            3 * max_tokens + model.max_docs(self.plan.input.has_separate_memory()).max(decode_docs) + 1;
        let rows_start = tables_start + model.page_table_elems();
        let pages_per_doc = model.generation.map_or(0, |generation| generation.pages_per_doc());
        InputViews {
            tokens: all.slice(0, tokens),
            // In the generate phase: the sampled token of each sequence.
            targets: all.slice(max_tokens, if is_generating { docs } else { tokens }),
            positions: all.slice(2 * max_tokens, tokens),
            cu_seqlens: all.slice(3 * max_tokens, docs + 1),
            decode: is_generating
                .then(|| [all.slice(tables_start, docs * pages_per_doc), all.slice(rows_start, docs)]),
            samples: self.uses_dropout().then(|| all.slice(rows_start + decode_docs, docs)),
        }
    }

    /// Whether the current phase uses dropout: only training does.
    fn uses_dropout(&self) -> bool {
        self.schedule_phase().kind == PhaseKind::Train && self.model().shape.dropout.is_on()
    }

    /// Checks a micro-batch and copies it to the device.
    pub(crate) fn feed(
        &self,
        batch: &MicroBatch,
        micro_batch: u32,
        queue: &Queue,
    ) -> Result<BatchSize, EngineError> {
        let bounds = self.model().bounds;
        let real_tokens = batch.tokens.len();
        let size =
            BatchSize { tokens: real_tokens, docs: batch.cu_seqlens.len().saturating_sub(1), real_tokens };
        within("tokens", size.tokens, bounds.tokens)?;
        within("documents", size.docs, bounds.docs)?;
        within("tokens in one document", longest_of(batch.cu_seqlens, real_tokens)?, bounds.max_doc)?;
        for (what, values) in [("targets", batch.targets), ("positions", batch.positions)] {
            one_per_token(what, values.len(), real_tokens)?;
        }
        self.check_ids("target", batch.targets)?;
        self.check_tokens(batch.tokens, batch.positions)?;
        let staging = self.inputs_on_host(micro_batch);
        let padded = if self.plan.input.has_separate_memory() { size.padded() } else { size };
        let views = self.parts_of(staging, padded);
        views.tokens.write_host(batch.tokens);
        views.targets.write_host(batch.targets);
        views.positions.write_host(batch.positions);
        views.cu_seqlens.write_host(if batch.cu_seqlens.is_empty() { &[0] } else { batch.cu_seqlens });
        if let Some(samples) = views.samples {
            assert_eq!(batch.samples.len(), size.docs, "dropout needs a sample index per document");
            samples.write_host(batch.samples);
        }
        if padded.docs > size.docs {
            for view in [views.tokens, views.targets, views.positions] {
                view.slice(real_tokens, padded.tokens - real_tokens).zero_host();
            }
            views.cu_seqlens.slice(padded.docs, 1).write_host(&[padded.tokens as u32]);
            views.samples.iter().for_each(|samples| samples.slice(size.docs, 1).zero_host());
        }
        let size = padded;
        self.transfer(queue, self.prepared_phase().addresses.inputs.view(&self.memories), staging);
        Ok(size)
    }

    /// Checks a decode batch, copies it to the device, and copies pages of the KV cache as it asks.
    pub(crate) fn feed_decode_batch(
        &self,
        new: &DecodeBatch,
        queue: &Queue,
    ) -> Result<BatchSize, EngineError> {
        let generation = self.model().generation.expect("a phase that generates has bounds");
        let (tokens, docs) = (new.tokens.len(), new.cu_seqlens.len().saturating_sub(1));
        let size = BatchSize { tokens, docs, real_tokens: tokens };
        one_per_token("positions", new.positions.len(), tokens)?;
        let longest = new.positions.iter().map(|p| *p as usize + 1).max().unwrap_or(0);
        within("new tokens", size.tokens, self.model().bounds.tokens)?;
        within("documents", size.docs, generation.docs)?;
        within("tokens in one document", longest, generation.tokens_per_doc)?;
        longest_of(new.cu_seqlens, size.tokens)?;
        self.check_tokens(new.tokens, new.positions)?;
        check_pages(new, &generation)?;
        let staging = self.inputs_on_host(0);
        let views = self.parts_of(staging, size);
        views.tokens.write_host(new.tokens);
        views.positions.write_host(new.positions);
        views.cu_seqlens.write_host(new.cu_seqlens);
        let [tables, picks] = views.decode.expect("this phase generates");
        tables.write_host(new.page_tables);
        for (i, end) in new.cu_seqlens[1..].iter().enumerate() {
            picks.slice(i, 1).write_host(&[end - 1]);
        }
        self.transfer(queue, self.prepared_phase().addresses.inputs.view(&self.memories), staging);
        for unit in 0..self.model().units.len() as u32 {
            if let Some(cache) = self.cache(unit) {
                lockstep_ops::attention::copy_pages(queue, cache, new.page_copies);
            }
        }
        Ok(size)
    }

    /// Kernels index the embedding table by token and the rotary table by position without checks, and a GPU could not
    /// report which one is wrong. So they are checked here.
    fn check_tokens(&self, tokens: &[u32], positions: &[u32]) -> Result<(), EngineError> {
        self.check_ids("token", tokens)?;
        let planned = self.prepared_phase().addresses.rope_tables.elems() / self.model().shape.head_dim;
        match positions.iter().enumerate().find(|(_, position)| **position as usize >= planned) {
            Some((at, position)) => Err(EngineError::UnplannedPosition { position: *position, at, planned }),
            None => Ok(()),
        }
    }

    fn check_ids(&self, what: &'static str, ids: &[u32]) -> Result<(), EngineError> {
        let vocab = self.model().shape.vocab;
        match ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
            Some((at, id)) => Err(EngineError::UnknownToken { what, id: *id, at, vocab }),
            None => Ok(()),
        }
    }
}

/// Checks the page tables and copies of a decode batch. Kernels process its sequences at the same time, so a page that
/// new tokens of one are stored in must not be in the table of another.
fn check_pages(new: &DecodeBatch, generation: &GenerationBounds) -> Result<(), EngineError> {
    let (docs, table_len) = (new.cu_seqlens.len().saturating_sub(1), generation.pages_per_doc());
    if new.page_tables.len() != docs * table_len {
        let found = new.page_tables.len();
        return Err(EngineError::PageTableLength { found, docs, table_len });
    }
    let check_id = |page: u32| within("pages", page as usize + 1, generation.pages);
    for (from, to) in new.page_copies {
        check_id(*from)?;
        check_id(*to)?;
        if from == to {
            return Err(EngineError::SharedPage { page: *to });
        }
    }
    // A sequence's pages up to its last token, and those of them that its new tokens are stored in.
    let tables = || {
        new.cu_seqlens.windows(2).enumerate().map(|(doc, rows)| {
            let positions = &new.positions[rows[0] as usize..rows[1] as usize];
            let [first, last] = [positions[0], positions[positions.len() - 1]]
                .map(|position| position as usize / generation.page_tokens);
            (&new.page_tables[doc * table_len..][..last + 1], first..last + 1)
        })
    };
    for (doc, rows) in new.cu_seqlens.windows(2).enumerate() {
        let positions = &new.positions[rows[0] as usize..rows[1] as usize];
        if positions.is_empty() {
            return Err(EngineError::NoNewToken { doc });
        }
        if positions.windows(2).any(|pair| pair[0].checked_add(1) != Some(pair[1])) {
            return Err(EngineError::PositionGap { doc });
        }
    }
    let mut num_users = vec![0u32; generation.pages];
    for (table, _) in tables() {
        for page in table {
            check_id(*page)?;
            num_users[*page as usize] += 1;
        }
    }
    for (table, written) in tables() {
        if let Some(page) = table[written].iter().find(|page| num_users[**page as usize] > 1) {
            return Err(EngineError::SharedPage { page: *page });
        }
    }
    Ok(())
}

/// The length of the longest document. Checks that `cu_seqlens` rises from 0 to the number of tokens.
fn longest_of(cu_seqlens: &[u32], tokens: usize) -> Result<usize, EngineError> {
    let (mut longest, mut before) = (0, 0);
    for (at, bound) in cu_seqlens.iter().enumerate() {
        let broken = *bound < before || (at == 0 && *bound > 0);
        if broken {
            return Err(EngineError::BadSequenceBounds { at, tokens });
        }
        (longest, before) = (longest.max(*bound - before), *bound);
    }
    if before as usize != tokens {
        return Err(EngineError::BadSequenceBounds { at: cu_seqlens.len().saturating_sub(1), tokens });
    }
    Ok(longest as usize)
}

fn one_per_token(what: &'static str, found: usize, tokens: usize) -> Result<(), EngineError> {
    if found == tokens { Ok(()) } else { Err(EngineError::LengthMismatch { what, found, tokens }) }
}

fn within(what: &'static str, found: usize, planned: usize) -> Result<(), EngineError> {
    if found > planned { Err(EngineError::TooLarge { what, found, planned }) } else { Ok(()) }
}
