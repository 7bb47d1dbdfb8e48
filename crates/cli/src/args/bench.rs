//! Arguments of `lockstep bench`.

use clap::{Args, Subcommand, ValueEnum};

use super::model::{DeviceArg, Storage};
use super::parsers::{dimension, few};
use super::train::Nproc;

const COLLECTIVES: &str = "\
Sizes are bytes of the whole tensor, and rates are these bytes divided by the time of one call. Ranks on GPUs use NCCL; \
ranks on the CPU use shared memory, or what --carrier names. Under mpiexec or srun, the command measures their ranks.";

const ROOFLINE: &str = "\
Shares are relative to the fastest large copy or large matmul of the same run. Bytes and operations are the minimum \
that the result needs, so extra work lowers the rate.";

#[derive(Debug, Args)]
pub(crate) struct Bench {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure training steps on random tokens: tokens per second, MFU and memory
    Step(BenchStep),
    /// Measure every operation of a training step, and its share of the step
    #[command(after_help = ROOFLINE)]
    Kernels(BenchKernels),
    /// Measure matrix multiplications in the three layouts of training
    #[command(after_help = ROOFLINE)]
    Matmul(BenchMatmul),
    /// Measure attention: forward, backward, and decoding with a KV cache
    #[command(after_help = ROOFLINE)]
    Attention(BenchAttention),
    /// Measure collectives between ranks of this host
    #[command(after_help = COLLECTIVES)]
    Collectives(BenchCollectives),
}

#[derive(Debug, Args)]
pub(crate) struct BenchStep {
    /// Set keys as in a run: model=1b, recompute=full, offload_optimizer=cpu [default: model=300m mixed_precision=auto]
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) settings: Vec<String>,
    /// Use this many rows per micro-batch
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = dimension)]
    pub(crate) rows: usize,
    /// Use this many tokens per row
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = dimension)]
    pub(crate) length: usize,
    /// Use this vocabulary size, if the model is a named size
    #[arg(long, value_name = "N", default_value_t = 32000, value_parser = dimension)]
    pub(crate) vocab: usize,
    /// Run this many steps; the first two are not counted
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = dimension)]
    pub(crate) steps: usize,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// The device of a benchmark, and its output.
#[derive(Debug, Args)]
pub(crate) struct BenchMachine {
    /// Compute on this device: auto, cpu or cuda [default: a GPU if one works]
    #[arg(long, value_enum, value_name = "DEVICE", default_value_t = DeviceArg::Auto, hide_default_value = true, hide_possible_values = true)]
    pub(crate) device: DeviceArg,
    /// Store weights and activations in f32, bf16 or f16 [default: bf16 on a GPU, f32 on a CPU]
    #[arg(long, value_name = "TYPE", ignore_case = true, hide_possible_values = true)]
    pub(crate) dtype: Option<Storage>,
    /// Use this many CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = few)]
    pub(crate) threads: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchKernels {
    /// Use this named model size [default: 300m on a GPU, 15m on a CPU]
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Option<String>,
    /// Use this many rows per micro-batch [default: 16 on a GPU, 8 on a CPU]
    #[arg(long, value_name = "N", value_parser = dimension)]
    pub(crate) rows: Option<usize>,
    /// Use this many tokens per row [default: 2048 on a GPU, 256 on a CPU]
    #[arg(long, value_name = "N", value_parser = dimension)]
    pub(crate) length: Option<usize>,
    /// Use this vocabulary size [default: 32000 on a GPU, 4096 on a CPU]
    #[arg(long, value_name = "N", value_parser = dimension)]
    pub(crate) vocab: Option<usize>,
    /// Recompute these activations in backward: none, selective or full
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = Recompute::None, hide_possible_values = true)]
    pub(crate) recompute: Recompute,
    #[command(flatten)]
    pub(crate) machine: BenchMachine,
}

#[derive(Debug, Args)]
pub(crate) struct BenchMatmul {
    /// Set m, the rows of the result [default: square matrices of several sizes]
    #[arg(long, value_name = "N", requires_all = ["n", "k"], value_parser = dimension)]
    pub(crate) m: Option<usize>,
    /// Set n, the columns of the result
    #[arg(long, value_name = "N", requires = "m", value_parser = dimension)]
    pub(crate) n: Option<usize>,
    /// Set k, the inner dimension
    #[arg(long, value_name = "N", requires = "m", value_parser = dimension)]
    pub(crate) k: Option<usize>,
    #[command(flatten)]
    pub(crate) machine: BenchMachine,
}

#[derive(Debug, Args)]
pub(crate) struct BenchAttention {
    /// Use this many rows [default: several shapes, if no shape is given]
    #[arg(long, value_name = "N", value_parser = dimension)]
    pub(crate) rows: Option<usize>,
    /// Use this many tokens per row
    #[arg(long, value_name = "N", value_parser = dimension)]
    pub(crate) length: Option<usize>,
    /// Use this many query heads
    #[arg(long, value_name = "N", value_parser = few)]
    pub(crate) heads: Option<usize>,
    /// Use this many key-value heads, a divisor of the query heads [default: as many as query heads]
    #[arg(long, value_name = "N", alias = "kv_heads", value_parser = few)]
    pub(crate) kv_heads: Option<usize>,
    /// Use heads of this size
    #[arg(long, value_name = "N", alias = "head_dim", value_parser = few)]
    pub(crate) head_dim: Option<usize>,
    /// Use a sliding window of this many keys, including the query's own [default: all keys]
    #[arg(long, value_name = "N", value_parser = dimension)]
    pub(crate) window: Option<usize>,
    #[command(flatten)]
    pub(crate) machine: BenchMachine,
}

#[derive(Debug, Args)]
pub(crate) struct BenchCollectives {
    /// Set keys as in a run: device=cpu, share_gpus=true
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) settings: Vec<String>,
    /// Communicate by this: auto, shm, tcp or mpi [default: auto]
    #[arg(long, value_name = "CARRIER")]
    pub(crate) carrier: Option<String>,
    /// Start this many ranks: a number, gpu (one per GPU), cpu (one per core) or auto
    #[arg(
        long,
        value_name = "N",
        default_value = "2",
        visible_alias = "nproc-per-node",
        alias = "nproc_per_node"
    )]
    pub(crate) nproc: Nproc,
    /// Measure sizes up to this many MiB
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) largest: u16,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// The activations that backward recomputes.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Recompute {
    None,
    Selective,
    Full,
}
