//! Gathering of parameters before use, and their release after it.

use crate::buffer::{Access, BufferId, BufferKind, MemoryTier, ParamState};
use crate::builder::{StepBuilder, UnitPass};
use crate::lane::Lane;
use crate::schedule::{CopyEnd, CopyPayload, OpId, OpKind};

impl StepBuilder<'_> {
    /// Gathers a unit's parameters, unless they are gathered already. `after` is a release that must come first.
    pub fn gather(&mut self, unit: u32, after: Option<OpId>) {
        let held = self.gather_counts.entry(unit).or_insert(0);
        *held += 1;
        if *held > 1 {
            return;
        }
        let span = self.gather_span(unit);
        let axes = self.input.sharded_over(self.model, ParamState::Working);
        let resident = self.state(unit, ParamState::Working);
        let after: Vec<OpId> = after.into_iter().collect();
        if self.has_quantised(unit) {
            let (from, to) = (self.quantised_residents(unit), self.gathered_states(unit));
            let reads = from.into_iter().map(|id| (id, Access::Read));
            let accesses = reads.chain(to.into_iter().map(|id| (id, Access::Define))).collect();
            let kind = OpKind::Gather { span, from: CopyEnd::Resident, axes };
            self.emit(kind, Lane::Comm, accesses, &after);
            return;
        }
        let (mut from, mut from_id) = (CopyEnd::Resident, resident);
        if !axes.is_empty() && self.plan().placements.params_tier != MemoryTier::Device {
            let elems = self.input.resident(self.model, unit, ParamState::Working).1;
            let staging = self.param_staging(elems);
            let to = CopyEnd::Buffer(staging);
            // This copy needs only the staging buffer, so it may run before the release that the gather waits for.
            let accesses = vec![(resident, Access::Read), (staging, Access::Define)];
            self.emit(
                OpKind::Copy { payload: CopyPayload::Params, from, to, span },
                Lane::Copy,
                accesses,
                &[],
            );
            (from, from_id) = (to, staging);
        }
        let accesses = vec![(from_id, Access::Read), (self.unsharded_params(unit), Access::Define)];
        let lane = if axes.is_empty() { Lane::Copy } else { Lane::Comm };
        self.emit(OpKind::Gather { span, from, axes }, lane, accesses, &after);
    }

    /// Ends a use of gathered parameters. The last use frees them.
    pub fn release(&mut self, unit: u32, last_use: OpId) -> OpId {
        let held = self.gather_counts.get_mut(&unit).expect("a unit is released after it was gathered");
        *held -= 1;
        if *held > 0 {
            return last_use;
        }
        let gathered = match self.has_quantised(unit) {
            true => self.gathered_states(unit),
            false => vec![self.unsharded_params(unit)],
        };
        self.gather_counts.remove(&unit);
        let span = self.gather_span(unit);
        let accesses = gathered.into_iter().map(|id| (id, Access::Read)).collect();
        self.emit(OpKind::Release(span), Lane::Compute, accesses, &[])
    }

    /// Runs passes in order. Gathers parameters up to `prefetch` passes ahead and releases them after each pass, so that
    /// the parameters of at most `prefetch + 1` passes are gathered at a time. The next gather is emitted before
    /// `after_each`, so that it does not queue behind the reduction of the unit just released.
    pub fn run_with_prefetch(
        &mut self,
        passes: &[UnitPass],
        after_each: &mut dyn FnMut(&mut Self, &UnitPass),
    ) {
        let gathered = |one: &UnitPass| if self.needs_gather() { one.units.clone() } else { vec![] };
        let units: Vec<Vec<u32>> = passes.iter().map(gathered).collect();
        let depth = self.input.prefetch as usize;
        for unit in units.iter().take(depth + 1).flatten() {
            self.gather(*unit, None);
        }
        for (i, one) in passes.iter().enumerate() {
            let mut last = self.run(one.kind, one.micro_batch);
            let next = units.get(i + depth + 1).map_or(&[][..], |next| &next[..]);
            // A unit that the next pass needs and that is still gathered is not gathered again.
            let (held, missing): (Vec<u32>, Vec<u32>) =
                next.iter().partition(|u| self.gather_counts.contains_key(u));
            held.into_iter().for_each(|unit| self.gather(unit, None));
            for unit in &units[i] {
                last = self.release(*unit, last);
            }
            missing.into_iter().for_each(|unit| self.gather(unit, Some(last)));
            after_each(self, one);
        }
    }

    /// Runs a micro-batch's passes and keeps each unit gathered from its first use to its last.
    pub fn run_keeping_gathered(
        &mut self,
        passes: &[UnitPass],
        after_each: &mut dyn FnMut(&mut Self, &UnitPass),
    ) {
        for (i, one) in passes.iter().enumerate() {
            let used =
                |unit: &u32, others: &[UnitPass]| others.iter().any(|other| other.units.contains(unit));
            let units: &[u32] = if self.needs_gather() { &one.units } else { &[] };
            for unit in units.iter().filter(|u| !used(u, &passes[..i])) {
                self.gather(*unit, None);
            }
            let last = self.run(one.kind, one.micro_batch);
            for unit in units.iter().filter(|u| !used(u, &passes[i + 1..])) {
                self.release(*unit, last);
            }
            after_each(self, one);
        }
    }

    /// A staging buffer for a shard between the host and the device. Two alternate, so that one is filled while the
    /// other is read.
    pub(super) fn param_staging(&mut self, elems: usize) -> BufferId {
        let turn = self.num_fetches % 2;
        self.num_fetches += 1;
        self.device(BufferKind::ParamStaging { turn }, elems, self.input.storage)
    }
}
