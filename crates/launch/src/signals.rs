//! Delivers signals as bytes in pipes, so that a loop or a thread can poll for them.

use std::io::Read as _;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1};

use crate::error::LaunchError;
use crate::serve::IDLE;

/// A signal that asks a process to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndSignal {
    /// Ctrl-C.
    Interrupt,
    Hangup,
    /// SIGTERM or SIGUSR1, which schedulers send some time before they kill a process: save, then end.
    Stop {
        name: &'static str,
    },
}

impl EndSignal {
    fn of(signal: i32) -> Option<EndSignal> {
        match signal {
            SIGINT => Some(EndSignal::Interrupt),
            SIGHUP => Some(EndSignal::Hangup),
            SIGTERM => Some(EndSignal::Stop { name: "SIGTERM" }),
            SIGUSR1 => Some(EndSignal::Stop { name: "SIGUSR1" }),
            _ => None,
        }
    }

    /// The exit code of a process that this signal ended.
    pub fn exit_code(self) -> u8 {
        128 + self.number()
    }

    /// The signal's number. SIGUSR1 counts as SIGTERM.
    pub(crate) fn number(self) -> u8 {
        let number = match self {
            EndSignal::Interrupt => SIGINT,
            EndSignal::Hangup => SIGHUP,
            EndSignal::Stop { .. } => SIGTERM,
        };
        number as u8
    }
}

/// Catches signals while it lives.
pub struct Signals {
    /// For each signal: the read end of its pipe.
    pipes: Vec<(i32, UnixStream)>,
    ids: Vec<signal_hook::SigId>,
}

impl Signals {
    /// Catches SIGTERM and SIGUSR1.
    pub fn that_stop() -> Result<Signals, LaunchError> {
        Signals::catch(&[SIGTERM, SIGUSR1])
    }

    /// Catches the signals that end a program with nothing to save, such as one that has to restore the terminal.
    pub fn that_end() -> Result<Signals, LaunchError> {
        Signals::catch(&[SIGINT, SIGTERM, SIGUSR1, SIGHUP])
    }

    /// Catches the signals that ask the launcher to stop, and SIGCHLD.
    pub(crate) fn of_launcher() -> Result<Signals, LaunchError> {
        Signals::catch(&[SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGCHLD])
    }

    fn catch(list: &[i32]) -> Result<Signals, LaunchError> {
        let mut signals = Signals { pipes: Vec::new(), ids: Vec::new() };
        let mut add = |signal| -> std::io::Result<()> {
            let (read, write) = UnixStream::pair()?;
            read.set_nonblocking(true)?;
            signals.ids.push(signal_hook::low_level::pipe::register(signal, write)?);
            signals.pipes.push((signal, read));
            Ok(())
        };
        for signal in list {
            add(*signal).map_err(|cause| LaunchError::System { what: "catch signals", cause })?;
        }
        Ok(signals)
    }

    /// Waits for a signal that asks this process to end, for at most `timeout`, or forever.
    pub fn next(&self, timeout: Option<Duration>) -> Option<EndSignal> {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        self.poll::<UnixStream>(&[], timeout.as_ref())
    }

    /// Waits briefly for a signal, the end of a child process or readable input. Returns a signal that asks this
    /// process to end, if one has arrived.
    pub(crate) fn wait<T: AsFd>(&self, others: &[&T]) -> Option<EndSignal> {
        self.poll(others, Some(&IDLE))
    }

    fn poll<T: AsFd>(&self, others: &[&T], timeout: Option<&Timespec>) -> Option<EndSignal> {
        let mut fds: Vec<PollFd<'_>> =
            self.pipes.iter().map(|(_, pipe)| PollFd::new(pipe, PollFlags::IN)).collect();
        fds.extend(others.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)));
        let _ = poll(&mut fds, timeout);
        let mut received = None;
        for (signal, pipe) in &self.pipes {
            // Repetitions that are read together count as one signal; only one that arrives later is a second.
            if matches!((&*pipe).read(&mut [0; 64]), Ok(1..)) {
                received = EndSignal::of(*signal).or(received);
            }
        }
        received
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}
