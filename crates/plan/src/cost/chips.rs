//! Published figures of chips. All of them come from the vendor's data sheet and are peaks; what kernels attain of a
//! peak is taken from the one GPU that was measured.

use lockstep_core::{Bytes, DType};

use crate::cost::cluster::{Cluster, Link, NetworkSpeed, Transport};
use crate::cost::rates::{GemmTile, MatmulRates, Rates};

/// Measured on an H200: 790 TFLOP/s of 989 in a bf16 matmul of 8192³.
const MATMUL_SHARE: f64 = 790.0 / 989.0;
/// Measured on an H200: 4.3 TB/s of 4.8 copying.
const MEMORY_SHARE: f64 = 4.3 / 4.8;
/// Measured on an H200: attention kernels attain 41 to 52 % of the matmul's rate.
const ATTENTION_SHARE: f64 = 0.465;
/// Measured on an H200: kernels timed one by one add up to 0.89 and 0.90 of a whole step's time (7b, 300m).
const SUSTAINED_SHARE: f64 = 0.9;
/// An assumption: PCIe and NVLink carry four fifths of their data sheet's figure.
const LINK_SHARE: f64 = 0.8;
/// An assumption: the gap between two kernels of one stream.
const GPU_KERNEL_SECONDS: f64 = 2e-6;
/// Seconds per hop that NCCL's own tuner assumes for large messages.
const NVLINK_HOP_SECONDS: f64 = 3.4e-6;
const PCIE_HOP_SECONDS: f64 = 5.7e-6;
const NETWORK_HOP_SECONDS: f64 = 14e-6;

/// One direction of a PCIe slot with 16 lanes.
const PCIE4_X16: f64 = 32e9;
const PCIE5_X16: f64 = 64e9;

/// A GPU by its vendor's data sheet: dense rates, without sparsity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chip {
    /// The name that `--gpu` takes.
    pub name: &'static str,
    /// In units of 10⁹ bytes, as data sheets count. Drivers report up to 7 % more.
    pub memory_gb: f64,
    pub bf16_tflops: f64,
    pub f32_tflops: f64,
    pub memory_gb_per_s: f64,
    pub multiprocessors: u32,
    /// One direction, per GPU. `None`: GPUs of a node talk over PCIe.
    pub nvlink_gb_per_s: Option<f64>,
    pub pcie_bytes_per_s: f64,
    pub source: &'static str,
}

const fn chip(
    name: &'static str,
    [memory_gb, bf16_tflops, f32_tflops, memory_gb_per_s]: [f64; 4],
    multiprocessors: u32,
    nvlink_gb_per_s: Option<f64>,
    pcie_bytes_per_s: f64,
) -> Chip {
    Chip {
        name,
        memory_gb,
        bf16_tflops,
        f32_tflops,
        memory_gb_per_s,
        multiprocessors,
        nvlink_gb_per_s,
        pcie_bytes_per_s,
        source: "vendor data sheet",
    }
}

/// The GPUs that a plan on paper can name. Columns: memory in GB, dense bf16 and f32 TFLOP/s, memory in GB/s.
#[rustfmt::skip]
pub const CHIPS: [Chip; 13] = [
    chip("b200",       [180.0, 2250.0, 75.0, 7700.0], 148, Some(900.0), PCIE5_X16),
    chip("h200",       [141.0, 989.0, 67.0, 4800.0], 132, Some(450.0), PCIE5_X16),
    chip("h100-80g",   [80.0, 989.0, 67.0, 3350.0], 132, Some(450.0), PCIE5_X16),
    chip("h100-pcie",  [80.0, 756.0, 51.0, 2000.0], 114, None, PCIE5_X16),
    chip("a100-80g",   [80.0, 312.0, 19.5, 2039.0], 108, Some(300.0), PCIE4_X16),
    chip("a100-40g",   [40.0, 312.0, 19.5, 1555.0], 108, Some(300.0), PCIE4_X16),
    chip("l40s",       [48.0, 362.0, 91.6, 864.0], 142, None, PCIE4_X16),
    chip("a40",        [48.0, 149.7, 37.4, 696.0], 84, None, PCIE4_X16),
    chip("rtx-a6000",  [48.0, 154.8, 38.7, 768.0], 84, None, PCIE4_X16),
    chip("rtx-4090",   [24.0, 165.2, 82.6, 1008.0], 128, None, PCIE4_X16),
    chip("rtx-3090",   [24.0, 71.0, 35.6, 936.0], 82, None, PCIE4_X16),
    chip("a10",        [24.0, 125.0, 31.2, 600.0], 72, None, PCIE4_X16),
    chip("l4",         [24.0, 121.0, 30.3, 300.0], 58, None, PCIE4_X16),
];

/// The host of a node, which its ranks share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostRates {
    /// Bytes that updates read and write per second, with all cores.
    pub update_bytes_per_s: f64,
    pub nvme_read_bytes_per_s: f64,
    pub nvme_write_bytes_per_s: f64,
}

impl HostRates {
    /// An assumption for hosts nobody has measured: half of eight channels of DDR5-4800 (307 GB/s), and one PCIe 4.0
    /// drive.
    pub const GENERIC: HostRates =
        HostRates { update_bytes_per_s: 150e9, nvme_read_bytes_per_s: 7e9, nvme_write_bytes_per_s: 5e9 };
}

/// A name that is not in [`CHIPS`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there are no published figures of a GPU `{name}` here")]
pub struct ChipError {
    pub name: String,
    pub closest: Option<&'static str>,
}

impl ChipError {
    /// What to write instead.
    pub fn hint(&self) -> String {
        let names: Vec<&str> = CHIPS.iter().map(|chip| chip.name).collect();
        let known = format!("Known: {}.", names.join(", "));
        self.closest.map_or(known.clone(), |closest| format!("Did you mean `{closest}`? {known}"))
    }
}

impl Chip {
    pub fn named(name: &str) -> Result<&'static Chip, ChipError> {
        let wanted = name.trim().to_ascii_lowercase();
        CHIPS.iter().find(|chip| chip.name == wanted).ok_or_else(|| {
            let names = || CHIPS.iter().map(|chip| chip.name);
            // `h100` means a model of the H100, not the H200.
            let longer = names().find(|name| !wanted.is_empty() && name.starts_with(&wanted));
            let closest = longer.or_else(|| lockstep_core::closest(&wanted, names()));
            ChipError { name: name.into(), closest }
        })
    }

    pub fn memory(&self) -> Bytes {
        Bytes((self.memory_gb * 1e9) as u64)
    }

    /// The rates of a rank that has one such GPU, on a host with `ranks_per_node` of them.
    pub fn rates(&self, host: &HostRates, ranks_per_node: u32, storage: DType) -> Rates {
        let tensor = self.bf16_tflops * 1e12 * MATMUL_SHARE;
        let ranks = f64::from(ranks_per_node.max(1));
        let peak_tflops = if storage == DType::F32 { self.f32_tflops } else { self.bf16_tflops };
        Rates {
            matmul: MatmulRates { f32: self.f32_tflops * 1e12 * MATMUL_SHARE, bf16: tensor, f16: tensor },
            attention_share: ATTENTION_SHARE,
            gemm_units: self.multiprocessors,
            gemm_tile: GemmTile::GPU,
            memory_bytes_per_s: self.memory_gb_per_s * 1e9 * MEMORY_SHARE,
            sustained_share: SUSTAINED_SHARE,
            kernel_seconds: GPU_KERNEL_SECONDS,
            host_link_bytes_per_s: self.pcie_bytes_per_s * LINK_SHARE,
            nvme_read_bytes_per_s: host.nvme_read_bytes_per_s / ranks,
            nvme_write_bytes_per_s: host.nvme_write_bytes_per_s / ranks,
            host_update_bytes_per_s: host.update_bytes_per_s / ranks,
            lanes_share_cores: false,
            peak_flops_per_s: peak_tflops * 1e12,
        }
    }

    /// A cluster of such GPUs over NCCL.
    pub fn cluster(&self, nodes: u32, ranks_per_node: u32, network: NetworkSpeed) -> Cluster {
        let intra = match self.nvlink_gb_per_s {
            Some(gb) => Link { bytes_per_s: gb * 1e9 * LINK_SHARE, latency_s: NVLINK_HOP_SECONDS },
            None => Link { bytes_per_s: self.pcie_bytes_per_s * LINK_SHARE, latency_s: PCIE_HOP_SECONDS },
        };
        let inter = Link { bytes_per_s: network.per_node(ranks_per_node), latency_s: NETWORK_HOP_SECONDS };
        Cluster { nodes, ranks_per_node, intra, inter, transport: Transport::Nccl }
    }
}

impl Rates {
    /// An assumption for a CPU nobody has measured: `cores` cores with AVX2 at 3 GHz (two multiply-adds of eight f32 a
    /// cycle, four fifths of which GEMMs attain) and 10 GB/s each.
    pub fn generic_cpu(cores: u32) -> Rates {
        let cores = f64::from(cores.max(1));
        let (peak, memory) = (cores * 96e9, cores * 10e9);
        Rates {
            matmul: MatmulRates::same(0.8 * peak),
            attention_share: 0.5,
            gemm_units: 1,
            gemm_tile: GemmTile::CPU,
            memory_bytes_per_s: memory,
            sustained_share: 1.0,
            kernel_seconds: 5e-6,
            // A copy reads and writes.
            host_link_bytes_per_s: memory / 2.0,
            nvme_read_bytes_per_s: 2e9,
            nvme_write_bytes_per_s: 1e9,
            host_update_bytes_per_s: memory,
            lanes_share_cores: true,
            peak_flops_per_s: peak,
        }
    }
}
