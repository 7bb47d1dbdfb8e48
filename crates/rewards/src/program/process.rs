//! A process of a reward program. Its pipes are non-blocking, so that no thread ever waits for a pipe without a deadline:
//! a program that stops reading while it writes, or that hands its pipes to a process that never ends, blocks nothing.
//!
//! The process has its own process group, which is killed as a whole. The process itself is reaped after that, because
//! its id names the group: once it is reaped, the id may belong to others.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write as _};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::lines::{LineBuffer, StderrTail};
use crate::fault::ProgramExit;

/// How long a process may take to end after SIGTERM, before SIGKILL.
const TERM_PATIENCE: Duration = Duration::from_millis(500);
/// How long the system may take to end a process after SIGKILL. One that hangs in a system call takes longer, and is not
/// waited for.
const KILL_PATIENCE: Duration = Duration::from_secs(2);
const EXIT_POLL: Duration = Duration::from_millis(2);
const READ_BYTES: usize = 64 << 10;

/// What came of reading from a pipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadState {
    /// There may be more.
    Data,
    /// Nothing is there now.
    Empty,
    /// All writers have closed it.
    Closed,
}

pub(crate) struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    pub(crate) lines: LineBuffer,
    pub(crate) tail: StderrTail,
    exit: Option<ProgramExit>,
}

impl Process {
    pub(crate) fn start(
        command: &[String],
        environment: &BTreeMap<OsString, OsString>,
    ) -> io::Result<Process> {
        let mut child = Command::new(&command[0])
            .args(&command[1..])
            .env_clear()
            .envs(environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (lines, tail) = (LineBuffer::default(), StderrTail::default());
        let process = Process { child, stdin, stdout, stderr, lines, tail, exit: None };
        // This changes our ends of the pipes only.
        process.stdin.as_ref().map_or(Ok(()), set_non_blocking)?;
        process.stdout.as_ref().map_or(Ok(()), set_non_blocking)?;
        process.stderr.as_ref().map_or(Ok(()), set_non_blocking)?;
        Ok(process)
    }

    /// Waits until a pipe is ready, or until the time is over.
    pub(crate) fn wait_ready(&self, wants_write: bool, timeout: Duration) {
        let mut fds = Vec::with_capacity(3);
        fds.extend(self.stdout.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
        fds.extend(self.stderr.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
        if wants_write {
            fds.extend(self.stdin.as_ref().map(|fd| PollFd::new(fd, PollFlags::OUT)));
        }
        let timeout = Timespec::try_from(timeout).ok();
        // Interrupted or not: the caller tries the pipes and looks at the clock.
        let _ = poll(&mut fds, timeout.as_ref());
    }

    /// Writes what the pipe takes. Nothing after the program has closed its stdin.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(stdin) = &mut self.stdin else { return Ok(0) };
        match stdin.write(bytes) {
            Ok(count) => Ok(count),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
            Err(e) if e.kind() == ErrorKind::BrokenPipe => {
                self.stdin = None;
                Ok(0)
            }
            Err(e) => Err(e),
        }
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.stdin.is_some()
    }

    /// Reads some of stdout into `lines`.
    pub(crate) fn read_stdout(&mut self) -> io::Result<ReadState> {
        let lines = &mut self.lines;
        read_some(&mut self.stdout, |bytes| lines.push(bytes))
    }

    /// Reads some of stderr into `tail`. Several times, because a program may flood it; not endlessly, for the same
    /// reason.
    pub(crate) fn read_stderr(&mut self) {
        for _ in 0..16 {
            let tail = &mut self.tail;
            if !matches!(read_some(&mut self.stderr, |bytes| tail.push(bytes)), Ok(ReadState::Data)) {
                return;
            }
        }
    }

    /// Whether the process has ended. It is not reaped yet.
    pub(crate) fn has_exited(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.exit.is_some() || !matches!(waitid(WaitId::Pid(Pid::from_child(&self.child)), options), Ok(None))
    }

    /// Waits until the process has ended. Returns whether it has.
    pub(crate) fn wait_exit(&mut self, patience: Duration) -> bool {
        wait_exits(&mut [self], patience)
    }

    /// Ends the process, if it has not ended, and everything that it started. Returns how it ended.
    pub(crate) fn stop(&mut self) -> Option<ProgramExit> {
        stop_all(&mut [self], Duration::ZERO);
        self.exit
    }

    fn signal(&self, signal: Signal) {
        if self.exit.is_none() {
            let _ = kill_process_group(Pid::from_child(&self.child), signal);
        }
    }

    fn reap(&mut self) {
        let deadline = Instant::now() + KILL_PATIENCE;
        while self.exit.is_none() && Instant::now() < deadline {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    let signal = || ProgramExit::Signal(status.signal().unwrap_or_default());
                    self.exit = Some(status.code().map_or_else(signal, ProgramExit::Code));
                }
                Ok(None) => std::thread::sleep(EXIT_POLL),
                Err(_) => return,
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.exit.is_none() {
            self.signal(Signal::KILL);
            self.reap();
        }
    }
}

/// Ends processes: closes their stdin, which is how they should end; then SIGTERM, then SIGKILL to their groups.
pub(crate) fn stop_all(processes: &mut [&mut Process], patience: Duration) {
    processes.iter_mut().for_each(|process| process.stdin = None);
    if !wait_exits(processes, patience) {
        let running = processes.iter().filter(|process| !process.has_exited());
        running.for_each(|process| process.signal(Signal::TERM));
        wait_exits(processes, TERM_PATIENCE);
    }
    for process in processes {
        // Also if the process itself has ended: what it started may still run.
        process.signal(Signal::KILL);
        process.reap();
        process.read_stderr();
    }
}

/// Waits until all have ended. Their output is read, because a process that waits for its output to be read cannot end.
fn wait_exits(processes: &mut [&mut Process], patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        let mut running = 0;
        for process in processes.iter_mut() {
            running += usize::from(!process.has_exited());
            let _ = read_some(&mut process.stdout, |_| {});
            process.read_stderr();
        }
        if running == 0 || Instant::now() >= deadline {
            return running == 0;
        }
        std::thread::sleep(EXIT_POLL);
    }
}

fn set_non_blocking<Fd: AsFd>(fd: Fd) -> io::Result<()> {
    Ok(rustix::io::ioctl_fionbio(fd, true)?)
}

/// Reads once. A pipe that is closed is dropped, because `poll` would return at once for it.
fn read_some<R: Read>(pipe: &mut Option<R>, push: impl FnOnce(&[u8])) -> io::Result<ReadState> {
    let Some(reader) = pipe else { return Ok(ReadState::Closed) };
    let mut buffer = vec![0; READ_BYTES];
    match reader.read(&mut buffer) {
        Ok(0) => {
            *pipe = None;
            Ok(ReadState::Closed)
        }
        Ok(count) => {
            push(&buffer[..count]);
            Ok(ReadState::Data)
        }
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(ReadState::Empty),
        Err(e) => Err(e),
    }
}
