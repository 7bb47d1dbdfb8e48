//! Stops a run on SIGTERM and SIGUSR1, which schedulers send some time before they kill a process. The run finishes its
//! step, saves a checkpoint and exits with 143. It has `--grace` seconds for that; a second signal ends it at once.

use std::process::exit;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lockstep_launch::{EndSignal, FailureNotice, LaunchError, STOPPED, Session, Signals, World};
use lockstep_train::StopRequest;

use crate::report::Failure;
use crate::reporter::Reporter;

/// Default of `--grace`, in seconds.
pub(crate) const GRACE: f64 = 30.0;
/// `timeout` sends its signal twice: to the process, and to its group.
const REPEATED: Duration = Duration::from_millis(100);
/// A launcher forwards a signal that its ranks may have received as well, as part of its process group.
const PASSED_ON: Duration = Duration::from_secs(1);

/// Listens for signals until the process ends.
pub(crate) struct Stopper {
    pub(crate) request: StopRequest,
    notice: Arc<Mutex<Option<FailureNotice>>>,
}

impl Stopper {
    /// Starts to listen. `world`: the world of a rank.
    pub(crate) fn listen(grace: f64, world: Option<&World>) -> Result<Stopper, Failure> {
        let failed = |error: LaunchError| -> Failure { Box::new(error) };
        let stopper = Stopper { request: StopRequest::default(), notice: Arc::default() };
        let mut watch = SignalWatch {
            signals: Signals::that_stop().map_err(failed)?,
            request: stopper.request.clone(),
            notice: Arc::clone(&stopper.notice),
            grace: Duration::from_secs_f64(grace),
            repeated: if world.is_some() { PASSED_ON } else { REPEATED },
            prints: world.is_none_or(|world| world.rank == 0),
        };
        let thread = std::thread::Builder::new().name("signals".into()).spawn(move || watch.run());
        thread.map_err(|cause| failed(LaunchError::System { what: "catch signals", cause }))?;
        Ok(stopper)
    }

    /// From now on, a process that exits at once notifies the other ranks first.
    pub(crate) fn notify_through(&self, session: &Session) -> Result<(), LaunchError> {
        let notice = session.failure_notice()?;
        *self.notice.lock().unwrap_or_else(PoisonError::into_inner) = Some(notice);
        Ok(())
    }
}

/// The thread that waits for signals.
struct SignalWatch {
    signals: Signals,
    request: StopRequest,
    notice: Arc<Mutex<Option<FailureNotice>>>,
    grace: Duration,
    /// A signal that follows the first within this time is the same one.
    repeated: Duration,
    /// Whether this rank prints for all ranks.
    prints: bool,
}

impl SignalWatch {
    fn run(&mut self) -> ! {
        let by = loop {
            if let Some(EndSignal::Stop { name }) = self.signals.next(None) {
                break name;
            }
        };
        let since = Instant::now();
        if !self.request.raise(by) {
            self.exit_now(self.prints, &format!("stopped by {by} before the first step"));
        }
        loop {
            let left = self.grace.saturating_sub(since.elapsed());
            if left.is_zero() {
                let grace = self.grace.as_secs_f64();
                self.exit_now(
                    true,
                    &format!(
                        "the run did not stop within {grace} s of {by} (--grace), so it ends without a checkpoint \
                         of its last steps"
                    ),
                );
            }
            match self.signals.next(Some(left)) {
                Some(EndSignal::Stop { name }) if since.elapsed() >= self.repeated => self.exit_now(
                    true,
                    &format!(
                        "received a second {name}: the run ends at once, without a checkpoint of its last steps"
                    ),
                ),
                _ => {}
            }
        }
    }

    /// Ends the process at once.
    fn exit_now(&self, print: bool, text: &str) -> ! {
        if print {
            Reporter::of_this_process().line(text);
        }
        if let Some(notice) = &*self.notice.lock().unwrap_or_else(PoisonError::into_inner) {
            notice.fail(text, STOPPED);
        }
        exit(STOPPED.into())
    }
}
