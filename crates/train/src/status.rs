//! Writes what this rank is doing to the output folder about once a second, for programs that watch the run. A thread of
//! its own writes it, so that a rank that hangs still shows where, and a slow disk slows no step.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use lockstep_engine::{Engine, LaneMonitor};
use lockstep_observe::{MAX_STATUS_RANKS, RankStatus, RunningOperation};

use crate::output_dir::{LockHolder, OutputDir};

const EVERY: Duration = Duration::from_secs(1);
/// How long the end of a run waits for a disk that does not answer.
const END: Duration = Duration::from_secs(2);

/// The thread that writes the status. It ends, and removes the file, when this is dropped.
pub(crate) struct StatusWriter {
    step: Arc<AtomicU64>,
    end: Option<Sender<()>>,
    ended: Receiver<()>,
}

impl StatusWriter {
    /// `None` for more ranks than a shared disk should serve.
    pub(crate) fn start(engine: &Engine, output: &OutputDir, step: u64) -> Option<StatusWriter> {
        let (rank, ranks) = (engine.rank().0, engine.plan().input.mesh.world_size());
        let dir = output.path().to_path_buf();
        let writes = ranks <= MAX_STATUS_RANKS;
        if rank == 0 {
            // Left by an earlier run of more ranks that was killed.
            RankStatus::remove_from(&dir, if writes { ranks } else { 0 });
        }
        if !writes {
            return None;
        }
        let step = Arc::new(AtomicU64::new(step));
        let (end, ending) = channel();
        let (sender, ended) = channel();
        let (monitor, steps) = (engine.lane_monitor(), Arc::clone(&step));
        let work = move || {
            write_until_end(rank, &dir, &monitor, &steps, &ending);
            RankStatus::remove(&dir, rank);
            let _ = sender.send(());
        };
        // A run without it trains as well.
        std::thread::Builder::new().name("status".into()).spawn(work).ok()?;
        Some(StatusWriter { step, end: Some(end), ended })
    }

    /// The rank has completed a step.
    pub(crate) fn step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }
}

fn write_until_end(rank: u32, dir: &Path, monitor: &LaneMonitor, step: &AtomicU64, ending: &Receiver<()>) {
    let LockHolder { pid, host, .. } = LockHolder::this();
    loop {
        let running = monitor.operations().into_iter().map(|one| RunningOperation {
            lane: one.lane,
            operation: one.operation,
            collective: one.collective,
            seconds: one.seconds,
        });
        let status = RankStatus {
            rank,
            host: host.clone(),
            pid,
            step: step.load(Ordering::Relaxed),
            operations: running.collect(),
            age: Duration::ZERO,
        };
        // A disk that is full now may have space in a second.
        let _ = status.write(dir);
        if ending.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

impl Drop for StatusWriter {
    fn drop(&mut self) {
        drop(self.end.take());
        let _ = self.ended.recv_timeout(END);
    }
}
