//! Requests to stop a run early, for example when a scheduler preempts it: the run finishes its current step, saves a
//! checkpoint and returns. The caller handles signals; this module only passes the request on.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A request to stop, which another thread may raise at any time. Clones share the same request.
///
/// Every rank has its own. The ranks sum them with the losses of a step, so that all of them stop after the same step,
/// whichever rank received the request.
#[derive(Clone, Debug, Default)]
pub struct StopRequest(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// What raised the request, such as `SIGTERM`.
    by: OnceLock<&'static str>,
    in_steps: AtomicBool,
}

impl StopRequest {
    /// Asks the run to stop after its current step. Returns `false` if the first step has not begun, so that the
    /// process can just exit without losing work.
    pub fn raise(&self, by: &'static str) -> bool {
        let _ = self.0.by.set(by);
        self.0.in_steps.load(Ordering::Acquire)
    }

    pub fn is_raised(&self) -> bool {
        self.0.by.get().is_some()
    }

    /// From here on the run checks the request after every step.
    pub(crate) fn steps_begin(&self) {
        self.0.in_steps.store(true, Ordering::Release);
    }

    /// The message of a run that has stopped. `saved`: whether `checkpoint` is that of the last step.
    pub(crate) fn report(&self, step: u64, checkpoint: Option<&Path>, saved: bool) -> String {
        let by = self.0.by.get().copied().unwrap_or("a signal to another rank");
        let kept = match checkpoint {
            Some(path) if saved => format!("checkpoint in {}", path.display()),
            Some(path) => {
                format!("the last steps were not finite, so the newest checkpoint is {}", path.display())
            }
            None => return format!("stopped by {by} after step {step}; no checkpoint was saved"),
        };
        format!("stopped by {by} after step {step}; {kept}; resume with resume_from_checkpoint: auto")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_before_the_first_step_returns_false() {
        let request = StopRequest::default();
        assert!(!request.is_raised());
        assert!(!request.clone().raise("SIGTERM"));
        assert!(request.is_raised());
        request.steps_begin();
        assert!(request.raise("SIGUSR1"), "the first step has begun");
    }

    #[test]
    fn reports_name_the_signal_and_the_checkpoint() {
        let (request, path) = (StopRequest::default(), Path::new("out/checkpoints/step-4"));
        assert_eq!(
            request.report(4, Some(path), true),
            "stopped by a signal to another rank after step 4; checkpoint in out/checkpoints/step-4; resume with \
             resume_from_checkpoint: auto"
        );
        request.raise("SIGTERM");
        assert_eq!(
            request.report(6, Some(path), false),
            "stopped by SIGTERM after step 6; the last steps were not finite, so the newest checkpoint is \
             out/checkpoints/step-4; resume with resume_from_checkpoint: auto"
        );
        assert_eq!(
            request.report(2, None, false),
            "stopped by SIGTERM after step 2; no checkpoint was saved"
        );
    }
}
