//! SIGTERM and SIGUSR1, as schedulers send them some time before they end a process: the run saves a checkpoint after
//! the step it is in and leaves with 143. It has `--grace` seconds for that; a second signal ends it at once.

use std::process::exit;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lockstep_launch::{EndSignal, FailureNotice, LaunchError, STOPPED, Session, Signals, World};
use lockstep_train::StopRequest;

use crate::report::Failure;
use crate::voice::Voice;

/// Default of `--grace`, in seconds.
pub(crate) const GRACE: f64 = 30.0;
/// `timeout` sends its signal twice, to the process and to its group.
const REPEATED: Duration = Duration::from_millis(100);
/// A launcher passes on to its ranks what they may have got themselves, as one of its group.
const PASSED_ON: Duration = Duration::from_secs(1);

/// Listens to signals for the rest of the process's life.
pub(crate) struct Stopper {
    pub(crate) request: StopRequest,
    notice: Arc<Mutex<Option<FailureNotice>>>,
}

impl Stopper {
    /// Begins to listen. `world`: of a rank of several.
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

/// The thread that listens.
struct SignalWatch {
    signals: Signals,
    request: StopRequest,
    notice: Arc<Mutex<Option<FailureNotice>>>,
    grace: Duration,
    /// A signal that comes so soon after the first is the same one.
    repeated: Duration,
    /// This rank prints for all.
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
                        "the run did not stop within {grace} s of {by} (--grace): it ends without a checkpoint of \
                         its last steps"
                    ),
                );
            }
            match self.signals.next(Some(left)) {
                Some(EndSignal::Stop { name }) if since.elapsed() >= self.repeated => self.exit_now(
                    true,
                    &format!(
                        "a second {name} came: the run ends at once, without a checkpoint of its last steps"
                    ),
                ),
                _ => {}
            }
        }
    }

    /// Ends the process, whatever it does.
    fn exit_now(&self, print: bool, text: &str) -> ! {
        if print {
            Voice::of_this_process().warn(text);
        }
        if let Some(notice) = &*self.notice.lock().unwrap_or_else(PoisonError::into_inner) {
            notice.fail(text, STOPPED);
        }
        exit(STOPPED.into())
    }
}
