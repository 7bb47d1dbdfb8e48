//! Attention on tensor cores (mma.sync).

use lockstep_core::DType;
use lockstep_device::cuda::{Arg, CudaQueue, KernelSource, KernelVariant, Launch};

use super::super::{BackwardArgs, DecodeArgs, ForwardArgs, Heads};
use super::{RowStats, aligned, args, max_tiles};
use crate::Mat;

static FORWARD: KernelSource = KernelSource {
    name: "flash_forward",
    text: concat!(
        include_str!("tiles.cu"),
        include_str!("pages.cu"),
        include_str!("half_precision.cu"),
        include_str!("registers.cu"),
        include_str!("mma.cu"),
        include_str!("fragments.cu"),
        include_str!("flash_forward.cu")
    ),
    defines: &[("THREADS", THREADS as u32), ("PAD", PAD as u32)],
};

static BACKWARD: KernelSource = KernelSource {
    name: "flash_backward",
    text: concat!(
        include_str!("tiles.cu"),
        include_str!("half_precision.cu"),
        include_str!("registers.cu"),
        include_str!("mma.cu"),
        include_str!("fragments.cu"),
        include_str!("flash_backward.cu")
    ),
    defines: &[("THREADS", THREADS as u32), ("PAD", PAD as u32), ("NARROW", NARROW as u32)],
};

const THREADS: usize = 128;
/// Extra elements per row of a tile, so that eight rows that are read together lie in different banks.
const PAD: usize = 8;
/// Rows of a tile that a backward block owns: 16 per warp.
const BACKWARD_ROWS: usize = 64;
const MAX_WIDTH: usize = 256;
/// Up to this width a warp's registers hold 32 rows in forward, and the sums of both dk and dv in backward.
const NARROW: usize = 128;

/// The factor of the log-sum-exps that the backward kernels expect.
pub(super) const LOG_SCALE: f32 = std::f32::consts::LOG2_E;

/// Queries of a block and keys of a step in forward. Tiles fit in the shared memory of the smallest GPUs, 99 KiB.
const fn forward_tile(width: usize) -> (usize, usize) {
    if width <= NARROW { (128, 64) } else { (64, 64) }
}

/// Rows of a step in backward.
const fn backward_step(width: usize) -> usize {
    if width <= NARROW { 32 } else { 16 }
}

/// Whether these kernels support the operands.
pub(super) fn supports(heads: &Heads, mats: &[&Mat]) -> bool {
    let of_type = mats.iter().all(|mat| matches!(mat.view.dtype(), DType::BF16 | DType::F16));
    let of_width = heads.width.is_multiple_of(16) && heads.width <= MAX_WIDTH;
    // With a positive scale, the largest score stays the largest when scaled.
    of_type && of_width && heads.scale > 0.0 && mats.iter().all(|mat| aligned(mat))
}

fn forward_variant(real: DType, width: usize) -> KernelVariant {
    let (rows, keys) = forward_tile(width);
    KernelVariant::of(real)
        .with("WIDTH", width as u32)
        .with("ROWS", rows as u32)
        .with("KEYS", keys as u32)
        .with("FORWARD_BYTES", shared_bytes(width, forward_shared_rows(width)) as u32)
}

fn backward_variant(real: DType, width: usize) -> KernelVariant {
    KernelVariant::of(real)
        .with("WIDTH", width as u32)
        .with("ROWS", BACKWARD_ROWS as u32)
        .with("COLS", backward_step(width) as u32)
        .with("BACKWARD_BYTES", shared_bytes(width, backward_shared_rows(width)) as u32)
}

/// Queries, keys and values.
const fn forward_shared_rows(width: usize) -> usize {
    let (rows, keys) = forward_tile(width);
    rows + 2 * keys
}

/// Two tiles that the block owns, and two stages of two tiles.
const fn backward_shared_rows(width: usize) -> usize {
    2 * BACKWARD_ROWS + 4 * backward_step(width)
}

const fn shared_bytes(width: usize, rows: usize) -> usize {
    2 * rows * (width + PAD)
}

pub(super) fn sources(real: DType, width: usize) -> [(&'static KernelSource, KernelVariant); 2] {
    [(&FORWARD, forward_variant(real, width)), (&BACKWARD, backward_variant(real, width))]
}

/// `blocks` blocks with `rows` rows of shared memory.
fn launch(blocks: usize, width: usize, rows: usize) -> Launch {
    Launch { shared: shared_bytes(width, rows), ..Launch::new(blocks, THREADS) }
}

fn forward_launch(tokens: usize, cu_seqlens: lockstep_device::View, heads: &Heads) -> Launch {
    let blocks = max_tiles(tokens, cu_seqlens, forward_tile(heads.width).0) * heads.num_q;
    launch(blocks, heads.width, forward_shared_rows(heads.width))
}

pub(super) fn forward(cuda: &CudaQueue, call: &ForwardArgs) {
    let ForwardArgs { heads, q, cu_seqlens, .. } = *call;
    let kernel = cuda.kernel_variant(&FORWARD, forward_variant(q.view.dtype(), heads.width), "flash_forward");
    let args: [Arg; 15] = args::forward(call, &args::qkv(call));
    // SAFETY: these are the kernel's parameters, in order; it reads and writes rows of documents within the bounds,
    // which end at the number of rows, and columns of heads, whose number `check` compared with the matrices.
    unsafe { cuda.launch(kernel, forward_launch(q.rows, cu_seqlens, &heads), args) };
}

pub(super) fn backward(cuda: &CudaQueue, call: &BackwardArgs, stats: RowStats) {
    let BackwardArgs { dq, dk, dv, forward: ForwardArgs { heads, q, cu_seqlens, .. }, .. } = *call;
    let variant = backward_variant(q.view.dtype(), heads.width);
    let tiles = max_tiles(q.rows, cu_seqlens, BACKWARD_ROWS);
    let shared_rows = backward_shared_rows(heads.width);
    let qkv = args::qkv(&call.forward);

    let args: [Arg; 19] = args::backward([dq], call, stats, &[], &qkv);
    let kernel = cuda.kernel_variant(&BACKWARD, variant, "flash_dq");
    // SAFETY: as in forward; gradients have the shapes of their tensors.
    unsafe { cuda.launch(kernel, launch(tiles * heads.num_q, heads.width, shared_rows), args) };

    let args: [Arg; 21] = args::backward([dk, dv], call, stats, &[], &qkv);
    let names: &[&'static str] =
        if heads.width <= NARROW { &["flash_dkv"] } else { &["flash_dk", "flash_dv"] };
    for name in names {
        let kernel = cuda.kernel_variant(&BACKWARD, variant, name);
        // SAFETY: as above.
        unsafe { cuda.launch(kernel, launch(tiles * heads.num_kv, heads.width, shared_rows), args) };
    }
}

/// Attention over the cache, which already holds the new keys and values.
pub(super) fn decode(cuda: &CudaQueue, call: &DecodeArgs) {
    let DecodeArgs { heads, q, cu_seqlens, .. } = *call;
    let kernel = cuda.kernel_variant(&FORWARD, forward_variant(q.view.dtype(), heads.width), "flash_decode");
    let args = args::decode(call, heads.num_q);
    // SAFETY: as in forward; the kernel skips documents that exceed their page table, and reads pages of the cache only.
    unsafe { cuda.launch(kernel, forward_launch(q.rows, cu_seqlens, &heads), args) };
}
