//! Attention on the tensor cores of sm_90 (wgmma), which read operands from shared memory. Only for the most common
//! head widths; `flash` handles the others, and all other GPUs.

use lockstep_core::DType;
use lockstep_device::cuda::{Arg, CudaQueue, Gpu, KernelSource, KernelVariant, Launch};

use super::super::{BackwardArgs, ForwardArgs};
use super::{RowStats, args, hopper_fused_backward, max_tiles};

static FORWARD: KernelSource = KernelSource {
    name: "hopper_forward",
    text: concat!(
        include_str!("tiles.cu"),
        include_str!("half_precision.cu"),
        include_str!("registers.cu"),
        include_str!("wgmma.cu"),
        include_str!("panels.cu"),
        include_str!("hopper_forward.cu")
    ),
    defines: &[("GROUP_ROWS", GROUP_ROWS as u32), ("GROUP_THREADS", GROUP_THREADS as u32)],
};

static BACKWARD: KernelSource = KernelSource {
    name: "hopper_backward",
    text: concat!(
        include_str!("tiles.cu"),
        include_str!("half_precision.cu"),
        include_str!("registers.cu"),
        include_str!("wgmma.cu"),
        include_str!("panels.cu"),
        include_str!("hopper_backward.cu")
    ),
    defines: &[("GROUP_ROWS", GROUP_ROWS as u32), ("GROUP_THREADS", GROUP_THREADS as u32)],
};

pub(super) const SM: u32 = 90;
const WIDTHS: [usize; 2] = [64, 128];
/// Rows that four warps share.
pub(super) const GROUP_ROWS: usize = 64;
pub(super) const GROUP_THREADS: usize = 128;
/// Queries of a block in forward.
const FORWARD_ROWS: usize = 2 * GROUP_ROWS;
/// Rows of a block and of a step, in the backward of wide heads.
const BACKWARD_ROWS: usize = GROUP_ROWS;
const BACKWARD_COLS: usize = 64;

/// Keys of a step in forward: as many as there are registers for if two blocks share a multiprocessor.
const fn forward_keys(width: usize) -> usize {
    if width == 64 { 128 } else { 64 }
}

/// Whether these kernels support a call that `flash` supports.
pub(super) fn supports(gpu: &Gpu, call: &ForwardArgs) -> bool {
    fits(gpu.sm, call.heads.width) && call.k.stride == call.v.stride
}

pub(super) fn fits(sm: u32, width: usize) -> bool {
    sm == SM && WIDTHS.contains(&width)
}

fn forward_variant(real: DType, width: usize) -> KernelVariant {
    KernelVariant::of(real)
        .with("WIDTH", width as u32)
        .with("ROWS", FORWARD_ROWS as u32)
        .with("KEYS", forward_keys(width) as u32)
        .with("FORWARD_BYTES", shared_bytes(width, forward_shared_rows(width), 0) as u32)
}

fn backward_variant(real: DType, width: usize) -> KernelVariant {
    KernelVariant::of(real)
        .with("WIDTH", width as u32)
        .with("ROWS", BACKWARD_ROWS as u32)
        .with("COLS", BACKWARD_COLS as u32)
        .with("DQ_BYTES", shared_bytes(width, BACKWARD_SHARED_ROWS, 0) as u32)
        .with("DKV_BYTES", shared_bytes(width, BACKWARD_SHARED_ROWS, DKV_NUMBERS) as u32)
}

/// Queries, and two stages of keys and values.
const fn forward_shared_rows(width: usize) -> usize {
    FORWARD_ROWS + 4 * forward_keys(width)
}

/// Two tiles that the block owns, and two stages of two tiles.
const BACKWARD_SHARED_ROWS: usize = 2 * BACKWARD_ROWS + 4 * BACKWARD_COLS;
/// And, for dk and dv, two numbers for each query of a stage.
const DKV_NUMBERS: usize = 4 * BACKWARD_COLS;

/// Bytes of `rows` rows in half precision and `numbers` f32.
const fn shared_bytes(width: usize, rows: usize, numbers: usize) -> usize {
    2 * rows * width + 4 * numbers
}

pub(super) fn all_sources() -> Vec<(&'static KernelSource, KernelVariant)> {
    let each = [DType::BF16, DType::F16].into_iter().flat_map(|real| WIDTHS.map(|width| (real, width)));
    each.flat_map(|(real, width)| sources(real, width)).collect()
}

pub(super) fn sources(real: DType, width: usize) -> [(&'static KernelSource, KernelVariant); 2] {
    let backward = if hopper_fused_backward::fits(width) {
        hopper_fused_backward::source(real)
    } else {
        (&BACKWARD, backward_variant(real, width))
    };
    [(&FORWARD, forward_variant(real, width)), backward]
}

/// Blocks of `rows` rows, with `shared_rows` rows and `shared_numbers` f32 of shared memory.
fn launch(blocks: usize, rows: usize, width: usize, shared_rows: usize, shared_numbers: usize) -> Launch {
    let threads = rows / GROUP_ROWS * GROUP_THREADS;
    Launch { shared: shared_bytes(width, shared_rows, shared_numbers), ..Launch::new(blocks, threads) }
}

pub(super) fn forward(cuda: &CudaQueue, call: &ForwardArgs) {
    let ForwardArgs { heads, q, cu_seqlens, .. } = *call;
    let kernel =
        cuda.kernel_variant(&FORWARD, forward_variant(q.view.dtype(), heads.width), "hopper_forward");
    let args: [Arg; 14] = args::forward(call, &args::qkv_one_stride(call));
    let blocks = max_tiles(q.rows, cu_seqlens, FORWARD_ROWS) * heads.num_q;
    let shared_rows = forward_shared_rows(heads.width);
    // SAFETY: these are the kernel's parameters, in order; it reads and writes rows of documents within the bounds,
    // which end at the number of rows, and columns of heads, whose number `check` compared with the matrices.
    unsafe { cuda.launch(kernel, launch(blocks, FORWARD_ROWS, heads.width, shared_rows, 0), args) };
}

pub(super) fn backward(cuda: &CudaQueue, call: &BackwardArgs, stats: RowStats) {
    if hopper_fused_backward::fits(call.forward.heads.width) {
        return hopper_fused_backward::backward(cuda, call, stats);
    }
    let BackwardArgs { dq, dk, dv, forward: ForwardArgs { heads, q, cu_seqlens, .. }, .. } = *call;
    let variant = backward_variant(q.view.dtype(), heads.width);
    let tiles = max_tiles(q.rows, cu_seqlens, BACKWARD_ROWS);
    let shared_rows = BACKWARD_SHARED_ROWS;
    let qkv = args::qkv_one_stride(&call.forward);

    let args: [Arg; 18] = args::backward([dq], call, stats, &[], &qkv);
    let kernel = cuda.kernel_variant(&BACKWARD, variant, "hopper_dq");
    let dq_launch = launch(tiles * heads.num_q, BACKWARD_ROWS, heads.width, shared_rows, 0);
    // SAFETY: as in forward; gradients have the shapes of their tensors.
    unsafe { cuda.launch(kernel, dq_launch, args) };

    let args: [Arg; 20] = args::backward([dk, dv], call, stats, &[], &qkv);
    let kernel = cuda.kernel_variant(&BACKWARD, variant, "hopper_dkv");
    let dkv_launch = launch(tiles * heads.num_kv, BACKWARD_ROWS, heads.width, shared_rows, DKV_NUMBERS);
    // SAFETY: as above.
    unsafe { cuda.launch(kernel, dkv_launch, args) };
}
