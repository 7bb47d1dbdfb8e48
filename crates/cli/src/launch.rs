//! `lockstep launch`, and `lockstep train --nproc`: starts the ranks of this node.

use std::fmt;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use lockstep_config::{DeviceKind, RunConfig};
use lockstep_core::{Fault, FaultClass};
use lockstep_launch::{Console, Ending, ErrorNote, LaunchError, Supervisor, Tee, Token, cores, names};

use crate::args::{Launch, Nproc, Run};
use crate::gpu;
use crate::gpu_of_rank::{self, Host};
use crate::ranks::variable;
use crate::report::{self, Failure};
use crate::voice::Voice;

/// Flags that do not fit this machine or each other.
#[derive(Debug)]
enum FlagError {
    NoGpu,
    /// The process is a rank already.
    Nested {
        rank: String,
    },
    NoNodeRank {
        nodes: u32,
    },
    NodeRank {
        node: u32,
        nodes: u32,
    },
    NoAddress {
        nodes: u32,
    },
    Program {
        cause: std::io::Error,
    },
}

impl fmt::Display for FlagError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FlagError::NoGpu => write!(f, "--nproc-per-node gpu: no NVIDIA GPU was found"),
            FlagError::Nested { rank } => {
                write!(
                    f,
                    "ranks were to be started, but this process is a rank already ({} is {rank})",
                    names::RANK
                )
            }
            FlagError::NoNodeRank { nodes } => write!(f, "there are {nodes} nodes: which one is this?"),
            FlagError::NodeRank { node, nodes } => {
                write!(f, "--node-rank {node}: nodes count from 0, and there are {nodes}")
            }
            FlagError::NoAddress { nodes } => write!(f, "there are {nodes} nodes: where is node 0?"),
            FlagError::Program { cause } => write!(f, "cannot find this program to start it again: {cause}"),
        }
    }
}

impl std::error::Error for FlagError {}

impl Fault for FlagError {
    fn class(&self) -> FaultClass {
        match self {
            FlagError::NoGpu | FlagError::Program { .. } => FaultClass::Unavailable,
            _ => FaultClass::BadConfig,
        }
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            FlagError::NoGpu => {
                "Use --nproc-per-node with a number, or cpu. `lockstep doctor` tells what was looked for."
                    .into()
            }
            FlagError::Nested { .. } => {
                format!("Leave out --nproc under another launcher, or unset {}.", names::RANK)
            }
            FlagError::NoNodeRank { .. } | FlagError::NodeRank { .. } => {
                "Run `lockstep launch` on every node, with --node-rank 0, 1 and so on.".into()
            }
            FlagError::NoAddress { .. } => {
                "Give the host name or address of node 0 with --master-addr.".into()
            }
            FlagError::Program { .. } => return None,
        })
    }
}

/// Prints what ranks print.
struct Terminal;

impl Console for Terminal {
    fn stdout(&mut self, bytes: &[u8]) {
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(bytes).and_then(|()| out.flush());
    }

    fn stderr(&mut self, bytes: &[u8]) {
        let _ = std::io::stderr().lock().write_all(bytes);
    }
}

pub(crate) fn run(args: &Launch) -> Result<ExitCode, Failure> {
    let config = load(args)?;
    config.check_trainable().map_err(|e| -> Failure { Box::new(e) })?;
    start(args, &config, &["train", &format!("--grace={}", args.grace)])
}

/// The configuration of the ranks. What is wrong with it is told here, once, and not by every rank.
pub(crate) fn load(args: &Launch) -> Result<RunConfig, Failure> {
    let failed = |error: FlagError| -> Failure { Box::new(error) };
    if let Some(rank) = variable(names::RANK) {
        return Err(failed(FlagError::Nested { rank }));
    }
    let mut world = Vec::new();
    if args.standalone {
        world.push("nodes=1".into());
    }
    world.extend(args.nnodes.map(|n| format!("nodes={n}")));
    if let Some(nproc) = args.nproc_per_node {
        world.push(format!("nproc_per_node={}", count(nproc).map_err(failed)?));
    }
    Ok(report::load(&args.run.settings, &world)?.0)
}

/// Starts this program again as every rank of this node, with these words and the settings.
pub(crate) fn start(args: &Launch, config: &RunConfig, words: &[&str]) -> Result<ExitCode, Failure> {
    let failed = |error: FlagError| -> Failure { Box::new(error) };
    let launch_failed = |error: LaunchError| -> Failure { Box::new(error) };
    let nodes = config.plan.nodes;
    let node = node_rank(args, nodes).map_err(failed)?;
    let address = args.master_addr.clone().or_else(|| variable(names::MASTER_ADDR));
    let master_addr = match address {
        Some(host) => host,
        None if nodes == 1 => String::new(),
        None => return Err(failed(FlagError::NoAddress { nodes })),
    };
    let port = variable(names::MASTER_PORT).and_then(|port| port.parse().ok()).filter(|_| nodes > 1);
    let program = std::env::current_exe().map_err(|cause| failed(FlagError::Program { cause }))?;
    let logs = || args.log_dir.clone().unwrap_or_else(|| config.output.output_dir.join("logs"));
    let job = Supervisor {
        program,
        args: words.iter().map(Into::into).chain(args.run.settings.iter().map(Into::into)).collect(),
        nodes,
        node,
        local_world_size: config.plan.nproc_per_node,
        master_addr,
        master_port: args.master_port.or(port),
        token: Token::read(&variable).map_err(launch_failed)?,
        version: env!("CARGO_PKG_VERSION").into(),
        join_timeout: Duration::from_secs_f64(args.join_timeout),
        max_restarts: args.max_restarts,
        grace: Duration::from_secs_f64(args.grace),
        scratch: std::env::temp_dir(),
        tee: args.tee.filter(|bits| *bits > 0).map(|bits| Tee {
            dir: logs(),
            stdout: bits & 1 != 0,
            stderr: bits & 2 != 0,
        }),
        shown: args.local_ranks_filter.clone(),
        variables: variables(config)?,
    };
    Ok(match lockstep_launch::supervise(&job, &mut Terminal).map_err(launch_failed)? {
        Ending::Done => ExitCode::SUCCESS,
        Ending::Failed(failure) => {
            let note = ErrorNote { error: failure.text, hint: failure.hint, cause_code: None };
            Voice::of_this_process().error(&note);
            ExitCode::from(failure.code)
        }
        Ending::Signalled(signal) => ExitCode::from(signal.exit_code()),
    })
}

impl Launch {
    /// As many ranks of this host alone.
    pub(crate) fn on_this_host(settings: &[String], nproc: Option<Nproc>, grace: f64) -> Launch {
        Launch {
            run: Run { settings: settings.to_vec() },
            nproc_per_node: nproc,
            nnodes: None,
            node_rank: None,
            master_addr: None,
            master_port: None,
            standalone: false,
            max_restarts: 0,
            join_timeout: 60.0,
            grace,
            tee: None,
            log_dir: None,
            local_ranks_filter: None,
        }
    }
}

fn node_rank(args: &Launch, nodes: u32) -> Result<u32, FlagError> {
    let given = args.node_rank.map(u32::from);
    let set = || [names::GROUP_RANK, names::NODE_RANK].iter().find_map(|name| variable(name)?.parse().ok());
    match given.or_else(set) {
        Some(node) if node < nodes => Ok(node),
        Some(node) => Err(FlagError::NodeRank { node, nodes }),
        None if nodes == 1 => Ok(0),
        None => Err(FlagError::NoNodeRank { nodes }),
    }
}

fn count(nproc: Nproc) -> Result<usize, FlagError> {
    match nproc {
        Nproc::Count(count) => Ok(count.into()),
        Nproc::Cpu => Ok(cores::available().len().max(1)),
        Nproc::Auto => Ok(gpu::count().max(1) as usize),
        Nproc::Gpu => match gpu::count() {
            0 => Err(FlagError::NoGpu),
            count => Ok(count as usize),
        },
    }
}

/// What ranks on GPUs are given in their environments. More ranks than GPUs are refused here, once.
fn variables(config: &RunConfig) -> Result<Vec<Vec<(String, String)>>, Failure> {
    let gpus = if config.device.kind == DeviceKind::Cpu { 0 } else { gpu::count() };
    let name = lockstep_launch::host_name();
    let host = Host { name: &name, nodes: config.plan.nodes, ranks: config.plan.nproc_per_node, gpus };
    gpu_of_rank::variables(config.device, host, &|name| variable(name).is_some())
        .map_err(|e| -> Failure { Box::new(e) })
}
