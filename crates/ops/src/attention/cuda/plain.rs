//! Attention without tensor cores.

use lockstep_core::DType;
use lockstep_device::args;
use lockstep_device::cuda::{Arg, CudaQueue, KernelSource, KernelVariant, Launch};

use super::super::{BackwardArgs, DecodeArgs, ForwardArgs};
use super::{RowStats, args, max_tiles};
use crate::dropout::Mask;

static PLAIN: KernelSource = KernelSource {
    name: "attention_plain",
    text: concat!(include_str!("tiles.cu"), include_str!("pages.cu"), include_str!("plain.cu")),
    defines: &[("THREADS", THREADS as u32)],
};

const THREADS: usize = 64;
const MAX_WIDTH: usize = 512;

/// Rows of a tile, such that four f32 tiles fit in shared memory.
const fn tile(width: usize) -> usize {
    match width {
        0..=128 => 32,
        129..=256 => 16,
        _ => 8,
    }
}

pub(super) fn variant(real: DType, width: usize) -> (&'static KernelSource, KernelVariant) {
    assert!((1..=MAX_WIDTH).contains(&width), "head width {width} exceeds the maximum on a GPU, {MAX_WIDTH}");
    let variant = KernelVariant::of(real)
        .with("WIDTH", width as u32)
        .with("TILE", tile(width) as u32)
        .with("STRIDE", stride(width) as u32)
        .with("FORWARD_BYTES", shared_bytes(width, FORWARD_TILES) as u32)
        .with("DQ_BYTES", shared_bytes(width, DQ_TILES) as u32)
        .with("DKV_BYTES", shared_bytes(width, DKV_TILES) as u32);
    (&PLAIN, variant)
}

/// Elements from one row of a tile to the next: an odd multiple of four, so that eight rows lie in different banks.
const fn stride(width: usize) -> usize {
    4 * (width.div_ceil(4) | 1)
}

/// Tiles of rows and tiles of scores in a block's shared memory.
type SharedTiles = (usize, usize);
const FORWARD_TILES: SharedTiles = (2, 1);
const DQ_TILES: SharedTiles = (4, 1);
const DKV_TILES: SharedTiles = (4, 2);

const fn shared_bytes(width: usize, (tiles, scores): SharedTiles) -> usize {
    let rows = tile(width);
    4 * (tiles * rows * stride(width) + scores * rows * (rows + 1))
}

fn launch(blocks: usize, width: usize, tiles: SharedTiles) -> Launch {
    Launch { shared: shared_bytes(width, tiles), ..Launch::new(blocks, THREADS) }
}

/// The additional arguments for dropout.
fn dropout_args(dropout: Option<Mask>) -> [Arg; 6] {
    match dropout {
        None => args![None, 0u64, 0u32, 0u32, 0u32, 1f32],
        Some(mask) => {
            args![mask.samples, mask.seed, mask.step, mask.index(), mask.threshold(), mask.scale()]
        }
    }
}

pub(super) fn forward(cuda: &CudaQueue, call: &ForwardArgs) {
    let ForwardArgs { heads, q, cu_seqlens, dropout, .. } = *call;
    let (source, variant) = variant(q.view.dtype(), heads.width);
    let kernel = cuda.kernel_variant(source, variant, "plain_forward");
    let blocks = max_tiles(q.rows, cu_seqlens, tile(heads.width)) * heads.num_q;
    let first: [Arg; 15] = args::forward(call, &args::qkv(call));
    let args: [Arg; 21] = args::join(&[&first, &dropout_args(dropout)]);
    // SAFETY: these are the kernel's parameters, in order; it reads and writes rows of documents within the bounds,
    // which end at the number of rows, and columns of heads, whose number `check` compared with the matrices.
    unsafe { cuda.launch(kernel, launch(blocks, heads.width, FORWARD_TILES), args) };
}

pub(super) fn backward(cuda: &CudaQueue, call: &BackwardArgs, stats: RowStats) {
    let BackwardArgs { dq, dk, dv, forward: ForwardArgs { heads, q, cu_seqlens, dropout, .. }, .. } = *call;
    let (source, variant) = variant(q.view.dtype(), heads.width);
    let tiles = max_tiles(q.rows, cu_seqlens, tile(heads.width));
    let (qkv, dropped) = (args::qkv(&call.forward), dropout_args(dropout));

    let kernel = cuda.kernel_variant(source, variant, "plain_dq");
    let first: [Arg; 19] = args::backward([dq], call, stats, &[], &qkv);
    let args: [Arg; 25] = args::join(&[&first, &dropped]);
    let grid = launch(tiles * heads.num_q, heads.width, DQ_TILES);
    // SAFETY: as in forward; gradients have the shapes of their tensors.
    unsafe { cuda.launch(kernel, grid, args) };

    let kernel = cuda.kernel_variant(source, variant, "plain_dkv");
    let first: [Arg; 21] = args::backward([dk, dv], call, stats, &[], &qkv);
    let args: [Arg; 27] = args::join(&[&first, &dropped]);
    let grid = launch(tiles * heads.num_kv, heads.width, DKV_TILES);
    // SAFETY: as above.
    unsafe { cuda.launch(kernel, grid, args) };
}

/// Attention over the cache, which already holds the new keys and values.
pub(super) fn decode(cuda: &CudaQueue, call: &DecodeArgs) {
    let DecodeArgs { heads, q, cu_seqlens, .. } = *call;
    let (source, variant) = variant(q.view.dtype(), heads.width);
    let kernel = cuda.kernel_variant(source, variant, "plain_decode");
    let blocks = max_tiles(q.rows, cu_seqlens, tile(heads.width)) * heads.num_q;
    let args = args::decode(call, heads.num_q);
    // SAFETY: as in forward; the kernel skips documents that exceed their page table, and reads pages of the cache only.
    unsafe { cuda.launch(kernel, launch(blocks, heads.width, FORWARD_TILES), args) };
}
