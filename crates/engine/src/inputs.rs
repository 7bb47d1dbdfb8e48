//! Checks micro-batches and copies them to the device.

use lockstep_device::{Queue, View};
use lockstep_ops::rows::RowMap;
use lockstep_plan::{GenerationBounds, PhaseKind};

use crate::batch_fill::BatchFill;
use crate::driver::{DecodeBatch, MicroBatch};
use crate::engine::Shared;
use crate::error::EngineError;

/// The size of the current micro-batch. Counts include padding, which fills the last block of a device with its own
/// memory and does not affect any result; `real_` counts do not.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BatchSize {
    /// Its index in the accumulation window.
    pub(crate) micro_batch: u32,
    /// Rows that are computed.
    pub(crate) tokens: usize,
    pub(crate) docs: usize,
    /// Positions of all documents: more than rows if documents share some.
    pub(crate) positions: usize,
    pub(crate) real_positions: usize,
    /// Rows that the head runs on.
    pub(crate) head_rows: usize,
    pub(crate) real_head_rows: usize,
    pub(crate) shares_rows: bool,
}

/// The parts of the inputs buffer, with the lengths of a batch.
pub(crate) struct InputViews<'m> {
    pub(crate) tokens: View<'m>,
    pub(crate) targets: View<'m>,
    pub(crate) positions: View<'m>,
    pub(crate) cu_seqlens: View<'m>,
    pub(crate) head_rows: RowMap<'m>,
    pub(crate) shared_rows: Option<RowMap<'m>>,
    /// In the generate phase only.
    pub(crate) page_tables: Option<View<'m>>,
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
        let BatchSize { tokens, docs, positions, head_rows, real_head_rows, .. } = batch;
        let model = self.model();
        let at = model.inputs_layout(self.plan.input.has_separate_memory());
        let is_generating = self.schedule_phase().kind == PhaseKind::Generate;
        let pages_per_doc = model.generation.map_or(0, |generation| generation.pages_per_doc());
        let row_map = |[source, offsets, entries]: [usize; 3], len: usize, counted: usize| RowMap {
            source: all.slice(source, len),
            offsets: all.slice(offsets, tokens + 1),
            entries: all.slice(entries, counted),
        };
        InputViews {
            tokens: all.slice(at.tokens, tokens),
            // In the generate phase: the sampled token of each sequence.
            targets: all.slice(at.targets, head_rows),
            positions: all.slice(at.positions, tokens),
            cu_seqlens: all.slice(at.cu_seqlens, docs + 1),
            head_rows: row_map(at.head_rows, head_rows, real_head_rows),
            shared_rows: at
                .shared_rows
                .filter(|_| batch.shares_rows)
                .map(|at| row_map(at, positions, batch.real_positions)),
            page_tables: is_generating.then(|| all.slice(at.page_tables, docs * pages_per_doc)),
            samples: self.uses_dropout().then(|| all.slice(at.samples, docs)),
        }
    }

    /// Whether the current phase uses dropout: only training does.
    fn uses_dropout(&self) -> bool {
        self.schedule_phase().kind == PhaseKind::Train && self.model().shape.has_dropout()
    }

    /// Checks a micro-batch and copies it to the device.
    pub(crate) fn feed(
        &self,
        batch: &MicroBatch,
        micro_batch: u32,
        queue: &Queue,
    ) -> Result<BatchSize, EngineError> {
        let bounds = self.model().bounds;
        let (positions, docs) = (batch.tokens.len(), batch.cu_seqlens.len().saturating_sub(1));
        within("tokens", positions, bounds.tokens)?;
        within("documents", docs, bounds.docs)?;
        within("tokens in one document", longest_of(batch.cu_seqlens, positions)?, bounds.max_doc)?;
        for (what, values) in [("targets", batch.targets), ("positions", batch.positions)] {
            one_per_token(what, values.len(), positions)?;
        }
        if !batch.weights.is_empty() {
            one_per_token("weights", batch.weights.len(), positions)?;
        }
        self.check_ids("target", batch.targets)?;
        self.check_tokens(batch.tokens, batch.positions)?;
        let is_separate = self.plan.input.has_separate_memory();
        let fill = BatchFill {
            batch,
            layout: self.model().inputs_layout(is_separate),
            max_tokens: bounds.tokens,
            shares_rows: bounds.shares_rows,
            pads: is_separate,
            uses_samples: self.uses_dropout(),
        };
        let staging = self.inputs_on_host(micro_batch);
        let size = lockstep_ops::host::with_slice_mut(staging, |all: &mut [u32]| fill.run(all))?;
        let size = BatchSize { micro_batch, ..size };
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
        // The head runs on the last row of every sequence.
        let (head_rows, real_head_rows) = (docs, 0);
        let size = BatchSize { tokens, docs, head_rows, real_head_rows, ..BatchSize::default() };
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
        views.page_tables.expect("this phase generates").write_host(new.page_tables);
        for (i, end) in new.cu_seqlens[1..].iter().enumerate() {
            views.head_rows.source.slice(i, 1).write_host(&[end - 1]);
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
