//! How fast a rank computes and copies.

use lockstep_core::DType;

use crate::cost::work::{Gemm, Work};

/// FLOP/s of a large GEMM, by the type of its operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulRates {
    pub f32: f64,
    pub bf16: f64,
    pub f16: f64,
}

impl MatmulRates {
    /// The same rate for every type, as on a CPU that computes in f32.
    pub const fn same(flops_per_s: f64) -> MatmulRates {
        MatmulRates { f32: flops_per_s, bf16: flops_per_s, f16: flops_per_s }
    }

    pub const fn of(&self, dtype: DType) -> f64 {
        match dtype {
            DType::BF16 => self.bf16,
            DType::F16 => self.f16,
            _ => self.f32,
        }
    }
}

/// The piece of a GEMM that one unit of the device (a GPU's multiprocessor) computes at a time: `rows` × `cols` of the
/// output, and at least `inner` of the summed dimension if a GEMM is split along it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmTile {
    pub rows: usize,
    pub cols: usize,
    pub inner: usize,
}

impl GemmTile {
    /// Tiles of large GEMMs on tensor cores.
    pub const GPU: GemmTile = GemmTile { rows: 128, cols: 128, inner: 1024 };
    /// A CPU's register tiles are so small that rounding up to them costs little.
    pub const CPU: GemmTile = GemmTile { rows: 1, cols: 1, inner: 1 };
}

/// What one rank's device and its share of the host can do. A caller fills it from a benchmark and caches it, or takes
/// it from [`crate::cost::Chip::rates`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    pub matmul: MatmulRates,
    /// The share of the matmul rate that attention kernels attain.
    pub attention_share: f64,
    /// Units that compute tiles of a GEMM at the same time: multiprocessors of a GPU. 1 on a CPU, whose threads split
    /// outputs evenly.
    pub gemm_units: u32,
    pub gemm_tile: GemmTile,
    /// Bytes read plus bytes written per second, in the device's memory.
    pub memory_bytes_per_s: f64,
    /// The share of the device's rates that is left in a whole step, if they were measured in short bursts: a GPU at
    /// its power limit lowers its clock. 1 for rates that were measured under a sustained load.
    pub sustained_share: f64,
    /// The time that every kernel takes besides its work.
    pub kernel_seconds: f64,
    /// Between device and host, one direction.
    pub host_link_bytes_per_s: f64,
    pub nvme_read_bytes_per_s: f64,
    pub nvme_write_bytes_per_s: f64,
    /// Bytes read plus bytes written per second by the host's cores that update this rank's offloaded states.
    pub host_update_bytes_per_s: f64,
    /// Whether all lanes share the cores that compute, as on a CPU: then nothing overlaps.
    pub lanes_share_cores: bool,
    /// The data sheet's peak for the training type, which MFU is measured against.
    pub peak_flops_per_s: f64,
}

impl Rates {
    /// The share of the full matmul rate that a GEMM of this size attains: how full its edge tiles are, times how full
    /// the last round of tiles on all units is.
    pub fn gemm_efficiency(&self, gemm: &Gemm) -> f64 {
        let tile = self.gemm_tile;
        let (rows, cols) = (gemm.rows.div_ceil(tile.rows), gemm.cols.div_ceil(tile.cols));
        let filled = (gemm.rows * gemm.cols) as f64 / (rows * cols * tile.rows * tile.cols) as f64;
        let splits = (gemm.inner / tile.inner).max(1);
        let rounds = (rows * cols * splits) as f64 / f64::from(self.gemm_units);
        filled * rounds / rounds.ceil()
    }

    /// Seconds of one GEMM: the slower of its arithmetic and its memory traffic.
    pub fn gemm_seconds(&self, gemm: &Gemm) -> f64 {
        let compute = gemm.flops() / (self.matmul.of(gemm.dtype) * self.gemm_efficiency(gemm));
        compute.max(gemm.bytes / self.memory_bytes_per_s) + self.kernel_seconds
    }

    /// Seconds of some work on the device. Kernels run one after the other.
    pub fn seconds(&self, work: &Work) -> f64 {
        let gemms: f64 =
            work.gemms.iter().map(|(gemm, count)| f64::from(*count) * self.gemm_seconds(gemm)).sum();
        let attention_rate = self.matmul.of(work.attention_dtype) * self.attention_share;
        let in_a_burst = gemms
            + work.attention_flops / attention_rate
            + work.bytes / self.memory_bytes_per_s
            + f64::from(work.kernels) * self.kernel_seconds;
        in_a_burst / self.sustained_share
    }
}
