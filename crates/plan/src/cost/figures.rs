//! Published or generic figures of the machine that a run is on. They decide what a configuration leaves open, so they
//! must be the same on every rank: nothing here is measured.

use lockstep_core::{Bytes, DType};

use crate::cost::chips::{CHIPS, Chip};
use crate::cost::cluster::{Cluster, Link, NetworkSpeed, Transport};
use crate::cost::paper::PaperCluster;
use crate::cost::rates::Rates;
use crate::cost::workload::Machine;

/// Assumed for a GPU that is not here or has no published figures.
const ASSUMED_GPU: &str = "h100-80g";
/// Assumed between nodes: 10 Gbit/s Ethernet for CPUs, 100 Gbit/s for GPUs. `--network` sets it for a cluster on paper.
const ETHERNET: Link = Link { bytes_per_s: 1.25e9, latency_s: 50e-6 };
const GPU_NETWORK: NetworkSpeed = NetworkSpeed { bytes_per_s: 12.5e9, per_gpu: false };
/// Assumed between ranks on CPUs of one node: memory that both map.
const SHARED_MEMORY: Link = Link { bytes_per_s: 5e9, latency_s: 2e-6 };
/// Assumed of a rank's CPU where ranks must choose the same, though their hosts may differ.
const ASSUMED_CORES: u32 = 8;

/// Whose figures count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Figures {
    Cpu { cores: u32 },
    Gpu(&'static Chip),
}

impl Figures {
    /// A CPU nobody has measured.
    pub const CPU: Figures = Figures::Cpu { cores: ASSUMED_CORES };

    /// A GPU by the name that its driver reports. Unknown GPUs are assumed to be an H100.
    pub fn gpu(name: Option<&str>, memory: Option<Bytes>) -> Figures {
        let known = name.and_then(|name| Chip::reported_as(name, memory.unwrap_or_default()));
        Figures::Gpu(known.unwrap_or_else(Chip::assumed))
    }

    /// The machine with so many ranks, each with `budget` bytes of device memory.
    pub fn machine(&self, nodes: u32, ranks_per_node: u32, storage: DType, budget: Bytes) -> Machine {
        match *self {
            Figures::Cpu { cores } => {
                let (intra, inter, transport) = (SHARED_MEMORY, ETHERNET, Transport::Direct);
                let cluster = Cluster { nodes, ranks_per_node, intra, inter, transport };
                Machine { rates: Rates::generic_cpu(cores), cluster, budget, host_budget: None }
            }
            Figures::Gpu(chip) => {
                let gpus = nodes * ranks_per_node;
                let cluster =
                    PaperCluster { gpus, gpus_per_node: ranks_per_node, chip, network: GPU_NETWORK };
                cluster.machine(storage, Some(budget))
            }
        }
    }
}

impl Chip {
    /// The GPU whose figures count where none are known.
    pub fn assumed() -> &'static Chip {
        CHIPS.iter().find(|chip| chip.name == ASSUMED_GPU).unwrap_or(&CHIPS[0])
    }

    /// The chip that a driver's name such as `NVIDIA A100-SXM4-40GB` means; of several, the one with the nearest memory.
    pub fn reported_as(name: &str, memory: Bytes) -> Option<&'static Chip> {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chips_by_the_names_of_drivers() {
        let named = |name, gb: u64| Chip::reported_as(name, Bytes(gb * 1_000_000_000)).map(|chip| chip.name);
        assert_eq!(named("NVIDIA H200", 150), Some("h200"));
        assert_eq!(named("NVIDIA H100 80GB HBM3", 85), Some("h100-80g"));
        assert_eq!(named("NVIDIA H100 PCIe", 85), Some("h100-pcie"));
        assert_eq!(named("NVIDIA A100-SXM4-40GB", 42), Some("a100-40g"));
        assert_eq!(named("NVIDIA A100-SXM4-80GB", 85), Some("a100-80g"));
        assert_eq!(named("NVIDIA GeForce RTX 4090", 25), Some("rtx-4090"));
        assert_eq!(named("NVIDIA RTX A6000", 51), Some("rtx-a6000"));
        assert_eq!(named("NVIDIA L4", 24), Some("l4"));
        assert_eq!(named("Tesla T4", 16), None);
        for chip in CHIPS {
            assert_eq!(Chip::reported_as(chip.name, chip.memory()), Some(&chip), "its own name");
        }
        let unknown = Figures::gpu(Some("Tesla T4"), None);
        assert_eq!(
            unknown,
            Figures::gpu(None, Some(Bytes(16 << 30))),
            "an unknown GPU counts as {ASSUMED_GPU}"
        );
    }
}
