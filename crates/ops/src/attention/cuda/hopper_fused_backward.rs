//! Backward on sm_90 in one kernel, with an ordered accumulation of dq: five matmuls instead of the seven of two
//! kernels. That saves power, which limits training. Only for heads of width 64: wider ones leave too few registers.

use lockstep_core::DType;
use lockstep_device::args;
use lockstep_device::cuda::{Arg, CudaQueue, KernelSource, KernelVariant, Launch};

use super::super::{BackwardArgs, ForwardArgs};
use super::hopper::{GROUP_ROWS, GROUP_THREADS};
use super::{RowStats, args, max_tiles};

static SOURCE: KernelSource = KernelSource {
    name: "hopper_fused_backward",
    text: concat!(
        include_str!("tiles.cu"),
        include_str!("half_precision.cu"),
        include_str!("registers.cu"),
        include_str!("wgmma.cu"),
        include_str!("panels.cu"),
        include_str!("hopper_fused_backward.cu")
    ),
    defines: &[
        ("GROUP_ROWS", GROUP_ROWS as u32),
        ("GROUP_THREADS", GROUP_THREADS as u32),
        ("ALL_THREADS", ALL_THREADS as u32),
        ("STAGES", STAGES as u32),
        ("DS_STAGES", DS_STAGES as u32),
        ("DQ_STAGES", DQ_STAGES as u32),
        ("BACKWARD_BYTES", SHARED_BYTES as u32),
    ],
};

const WIDTH: usize = 64;
/// Keys of a block (two groups of them), and queries of a step.
const ROWS: usize = 2 * GROUP_ROWS;
const COLS: usize = 64;
/// Steps that fit in shared memory: of queries, of dS, of dq.
const STAGES: usize = 3;
const DS_STAGES: usize = 4;
const DQ_STAGES: usize = 4;
/// Two consumer groups, and one that copies and accumulates.
const ALL_THREADS: usize = 3 * GROUP_THREADS;
/// Keys and values, dS, queries and their dO; then f32: two for each query, and dq; then barriers.
const SHARED_BYTES: usize = {
    let halves = 2 * ROWS * WIDTH + DS_STAGES * ROWS * COLS + STAGES * 2 * COLS * WIDTH;
    let numbers = STAGES * 2 * COLS + DQ_STAGES * COLS * WIDTH;
    let events = 2 * STAGES + DS_STAGES + 2 * DQ_STAGES;
    2 * halves + 4 * numbers + 8 * events
};

pub(super) fn fits(width: usize) -> bool {
    width == WIDTH
}

pub(super) fn source(real: DType) -> (&'static KernelSource, KernelVariant) {
    let variant = KernelVariant::of(real)
        .with("WIDTH", WIDTH as u32)
        .with("ROWS", ROWS as u32)
        .with("COLS", COLS as u32);
    (&SOURCE, variant)
}

/// f32 elements that blocks share: sums of dq \[H, T, h\], and a count of finished blocks for each tile of queries.
pub(super) fn shared_elems(tokens: usize, num_q: usize, width: usize) -> usize {
    if fits(width) { (tokens * num_q * width + num_counts(tokens, num_q)).next_multiple_of(4) } else { 0 }
}

/// A count for each head of each tile, and the number of blocks that have started. Documents of more than one block
/// have at most three tiles per 128 rows; others need no count.
fn num_counts(tokens: usize, num_q: usize) -> usize {
    (3 * tokens / 128 + 2) * num_q + 1
}

pub(super) fn backward(cuda: &CudaQueue, call: &BackwardArgs, stats: RowStats) {
    let BackwardArgs { dq, dk, dv, forward: ForwardArgs { heads, q, cu_seqlens, .. }, .. } = *call;
    let tokens = q.rows;
    let (sums, counts) = (tokens * heads.num_q * WIDTH, num_counts(tokens, heads.num_q));
    let (sums, counts) = (stats.shared.slice(0, sums), stats.shared.slice(sums, counts));
    cuda.zero(counts);
    let (sums, qkv) = (args![sums, counts], args::qkv_one_stride(&call.forward));
    let args: [Arg; 24] = args::backward([dq, dk, dv], call, stats, &sums, &qkv);
    let (source, variant) = source(q.view.dtype());
    let kernel = cuda.kernel_variant(source, variant, "hopper_fused_backward");
    let blocks = max_tiles(tokens, cu_seqlens, ROWS) * heads.num_kv;
    let launch = Launch { shared: SHARED_BYTES, ..Launch::new(blocks, ALL_THREADS) };
    // SAFETY: these are the kernel's parameters, in order; it reads and writes rows of documents within the bounds,
    // which end at the number of rows, columns of heads, whose number `check` compared with the matrices, and sums and
    // counts of the sizes above.
    unsafe { cuda.launch(kernel, launch, args) };
}
