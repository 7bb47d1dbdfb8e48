//! Lanes that run side by side: how far each is, who waits for whom, and what stops them all.
//!
//! A run of a schedule may begin while lanes still work at the end of the one before it, if that was a run of the
//! same schedule; never while they work at the one before that.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use lockstep_plan::{Lane, Op, Schedule, Wait};

use crate::error::EngineError;

/// Looks before a waiting lane sleeps. Few: on a rank of one core the other lane needs that core.
const SPINS: u32 = 100;

/// One run of a schedule.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ScheduleRun {
    /// Counted from 1.
    number: u64,
    /// Operations of all runs before it.
    first: u64,
    /// The same of the run before, if that was a run of the same schedule and may still be going on.
    previous: Option<u64>,
}

impl ScheduleRun {
    /// Which of two: what a run leaves for its own operations lies apart from that of the run before.
    pub(crate) fn parity(&self) -> usize {
        (self.number % 2) as usize
    }

    /// What an operation of this run waits for. `None`: it is long over.
    pub(crate) fn awaited(&self, wait: &Wait) -> Option<WaitTarget> {
        let (op, first, parity) = match *wait {
            Wait::SameRun(id) => (id, self.first, self.parity()),
            Wait::PreviousRun(id) => (id, self.previous?, 1 - self.parity()),
        };
        Some(WaitTarget { op: op.0 as usize, count: first + u64::from(op.0), parity })
    }
}

/// An operation of this run or of the one before.
pub(crate) struct WaitTarget {
    pub(crate) op: usize,
    /// Operations before it, through all runs.
    count: u64,
    /// Of its run.
    pub(crate) parity: usize,
}

/// The progress of all lanes.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// One more than the last operation that each lane has finished, counted through all runs.
    done: [AtomicU64; Lane::COUNT],
    waiting: AtomicU32,
    stopped: AtomicBool,
    progress: Mutex<LaneProgress>,
    changed: Condvar,
}

/// What changes seldom, under the lock that waits sleep on.
#[derive(Debug)]
struct LaneProgress {
    /// The run begun last, and the one before it.
    runs: [ScheduleRun; 2],
    /// Operations of all runs begun.
    ops: u64,
    /// The last run that each lane's thread has finished. Lanes without a thread count as finished always.
    finished: [u64; Lane::COUNT],
    /// Lanes whose threads have not ended.
    running: usize,
    quit: bool,
    /// Why the lanes were stopped.
    cause: Option<EngineError>,
}

/// The lanes were stopped by one of them, which says why.
pub(crate) struct Stopped;

impl Lanes {
    /// With a thread for each of `threads`.
    pub(crate) fn new(threads: &[Lane]) -> Lanes {
        let mut finished = [u64::MAX; Lane::COUNT];
        threads.iter().for_each(|lane| finished[*lane as usize] = 0);
        Lanes {
            done: Default::default(),
            waiting: AtomicU32::new(0),
            stopped: AtomicBool::new(false),
            progress: Mutex::new(LaneProgress {
                runs: Default::default(),
                ops: 0,
                finished,
                running: threads.len(),
                quit: false,
                cause: None,
            }),
            changed: Condvar::new(),
        }
    }

    /// Begins a run of a schedule of `ops` operations, once `prepare` has seen it. `again`: it is the same as in
    /// the run before, which may still be going on.
    pub(crate) fn begin(
        &self,
        ops: usize,
        again: bool,
        prepare: impl FnOnce(ScheduleRun),
    ) -> Result<ScheduleRun, EngineError> {
        let last = self.lock().runs[0];
        self.finish(if again { last.number.saturating_sub(1) } else { last.number }, &Lane::ALL)?;
        let mut progress = self.lock();
        let previous = (again && last.number > 0).then_some(last.first);
        let run = ScheduleRun { number: last.number + 1, first: progress.ops, previous };
        prepare(run);
        progress.runs = [run, last];
        progress.ops += ops as u64;
        drop(progress);
        self.changed.notify_all();
        Ok(run)
    }

    /// Waits until some lanes have finished all that was begun, or one has failed.
    pub(crate) fn synchronize(&self, lanes: &[Lane]) -> Result<(), EngineError> {
        let last = self.lock().runs[0].number;
        self.finish(last, lanes)
    }

    fn finish(&self, run: u64, lanes: &[Lane]) -> Result<(), EngineError> {
        let mut progress = self.lock();
        while lanes.iter().any(|lane| progress.finished[*lane as usize] < run) && !self.is_stopped() {
            progress = self.sleep(progress);
        }
        match progress.cause.take() {
            Some(cause) => Err(cause),
            None if self.is_stopped() => Err(EngineError::Stopped),
            None => Ok(()),
        }
    }

    /// Waits until all that a schedule returns after is over.
    pub(crate) fn returned(&self, run: ScheduleRun, schedule: &Schedule) -> Result<(), EngineError> {
        let Some(over) = &schedule.returns_after else { return self.synchronize(&Lane::ALL) };
        let waited = over.iter().try_for_each(|id| self.wait(&Wait::SameRun(*id), run, schedule));
        // Also where all of them are over: a stream may fail when everything has been issued. Whoever failed says why.
        if waited.is_err() || self.is_stopped() { self.synchronize(&Lane::ALL) } else { Ok(()) }
    }

    /// A lane's thread waits for the run after the one it has `seen`. `None`: none will come.
    pub(crate) fn next_run(&self, seen: u64) -> Option<ScheduleRun> {
        let mut progress = self.lock();
        loop {
            if let Some(run) = progress.runs.iter().find(|run| run.number == seen + 1) {
                return Some(*run);
            }
            if progress.quit {
                return None;
            }
            progress = self.sleep(progress);
        }
    }

    /// A lane's thread has come to the end of a run.
    pub(crate) fn leave(&self, lane: Lane, run: ScheduleRun) {
        self.lock().finished[lane as usize] = run.number;
        self.changed.notify_all();
    }

    /// A lane's thread ends.
    pub(crate) fn end(&self) {
        self.lock().running -= 1;
        self.changed.notify_all();
    }

    /// Waits until all lanes' threads have ended, but not longer than this. Returns whether they have.
    pub(crate) fn end_within(&self, most: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), most, |progress| progress.running > 0);
        waited.unwrap_or_else(|e| e.into_inner()).0.running == 0
    }

    /// Stops every lane. The first cause stays.
    pub(crate) fn stop(&self, cause: EngineError) {
        let mut progress = self.lock();
        progress.cause.get_or_insert(cause);
        self.stopped.store(true, Ordering::SeqCst);
        drop(progress);
        self.changed.notify_all();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    pub(crate) fn quit(&self) {
        self.lock().quit = true;
        self.changed.notify_all();
    }

    /// Waits for everything that `op` waits for.
    pub(crate) fn before(&self, op: &Op, run: ScheduleRun, schedule: &Schedule) -> Result<(), Stopped> {
        op.waits.iter().try_for_each(|wait| self.wait(wait, run, schedule))?;
        if self.is_stopped() { Err(Stopped) } else { Ok(()) }
    }

    fn wait(&self, wait: &Wait, run: ScheduleRun, schedule: &Schedule) -> Result<(), Stopped> {
        let Some(WaitTarget { op, count, .. }) = run.awaited(wait) else { return Ok(()) };
        let done = &self.done[schedule.ops[op].lane as usize];
        for _ in 0..SPINS {
            if done.load(Ordering::Acquire) > count {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let mut progress = self.lock();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // Looked at after `waiting` was raised: whoever finishes either sees the one who waits, or is seen.
        while done.load(Ordering::SeqCst) <= count && !self.is_stopped() {
            progress = self.sleep(progress);
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if self.is_stopped() { Err(Stopped) } else { Ok(()) }
    }

    /// An operation is over.
    pub(crate) fn after(&self, lane: Lane, run: ScheduleRun, op: usize) {
        self.done[lane as usize].store(run.first + op as u64 + 1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // With the lock taken once, a waiter is either asleep by now or has not looked yet.
            drop(self.lock());
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, LaneProgress> {
        self.progress.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn sleep<'a>(&self, progress: MutexGuard<'a, LaneProgress>) -> MutexGuard<'a, LaneProgress> {
        self.changed.wait(progress).unwrap_or_else(|e| e.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use lockstep_plan::{ModelId, OpId, OpKind};

    use super::*;

    /// Two operations on the compute lane, then two updates on the host's. The second of the next run's waits
    /// for the second update.
    fn schedule() -> Schedule {
        let op = |lane, waits: Vec<Wait>| Op {
            kind: OpKind::ClipNorm { axes: &[] },
            model: ModelId::FIRST,
            lane,
            waits,
            accesses: vec![],
        };
        let ops = vec![
            op(Lane::Compute, vec![Wait::PreviousRun(OpId(2))]),
            op(Lane::Compute, vec![Wait::PreviousRun(OpId(3))]),
            op(Lane::Host, vec![Wait::SameRun(OpId(1))]),
            op(Lane::Host, vec![]),
        ];
        Schedule { ops, spans: vec![], returns_after: Some(vec![OpId(1)]) }
    }

    /// The compute lane of a run, which tells of every operation.
    fn compute(lanes: &Lanes, schedule: &Schedule, run: ScheduleRun, told: &mpsc::Sender<usize>) {
        for i in 0..2 {
            assert!(lanes.before(&schedule.ops[i], run, schedule).is_ok());
            lanes.after(Lane::Compute, run, i);
            told.send(i).unwrap();
        }
    }

    fn panicked(lane: &str) -> EngineError {
        let panic = lockstep_core::panics::Panic { message: "on purpose".into(), location: None };
        EngineError::LanePanicked { lane: lane.into(), panic }
    }

    #[test]
    fn a_run_overlaps_the_end_of_the_one_before_and_waits_for_what_it_needs() {
        let (lanes, schedule) = (Lanes::new(&[Lane::Host]), schedule());
        let (go, gate) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            let (lanes, schedule) = (&lanes, &schedule);
            scope.spawn(move || {
                let mut seen = 0;
                while let Some(run) = lanes.next_run(seen) {
                    seen += 1;
                    for i in 2..4 {
                        assert!(lanes.before(&schedule.ops[i], run, schedule).is_ok());
                        gate.recv().unwrap();
                        lanes.after(Lane::Host, run, i);
                    }
                    lanes.leave(Lane::Host, run);
                }
            });
            let begin = || lanes.begin(schedule.ops.len(), true, |_| {}).unwrap();
            let first = begin();
            compute(lanes, schedule, first, &tell);
            lanes.returned(first, schedule).unwrap();
            assert_eq!((told.recv(), told.recv()), (Ok(0), Ok(1)));

            // The host has updated nothing yet.
            let second = begin();
            scope.spawn(move || {
                compute(lanes, schedule, second, &tell);
                lanes.returned(second, schedule).unwrap();
                // Not before the host has finished the first.
                let third = lanes.begin(schedule.ops.len(), true, |_| {}).unwrap();
                tell.send(third.number as usize).unwrap();
            });
            let pause = Duration::from_millis(30);
            assert!(told.recv_timeout(pause).is_err(), "its parameters are not updated");
            go.send(()).unwrap();
            assert_eq!(told.recv(), Ok(0));
            assert!(told.recv_timeout(pause).is_err(), "only the first is");
            go.send(()).unwrap();
            assert_eq!((told.recv(), told.recv()), (Ok(1), Ok(3)));

            // All that was begun is finished, also when the end comes before it was.
            lanes.quit();
            (0..4).for_each(|_| go.send(()).unwrap());
            // The third computes nothing here: its host lane waits for that.
            let third = lanes.lock().runs[0];
            lanes.after(Lane::Compute, third, 1);
            lanes.synchronize(&Lane::ALL).unwrap();
        });
    }

    #[test]
    fn a_failure_when_all_operations_are_over_is_told_by_the_step_itself() {
        let (lanes, schedule) = (Lanes::new(&[Lane::Host]), schedule());
        let run = lanes.begin(schedule.ops.len(), true, |_| {}).unwrap();
        lanes.after(Lane::Compute, run, 1);
        lanes.stop(panicked("compute"));
        let failed = lanes.returned(run, &schedule);
        assert!(matches!(failed, Err(EngineError::LanePanicked { .. })), "{failed:?}");
    }

    #[test]
    fn a_failure_after_the_step_has_returned_is_told_by_the_next() {
        let (lanes, schedule) = (Lanes::new(&[Lane::Host]), schedule());
        let first = lanes.begin(schedule.ops.len(), true, |_| {}).unwrap();
        lanes.after(Lane::Compute, first, 1);
        lanes.returned(first, &schedule).unwrap();
        lanes.stop(panicked("host"));
        let failed = lanes.begin(schedule.ops.len(), true, |_| {});
        assert!(matches!(failed, Err(EngineError::LanePanicked { .. })));
        assert!(matches!(lanes.synchronize(&[]), Err(EngineError::Stopped)), "and what follows says so");
    }
}
