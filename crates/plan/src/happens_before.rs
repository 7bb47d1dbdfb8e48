//! Which operations are guaranteed to have finished when another starts.

use crate::lane::Lane;
use crate::schedule::{OpId, Schedule, Wait};

/// The happens-before relation of a schedule, as vector clocks: for every operation, the last operation of each lane
/// that has finished before it starts. Ids continue in a second run of the schedule.
#[derive(Clone, Debug, Default)]
pub(crate) struct HappensBefore {
    clocks: Vec<Clock>,
    lanes: Vec<Lane>,
    last_on_lane: Clock,
    /// What had finished before the current run began.
    before_run: Clock,
}

type Clock = [Option<OpId>; Lane::COUNT];

fn join(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}

impl HappensBefore {
    /// Follows lane order and waits through all runs that can overlap.
    pub(crate) fn of(schedule: &Schedule) -> HappensBefore {
        let mut order = HappensBefore::default();
        let len = schedule.ops.len() as u32;
        for (id, op) in schedule.in_flight() {
            if id.0 > 0 && id.0 % len == 0 {
                order.begin_run(schedule.returns_after.as_deref().unwrap_or_default());
            }
            order.push(op.lane, &waits_in_run(&op.waits, id.0 / len, len));
        }
        order
    }

    /// Begins the next run, which starts after the operations `finished`.
    pub(crate) fn begin_run(&mut self, finished: &[OpId]) {
        for id in finished {
            let mut clock = self.clocks[id.0 as usize];
            clock[self.lanes[id.0 as usize] as usize] = Some(*id);
            join(&mut self.before_run, &clock);
        }
    }

    /// Adds the next operation.
    pub(crate) fn push(&mut self, lane: Lane, waits: &[OpId]) -> OpId {
        let id = OpId(self.clocks.len() as u32);
        let clock = self.clock_of(lane, waits);
        self.clocks.push(clock);
        self.lanes.push(lane);
        self.last_on_lane[lane as usize] = Some(id);
        id
    }

    fn clock_of(&self, lane: Lane, waits: &[OpId]) -> Clock {
        let mut clock = self.before_run;
        // `check` reports a wait for a later operation; here it orders nothing.
        let waits = waits.iter().copied().filter(|id| (id.0 as usize) < self.clocks.len());
        for before in waits.chain(self.last_on_lane[lane as usize]) {
            join(&mut clock, &self.clocks[before.0 as usize]);
            let lane = self.lanes[before.0 as usize] as usize;
            clock[lane] = clock[lane].max(Some(before));
        }
        clock
    }

    /// Whether `a` would have finished if an operation with these waits came next on `lane`.
    pub(crate) fn before_next(&self, a: OpId, lane: Lane, waits: &[OpId]) -> bool {
        self.clock_of(lane, waits)[self.lanes[a.0 as usize] as usize] >= Some(a)
    }

    /// Whether `a` has always finished when `b` starts.
    pub(crate) fn before(&self, a: OpId, b: OpId) -> bool {
        self.clocks[b.0 as usize][self.lanes[a.0 as usize] as usize] >= Some(a)
    }
}

/// The ids of the operations that `waits` names in the given run of a schedule of `len` operations. Ids continue from
/// run to run.
pub(crate) fn waits_in_run(waits: &[Wait], run: u32, len: u32) -> Vec<OpId> {
    let in_run = |wait: &Wait| match *wait {
        Wait::SameRun(id) => Some(OpId(id.0 + run * len)),
        Wait::PreviousRun(id) => run.checked_sub(1).map(|before| OpId(id.0 + before * len)),
    };
    waits.iter().filter_map(in_run).collect()
}
