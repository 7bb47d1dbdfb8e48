//! Phases that do not train: scoring and generation.

use lockstep_core::DType;

use crate::buffer::{Access, BufferKind};
use crate::builder::{FLIGHT, PassKind, StepBuilder};
use crate::schedule::{Lane, OpKind};

impl StepBuilder<'_> {
    /// Forward through the body and the head's outputs: a score or evaluation phase.
    pub fn score(&mut self) {
        let uses = self.forward_passes(0, PassKind::Score);
        self.run_with_prefetch(&uses, &mut |_, _| {});
    }

    /// Documents grow with a key-value cache until the caller has no more: one operation, for how long it
    /// takes depends on what is drawn. Parameters stay whole meanwhile. Each unit reads one stream and
    /// writes the other; the cache is all that a pass leaves to the next.
    pub fn generate(&mut self) {
        let generation = self.plan().generation.expect("a phase that generates has bounds");
        assert!(
            generation.docs <= self.plan().head_chunk_tokens,
            "logits of all documents are there at once"
        );
        let cache = self.plan().shape.layers * generation.cache_elems;
        let cache = self.device(BufferKind::KvCache { model: self.model }, cache, DType::F32);
        let units: Vec<u32> = self.body().chain([self.head_unit()]).collect();
        if self.needs_gather() {
            units.iter().for_each(|u| self.gather(*u, None));
        }
        let [inputs, tables] = self.inputs();
        let mut made = vec![cache, inputs, self.scratch(), self.stream(1), self.stream(2)];
        made.push(self.per_token(BufferKind::Outputs { in_flight: FLIGHT }));
        // All blocks share what the one that keeps most would keep.
        let blocks = self.body().skip(1);
        let saved = blocks.map(|unit| self.layout(unit).saved).max().unwrap_or_default();
        if saved.0 > 0 {
            made.push(self.bytes(
                BufferKind::SavedActivations { model: self.model, unit: 1, in_flight: FLIGHT },
                saved,
            ));
        }
        let mut accesses = vec![(tables, Access::Read)];
        accesses.extend(made.into_iter().map(|id| (id, Access::Define)));
        for unit in &units {
            accesses.push((self.params(*unit), Access::Read));
        }
        let last = self.emit(OpKind::Generate, Lane::Compute, accesses, &[]);
        if self.needs_gather() {
            units.iter().for_each(|u| {
                self.release(*u, last);
            });
        }
    }
}
