//! Which operations are certain to be finished when another starts.

use crate::schedule::{Lane, OpId, Schedule, Wait};

/// For every operation, the last operation of each lane that is finished before it starts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Order {
    clocks: Vec<Clock>,
    lanes: Vec<Lane>,
    last_on_lane: Clock,
}

type Clock = [Option<OpId>; Lane::COUNT];

impl Order {
    /// Follows lane order and waits. Operations of the previous run all count as finished.
    pub(crate) fn of(schedule: &Schedule) -> Order {
        let mut order = Order::default();
        for op in &schedule.ops {
            order.push(op.lane, &op.waits);
        }
        order
    }

    /// Adds the next operation.
    pub(crate) fn push(&mut self, lane: Lane, waits: &[Wait]) -> OpId {
        let id = OpId(self.clocks.len() as u32);
        let clock = self.clock_of(lane, waits);
        self.clocks.push(clock);
        self.lanes.push(lane);
        self.last_on_lane[lane as usize] = Some(id);
        id
    }

    fn clock_of(&self, lane: Lane, waits: &[Wait]) -> Clock {
        let mut clock = Clock::default();
        let waits = waits.iter().filter_map(|w| match w {
            // A wait for the future is reported by `check`; here it orders nothing.
            Wait::This(id) => Some(*id).filter(|id| (id.0 as usize) < self.clocks.len()),
            Wait::Previous(_) => None,
        });
        for before in waits.chain(self.last_on_lane[lane as usize]) {
            for (mine, theirs) in clock.iter_mut().zip(self.clocks[before.0 as usize]) {
                *mine = (*mine).max(theirs);
            }
            let lane = self.lanes[before.0 as usize] as usize;
            clock[lane] = clock[lane].max(Some(before));
        }
        clock
    }

    /// Whether `a` would be finished if an operation with these waits came next on `lane`.
    pub(crate) fn before_next(&self, a: OpId, lane: Lane, waits: &[Wait]) -> bool {
        self.clock_of(lane, waits)[self.lanes[a.0 as usize] as usize] >= Some(a)
    }

    /// Whether `a` is finished whenever `b` starts.
    pub(crate) fn before(&self, a: OpId, b: OpId) -> bool {
        self.clocks[b.0 as usize][self.lanes[a.0 as usize] as usize] >= Some(a)
    }
}
