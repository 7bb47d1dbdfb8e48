//! Retries with growing waits.

use std::time::Duration;

use crate::error::HubError;
use crate::progress::DownloadProgress;

/// A server may not keep us waiting longer than this.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(300);
/// A request that brought this many bytes was not in vain: the count of failures starts anew.
pub(crate) const WORTHWHILE_BYTES: u64 = 1 << 20;

/// When to give up.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// How often a request is sent without success.
    pub attempts: u32,
    /// The wait after the first failure. It doubles after each further one.
    pub first_wait: Duration,
    pub max_wait: Duration,
    /// A connection that brings no byte for this long counts as cut.
    pub stall: Duration,
}

impl Default for RetryPolicy {
    fn default() -> RetryPolicy {
        RetryPolicy {
            attempts: 6,
            first_wait: Duration::from_millis(500),
            max_wait: Duration::from_secs(16),
            stall: Duration::from_secs(30),
        }
    }
}

/// A failure that may pass.
#[derive(Debug)]
pub(crate) struct Transient {
    /// What to report if it does not pass.
    pub(crate) error: HubError,
    /// How long the server wants us to wait.
    pub(crate) retry_after: Option<Duration>,
}

/// A failure of one attempt.
#[derive(Debug)]
pub(crate) enum Failed {
    Transient(Box<Transient>),
    Permanent(HubError),
}

impl From<HubError> for Failed {
    fn from(error: HubError) -> Failed {
        Failed::Permanent(error)
    }
}

/// Counts failures and waits between attempts.
pub(crate) struct Backoff {
    policy: RetryPolicy,
    failures: u32,
}

impl Backoff {
    pub(crate) fn new(policy: RetryPolicy) -> Backoff {
        Backoff { policy, failures: 0 }
    }

    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }

    /// Waits before the next attempt, or returns the error if there is none.
    pub(crate) fn wait(
        &mut self,
        failed: Transient,
        progress: &mut dyn DownloadProgress,
    ) -> Result<(), HubError> {
        self.failures += 1;
        let wait = match wait_after(&self.policy, self.failures, failed.retry_after) {
            Some(wait) => wait,
            None => return Err(failed.error),
        };
        if wait >= Duration::from_secs(1) {
            progress.note(&format!("{}; trying again in {} s", failed.error, wait.as_secs()));
        }
        std::thread::sleep(wait);
        Ok(())
    }
}

/// The wait after the `failures`th failure in a row; `None`: give up.
fn wait_after(policy: &RetryPolicy, failures: u32, retry_after: Option<Duration>) -> Option<Duration> {
    if failures >= policy.attempts {
        return None;
    }
    let doubled = policy.first_wait.saturating_mul(1 << (failures - 1).min(16)).min(policy.max_wait);
    match retry_after {
        Some(wait) if wait > MAX_RETRY_AFTER => None,
        Some(wait) => Some(wait.max(doubled)),
        None => Some(doubled),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_and_end() {
        let policy =
            RetryPolicy { attempts: 4, max_wait: Duration::from_millis(1500), ..RetryPolicy::default() };
        let ms = |failures, after: Option<u64>| {
            wait_after(&policy, failures, after.map(Duration::from_secs)).map(|wait| wait.as_millis())
        };
        assert_eq!([1, 2, 3, 4].map(|n| ms(n, None)), [Some(500), Some(1000), Some(1500), None]);
        assert_eq!(ms(1, Some(7)), Some(7000));
        assert_eq!(ms(1, Some(301)), None);
    }
}
