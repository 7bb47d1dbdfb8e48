//! What each lane is doing right now, for other threads to read: a status that shows where a rank hangs.
//!
//! A lane stores one word before and after each operation. On a GPU a lane only issues work, so its word names the last
//! operation that was issued, until the lane has waited for the device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use lockstep_plan::{Lane, RunPlan, operation_text};

use crate::engine::Engine;

/// The lane of calls that the caller's thread makes between steps.
const BETWEEN_STEPS: &str = "between steps";
/// Bits of a word, from the lowest: the operation's index plus one, the phase, and the start in milliseconds.
const OP_BITS: u32 = 24;
const PHASE_BITS: u32 = 8;

/// What the lanes of a rank are doing.
#[derive(Debug)]
pub(crate) struct RunningOps {
    base: Instant,
    /// 0 while a lane is idle.
    words: [AtomicU64; Lane::COUNT],
    between_steps: Mutex<Option<(String, Instant)>>,
}

impl Default for RunningOps {
    fn default() -> Self {
        RunningOps { base: Instant::now(), words: Default::default(), between_steps: Mutex::default() }
    }
}

impl RunningOps {
    pub(crate) fn begin(&self, lane: Lane, phase: usize, op: usize, now: Instant) {
        // Milliseconds wrap around after seven weeks, far beyond the deadline of any operation.
        let milliseconds = now.saturating_duration_since(self.base).as_millis() as u32;
        let op = (op as u64 + 1) & ((1 << OP_BITS) - 1);
        let phase = (phase as u64) & ((1 << PHASE_BITS) - 1);
        let word = u64::from(milliseconds) << (OP_BITS + PHASE_BITS) | phase << OP_BITS | op;
        self.words[lane as usize].store(word, Ordering::Relaxed);
    }

    pub(crate) fn end(&self, lane: Lane) {
        self.words[lane as usize].store(0, Ordering::Relaxed);
    }

    /// The phase and the operation of a lane, and the seconds since it has begun.
    fn of(&self, lane: Lane) -> Option<(usize, usize, f64)> {
        let word = self.words[lane as usize].load(Ordering::Relaxed);
        let op = (word & ((1 << OP_BITS) - 1)).checked_sub(1)?;
        let phase = word >> OP_BITS & ((1 << PHASE_BITS) - 1);
        let began = (word >> (OP_BITS + PHASE_BITS)) as u32;
        let now = self.base.elapsed().as_millis() as u32;
        Some((phase as usize, op as usize, f64::from(now.wrapping_sub(began)) / 1e3))
    }

    /// Names a call between steps while `run` makes it.
    pub(crate) fn between_steps<T>(&self, what: &str, run: impl FnOnce() -> T) -> T {
        *self.call() = Some((what.to_owned(), Instant::now()));
        let outcome = run();
        *self.call() = None;
        outcome
    }

    fn call(&self) -> MutexGuard<'_, Option<(String, Instant)>> {
        self.between_steps.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Reads what the lanes of a rank are doing, from any thread and for longer than the engine lives.
#[derive(Clone, Debug)]
pub struct LaneMonitor {
    running: Arc<RunningOps>,
    /// The text of each operation of each phase.
    names: Arc<[Vec<String>]>,
}

/// An operation that has begun and has not ended.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneOperation {
    /// The name of the lane.
    pub lane: String,
    pub operation: String,
    /// Whether it ends only when other ranks take part.
    pub collective: bool,
    pub seconds: f64,
}

impl LaneMonitor {
    fn new(running: &Arc<RunningOps>, plan: &RunPlan) -> LaneMonitor {
        let several = plan.phases.len() > 1;
        let names = plan.phases.iter().map(|phase| {
            let text = |i| match several {
                true => format!("{}: {}", phase.name, operation_text(plan, phase, i)),
                false => operation_text(plan, phase, i),
            };
            (0..phase.schedule.ops.len()).map(text).collect()
        });
        LaneMonitor { running: Arc::clone(running), names: names.collect() }
    }

    /// The lanes that are not idle, and the call between steps if there is one.
    pub fn operations(&self) -> Vec<LaneOperation> {
        let of_lane = |lane: &Lane| {
            let (phase, op, seconds) = self.running.of(*lane)?;
            let operation = self.names.get(phase)?.get(op)?.clone();
            let collective = lane.spec().communicates;
            Some(LaneOperation { lane: lane.to_string(), operation, collective, seconds })
        };
        let call = self.running.call().as_ref().map(|(what, since)| LaneOperation {
            lane: BETWEEN_STEPS.into(),
            operation: what.clone(),
            collective: true,
            seconds: since.elapsed().as_secs_f64(),
        });
        Lane::ALL.iter().filter_map(of_lane).chain(call).collect()
    }
}

impl Engine {
    /// A reader of what the lanes are doing.
    pub fn lane_monitor(&self) -> LaneMonitor {
        LaneMonitor::new(&self.shared.running, &self.shared.plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_named_while_they_run() {
        let running = Arc::new(RunningOps::default());
        let names = Arc::new([vec!["#0 forward".to_owned()], vec!["#0 a".into(), "#1 all-reduce".into()]]);
        let monitor = LaneMonitor { running: Arc::clone(&running), names };
        assert!(monitor.operations().is_empty());
        running.begin(Lane::Comm, 1, 1, Instant::now());
        running.begin(Lane::Compute, 0, 0, Instant::now());
        // Of a plan that this monitor does not know.
        running.begin(Lane::Host, 5, 0, Instant::now());
        let now: Vec<(String, String)> =
            monitor.operations().into_iter().map(|one| (one.lane, one.operation)).collect();
        let expected = [("compute", "#0 forward"), ("comm", "#1 all-reduce")];
        assert_eq!(now, expected.map(|(lane, operation)| (lane.to_owned(), operation.to_owned())));
        assert_eq!(monitor.operations().iter().map(|one| one.collective).collect::<Vec<_>>(), [false, true]);
        assert!(monitor.operations().iter().all(|one| (0.0..600.0).contains(&one.seconds)));
        Lane::ALL.iter().for_each(|lane| running.end(*lane));
        let during = running.between_steps("losses", || monitor.operations());
        assert_eq!((&*during[0].lane, &*during[0].operation), ("between steps", "losses"));
        assert!(monitor.operations().is_empty());
    }
}
