//! The machine that a plan is for, as the cost model sees it: this one, or a cluster on paper.

use lockstep_config::RunConfig;
use lockstep_core::{Bytes, DType, Fault, FaultClass};
use lockstep_model::KernelBackend;
use lockstep_plan::cost::{
    CHIPS, Chip, Cluster, HostRates, Link, Machine, NetworkSpeed, PaperCluster, PaperClusterError, Rates,
    Transport,
};

use crate::args::Plan;
use crate::report::Failure;
use crate::{gpu, launch};

/// Assumed for a GPU that is not here or has no published figures.
const ASSUMED_GPU: &str = "h100-80g";
/// Assumed between nodes: 10 Gbit/s Ethernet for CPUs, 100 Gbit/s for GPUs. `--network` sets it for a cluster on paper.
const ETHERNET: Link = Link { bytes_per_s: 1.25e9, latency_s: 50e-6 };
const GPU_NETWORK: NetworkSpeed = NetworkSpeed { bytes_per_s: 12.5e9, per_gpu: false };
/// Assumed between ranks on CPUs of one node: memory that both map.
const SHARED_MEMORY: Link = Link { bytes_per_s: 5e9, latency_s: 2e-6 };

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
    let (nodes, ranks_per_node) = (config.plan.nodes, config.plan.nproc_per_node);
    let budget =
        configured.or_else(|| lockstep_plan::default_budget(config, lockstep_train::device_memory(kernels)));
    match kernels {
        KernelBackend::Cpu { num_threads } => {
            let cluster = Cluster {
                nodes,
                ranks_per_node,
                intra: SHARED_MEMORY,
                inter: ETHERNET,
                transport: Transport::Direct,
            };
            let rates = Rates::generic_cpu(num_threads as u32);
            let budget = budget.unwrap_or(Bytes(u64::MAX));
            let basis =
                format!("Times are rough predictions for {num_threads} cores of a CPU nobody has measured.");
            PlanMachine { machine: Machine { rates, cluster, budget, host_budget: None }, basis }
        }
        KernelBackend::Cuda { .. } => {
            let (chip, basis) = chip_here();
            let paper = PaperCluster {
                gpus: nodes * ranks_per_node,
                gpus_per_node: ranks_per_node,
                chip,
                network: GPU_NETWORK,
            };
            let rates = chip.rates(&HostRates::GENERIC, ranks_per_node, storage);
            PlanMachine { machine: Machine { rates, ..paper.machine(storage, budget) }, basis }
        }
    }
}

/// The published figures of the first GPU of this machine.
fn chip_here() -> (&'static Chip, String) {
    let here = gpu::first();
    let found = here.as_ref().and_then(|(name, memory)| chip_named(name, *memory));
    let assumed = || CHIPS.iter().find(|chip| chip.name == ASSUMED_GPU).unwrap_or(&CHIPS[0]);
    match (found, here) {
        (Some(chip), _) => (chip, format!("Times are predictions from published figures of {}.", chip.name)),
        (None, Some((name, _))) => {
            let basis = format!(
                "Times are predictions for {ASSUMED_GPU}: there are no published figures of {name} here."
            );
            (assumed(), basis)
        }
        (None, None) => {
            (assumed(), format!("Times are predictions for {ASSUMED_GPU}: there is no GPU here."))
        }
    }
}

/// The chip that a driver's name such as `NVIDIA A100-SXM4-40GB` means; of several, the one with the nearest memory.
fn chip_named(name: &str, memory: Bytes) -> Option<&'static Chip> {
    let lower = name.to_ascii_lowercase();
    let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    // `h100-80g` and `h100-pcie` are models of one GPU.
    let model = |chip: &Chip| chip.name.split('-').find(|part| *part != "rtx").unwrap_or_default();
    let differs = |chip: &Chip| {
        let form_factor = chip.name.ends_with("pcie") != words.contains(&"pcie");
        (form_factor, (chip.memory().0).abs_diff(memory.0))
    };
    let same = CHIPS.iter().filter(|chip| words.contains(&model(chip)));
    same.min_by_key(|chip| differs(chip))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chips_by_the_names_of_drivers() {
        let named = |name, gb: u64| chip_named(name, Bytes(gb * 1_000_000_000)).map(|chip| chip.name);
        assert_eq!(named("NVIDIA H200", 150), Some("h200"));
        assert_eq!(named("NVIDIA H100 80GB HBM3", 85), Some("h100-80g"));
        assert_eq!(named("NVIDIA H100 PCIe", 85), Some("h100-pcie"));
        assert_eq!(named("NVIDIA A100-SXM4-40GB", 42), Some("a100-40g"));
        assert_eq!(named("NVIDIA A100-SXM4-80GB", 85), Some("a100-80g"));
        assert_eq!(named("NVIDIA GeForce RTX 4090", 25), Some("rtx-4090"));
        assert_eq!(named("NVIDIA RTX A6000", 51), Some("rtx-a6000"));
        assert_eq!(named("NVIDIA L4", 24), Some("l4"));
        assert_eq!(named("Tesla T4", 16), None);
    }
}
