//! Starts the ranks of this node, and supervises them.

use std::fmt;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use lockstep_config::{CarrierName, DeviceKind, RunConfig};
use lockstep_core::{Fault, FaultClass};
use lockstep_launch::{
    Console, Ending, ErrorNote, LaunchError, MpiExec, StartedBy, Supervisor, Tee, Token, World, cores,
    host_name, names,
};

use crate::args::{JOIN_TIMEOUT, LaunchFlags, Nproc, Train};
use crate::cluster;
use crate::dashboard;
use crate::foreign_launch;
use crate::gpu;
use crate::gpu_of_rank::{self, Host};
use crate::mpi;
use crate::ranks::{self, variable};
use crate::report::Failure;
use crate::reporter::Reporter;

/// Flags that do not fit this machine or each other.
#[derive(Debug)]
pub(crate) enum FlagError {
    NoGpu,
    /// The process is already a rank.
    Nested {
        because: String,
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
    /// mpiexec starts the ranks.
    WithMpi {
        flag: &'static str,
        value: String,
    },
    Program {
        cause: std::io::Error,
    },
    /// A setting of another launcher that this one does not have.
    Unsupported {
        name: &'static str,
        value: String,
        instead: &'static str,
    },
    /// A setting of another launcher that contradicts the environment.
    OtherGpus {
        wanted: String,
        visible: String,
    },
}

impl fmt::Display for FlagError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FlagError::NoGpu => write!(f, "--nproc gpu: this machine has no usable NVIDIA GPU"),
            FlagError::Nested { because } => {
                write!(f, "cannot start ranks: this process is already a rank ({because})")
            }
            FlagError::NoNodeRank { nodes } => {
                write!(f, "--node-rank is missing: the run has {nodes} nodes, and this could be any of them")
            }
            FlagError::NodeRank { node, nodes } => {
                write!(f, "--node-rank {node} is too large: the run has {nodes} nodes, counted from 0")
            }
            FlagError::NoAddress { nodes } => {
                write!(f, "--master-addr is missing: the run has {nodes} nodes, and they must find node 0")
            }
            FlagError::WithMpi { flag, value } => {
                write!(
                    f,
                    "{flag} {value} does not go with `carrier: mpi`, for which mpiexec starts the ranks"
                )
            }
            FlagError::Unsupported { name, value, .. } => {
                write!(f, "`{name}: {value}` of another launcher is not supported")
            }
            FlagError::OtherGpus { wanted, visible } => {
                write!(f, "GPUs {wanted} are requested, but {}={visible}", names::CUDA_VISIBLE_DEVICES)
            }
            FlagError::Program { cause } => write!(f, "cannot find this program to start ranks: {cause}"),
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
                "Give a number or `cpu` instead. `lockstep doctor` shows why no GPU was found.".into()
            }
            FlagError::Nested { .. } => format!(
                "Under torchrun or another launcher, remove --nproc and the other launcher flags; otherwise unset {}.",
                names::RANK
            ),
            FlagError::NoNodeRank { .. } if variable(names::SLURM_JOB_ID).is_some() => {
                "Start the command with srun, which runs it on every node: srun --ntasks-per-node=1 lockstep train …"
                    .into()
            }
            FlagError::NoNodeRank { .. } | FlagError::NodeRank { .. } => {
                "Run the same command on every node, with --node-rank 0, 1 and so on.".into()
            }
            FlagError::WithMpi { flag, .. } => format!(
                "Remove {flag}: give the command on one host only, or start the ranks with mpiexec or srun yourself."
            ),
            FlagError::NoAddress { .. } => {
                "Give the host name or address of node 0 with --master-addr.".into()
            }
            FlagError::Unsupported { instead, .. } => (*instead).into(),
            FlagError::OtherGpus { .. } => {
                format!("Unset {}, or remove the other.", names::CUDA_VISIBLE_DEVICES)
            }
            FlagError::Program { .. } => return None,
        })
    }
}

/// Prints the output of ranks.
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

/// Fails if this process is already a rank, which cannot start others.
pub(crate) fn check_not_a_rank() -> Result<(), Failure> {
    // Kubeflow sets RANK for nodes.
    let is_node = variable(names::PET_NODE_RANK).is_some() && variable(names::LOCAL_RANK).is_none();
    match variable(names::RANK).filter(|_| !is_node) {
        Some(rank) => Err(Box::new(FlagError::Nested { because: format!("{} is {rank}", names::RANK) })),
        None => Ok(()),
    }
}

/// The world that the environment describes, if this process is a rank of it. Where a scheduler has started one process on
/// each host, as srun does by default, that process is the launcher of its host if several ranks are asked for.
pub(crate) fn world(args: &Train) -> Result<Option<World>, Failure> {
    let world = ranks::world(args.local_rank).map_err(|e| -> Failure { Box::new(e) })?;
    let Some(World { rank, world_size, local_world_size, started_by, .. }) = &world else { return Ok(None) };
    let starter = match started_by {
        StartedBy::Launcher => return Ok(world),
        // sbatch sets the variables of a task for its script as well.
        StartedBy::SlurmJob if args.launch.starts_ranks() => return Ok(None),
        StartedBy::Mpi => "an MPI launcher",
        StartedBy::Slurm | StartedBy::SlurmJob => "srun",
    };
    match (args.launch.starts_ranks(), local_world_size) {
        (true, 1) => Ok(None),
        (true, _) => {
            let because = format!("{starter} started it as rank {rank} of {world_size}");
            Err(Box::new(FlagError::Nested { because }))
        }
        (false, 1) if cluster::starts_several(&foreign_launch::read(&args.run.words(), &[])?.1) => Ok(None),
        (false, _) => Ok(world),
    }
}

/// The settings that `--nnodes` and `--nproc` stand for. They take precedence over those of the configuration.
pub(crate) fn world_settings(nnodes: Option<u16>, nproc: Option<Nproc>) -> Result<Vec<String>, Failure> {
    let mut settings = Vec::new();
    settings.extend(nnodes.map(|nodes| format!("nodes={nodes}")));
    if let Some(nproc) = nproc {
        settings.push(format!("nproc_per_node={}", count(nproc).map_err(|e| -> Failure { Box::new(e) })?));
    }
    Ok(settings)
}

/// Starts this program again as every rank of this node, with `words` and `settings` as its arguments, and waits for
/// the ranks to end.
pub(crate) fn start(
    flags: &LaunchFlags,
    config: &RunConfig,
    words: &[&str],
    settings: &[String],
) -> Result<ExitCode, Failure> {
    let failed = |error: FlagError| -> Failure { Box::new(error) };
    let launch_failed = |error: LaunchError| -> Failure { Box::new(error) };
    let nodes = config.plan.nodes;
    let mpiexec = through_mpiexec(flags, config)?;
    let address = flags.master_addr.clone().or_else(|| variable(names::MASTER_ADDR));
    let node =
        if mpiexec.is_some() { 0 } else { node_rank(flags, nodes, address.as_deref()).map_err(failed)? };
    // Rank 0, which writes the output folder, is on node 0.
    let _dashboard = if node == 0 { dashboard::of_run(config)? } else { None };
    let master_addr = match address {
        Some(host) => host,
        None if nodes == 1 => String::new(),
        None if mpiexec.is_some() => host_name(),
        None => return Err(failed(FlagError::NoAddress { nodes })),
    };
    let port = variable(names::MASTER_PORT).and_then(|port| port.parse().ok()).filter(|_| nodes > 1);
    let mut token = Token::read(&variable).map_err(launch_failed)?;
    if token.is_none() && mpiexec.is_some() {
        // mpiexec passes it on to ranks on other hosts.
        token = Some(Token::random().map_err(launch_failed)?);
    }
    let program = std::env::current_exe().map_err(|cause| failed(FlagError::Program { cause }))?;
    let logs = || flags.log_dir.clone().unwrap_or_else(|| config.output.output_dir.join("logs"));
    let job = Supervisor {
        program,
        args: words.iter().map(Into::into).chain(settings.iter().map(Into::into)).collect(),
        nodes,
        node,
        local_world_size: config.plan.nproc_per_node,
        master_addr,
        master_port: flags.master_port.or(port),
        token,
        version: env!("CARGO_PKG_VERSION").into(),
        join_timeout: Duration::from_secs_f64(flags.join_timeout.unwrap_or(JOIN_TIMEOUT)),
        max_restarts: flags.max_restarts,
        grace: Duration::from_secs_f64(flags.grace),
        scratch: std::env::temp_dir(),
        tee: flags.tee.filter(|bits| *bits > 0).map(|bits| Tee {
            dir: logs(),
            stdout: bits & 1 != 0,
            stderr: bits & 2 != 0,
        }),
        shown: flags.local_ranks_filter.clone(),
        variables: variables(config)?,
        mpiexec,
    };
    Ok(match lockstep_launch::supervise(&job, &mut Terminal).map_err(launch_failed)? {
        Ending::Done => ExitCode::SUCCESS,
        Ending::Failed(failure) => {
            let note = ErrorNote { error: failure.text, hint: failure.hint, cause_code: None };
            Reporter::of_this_process().error(&note);
            ExitCode::from(failure.code)
        }
        Ending::Signalled(signal) => ExitCode::from(signal.exit_code()),
    })
}

/// The launcher of MPI, if it has to start the ranks. It starts those of all hosts, and merges what they print.
fn through_mpiexec(flags: &LaunchFlags, config: &RunConfig) -> Result<Option<MpiExec>, Failure> {
    if config.plan.carrier != CarrierName::Mpi || config.plan.world_size() == 1 {
        return Ok(None);
    }
    let list = |ranks: &Vec<u32>| ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let refused = [
        ("--node-rank", flags.node_rank.map(|node| node.to_string())),
        ("--tee", flags.tee.map(|bits| bits.to_string())),
        ("--local-ranks-filter", flags.local_ranks_filter.as_ref().map(list)),
    ];
    match refused.into_iter().find_map(|(flag, value)| Some((flag, value?))) {
        Some((flag, value)) => Err(Box::new(FlagError::WithMpi { flag, value })),
        None => mpi::mpiexec(config).map(Some),
    }
}

fn node_rank(flags: &LaunchFlags, nodes: u32, address: Option<&str>) -> Result<u32, FlagError> {
    let given = flags.node_rank.map(u32::from);
    let set = || [names::GROUP_RANK, names::NODE_RANK].iter().find_map(|name| variable(name)?.parse().ok());
    let by_address = || address.filter(|_| nodes == 2).and_then(cluster::one_of_two);
    match given.or_else(set).or_else(by_address) {
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

/// Environment variables for ranks on GPUs. More ranks than GPUs are refused here, once, and not by every rank.
fn variables(config: &RunConfig) -> Result<Vec<Vec<(String, String)>>, Failure> {
    let gpus = if config.device.kind == DeviceKind::Cpu { 0 } else { gpu::count() };
    let name = lockstep_launch::host_name();
    let host = Host { name: &name, nodes: config.plan.nodes, ranks: config.plan.nproc_per_node, gpus };
    gpu_of_rank::variables(config.device, host, &|name| variable(name).is_some())
        .map_err(|e| -> Failure { Box::new(e) })
}
