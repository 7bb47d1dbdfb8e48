//! Supervises the ranks of one node from start to end: relays their output, stops all when one fails, passes signals
//! on, and leaves no process behind. `stop_policy` decides; this loop carries out the decisions.

use std::ffi::OsString;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::cause::{
    EndedRank, ErrorNote, RankFailure, STOPPED, cause, cause_of_mpiexec, not_saved, own_failure,
};
use crate::error::LaunchError;
use crate::relay::Console;
use crate::serve::{RendezvousOutcome, RunningServer, ServerOptions, open, serve};
use crate::signals::{EndSignal, Signals};
use crate::spawn::{RankProcess, Scratch};
use crate::stop_policy::{Action, Event, Restarts, StopPolicy};
use crate::token::Token;
use crate::world::{DEFAULT_PORT, LOOPBACK, RendezvousHost, StartedBy, World};

/// What to start on this node, and how.
#[derive(Clone, Debug)]
pub struct Supervisor {
    /// The program that each rank runs.
    pub program: PathBuf,
    pub args: Vec<OsString>,
    pub nodes: u32,
    /// The index of this node.
    pub node: u32,
    /// The number of ranks on each node.
    pub local_world_size: u32,
    /// The host of node 0. A single node does not need it.
    pub master_addr: String,
    /// The port of the rendezvous on node 0. By default a single node picks a free port.
    pub master_port: Option<u16>,
    /// A single node creates its own token if there is none.
    pub token: Option<Token>,
    /// The version of the program.
    pub version: String,
    pub join_timeout: Duration,
    pub max_restarts: u32,
    /// When the launcher or a rank is asked to stop: the time from asking ranks to end to killing them.
    pub grace: Duration,
    /// A folder for files that exist only while the launcher runs.
    pub scratch: PathBuf,
    /// Copies the output of ranks to files. Rank 0 then does not write to the terminal directly.
    pub tee: Option<Tee>,
    /// The local ranks whose output is shown; `None` shows all.
    pub shown: Option<Vec<u32>>,
    /// Additional environment variables, indexed by local rank. The list may be shorter than the number of ranks.
    pub variables: Vec<Vec<(String, String)>>,
    /// Starts the ranks of all nodes, instead of this launcher those of its own node. They share one error file.
    pub mpiexec: Option<MpiExec>,
}

/// MPI's launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpiExec {
    pub program: PathBuf,
    /// Its arguments besides the number of ranks.
    pub args: Vec<OsString>,
}

/// Which output of ranks is copied to files in `dir`.
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

/// The signal reported when a rank exits with code 143.
const STOP: EndSignal = EndSignal::Stop { name: "SIGTERM" };

/// Starts the ranks and waits until they have ended. Call it from a thread that lives as long as the process: ranks
/// are killed when the thread that started them ends.
pub fn supervise(job: &Supervisor, console: &mut dyn Console) -> Result<Ending, LaunchError> {
    let token = match &job.token {
        Some(token) => token.clone(),
        None if job.nodes == 1 => Token::random()?,
        None => return Err(LaunchError::NoToken { nodes: job.nodes }),
    };
    let port = job.master_port.unwrap_or(if job.nodes == 1 { 0 } else { DEFAULT_PORT });
    // A single rank needs no rendezvous.
    let hosts_rendezvous = job.node == 0 && job.nodes * job.local_world_size > 1;
    let listener = if hosts_rendezvous { Some(open(job.nodes, port, Some(&token))?) } else { None };
    let port = match listener.as_ref().map(TcpListener::local_addr) {
        Some(Ok(addr)) => addr.port(),
        // Nobody connects to it, but the variable must hold a valid port.
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
            "{failure}\nrestarting all ranks in {} s (restart {} of {})\n",
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

/// How long to wait for ranks on other nodes after those on this node have ended.
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
    /// Returns how the attempt ended, and whether the launcher was asked to stop during it.
    fn run(&self, console: &mut dyn Console) -> Result<(Ending, bool), LaunchError> {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let server = self.serve(&lines)?;
        let mut ranks = self.start()?;
        let start = Instant::now();
        let mut policy = StopPolicy::new(ranks.len(), self.job.grace);
        let mut order = Vec::new();
        let mut events = Vec::new();
        let mut run_failed = false;
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
            let outcome = server.as_ref().and_then(RunningServer::outcome);
            if !run_failed && matches!(outcome, Some(RendezvousOutcome::Failed(_))) {
                run_failed = true;
                events.push(Event::RunFailed);
            }
            events.push(Event::Tick);
            let mut finished = false;
            for event in events.drain(..) {
                for action in policy.handle(start.elapsed(), event) {
                    match action {
                        Action::Stop => stop(&mut ranks, Signal::TERM),
                        // Not SIGTERM, which makes ranks save; not SIGINT, which a shell may have set to be ignored.
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
        let ending = self.ending(&policy, &ended, server.as_ref());
        if let (Ending::Signalled(EndSignal::Stop { .. }), Some(failure)) = (&ending, not_saved(&ended)) {
            let text = format!("the run ended without a checkpoint of its last steps: {failure}\n");
            console.stderr(text.as_bytes());
        }
        let ending = match (ending, server) {
            (Ending::Failed(failure), _) => Ending::Failed(failure),
            (ending, Some(server)) if self.job.nodes > 1 && self.job.mpiexec.is_none() => {
                self.wait_for_other_nodes(server, ending)
            }
            (ending, _) => ending,
        };
        Ok((ending, policy.stop_requested()))
    }

    /// Ranks on other nodes may still be leaving the rendezvous, which runs in this process.
    fn wait_for_other_nodes(&self, server: RunningServer, ending: Ending) -> Ending {
        let start = Instant::now();
        while server.outcome().is_none() && start.elapsed() < OTHER_NODES {
            if let Some(signal) = self.signals.wait::<UnixStream>(&[]) {
                return Ending::Signalled(signal);
            }
        }
        match server.outcome() {
            Some(RendezvousOutcome::Failed(abort)) if ending == Ending::Done => {
                Ending::Failed(cause(&[], Some(&abort)))
            }
            Some(_) => {
                server.finish();
                ending
            }
            None => ending,
        }
    }

    fn ending(&self, policy: &StopPolicy, ended: &[EndedRank], server: Option<&RunningServer>) -> Ending {
        let all = self.num_processes() as usize;
        let done = ended.len() == all && ended.iter().all(|e| e.exit.is_success());
        match policy.signal() {
            // The run completed its last step before it stopped, or a rank failed to save and reported why.
            Some(EndSignal::Stop { .. }) if done => return Ending::Done,
            Some(signal @ EndSignal::Stop { .. }) => {
                return own_failure(ended).map_or(Ending::Signalled(signal), Ending::Failed);
            }
            Some(signal) => return Ending::Signalled(signal),
            None if done => return Ending::Done,
            None => {}
        }
        let abort = match server.and_then(RunningServer::outcome) {
            Some(RendezvousOutcome::Failed(abort)) => Some(abort),
            _ => None,
        };
        let cause = match &self.job.mpiexec {
            None => cause(ended, abort.as_ref()),
            Some(_) => cause_of_mpiexec(ended, abort.as_ref()),
        };
        match cause {
            // A rank on another node was asked to stop.
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

    /// The processes that this launcher starts: the ranks of its node, or mpiexec.
    fn num_processes(&self) -> u32 {
        if self.job.mpiexec.is_some() { 1 } else { self.job.local_world_size }
    }

    fn start(&self) -> Result<Vec<RankProcess>, LaunchError> {
        let Supervisor { nodes, node, local_world_size, .. } = *self.job;
        let mut ranks = Vec::new();
        for local_rank in 0..self.num_processes() {
            let world = World {
                rank: node * local_world_size + local_rank,
                world_size: nodes * local_world_size,
                local_rank,
                local_world_size,
                node,
                master_addr: if nodes == 1 { LOOPBACK.into() } else { self.job.master_addr.clone() },
                port: self.port,
                server: RendezvousHost::Launcher,
                restart: self.number,
                started_by: StartedBy::Launcher,
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

/// The ranks that have ended, in the order in which they ended.
fn in_order(ranks: &[RankProcess], order: &[usize]) -> Vec<EndedRank> {
    let ended = |rank: &RankProcess| {
        Some(EndedRank {
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
