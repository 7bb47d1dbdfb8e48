//! A cluster that is not here, from what people say of one: so many GPUs of a kind, and a network.

use lockstep_core::{Bytes, DType};

use crate::cost::chips::{Chip, ChipError, HostRates};
use crate::cost::cluster::{NetworkError, NetworkSpeed, usable};
use crate::cost::workload::Machine;

/// GPUs of a node, if nothing else is known.
const GPUS_PER_NODE: u32 = 8;

/// A cluster of GPUs with published figures: `--gpus 1024 --gpu h100-80g --network 400Gbps`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PaperCluster {
    pub gpus: u32,
    pub gpus_per_node: u32,
    pub chip: &'static Chip,
    pub network: NetworkSpeed,
}

/// Why a cluster cannot be described.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PaperClusterError {
    #[error(transparent)]
    Chip(#[from] ChipError),
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error("{gpus} GPUs do not fill nodes of {gpus_per_node}")]
    PartialNode { gpus: u32, gpus_per_node: u32 },
}

impl PaperClusterError {
    /// What to write instead.
    pub fn hint(&self) -> String {
        match self {
            PaperClusterError::Chip(error) => error.hint(),
            PaperClusterError::Network(_) => NetworkError::HINT.into(),
            PaperClusterError::PartialNode { gpus_per_node, .. } => {
                format!("Use a multiple of {gpus_per_node}, or set the number of GPUs per node.")
            }
        }
    }
}

impl PaperCluster {
    /// A cluster from its description. `gpus_per_node` defaults to 8, or fewer if there are fewer GPUs.
    pub fn parse(
        gpus: u32,
        gpu: &str,
        network: &str,
        gpus_per_node: Option<u32>,
    ) -> Result<PaperCluster, PaperClusterError> {
        let gpus_per_node = gpus_per_node.unwrap_or(GPUS_PER_NODE).min(gpus);
        if gpus_per_node == 0 || !gpus.is_multiple_of(gpus_per_node) {
            return Err(PaperClusterError::PartialNode { gpus, gpus_per_node });
        }
        let (chip, network) = (Chip::named(gpu)?, NetworkSpeed::parse(network)?);
        Ok(PaperCluster { gpus, gpus_per_node, chip, network })
    }

    pub fn nodes(&self) -> u32 {
        self.gpus / self.gpus_per_node
    }

    /// The machine, with 97 % of the GPU's memory or `budget`, and as much host memory as it takes.
    pub fn machine(&self, storage: DType, budget: Option<Bytes>) -> Machine {
        Machine {
            rates: self.chip.rates(&HostRates::GENERIC, self.gpus_per_node, storage),
            cluster: self.chip.cluster(self.nodes(), self.gpus_per_node, self.network),
            budget: budget.unwrap_or_else(|| usable(self.chip.memory())),
            host_budget: None,
        }
    }
}

impl std::fmt::Display for PaperCluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (nodes, per_node, chip) = (self.nodes(), self.gpus_per_node, self.chip);
        let plural = if nodes == 1 { "node" } else { "nodes" };
        write!(f, "{nodes} {plural} of {per_node} {} ({})", chip.name, chip.source)?;
        if nodes > 1 { write!(f, ", network {}", self.network) } else { Ok(()) }
    }
}
