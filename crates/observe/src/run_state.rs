//! Whether a run is going on, as its files show.

use std::fmt;
use std::time::Duration;

use crate::rank_status::RankStatus;
use crate::run_files::{RunFiles, RunInfo};

/// A run that writes nothing for this long is not running, unless its steps take long.
const SILENT: Duration = Duration::from_secs(120);
/// … or for this many steps.
const SILENT_STEPS: f64 = 10.0;
/// The lines of the log among which the end of a run is.
const END_LINES: usize = 20;

/// The state of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    Running,
    Finished,
    /// Ended before its last step, or silent for too long.
    Stopped,
    /// Written by a version that did not write how many steps there are.
    Unknown,
}

impl fmt::Display for RunState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            RunState::Running => "running",
            RunState::Finished => "finished",
            RunState::Stopped => "stopped",
            RunState::Unknown => "-",
        })
    }
}

/// What the state of a run follows from.
#[derive(Clone, Debug, Default)]
pub struct RunSigns {
    /// The steps completed.
    pub steps: u64,
    pub step_seconds: Option<f64>,
    /// How long nothing has been written.
    pub silent: Option<Duration>,
    /// Whether a rank has just written its status.
    pub alive: bool,
    /// Why the run stopped early, as its log has it.
    pub stop: Option<String>,
}

impl RunSigns {
    /// Whether nothing has been written for longer than steps take.
    pub fn is_silent(&self) -> bool {
        let step_seconds = self.step_seconds.filter(|seconds| (0.0..1e6).contains(seconds)).unwrap_or(0.0);
        let limit = SILENT.max(Duration::from_secs_f64(step_seconds * SILENT_STEPS));
        self.silent.is_none_or(|silent| silent >= limit)
    }

    pub fn state(&self, info: &RunInfo) -> RunState {
        match info.total_steps {
            total if total > 0 && self.steps >= total => RunState::Finished,
            _ if self.stop.is_some() => RunState::Stopped,
            // A long evaluation writes nothing else.
            _ if self.alive || !self.is_silent() => RunState::Running,
            0 => RunState::Unknown,
            _ => RunState::Stopped,
        }
    }
}

impl RunFiles {
    /// How long ago the run has written something. A time in the future, by a host whose clock is ahead, is now.
    pub fn silent(&self) -> Option<Duration> {
        self.last_written().map(|time| time.elapsed().unwrap_or_default())
    }

    /// Whether rank 0 has just written what it is doing.
    pub fn is_alive(&self) -> bool {
        self.rank_status(1).iter().any(RankStatus::is_new)
    }

    /// Why the run stopped early, if that is how its log ends.
    pub fn stop_reason(&self) -> Option<String> {
        let messages = self.log_tail(END_LINES);
        // After the time.
        let messages =
            messages.iter().rev().filter_map(|line| line.split_once(' ')).map(|(_, message)| message);
        let is_stop = |message: &str| message.starts_with("stopped by ") || message.starts_with("stopped: ");
        // Later messages are of the run that resumed.
        let is_start = |message: &str| message.starts_with("step ") || message.starts_with("fingerprint ");
        let last = messages.into_iter().find(|message| is_stop(message) || is_start(message))?;
        is_stop(last).then(|| last.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::RECORD;
    use crate::run_log::RunLog;

    #[test]
    fn states() {
        let info = RunInfo { total_steps: 10, ..RunInfo::default() };
        let signs = |steps, silent, step_seconds| RunSigns {
            steps,
            silent: Some(Duration::from_secs(silent)),
            step_seconds: Some(step_seconds),
            ..RunSigns::default()
        };
        let stopped = |stop: &str| RunSigns { stop: Some(stop.into()), ..signs(3, 0, 1.0) };
        assert_eq!(signs(10, 0, 1.0).state(&info), RunState::Finished);
        assert_eq!(signs(3, 100, 1.0).state(&info), RunState::Running);
        assert_eq!(signs(3, 130, 1.0).state(&info), RunState::Stopped);
        assert_eq!(signs(3, 130, 60.0).state(&info), RunState::Running, "its steps take a minute");
        let alive = RunSigns { alive: true, ..signs(3, 900, 1.0) };
        assert_eq!((alive.state(&info), alive.is_silent()), (RunState::Running, true), "a long evaluation");
        assert_eq!(stopped("stopped by SIGTERM").state(&info), RunState::Stopped);
        assert_eq!(signs(3, 130, f64::NAN).state(&RunInfo::default()), RunState::Unknown);
        assert_eq!(RunSigns::default().state(&info), RunState::Stopped);
    }

    #[test]
    fn the_log_has_the_reason_of_a_stop() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = RunLog::open(dir.path(), None).unwrap();
        let files = RunFiles::open(dir.path()).unwrap();
        log.step(&RECORD).unwrap();
        assert_eq!(files.stop_reason(), None);
        log.event("stopped by SIGTERM after step 12; checkpoint in out").unwrap();
        log.event("profile in out").unwrap();
        assert_eq!(
            files.stop_reason().as_deref(),
            Some("stopped by SIGTERM after step 12; checkpoint in out")
        );
        log.fingerprint("abc", &[]).unwrap();
        assert_eq!(files.stop_reason(), None, "the run has resumed");
    }
}
