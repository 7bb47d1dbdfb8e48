//! The ranks of one node, from start to end: what they print is relayed, one's failure is everyone's, a
//! signal to the launcher reaches all, and none is left behind. `watch` decides; this loop does it.

use std::ffi::OsString;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::cause::{Ended, ErrorNote, RankFailure, STOPPED, cause, not_saved, own_failure};
use crate::error::LaunchError;
use crate::relay::Console;
use crate::serve::{Outcome, RunningServer, ServerOptions, open, serve};
use crate::signals::{EndSignal, Signals};
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
    /// From asking ranks to end to killing them, when the launcher or a rank is asked to stop.
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
    /// The launcher or a rank was asked to stop.
    Signalled(EndSignal),
}

/// A rank ended with 143.
const STOP: EndSignal = EndSignal::Stop { name: "SIGTERM" };

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
    let signals = Signals::of_launcher()?;
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
        let (ending, stop_requested) = attempt.run(console)?;
        let Ending::Failed(failure) = &ending else { return Ok(ending) };
        if stop_requested {
            return Ok(ending);
        }
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

/// For ranks of other nodes to end after those of this one have.
const OTHER_NODES: Duration = Duration::from_secs(10);

/// One start of all ranks of this node.
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
    /// How it ended, and whether the launcher was asked to stop meanwhile.
    fn run(&self, console: &mut dyn Console) -> Result<(Ending, bool), LaunchError> {
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
                        Action::Stop => stop(&mut ranks, Signal::TERM),
                        // SIGTERM would make ranks save, and a shell may start them with SIGINT ignored.
                        Action::Interrupt => stop(&mut ranks, Signal::USR2),
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
        let ended = in_order(&ranks, &order);
        let ending = self.ending(&watch, &ended, server.as_ref());
        if let (Ending::Signalled(EndSignal::Stop { .. }), Some(failure)) = (&ending, not_saved(&ended)) {
            let text = format!("the run ended without a checkpoint of its last steps: {failure}\n");
            console.stderr(text.as_bytes());
        }
        let ending = match (ending, server) {
            (Ending::Failed(failure), _) => Ending::Failed(failure),
            (ending, Some(server)) if self.job.nodes > 1 => self.outlive(server, ending),
            (ending, _) => ending,
        };
        Ok((ending, watch.stop_requested()))
    }

    /// Ranks of other nodes may still be taking their leave of the rendezvous, which is here.
    fn outlive(&self, server: RunningServer, ending: Ending) -> Ending {
        let start = Instant::now();
        while server.outcome().is_none() && start.elapsed() < OTHER_NODES {
            if let Some(signal) = self.signals.wait::<UnixStream>(&[]) {
                return Ending::Signalled(signal);
            }
        }
        match server.outcome() {
            Some(Outcome::Failed(abort)) if ending == Ending::Done => {
                Ending::Failed(cause(&[], Some(&abort)))
            }
            Some(_) => {
                server.finish();
                ending
            }
            None => ending,
        }
    }

    fn ending(&self, watch: &Watch, ended: &[Ended], server: Option<&RunningServer>) -> Ending {
        let all = self.job.local_world_size as usize;
        let done = ended.len() == all && ended.iter().all(|e| e.exit.is_success());
        match watch.signal() {
            // The last step came first: the run is done. Or a rank could not save, and says why.
            Some(EndSignal::Stop { .. }) if done => return Ending::Done,
            Some(signal @ EndSignal::Stop { .. }) => {
                return own_failure(ended).map_or(Ending::Signalled(signal), Ending::Failed);
            }
            Some(signal) => return Ending::Signalled(signal),
            None if done => return Ending::Done,
            None => {}
        }
        let abort = match server.and_then(RunningServer::outcome) {
            Some(Outcome::Failed(abort)) => Some(abort),
            _ => None,
        };
        match cause(ended, abort.as_ref()) {
            // A rank of another node was asked to stop.
            failure if failure.code == STOPPED => Ending::Signalled(STOP),
            failure => Ending::Failed(failure),
        }
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

/// The ranks that have ended, in the order in which they did.
fn in_order(ranks: &[RankProcess], order: &[usize]) -> Vec<Ended> {
    let ended = |rank: &RankProcess| {
        Some(Ended {
            member: rank.member.clone(),
            exit: rank.exit?,
            stopped: rank.stopped,
            note: ErrorNote::read(&rank.error_file),
        })
    };
    order.iter().filter_map(|&local| ended(&ranks[local])).collect()
}

fn stop(ranks: &mut [RankProcess], signal: Signal) {
    for rank in ranks.iter_mut().filter(|rank| rank.exit.is_none()) {
        rank.stopped = true;
        rank.signal(signal);
    }
}
