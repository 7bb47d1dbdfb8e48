//! Messages and source locations of caught panics: the payload of a caught panic has no location.
//!
//! [`install_hook`] installs a panic hook that records the last panics of the process and then calls the previous hook.
//! [`from_payload`] finds the location of a caught panic.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::panic::PanicHookInfo;
use std::sync::{Mutex, MutexGuard, Once};

/// How many panics are recorded. One failure rarely causes more than one per thread.
const MAX_RECORDS: usize = 64;

static RECORDS: Mutex<VecDeque<Panic>> = Mutex::new(VecDeque::new());

/// One panic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panic {
    pub message: String,
    /// `file:line:column`. `None` if it panicked before [`install_hook`] was called.
    pub location: Option<String>,
}

impl fmt::Display for Panic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.location {
            Some(location) => write!(f, "panicked at {location}: {}", self.message),
            None => write!(f, "panicked: {}", self.message),
        }
    }
}

/// Records panics from now on. Further calls do nothing.
pub fn install_hook() {
    static INSTALLED: Once = Once::new();
    // A thread that is panicking cannot replace the hook.
    if std::thread::panicking() {
        return;
    }
    INSTALLED.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            remember(info);
            previous(info);
        }));
    });
}

/// The panic behind a payload from `catch_unwind` or a thread's `join`, with its location if that is known.
pub fn from_payload(payload: &(dyn Any + Send)) -> Panic {
    let message = message_of(payload);
    let location =
        records().iter().rev().find(|panic| panic.message == message).and_then(|p| p.location.clone());
    Panic { message, location }
}

fn remember(info: &PanicHookInfo<'_>) {
    let panic =
        Panic { message: message_of(info.payload()), location: info.location().map(ToString::to_string) };
    let mut records = records();
    if records.len() == MAX_RECORDS {
        records.pop_front();
    }
    records.push_back(panic);
}

fn message_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a value that is not text")
        .to_string()
}

fn records() -> MutexGuard<'static, VecDeque<Panic>> {
    RECORDS.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caught_panic_has_its_message_and_location() {
        install_hook();
        install_hook();
        let thread = std::thread::spawn(|| panic!("number {}", 17));
        let payload = thread.join().expect_err("it panics");
        let panic = from_payload(&*payload);
        assert_eq!(panic.message, "number 17");
        let location = panic.location.clone().expect("it was recorded");
        assert!(location.contains("panics.rs:"), "{location}");
        assert_eq!(panic.to_string(), format!("panicked at {location}: number 17"));
    }
}
