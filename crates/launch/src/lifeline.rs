//! A rank does not outlive its launcher.

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Asks the system to end this process when its launcher ends, however that comes about. `false`: the
/// launcher is gone already. To be called before anything else is started.
pub fn die_with(launcher: u32) -> bool {
    // Where the system has no such thing, the lost connection to the rendezvous does the same, later.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    // It may have gone between starting us and the call.
    getppid().map(Pid::as_raw_pid) == i32::try_from(launcher).ok()
}
