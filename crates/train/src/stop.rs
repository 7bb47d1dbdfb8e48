//! Stopping a run early, as a scheduler asks for it when it wants the machine back: the run finishes the step it is
//! in, saves a checkpoint and returns. Whoever runs the process listens to signals; here is only the request.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A request to stop, which another thread may make at any time. Clones are the same request.
///
/// With several ranks each has its own: the ranks sum them with the losses of a step, so that all of them stop after
/// the same step, whichever of them was asked.
#[derive(Clone, Debug, Default)]
pub struct StopRequest(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// What asked, by name: `SIGTERM`.
    by: OnceLock<&'static str>,
    in_steps: AtomicBool,
}

impl StopRequest {
    /// Asks the run to stop after the step it is in. `false`: the run is not in its steps yet, so that nothing is
    /// lost if the process just ends.
    pub fn raise(&self, by: &'static str) -> bool {
        let _ = self.0.by.set(by);
        self.0.in_steps.load(Ordering::Acquire)
    }

    pub fn is_raised(&self) -> bool {
        self.0.by.get().is_some()
    }

    /// From here on the run looks at the request after every step.
    pub(crate) fn steps_begin(&self) {
        self.0.in_steps.store(true, Ordering::Release);
    }

    /// What the run reports when it has stopped.
    pub(crate) fn report(&self, step: u64, checkpoint: Option<&Path>, saved: bool) -> String {
        let by = self.0.by.get().copied().unwrap_or("a signal to another rank");
        let kept = match checkpoint {
            Some(path) if saved => format!("checkpoint in {}", path.display()),
            Some(path) => {
                format!("its last steps were not sound, the newest checkpoint is {}", path.display())
            }
            None => return format!("stopped by {by} after step {step}; there is no sound step to save"),
        };
        format!("stopped by {by} after step {step}; {kept}; resume with resume_from_checkpoint: auto")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_before_the_first_step_says_so() {
        let request = StopRequest::default();
        assert!(!request.is_raised());
        assert!(!request.clone().raise("SIGTERM"));
        assert!(request.is_raised());
        request.steps_begin();
        assert!(request.raise("SIGUSR1"), "the run is in its steps");
    }

    #[test]
    fn reports() {
        let (request, path) = (StopRequest::default(), Path::new("out/checkpoints/step-4"));
        assert_eq!(
            request.report(4, Some(path), true),
            "stopped by a signal to another rank after step 4; checkpoint in out/checkpoints/step-4; resume with \
             resume_from_checkpoint: auto"
        );
        request.raise("SIGTERM");
        assert_eq!(
            request.report(6, Some(path), false),
            "stopped by SIGTERM after step 6; its last steps were not sound, the newest checkpoint is \
             out/checkpoints/step-4; resume with resume_from_checkpoint: auto"
        );
        assert_eq!(
            request.report(2, None, false),
            "stopped by SIGTERM after step 2; there is no sound step to save"
        );
    }
}
