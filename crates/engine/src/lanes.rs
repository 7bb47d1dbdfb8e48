//! Synchronisation of lanes: how far each is, how they wait for each other, and how all of them stop.
//!
//! A run of a schedule may begin while lanes still work on the previous run, if that was a run of the same schedule. At
//! most two runs are in flight.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use lockstep_plan::{Lane, Op, Schedule, Wait};

use crate::error::EngineError;
use crate::meter::{Activity, Meter};

/// How often a waiting lane checks before it sleeps. It spins only briefly: with one core per rank, spinning starves the
/// lane it waits for.
const SPINS: u32 = 100;

/// One run of a schedule.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ScheduleRun {
    /// Counted from 1.
    number: u64,
    /// The number of operations in all earlier runs.
    first: u64,
    /// `first` of the previous run, if that was a run of the same schedule and may still be in flight.
    previous: Option<u64>,
}

impl ScheduleRun {
    /// 0 or 1, alternating: two runs in flight use separate events and step states.
    pub(crate) fn parity(&self) -> usize {
        (self.number % 2) as usize
    }

    /// The operation that an operation of this run waits for. `None`: it finished long ago.
    pub(crate) fn wait_target(&self, wait: &Wait) -> Option<WaitTarget> {
        let (op, first, parity) = match *wait {
            Wait::SameRun(id) => (id, self.first, self.parity()),
            Wait::PreviousRun(id) => (id, self.previous?, 1 - self.parity()),
        };
        Some(WaitTarget { op: op.0 as usize, count: first + u64::from(op.0), parity })
    }
}

/// An operation of this run or of the previous one that is waited for.
pub(crate) struct WaitTarget {
    pub(crate) op: usize,
    /// The number of operations before it, in all runs.
    count: u64,
    /// The parity of its run.
    pub(crate) parity: usize,
}

/// The progress of all lanes.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// For each lane, one more than the index of the last operation it has finished, counted over all runs.
    done: [AtomicU64; Lane::COUNT],
    waiting: AtomicU32,
    stopped: AtomicBool,
    progress: Mutex<LaneProgress>,
    changed: Condvar,
}

/// The part of the progress that changes rarely, under the lock that waiting lanes sleep on.
#[derive(Debug)]
struct LaneProgress {
    /// The latest run and the one before it.
    runs: [ScheduleRun; 2],
    /// The number of operations in all runs so far.
    ops: u64,
    /// The last run that each lane's thread has finished; `u64::MAX` for lanes without a thread.
    finished: [u64; Lane::COUNT],
    /// The number of lane threads that have not ended.
    running: usize,
    quit: bool,
    /// Why the lanes were stopped. Taken by the first caller that reports it.
    cause: Option<EngineError>,
}

/// The lanes were stopped; [`LaneProgress::cause`] says why.
pub(crate) struct Stopped;

impl Lanes {
    /// `threads` are the lanes that have a thread of their own.
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

    /// Begins a run of a schedule of `ops` operations, after calling `prepare`. `same_schedule`: the previous run was of
    /// the same schedule, and may still be in flight.
    pub(crate) fn begin(
        &self,
        ops: usize,
        same_schedule: bool,
        prepare: impl FnOnce(ScheduleRun),
    ) -> Result<ScheduleRun, EngineError> {
        let last = self.lock().runs[0];
        self.wait_for_run(
            if same_schedule { last.number.saturating_sub(1) } else { last.number },
            &Lane::ALL,
        )?;
        let mut progress = self.lock();
        let previous = (same_schedule && last.number > 0).then_some(last.first);
        let run = ScheduleRun { number: last.number + 1, first: progress.ops, previous };
        prepare(run);
        progress.runs = [run, last];
        progress.ops += ops as u64;
        drop(progress);
        self.changed.notify_all();
        Ok(run)
    }

    /// Waits until the given lanes have finished all runs, or any lane has failed.
    pub(crate) fn synchronize(&self, lanes: &[Lane]) -> Result<(), EngineError> {
        let last = self.lock().runs[0].number;
        self.wait_for_run(last, lanes)
    }

    fn wait_for_run(&self, run: u64, lanes: &[Lane]) -> Result<(), EngineError> {
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

    /// Waits for the operations that a schedule returns after.
    pub(crate) fn wait_for_return(
        &self,
        run: ScheduleRun,
        schedule: &Schedule,
        meter: &Meter,
    ) -> Result<(), EngineError> {
        let Some(over) = &schedule.returns_after else { return self.synchronize(&Lane::ALL) };
        // The caller's thread is the compute lane.
        let waited =
            over.iter().try_for_each(|id| self.wait(&Wait::SameRun(*id), run, schedule, Some(meter)));
        // Checked even if all of them have finished: a stream can fail after everything was enqueued.
        if waited.is_err() || self.is_stopped() { self.synchronize(&Lane::ALL) } else { Ok(()) }
    }

    /// Waits, on a lane's thread, for the run after number `seen`. `None`: there will be none.
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

    /// Records that a lane's thread has finished a run.
    pub(crate) fn finish_run(&self, lane: Lane, run: ScheduleRun) {
        self.lock().finished[lane as usize] = run.number;
        self.changed.notify_all();
    }

    /// Records that a lane's thread ends.
    pub(crate) fn end_thread(&self) {
        self.lock().running -= 1;
        self.changed.notify_all();
    }

    /// Waits until all lane threads have ended, for at most `most`. Returns whether they have.
    pub(crate) fn ended_within(&self, most: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), most, |progress| progress.running > 0);
        waited.unwrap_or_else(|e| e.into_inner()).0.running == 0
    }

    /// Stops all lanes. The first cause is kept.
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

    /// Waits for all operations that `op` waits for.
    pub(crate) fn wait_for_ops(
        &self,
        op: &Op,
        run: ScheduleRun,
        schedule: &Schedule,
        meter: &Meter,
    ) -> Result<(), Stopped> {
        let meter = (op.lane == Lane::Compute).then_some(meter);
        op.waits.iter().try_for_each(|wait| self.wait(wait, run, schedule, meter))?;
        if self.is_stopped() { Err(Stopped) } else { Ok(()) }
    }

    fn wait(
        &self,
        wait: &Wait,
        run: ScheduleRun,
        schedule: &Schedule,
        meter: Option<&Meter>,
    ) -> Result<(), Stopped> {
        let Some(WaitTarget { op, count, .. }) = run.wait_target(wait) else { return Ok(()) };
        let done = &self.done[schedule.ops[op].lane as usize];
        for _ in 0..SPINS {
            if done.load(Ordering::Acquire) > count {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        let waited = self.sleep_until_done(done, count);
        if let Some(meter) = meter {
            meter.waited(Activity::of(schedule.ops[op].kind), start.elapsed());
        }
        waited
    }

    fn sleep_until_done(&self, done: &AtomicU64, count: u64) -> Result<(), Stopped> {
        let mut progress = self.lock();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // `done` is read after `waiting` was raised, so a lane that finishes either sees `waiting` and notifies, or is
        // seen here.
        while done.load(Ordering::SeqCst) <= count && !self.is_stopped() {
            progress = self.sleep(progress);
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if self.is_stopped() { Err(Stopped) } else { Ok(()) }
    }

    /// Records that an operation has finished.
    pub(crate) fn finish_op(&self, lane: Lane, run: ScheduleRun, op: usize) {
        self.done[lane as usize].store(run.first + op as u64 + 1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // After taking the lock once, a waiter is either asleep or has not read `done` yet.
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

    /// Two operations on the compute lane, then two updates on the host lane. In the next run the first operation waits
    /// for the first update and the second for the second.
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

    /// The compute lane of a run; it sends the index of every operation it has finished.
    fn compute(lanes: &Lanes, schedule: &Schedule, run: ScheduleRun, finished: &mpsc::Sender<usize>) {
        for i in 0..2 {
            assert!(lanes.wait_for_ops(&schedule.ops[i], run, schedule, &Meter::default()).is_ok());
            lanes.finish_op(Lane::Compute, run, i);
            finished.send(i).unwrap();
        }
    }

    fn panicked(lane: &str) -> EngineError {
        let panic = lockstep_core::panics::Panic { message: "on purpose".into(), location: None };
        EngineError::LanePanicked { lane: lane.into(), panic }
    }

    #[test]
    fn a_run_overlaps_the_previous_one_and_waits_for_what_it_needs() {
        let (lanes, schedule) = (Lanes::new(&[Lane::Host]), schedule());
        let (go, gate) = mpsc::channel::<()>();
        let (sender, finished) = mpsc::channel();
        std::thread::scope(|scope| {
            let (lanes, schedule) = (&lanes, &schedule);
            scope.spawn(move || {
                let mut seen = 0;
                while let Some(run) = lanes.next_run(seen) {
                    seen += 1;
                    for i in 2..4 {
                        assert!(
                            lanes.wait_for_ops(&schedule.ops[i], run, schedule, &Meter::default()).is_ok()
                        );
                        gate.recv().unwrap();
                        lanes.finish_op(Lane::Host, run, i);
                    }
                    lanes.finish_run(Lane::Host, run);
                }
            });
            let begin = || lanes.begin(schedule.ops.len(), true, |_| {}).unwrap();
            let first = begin();
            compute(lanes, schedule, first, &sender);
            lanes.wait_for_return(first, schedule, &Meter::default()).unwrap();
            assert_eq!((finished.recv(), finished.recv()), (Ok(0), Ok(1)));

            // The host has updated nothing yet.
            let second = begin();
            scope.spawn(move || {
                compute(lanes, schedule, second, &sender);
                lanes.wait_for_return(second, schedule, &Meter::default()).unwrap();
                // Not before the host has finished the first.
                let third = lanes.begin(schedule.ops.len(), true, |_| {}).unwrap();
                sender.send(third.number as usize).unwrap();
            });
            let pause = Duration::from_millis(30);
            assert!(finished.recv_timeout(pause).is_err(), "its parameters are not updated yet");
            go.send(()).unwrap();
            assert_eq!(finished.recv(), Ok(0));
            assert!(finished.recv_timeout(pause).is_err(), "only the first update has finished");
            go.send(()).unwrap();
            assert_eq!((finished.recv(), finished.recv()), (Ok(1), Ok(3)));

            // Runs that have begun are finished even if `quit` comes first.
            lanes.quit();
            (0..4).for_each(|_| go.send(()).unwrap());
            // The third run computes nothing here, so its compute operation is recorded by hand for the host lane.
            let third = lanes.lock().runs[0];
            lanes.finish_op(Lane::Compute, third, 1);
            lanes.synchronize(&Lane::ALL).unwrap();
        });
    }

    #[test]
    fn a_failure_after_all_operations_is_reported_by_the_step() {
        let (lanes, schedule) = (Lanes::new(&[Lane::Host]), schedule());
        let run = lanes.begin(schedule.ops.len(), true, |_| {}).unwrap();
        lanes.finish_op(Lane::Compute, run, 1);
        lanes.stop(panicked("compute"));
        let failed = lanes.wait_for_return(run, &schedule, &Meter::default());
        assert!(matches!(failed, Err(EngineError::LanePanicked { .. })), "{failed:?}");
    }

    #[test]
    fn a_failure_after_the_step_has_returned_is_reported_by_the_next() {
        let (lanes, schedule) = (Lanes::new(&[Lane::Host]), schedule());
        let first = lanes.begin(schedule.ops.len(), true, |_| {}).unwrap();
        lanes.finish_op(Lane::Compute, first, 1);
        lanes.wait_for_return(first, &schedule, &Meter::default()).unwrap();
        lanes.stop(panicked("host"));
        let failed = lanes.begin(schedule.ops.len(), true, |_| {});
        assert!(matches!(failed, Err(EngineError::LanePanicked { .. })));
        assert!(
            matches!(lanes.synchronize(&[]), Err(EngineError::Stopped)),
            "later calls report that the engine has stopped"
        );
    }
}
