//! Failpoints: named places in the code where a test can cause a panic, even in the real binary.
//!
//! No failpoint is armed by default. Passing one that is not armed costs one atomic load.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_ARMED: AtomicBool = AtomicBool::new(false);
static ARMED: Mutex<Option<Failpoint>> = Mutex::new(None);

/// Which failpoint panics, and after how many passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failpoint {
    pub name: String,
    /// How many passes succeed first.
    pub passes: u64,
}

/// A text that is not a failpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadFailpoint {
    pub text: String,
}

impl std::fmt::Display for BadFailpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` is not a failpoint; expected NAME or NAME:PASSES, such as lane.host:12", self.text)
    }
}

impl std::error::Error for BadFailpoint {}

impl std::str::FromStr for Failpoint {
    type Err = BadFailpoint;

    /// `NAME` or `NAME:PASSES`.
    fn from_str(text: &str) -> Result<Failpoint, BadFailpoint> {
        let bad = || BadFailpoint { text: text.into() };
        let (name, passes) = match text.split_once(':') {
            Some((name, passes)) => (name, passes.parse().map_err(|_| bad())?),
            None => (text, 0),
        };
        if name.is_empty() { Err(bad()) } else { Ok(Failpoint { name: name.into(), passes }) }
    }
}

/// Arms a failpoint in this process. It replaces an earlier one.
pub fn arm(failpoint: Failpoint) {
    *lock() = Some(failpoint);
    IS_ARMED.store(true, Ordering::SeqCst);
}

/// Panics if this failpoint is armed and its passes are used up, and disarms it.
#[inline]
#[track_caller]
pub fn pass(name: &str) {
    if IS_ARMED.load(Ordering::Relaxed) {
        pass_armed(name);
    }
}

#[cold]
#[track_caller]
fn pass_armed(name: &str) {
    let mut armed = lock();
    let Some(failpoint) = armed.as_mut().filter(|failpoint| failpoint.name == name) else { return };
    if failpoint.passes > 0 {
        failpoint.passes -= 1;
        return;
    }
    *armed = None;
    IS_ARMED.store(false, Ordering::SeqCst);
    drop(armed);
    panic!("failpoint {name}");
}

fn lock() -> std::sync::MutexGuard<'static, Option<Failpoint>> {
    ARMED.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_armed_failpoint_panics_once_after_its_passes() {
        arm("a.place:2".parse().unwrap());
        pass("a.place");
        pass("another.place");
        pass("a.place");
        let panicked = std::panic::catch_unwind(|| pass("a.place"));
        assert!(panicked.is_err());
        pass("a.place");
        for bad in ["", ":1", "x:", "x:-1", "x:y"] {
            assert!(bad.parse::<Failpoint>().is_err(), "{bad}");
        }
    }
}
