//! The phases that do not train: score and generate.

use lockstep_core::DType;

use crate::buffer::{Access, BufferKind};
use crate::builder::{IN_FLIGHT, PassKind, StepBuilder};
use crate::lane::Lane;
use crate::schedule::OpKind;

impl StepBuilder<'_> {
    /// Forward only, for scoring and evaluation.
    pub fn score(&mut self) {
        let passes = self.forward_passes(0, PassKind::Score);
        self.run_with_prefetch(&passes, &mut |_, _| {});
    }

    /// Prefill and decode with a KV cache. This is one operation, because its length depends on the sampled tokens.
    /// Parameters stay gathered throughout. Units alternate between two residual buffers; only the cache is carried
    /// from one decode batch to the next. Units with 4-bit parameters are dequantised again in every batch, one at a time.
    pub fn generate(&mut self) {
        let generation = self.plan().generation.expect("a phase that generates has bounds");
        assert!(
            generation.docs <= self.plan().head_chunk_tokens,
            "one head chunk holds the logits of all sequences"
        );
        let cache = self.plan().shape.layers * generation.cache_elems;
        let cache = self.device(BufferKind::KvCache { model: self.model }, cache, DType::F32);
        let units: Vec<u32> = self.body().chain([self.head_unit()]).collect();
        if self.needs_gather() {
            units.iter().for_each(|u| self.gather(*u, None));
        }
        let [inputs, tables] = self.inputs();
        let mut defined = vec![cache, inputs, self.scratch(), self.residual(1), self.residual(2)];
        defined.push(self.per_token(BufferKind::Outputs, 1));
        // All blocks share one buffer, as large as the largest block needs.
        let blocks = self.body().skip(1);
        let saved = blocks.map(|unit| self.layout(unit).saved).max().unwrap_or_default();
        if saved.0 > 0 {
            defined.push(self.bytes(
                BufferKind::SavedActivations { model: self.model, unit: 1, in_flight: IN_FLIGHT },
                saved,
            ));
        }
        let mut accesses = vec![(tables, Access::Read)];
        accesses.extend(defined.into_iter().map(|id| (id, Access::Define)));
        for unit in &units {
            match self.has_quantised(*unit) {
                true => accesses.extend(self.dequantised_from(*unit)),
                false => accesses.push((self.params(*unit), Access::Read)),
            }
        }
        accesses.extend(self.shared_params().map(|shared| (shared, Access::Define)));
        let last = self.emit(OpKind::Generate, Lane::Compute, accesses, &[]);
        if self.needs_gather() {
            units.iter().for_each(|u| {
                self.release(*u, last);
            });
        }
    }
}
