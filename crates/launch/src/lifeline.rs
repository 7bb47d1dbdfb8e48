//! Ties the lifetime of a rank to its launcher.

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Asks the kernel to kill this process when its launcher ends for any reason. Returns `false` if the launcher has
/// already ended. Call it before starting any thread.
pub fn die_with(launcher: u32) -> bool {
    // If the kernel does not support it, the lost connection to the rendezvous ends this process later.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    // The launcher may have ended before the call above.
    getppid().map(Pid::as_raw_pid) == i32::try_from(launcher).ok()
}
