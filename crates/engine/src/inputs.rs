//! A micro-batch on its way to the device.

use lockstep_device::{Queue, View};
use lockstep_plan::PhaseKind;

use crate::driver::{DecodeBatch, MicroBatch};
use crate::engine::Shared;
use crate::error::EngineError;

/// The size of the micro-batch that is being computed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BatchSize {
    pub(crate) tokens: usize,
    pub(crate) docs: usize,
    /// Tokens that the caller gave; the rest fills the last block and counts for nothing.
    pub(crate) given: usize,
}

/// Tokens of a block.
const BLOCK: usize = 256;

impl BatchSize {
    /// With its last block filled by one more document. Its coefficients are zero, so its gradients are.
    fn filled(&self) -> BatchSize {
        let tokens = self.tokens.next_multiple_of(BLOCK);
        BatchSize { tokens, docs: self.docs + usize::from(tokens > self.tokens), given: self.given }
    }
}

/// The parts of the inputs buffer, at a batch's own lengths.
pub(crate) struct InputViews<'m> {
    pub(crate) tokens: View<'m>,
    pub(crate) targets: View<'m>,
    pub(crate) positions: View<'m>,
    pub(crate) cu_seqlens: View<'m>,
    /// Slots in the cache and rows to draw from, while documents grow.
    pub(crate) growing: Option<[View<'m>; 2]>,
    /// Which sample each document is, where a step drops.
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
        let (room, grown) = (model.bounds.tokens, model.max_decode_docs());
        let is_generating = self.schedule_phase().kind == PhaseKind::Generate;
        let behind = 3 * room + model.max_docs(self.plan.input.has_separate_memory()).max(grown) + 1;
        InputViews {
            tokens: all.slice(0, tokens),
            // While documents grow there is one for each of them.
            targets: all.slice(room, if is_generating { docs } else { tokens }),
            positions: all.slice(2 * room, tokens),
            cu_seqlens: all.slice(3 * room, docs + 1),
            growing: is_generating.then(|| [all.slice(behind, docs), all.slice(behind + grown, docs)]),
            samples: self.drops().then(|| all.slice(behind + 2 * grown, docs)),
        }
    }

    /// Whether the phase that runs drops: training of a model that has it, nothing else.
    fn drops(&self) -> bool {
        self.schedule_phase().kind == PhaseKind::Train && self.model().shape.dropout.is_on()
    }

    /// Copies a micro-batch to the device.
    pub(crate) fn feed(
        &self,
        batch: &MicroBatch,
        micro_batch: u32,
        queue: &Queue,
    ) -> Result<BatchSize, EngineError> {
        let bounds = self.model().bounds;
        let given = batch.tokens.len();
        let size = BatchSize { tokens: given, docs: batch.cu_seqlens.len().saturating_sub(1), given };
        within("tokens", size.tokens, bounds.tokens)?;
        within("documents", size.docs, bounds.docs)?;
        within("tokens in one document", longest_of(batch.cu_seqlens, given)?, bounds.max_doc)?;
        for (what, values) in [("targets", batch.targets), ("positions", batch.positions)] {
            one_per_token(what, values.len(), given)?;
        }
        self.check_ids("target", batch.targets)?;
        self.check_tokens(batch.tokens, batch.positions)?;
        let here = self.inputs_on_host(micro_batch);
        let filled = if self.plan.input.has_separate_memory() { size.filled() } else { size };
        let views = self.parts_of(here, filled);
        views.tokens.write_host(batch.tokens);
        views.targets.write_host(batch.targets);
        views.positions.write_host(batch.positions);
        views.cu_seqlens.write_host(if batch.cu_seqlens.is_empty() { &[0] } else { batch.cu_seqlens });
        if let Some(samples) = views.samples {
            assert_eq!(batch.samples.len(), size.docs, "a sample per document, where a step drops");
            samples.write_host(batch.samples);
        }
        if filled.docs > size.docs {
            for view in [views.tokens, views.targets, views.positions] {
                view.slice(given, filled.tokens - given).zero_host();
            }
            views.cu_seqlens.slice(filled.docs, 1).write_host(&[filled.tokens as u32]);
            views.samples.iter().for_each(|samples| samples.slice(size.docs, 1).zero_host());
        }
        let size = filled;
        self.transfer(queue, self.prepared_phase().addresses.inputs.view(&self.memories), here);
        Ok(size)
    }

    /// Copies new tokens of growing documents to the device.
    pub(crate) fn feed_decode_batch(
        &self,
        new: &DecodeBatch,
        queue: &Queue,
    ) -> Result<BatchSize, EngineError> {
        let generation = self.model().generation.expect("a phase that generates has bounds");
        let size = BatchSize { tokens: new.tokens.len(), docs: new.slots.len(), given: new.tokens.len() };
        assert_eq!((new.positions.len(), new.cu_seqlens.len()), (size.tokens, size.docs + 1));
        let longest = new.positions.iter().map(|p| *p as usize + 1).max().unwrap_or(0);
        within("new tokens", size.tokens, self.model().bounds.tokens)?;
        within("documents", size.docs, generation.docs)?;
        within("tokens in one document", longest, generation.tokens_per_doc)?;
        longest_of(new.cu_seqlens, size.tokens)?;
        within("slots", new.slots.iter().map(|slot| *slot as usize + 1).max().unwrap_or(0), generation.docs)?;
        self.check_tokens(new.tokens, new.positions)?;
        let here = self.inputs_on_host(0);
        let views = self.parts_of(here, size);
        views.tokens.write_host(new.tokens);
        views.positions.write_host(new.positions);
        views.cu_seqlens.write_host(new.cu_seqlens);
        let [slots, picks] = views.growing.expect("this phase generates");
        slots.write_host(new.slots);
        for (i, end) in new.cu_seqlens[1..].iter().enumerate() {
            assert!(*end > new.cu_seqlens[i], "every document of an extension has a new token");
            picks.slice(i, 1).write_host(&[end - 1]);
        }
        self.transfer(queue, self.prepared_phase().addresses.inputs.view(&self.memories), here);
        Ok(size)
    }

    /// Kernels read the embedding's row of every token and the rotary angles of every position, and trust both: a GPU
    /// cannot refuse one by name.
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

/// The length of the longest document, of bounds that go from 0 to the number of tokens and never back.
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
