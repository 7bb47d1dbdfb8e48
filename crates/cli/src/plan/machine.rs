//! The machine that a plan is for, as the cost model sees it: this one, or a cluster on paper.

use lockstep_config::RunConfig;
use lockstep_core::{Bytes, DType, Fault, FaultClass};
use lockstep_model::KernelBackend;
use lockstep_plan::cost::{Chip, Figures, Machine, PaperCluster, PaperClusterError};

use crate::args::Plan;
use crate::launch;
use crate::report::Failure;

/// A machine, and where its rates come from.
pub(crate) struct PlanMachine {
    pub(crate) machine: Machine,
    pub(crate) basis: String,
}

/// A cluster on paper that cannot be planned for.
#[derive(Debug)]
enum PaperError {
    Cluster(PaperClusterError),
    NoNetwork { nodes: u32 },
}

impl std::fmt::Display for PaperError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PaperError::Cluster(error) => error.fmt(f),
            PaperError::NoNetwork { nodes } => {
                write!(
                    f,
                    "--network is missing: the cluster has {nodes} nodes, and they exchange data over it"
                )
            }
        }
    }
}

impl std::error::Error for PaperError {}

impl Fault for PaperError {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            PaperError::Cluster(error) => error.hint(),
            PaperError::NoNetwork { .. } => {
                "Give its speed, such as --network 400Gbps, or --gpus-per-node for one larger node.".into()
            }
        })
    }
}

/// The cluster on paper that flags describe.
pub(super) fn paper(args: &Plan) -> Result<Option<PaperCluster>, Failure> {
    let failed = |error: PaperError| -> Failure { Box::new(error) };
    let (Some(gpus), Some(gpu)) = (args.gpus, &args.gpu) else { return Ok(None) };
    // A single node uses no network.
    let network = args.network.as_deref().unwrap_or("100Gbps");
    let cluster = PaperCluster::parse(gpus, gpu, network, args.gpus_per_node)
        .map_err(|error| failed(PaperError::Cluster(error)))?;
    match cluster.nodes() {
        nodes @ 2.. if args.network.is_none() => Err(failed(PaperError::NoNetwork { nodes })),
        _ => Ok(Some(cluster)),
    }
}

/// The settings of the world that the flags describe.
pub(super) fn world_settings(args: &Plan, paper: Option<&PaperCluster>) -> Result<Vec<String>, Failure> {
    match paper {
        Some(cluster) => Ok(vec![
            format!("nodes={}", cluster.nodes()),
            format!("nproc_per_node={}", cluster.gpus_per_node),
            "device=cuda".into(),
        ]),
        None => launch::world_settings(args.nnodes, args.nproc),
    }
}

/// The machine of a run: the cluster on paper, or this one.
pub(super) fn of(
    config: &RunConfig,
    kernels: KernelBackend,
    storage: DType,
    paper: Option<&PaperCluster>,
) -> PlanMachine {
    let configured = lockstep_plan::budget(config);
    if let Some(paper) = paper {
        let basis = format!("Times are predictions from published figures of {}.", paper.chip.name);
        return PlanMachine { machine: paper.machine(storage, configured), basis };
    }
    let budget =
        configured.or_else(|| lockstep_plan::default_budget(config, lockstep_train::device_memory(kernels)));
    let (figures, basis) = match kernels {
        KernelBackend::Cpu { num_threads } => {
            let basis =
                format!("Times are rough predictions for {num_threads} cores of a CPU nobody has measured.");
            (Figures::Cpu { cores: num_threads as u32 }, basis)
        }
        KernelBackend::Cuda { name, memory } => (Figures::gpu(name, memory), basis_of(name, memory)),
    };
    let budget = budget.unwrap_or(Bytes(u64::MAX));
    let (nodes, ranks_per_node) = (config.plan.nodes, config.plan.nproc_per_node);
    PlanMachine { machine: figures.machine(nodes, ranks_per_node, storage, budget), basis }
}

/// Which GPU's figures count, as a sentence.
fn basis_of(name: Option<&str>, memory: Option<Bytes>) -> String {
    let assumed = Chip::assumed().name;
    match (name.and_then(|name| Chip::reported_as(name, memory.unwrap_or_default())), name) {
        (Some(chip), _) => format!("Times are predictions from published figures of {}.", chip.name),
        (None, Some(name)) => {
            format!("Times are predictions for {assumed}: there are no published figures of {name} here.")
        }
        (None, None) => format!("Times are predictions for {assumed}: there is no GPU here."),
    }
}
