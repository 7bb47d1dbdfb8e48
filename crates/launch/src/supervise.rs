//! The ranks of one node, from start to end: what they print is relayed, one's failure is everyone's, a
//! signal to the launcher reaches all, and none is left behind. `watch` decides; this loop does it.

use std::ffi::OsString;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};

use crate::cause::{Ended, ErrorNote, RankFailure, cause};
use crate::error::LaunchError;
use crate::relay::Console;
use crate::serve::{IDLE, Outcome, RunningServer, ServerOptions, open, serve};
use crate::spawn::{RankProcess, Scratch};
use crate::token::Token;
use crate::watch::{Action, Event, Restarts, Watch};
use crate::world::{LOOPBACK, ServerPlace, World};

/// What to start, and how.
#[derive(Clone, Debug)]
pub struct Supervisor {
    /// What a rank runs.
    pub program: PathBuf,
    pub args: Vec<OsString>,
    pub nodes: u32,
    /// This node's number.
    pub node: u32,
    /// Ranks on each node.
    pub local_world_size: u32,
    /// Node 0's host, and the port of the rendezvous there; a single node needs neither and takes a free
    /// port of its own, unless one is given.
    pub master_addr: String,
    pub master_port: Option<u16>,
    /// A single node makes its own.
    pub token: Option<Token>,
    /// Of the program.
    pub version: String,
    pub join_timeout: Duration,
    pub max_restarts: u32,
    /// From SIGTERM to SIGKILL, when the launcher itself is told to end.
    pub grace: Duration,
    /// For files that live as long as the launcher.
    pub scratch: PathBuf,
    /// Copies what ranks print into files. Rank 0 then has no terminal.
    pub tee: Option<Tee>,
    /// The local ranks whose output is shown; all where there is no list.
    pub shown: Option<Vec<u32>>,
    /// By local rank: variables of its environment besides those of the run. No more than there are ranks.
    pub variables: Vec<Vec<(String, String)>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tee {
    pub dir: PathBuf,
    pub stdout: bool,
    pub stderr: bool,
}

/// How the ranks ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    Done,
    Failed(RankFailure),
    /// The launcher was told to end: the signal's number.
    Signalled(i32),
}

/// The port of several nodes where none is given, as torchrun has it.
const DEFAULT_PORT: u16 = 29500;

/// Starts the ranks and stays until they have ended. To be called from a thread that lives as long as
/// the process: ranks are ended with the thread that started them.
pub fn supervise(job: &Supervisor, console: &mut dyn Console) -> Result<Ending, LaunchError> {
    let token = match &job.token {
        Some(token) => token.clone(),
        None if job.nodes == 1 => Token::random()?,
        None => return Err(LaunchError::NoToken { nodes: job.nodes }),
    };
    let port = job.master_port.unwrap_or(if job.nodes == 1 { 0 } else { DEFAULT_PORT });
    // A rank that is alone has nobody to meet.
    let meets = job.node == 0 && job.nodes * job.local_world_size > 1;
    let listener = if meets { Some(open(job.nodes, port, Some(&token))?) } else { None };
    let port = match listener.as_ref().map(TcpListener::local_addr) {
        Some(Ok(addr)) => addr.port(),
        // Nobody will ask there, but what is set must be a port.
        _ if port == 0 => DEFAULT_PORT,
        _ => port,
    };
    let scratch = Scratch::make(&job.scratch)?;
    let signals = Signals::catch()?;
    let mut restarts = Restarts { done: 0, most: job.max_restarts };
    loop {
        let attempt = Attempt {
            job,
            token: &token,
            listener: listener.as_ref(),
            port,
            scratch: &scratch,
            signals: &signals,
            number: restarts.done,
        };
        let ending = attempt.run(console)?;
        let Ending::Failed(failure) = &ending else { return Ok(ending) };
        let Some(wait) = restarts.next(failure.code) else { return Ok(ending) };
        let text = format!(
            "{failure}\nthe ranks start again in {} s (restart {} of {})\n",
            wait.as_secs(),
            restarts.done,
            restarts.most
        );
        console.stderr(text.as_bytes());
        let since = Instant::now();
        while since.elapsed() < wait {
            if let Some(signal) = signals.wait::<UnixStream>(&[]) {
                return Ok(Ending::Signalled(signal));
            }
        }
    }
}

/// One start of all ranks of this node.
/// For ranks of other nodes to end after those of this one have.
const OTHER_NODES: Duration = Duration::from_secs(10);

struct Attempt<'a> {
    job: &'a Supervisor,
    token: &'a Token,
    listener: Option<&'a TcpListener>,
    port: u16,
    scratch: &'a Scratch,
    signals: &'a Signals,
    number: u32,
}

impl Attempt<'_> {
    fn run(&self, console: &mut dyn Console) -> Result<Ending, LaunchError> {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let server = self.serve(&lines)?;
        let mut ranks = self.start()?;
        let start = Instant::now();
        let mut watch = Watch::new(ranks.len(), self.job.grace);
        let mut order = Vec::new();
        let mut events = Vec::new();
        let mut told = false;
        loop {
            let pipes: Vec<_> =
                ranks.iter().flat_map(|rank| &rank.pipes).filter(|pipe| pipe.is_open()).collect();
            let signal = self.signals.wait(&pipes);
            ranks.iter_mut().flat_map(|rank| &mut rank.pipes).for_each(|pipe| pipe.relay(console));
            for line in lines.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
                console.stderr(format!("{line}\n").as_bytes());
            }
            events.extend(signal.map(Event::Signalled));
            for (local, rank) in ranks.iter_mut().enumerate() {
                if let Some(exit) = rank.reap() {
                    rank.pipes.iter_mut().for_each(|pipe| pipe.finish(console));
                    order.push(local);
                    events.push(Event::Exited { local, exit });
                }
            }
            if !told && matches!(server.as_ref().and_then(RunningServer::outcome), Some(Outcome::Failed(_))) {
                told = true;
                events.push(Event::RunFailed);
            }
            events.push(Event::Tick);
            let mut finished = false;
            for event in events.drain(..) {
                for action in watch.handle(start.elapsed(), event) {
                    match action {
                        Action::Terminate => stop(&mut ranks, Signal::TERM),
                        Action::Kill => stop(&mut ranks, Signal::KILL),
                        Action::Finished => finished = true,
                    }
                }
            }
            if finished {
                break;
            }
        }
        ranks.iter_mut().flat_map(|rank| &mut rank.pipes).for_each(|pipe| pipe.finish(console));
        let ending = self.ending(&watch, &ranks, &order, server.as_ref());
        match (ending, server) {
            (Ending::Done, Some(server)) if self.job.nodes > 1 => Ok(self.outlive(server)),
            (ending, _) => Ok(ending),
        }
    }

    /// Ranks of other nodes may still be taking their leave of the rendezvous, which is here.
    fn outlive(&self, server: RunningServer) -> Ending {
        let start = Instant::now();
        while server.outcome().is_none() && start.elapsed() < OTHER_NODES {
            if let Some(signal) = self.signals.wait::<UnixStream>(&[]) {
                return Ending::Signalled(signal);
            }
        }
        match server.outcome() {
            Some(Outcome::Failed(abort)) => Ending::Failed(cause(&[], Some(&abort))),
            Some(Outcome::Done) => {
                server.finish();
                Ending::Done
            }
            None => Ending::Done,
        }
    }

    fn ending(
        &self,
        watch: &Watch,
        ranks: &[RankProcess],
        order: &[usize],
        server: Option<&RunningServer>,
    ) -> Ending {
        if let Some(signal) = watch.signal() {
            return Ending::Signalled(signal);
        }
        let ended: Vec<Ended> = order
            .iter()
            .map(|&local| &ranks[local])
            .filter_map(|rank| {
                Some(Ended {
                    member: rank.member.clone(),
                    exit: rank.exit?,
                    stopped: rank.stopped,
                    note: ErrorNote::read(&rank.error_file),
                })
            })
            .collect();
        if ended.len() == ranks.len() && ended.iter().all(|e| e.exit.is_success()) {
            return Ending::Done;
        }
        let abort = match server.and_then(RunningServer::outcome) {
            Some(Outcome::Failed(abort)) => Some(abort),
            _ => None,
        };
        Ending::Failed(cause(&ended, abort.as_ref()))
    }

    fn serve(&self, lines: &Arc<Mutex<Vec<String>>>) -> Result<Option<RunningServer>, LaunchError> {
        let Some(listener) = self.listener else { return Ok(None) };
        let lines = Arc::clone(lines);
        let options = ServerOptions {
            world_size: self.job.nodes * self.job.local_world_size,
            local_world_size: self.job.local_world_size,
            attempt: self.number,
            token: Some(self.token.clone()),
            version: self.job.version.clone(),
            join_timeout: self.job.join_timeout,
            log: Box::new(move |line| lines.lock().unwrap_or_else(PoisonError::into_inner).push(line.into())),
        };
        serve(listener, options).map(Some)
    }

    fn start(&self) -> Result<Vec<RankProcess>, LaunchError> {
        let Supervisor { nodes, node, local_world_size, .. } = *self.job;
        let mut ranks = Vec::new();
        for local_rank in 0..local_world_size {
            let world = World {
                rank: node * local_world_size + local_rank,
                world_size: nodes * local_world_size,
                local_rank,
                local_world_size,
                node,
                master_addr: if nodes == 1 { LOOPBACK.into() } else { self.job.master_addr.clone() },
                port: self.port,
                server: ServerPlace::Launcher,
                restart: self.number,
            };
            match RankProcess::start(self.job, &world, Some(self.token), self.scratch) {
                Ok(rank) => ranks.push(rank),
                Err(error) => {
                    stop(&mut ranks, Signal::KILL);
                    while ranks.iter_mut().any(|rank| rank.reap().is_none() && rank.exit.is_none()) {
                        self.signals.wait::<UnixStream>(&[]);
                    }
                    return Err(error);
                }
            }
        }
        Ok(ranks)
    }
}

fn stop(ranks: &mut [RankProcess], signal: Signal) {
    for rank in ranks.iter_mut().filter(|rank| rank.exit.is_none()) {
        rank.stopped = true;
        rank.signal(signal);
    }
}

/// Signals as bytes in pipes: the loop reads them when it looks.
struct Signals {
    ends: Vec<(i32, UnixStream)>,
    ids: Vec<signal_hook::SigId>,
}

impl Signals {
    fn catch() -> Result<Signals, LaunchError> {
        let mut signals = Signals { ends: Vec::new(), ids: Vec::new() };
        let mut add = |signal| -> std::io::Result<()> {
            let (read, write) = UnixStream::pair()?;
            read.set_nonblocking(true)?;
            signals.ids.push(signal_hook::low_level::pipe::register(signal, write)?);
            signals.ends.push((signal, read));
            Ok(())
        };
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGCHLD] {
            add(signal).map_err(|cause| LaunchError::System { what: "listen to signals", cause })?;
        }
        Ok(signals)
    }

    /// Waits a moment for a signal, a child's end or something to read. The signal that asks us to end.
    fn wait<T: std::os::fd::AsFd>(&self, others: &[&T]) -> Option<i32> {
        use std::io::Read as _;
        let mut fds: Vec<PollFd<'_>> =
            self.ends.iter().map(|(_, end)| PollFd::new(end, PollFlags::IN)).collect();
        fds.extend(others.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)));
        let _ = poll(&mut fds, Some(&IDLE));
        let mut came = None;
        for (signal, end) in &self.ends {
            // Every repetition counts as one: what matters is that it came again later.
            if matches!((&*end).read(&mut [0; 64]), Ok(1..)) && *signal != SIGCHLD {
                came = Some(*signal);
            }
        }
        came
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}
