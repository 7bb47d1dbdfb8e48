//! Attention without tensor cores.

use lockstep_core::DType;
use lockstep_device::args;
use lockstep_device::cuda::{Arg, CudaQueue, KernelSource, KernelVariant, Launch};

use super::super::{BackwardArgs, DecodeArgs, ForwardArgs};
use super::{Rows, args, most_tiles};
use crate::dropout::Mask;

static PLAIN: KernelSource = KernelSource {
    name: "attention_plain",
    text: concat!(include_str!("tiles.cu"), include_str!("plain.cu")),
    defines: &[("THREADS", THREADS as u32)],
};

const THREADS: usize = 64;
const MAX_WIDTH: usize = 512;

/// Rows of a tile, chosen so that four tiles in f32 lie in shared memory.
const fn tile(width: usize) -> usize {
    match width {
        0..=128 => 32,
        129..=256 => 16,
        _ => 8,
    }
}

pub(super) fn variant(real: DType, width: usize) -> (&'static KernelSource, KernelVariant) {
    assert!((1..=MAX_WIDTH).contains(&width), "a head of {width}: at most {MAX_WIDTH} on a GPU");
    let variant = KernelVariant::of(real)
        .with("WIDTH", width as u32)
        .with("TILE", tile(width) as u32)
        .with("STRIDE", stride(width) as u32)
        .with("FORWARD_BYTES", shared_bytes(width, FORWARD_ROOM) as u32)
        .with("DQ_BYTES", shared_bytes(width, DQ_ROOM) as u32)
        .with("DKV_BYTES", shared_bytes(width, DKV_ROOM) as u32);
    (&PLAIN, variant)
}

/// Elements between rows of a tile: an odd number of fours, so that eight rows' fours lie in different banks.
const fn stride(width: usize) -> usize {
    4 * (width.div_ceil(4) | 1)
}

/// Tiles of rows and tiles of scores in a block's shared memory.
type Room = (usize, usize);
const FORWARD_ROOM: Room = (2, 1);
const DQ_ROOM: Room = (4, 1);
const DKV_ROOM: Room = (4, 2);

const fn shared_bytes(width: usize, (tiles, scores): Room) -> usize {
    let rows = tile(width);
    4 * (tiles * rows * stride(width) + scores * rows * (rows + 1))
}

fn launch(blocks: usize, width: usize, room: Room) -> Launch {
    Launch { shared: shared_bytes(width, room), ..Launch::new(blocks, THREADS) }
}

/// The arguments that dropout adds to a kernel's.
fn dropout_args(dropout: Option<Mask>) -> [Arg; 6] {
    match dropout {
        None => args![None, 0u64, 0u32, 0u32, 0u32, 1f32],
        Some(mask) => {
            args![mask.samples, mask.seed, mask.step, mask.place(), mask.threshold(), mask.scale()]
        }
    }
}

pub(super) fn forward(cuda: &CudaQueue, call: &ForwardArgs) {
    let ForwardArgs { heads, q, cu_seqlens, dropout, .. } = *call;
    let (source, variant) = variant(q.view.dtype(), heads.width);
    let kernel = cuda.kernel_variant(source, variant, "plain_forward");
    let blocks = most_tiles(q.rows, cu_seqlens, tile(heads.width)) * heads.num_q;
    let first: [Arg; 15] = args::forward(call, &args::qkv(call));
    let args: [Arg; 21] = args::join(&[&first, &dropout_args(dropout)]);
    // SAFETY: these are the kernel's parameters, in order; it reads and writes rows of documents within the bounds, whose
    // end is the number of rows, and columns of heads, which `check` found in the matrices.
    unsafe { cuda.launch(kernel, launch(blocks, heads.width, FORWARD_ROOM), args) };
}

pub(super) fn backward(cuda: &CudaQueue, call: &BackwardArgs, rows: Rows) {
    let BackwardArgs { dq, dk, dv, forward: ForwardArgs { heads, q, cu_seqlens, dropout, .. }, .. } = *call;
    let (source, variant) = variant(q.view.dtype(), heads.width);
    let tiles = most_tiles(q.rows, cu_seqlens, tile(heads.width));
    let (qkv, dropped) = (args::qkv(&call.forward), dropout_args(dropout));

    let kernel = cuda.kernel_variant(source, variant, "plain_dq");
    let first: [Arg; 19] = args::backward([dq], call, rows, &[], &qkv);
    let args: [Arg; 25] = args::join(&[&first, &dropped]);
    let grid = launch(tiles * heads.num_q, heads.width, DQ_ROOM);
    // SAFETY: as in forward; the gradients have the shapes of what they are of.
    unsafe { cuda.launch(kernel, grid, args) };

    let kernel = cuda.kernel_variant(source, variant, "plain_dkv");
    let first: [Arg; 21] = args::backward([dk, dv], call, rows, &[], &qkv);
    let args: [Arg; 27] = args::join(&[&first, &dropped]);
    let grid = launch(tiles * heads.num_kv, heads.width, DKV_ROOM);
    // SAFETY: as above.
    unsafe { cuda.launch(kernel, grid, args) };
}

/// Attends over the cache, in which the new keys and values already are.
pub(super) fn decode(cuda: &CudaQueue, call: &DecodeArgs) {
    let DecodeArgs { heads, q, cu_seqlens, .. } = *call;
    let (source, variant) = variant(q.view.dtype(), heads.width);
    let kernel = cuda.kernel_variant(source, variant, "plain_decode");
    let blocks = most_tiles(q.rows, cu_seqlens, tile(heads.width)) * heads.num_q;
    let args = args::decode(call, heads.num_q);
    // SAFETY: as in forward; documents whose slot or length the cache does not have are left out by the kernel.
    unsafe { cuda.launch(kernel, launch(blocks, heads.width, FORWARD_ROOM), args) };
}
