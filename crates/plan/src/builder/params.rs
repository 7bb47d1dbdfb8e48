//! Parameters on the move: gathered before use, released after it.

use crate::buffer::{Access, BufferId, BufferKind, MemoryTier, ParamState};
use crate::builder::{StepBuilder, UnitPass};
use crate::schedule::{CopyEnd, CopyPayload, Lane, OpId, OpKind};

impl StepBuilder<'_> {
    /// Brings a unit's whole parameters to the device, unless they are there. `after`: what must have been
    /// released first.
    pub fn gather(&mut self, unit: u32, after: Option<OpId>) {
        let held = self.held.entry(unit).or_insert(0);
        *held += 1;
        if *held > 1 {
            return;
        }
        let span = self.gather_span(unit);
        let axes = self.input.sharded_over(self.model, ParamState::Working);
        let home = self.state(unit, ParamState::Working);
        let after: Vec<OpId> = after.into_iter().collect();
        let (mut from, mut from_id) = (CopyEnd::Resident, home);
        if !axes.is_empty() && self.plan().placements.params_tier != MemoryTier::Device {
            let elems = self.input.resident(self.model, unit, ParamState::Working).1;
            let staging = self.param_staging(elems);
            let to = CopyEnd::Buffer(staging);
            // Needs only its staging: it may run ahead of the release that the gather waits for.
            let accesses = vec![(home, Access::Read), (staging, Access::Define)];
            self.emit(
                OpKind::Copy { payload: CopyPayload::Params, from, to, span },
                Lane::Copy,
                accesses,
                &[],
            );
            (from, from_id) = (to, staging);
        }
        let accesses = vec![(from_id, Access::Read), (self.whole(unit), Access::Define)];
        let lane = if axes.is_empty() { Lane::Copy } else { Lane::Comm };
        self.emit(OpKind::Gather { span, from, axes }, lane, accesses, &after);
    }

    /// Ends a use of gathered parameters; the last one frees them.
    pub fn release(&mut self, unit: u32, last_use: OpId) -> OpId {
        let held = self.held.get_mut(&unit).expect("a unit is released after it was gathered");
        *held -= 1;
        if *held > 0 {
            return last_use;
        }
        self.held.remove(&unit);
        let span = self.gather_span(unit);
        let whole = self.whole(unit);
        self.emit(OpKind::Release(span), Lane::Compute, vec![(whole, Access::Read)], &[])
    }

    /// Runs uses in order, gathering up to `prefetch` of them ahead and releasing each when it is done.
    /// At most `prefetch + 1` uses' parameters are whole at a time. The next gather is issued before
    /// `after_each`, so that it does not queue behind the reduction of the unit just released.
    pub fn run_with_prefetch(&mut self, uses: &[UnitPass], after_each: &mut dyn FnMut(&mut Self, &UnitPass)) {
        let gathered = |one: &UnitPass| if self.needs_gather() { one.units.clone() } else { vec![] };
        let units: Vec<Vec<u32>> = uses.iter().map(gathered).collect();
        let depth = self.input.prefetch as usize;
        for unit in units.iter().take(depth + 1).flatten() {
            self.gather(*unit, None);
        }
        for (i, one) in uses.iter().enumerate() {
            let mut last = self.run(one.work, one.micro_batch);
            let next = units.get(i + depth + 1).map_or(&[][..], |next| &next[..]);
            // A unit that comes into the window as it would leave it stays: no gather is emitted.
            let (stay, come): (Vec<u32>, Vec<u32>) = next.iter().partition(|u| self.held.contains_key(u));
            stay.into_iter().for_each(|unit| self.gather(unit, None));
            for unit in &units[i] {
                last = self.release(*unit, last);
            }
            come.into_iter().for_each(|unit| self.gather(unit, Some(last)));
            after_each(self, one);
        }
    }

    /// Runs a micro-batch's uses, keeping each unit whole from its first use to its last.
    pub fn run_keeping_gathered(
        &mut self,
        uses: &[UnitPass],
        after_each: &mut dyn FnMut(&mut Self, &UnitPass),
    ) {
        for (i, one) in uses.iter().enumerate() {
            let used =
                |unit: &u32, others: &[UnitPass]| others.iter().any(|other| other.units.contains(unit));
            let units: &[u32] = if self.needs_gather() { &one.units } else { &[] };
            for unit in units.iter().filter(|u| !used(u, &uses[..i])) {
                self.gather(*unit, None);
            }
            let last = self.run(one.work, one.micro_batch);
            for unit in units.iter().filter(|u| !used(u, &uses[i + 1..])) {
                self.release(*unit, last);
            }
            after_each(self, one);
        }
    }

    /// A shard between the host and the device. Two take turns, so that one fills while the other is read.
    pub(super) fn param_staging(&mut self, elems: usize) -> BufferId {
        let turn = self.fetches % 2;
        self.fetches += 1;
        self.device(BufferKind::ParamStaging { turn }, elems, self.input.storage)
    }
}
