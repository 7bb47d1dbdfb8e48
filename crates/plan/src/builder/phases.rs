//! Phases that do not train: scoring and generation.

use crate::buffer::{Access, What};
use crate::builder::{StepBuilder, Work};
use crate::schedule::{Lane, OpKind};

impl StepBuilder<'_> {
    /// Forward through the body and the head's log-probabilities: a score or evaluation phase.
    pub fn score(&mut self) {
        let uses = self.forward_uses(0, Work::Score);
        self.run_windowed(&uses, &mut |_, _| {});
    }

    /// Prefill and decode with a key-value cache. Parameters stay whole for the whole phase. Each unit
    /// reads one stream and writes the other; one block's kept slots and the cache are all it leaves.
    pub fn rollout(&mut self) {
        let rollout = self.input.rollout.expect("a rollout phase has bounds");
        let shape = &self.plan().shape;
        let cache = 2 * shape.layers * shape.kv_width() * rollout.docs * rollout.tokens_per_doc;
        let cache = self.device(What::KvCache { model: self.model }, cache, self.input.storage);
        let units: Vec<u32> = (0..=self.head_unit()).collect();
        if self.gathers() {
            units.iter().for_each(|u| self.gather(*u, None));
        }
        let mut last = None;
        for (kind, access) in [(OpKind::Prefill, Access::Define), (OpKind::Decode, Access::Update)] {
            let [inputs, tables] = self.inputs();
            let mut accesses = vec![(cache, access), (tables, Access::Read)];
            let mut made = vec![inputs, self.scratch(), self.stream(1), self.stream(2)];
            made.push(self.per_token(What::LogProbs));
            let saved = self.layout(1).saved;
            if saved.0 > 0 {
                made.push(self.bytes(What::Saved { model: self.model, unit: 1 }, saved));
            }
            accesses.extend(made.into_iter().map(|id| (id, Access::Define)));
            for unit in &units {
                accesses.push((self.params(*unit), Access::Read));
            }
            last = Some(self.emit(kind, Lane::Compute, accesses, &[]));
        }
        let last = last.expect("two operations were emitted");
        if self.gathers() {
            units.iter().for_each(|u| {
                self.release(*u, last);
            });
        }
    }
}
