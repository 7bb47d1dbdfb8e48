//! What is known of a run at one moment, and the reader that keeps it up to date. Files are polled, because folders that
//! another machine mounts do not report changes.

use std::io;
use std::time::{Duration, Instant, SystemTime};

use lockstep_observe::{
    History, MetricsEvent, MetricsReader, RankStatus, RunFiles, RunInfo, RunSigns, RunState,
};

/// The newest lines of the log that a screen may show.
const LOG_LINES: usize = 60;

/// What is known of a run.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The output folder.
    pub path: String,
    pub info: RunInfo,
    pub history: History,
    pub state: RunState,
    /// Why the run stopped early.
    pub stop: Option<String>,
    /// How long nothing has been written.
    pub silent: Option<Duration>,
    /// Whether that is longer than steps take.
    pub is_silent: bool,
    /// The newest lines of the log, oldest first.
    pub log: Vec<String>,
    pub ranks: Vec<RankStatus>,
    /// The GPUs of the machine that shows the run, which need not be the one that trains.
    pub gpus: Vec<GpuStatus>,
    /// Why the files could not be read.
    pub problem: Option<String>,
}

/// A GPU and the processes on it. `None`: its driver does not report that.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuStatus {
    pub name: String,
    pub temperature_celsius: Option<f64>,
    pub power_watts: Option<f64>,
    pub power_limit_watts: Option<f64>,
    /// The share of time in which a kernel ran, between 0 and 1.
    pub utilization: Option<f64>,
    pub used_bytes: u64,
    pub total_bytes: u64,
    /// Process ids and their bytes.
    pub processes: Vec<(u32, Option<u64>)>,
}

impl Snapshot {
    pub(crate) fn name(&self) -> &str {
        if self.info.name.is_empty() { &self.path } else { &self.info.name }
    }
}

/// Reads a run again and again.
#[derive(Debug)]
pub struct RunReader {
    files: RunFiles,
    metrics: MetricsReader,
    snapshot: Snapshot,
    last_written: Option<SystemTime>,
    /// When this reader has last seen the run write. The clock of the host that writes may differ from ours.
    seen_writing: Option<Instant>,
}

impl RunReader {
    pub fn new(files: RunFiles) -> RunReader {
        let snapshot = Snapshot {
            path: files.dir().display().to_string(),
            info: RunInfo::default(),
            history: History::default(),
            state: RunState::Unknown,
            stop: None,
            silent: None,
            is_silent: false,
            log: Vec::new(),
            ranks: Vec::new(),
            gpus: Vec::new(),
            problem: None,
        };
        let metrics = files.metrics();
        RunReader { files, metrics, snapshot, last_written: None, seen_writing: None }
    }

    /// Reads what is new.
    pub fn read(&mut self, gpus: Vec<GpuStatus>) -> &Snapshot {
        let read = self.read_metrics();
        let (files, snapshot) = (&self.files, &mut self.snapshot);
        snapshot.problem = read.err().map(|cause| format!("cannot read the metrics: {cause}"));
        snapshot.info = files.info();
        snapshot.log = files.log_tail(LOG_LINES);
        snapshot.ranks = files.rank_status(snapshot.info.ranks);
        snapshot.gpus = gpus;
        let written = files.last_written();
        if self.last_written.is_some() && written != self.last_written {
            self.seen_writing = Some(Instant::now());
        }
        self.last_written = written;
        snapshot.silent =
            [files.silent(), self.seen_writing.map(|at| at.elapsed())].into_iter().flatten().min();
        snapshot.stop = files.stop_reason();
        let signs = RunSigns {
            steps: snapshot.history.steps(),
            step_seconds: snapshot.history.recent("step_seconds"),
            silent: snapshot.silent,
            alive: snapshot.ranks.iter().any(RankStatus::is_new),
            stop: snapshot.stop.clone(),
        };
        snapshot.state = signs.state(&snapshot.info);
        snapshot.is_silent = signs.is_silent();
        snapshot
    }

    fn read_metrics(&mut self) -> io::Result<()> {
        let history = &mut self.snapshot.history;
        self.metrics.read_each(&mut |event| match event {
            MetricsEvent::Restarted => *history = History::default(),
            MetricsEvent::Line(line) => history.push(line),
        })
    }
}
