//! Attention on a GPU.
//!
//! `flash` uses tensor cores: bf16 and f16, head widths that are multiples of 16, rows at multiples of 16 bytes.
//! `hopper` handles some of these cases faster on GPUs that have the instructions. `plain` handles everything else:
//! f32, odd widths, dropout. All use tiles of a document, like the CPU. Blocks share no sums, or accumulate them in a
//! fixed order (`hopper_fused_backward`), so runs are reproducible bit for bit and a row depends only on its document.
//! The host does not know where documents start: it launches a block for every possible tile, and each block finds its
//! own tile from the bounds.

mod args;
mod decode;
mod flash;
mod hopper;
mod hopper_fused_backward;
mod plain;

use lockstep_core::{Bytes, DType};
use lockstep_device::View;
use lockstep_device::cuda::{CudaQueue, KernelSource, KernelVariant, Launch};

use super::{BackwardArgs, ForwardArgs, Heads};
use crate::Mat;

pub use decode::cuda_kv_page_elems;
pub(super) use decode::decode;

static DELTA: KernelSource = KernelSource {
    name: "attention_delta",
    text: include_str!("delta.cu"),
    defines: &[("THREADS", DELTA_THREADS as u32)],
};

/// Threads of a block of `attention_delta`.
const DELTA_THREADS: usize = 256;

/// The scratch that backward needs on a GPU.
pub fn cuda_scratch_bytes(tokens: usize, num_q_heads: usize, width: usize) -> Bytes {
    Bytes(
        4 * (2 * tokens * num_q_heads + hopper_fused_backward::shared_elems(tokens, num_q_heads, width))
            as u64,
    )
}

/// Every source of attention for a GPU, in variants that together cover every path of the kernels: all tile shapes,
/// even and odd widths, and each element type.
pub fn all_cuda_sources(sm: u32) -> Vec<(&'static KernelSource, KernelVariant)> {
    let mut all = Vec::new();
    for real in [DType::F32, DType::BF16, DType::F16] {
        all.push((&DELTA, KernelVariant::of(real)));
        all.extend([plain::variant(real, 20), decode::source(real, 128, 4)]);
    }
    all.extend([128, 256, 512].map(|width| plain::variant(DType::F32, width)));
    all.extend(
        [(20, 3), (64, 1), (256, 8), (512, 4)].map(|(width, group)| decode::source(DType::F32, width, group)),
    );
    all.extend(
        [16, 48, 64, 80, 96, 128, 256].into_iter().flat_map(|width| flash::sources(DType::BF16, width)),
    );
    all.extend([64, 128, 256].into_iter().flat_map(|width| flash::sources(DType::F16, width)));
    if sm == hopper::SM {
        all.extend(hopper::all_sources());
    }
    all
}

/// The sources that training with these heads uses.
pub fn model_cuda_sources(
    sm: u32,
    real: DType,
    heads: &Heads,
    drops: bool,
) -> Vec<(&'static KernelSource, KernelVariant)> {
    let flash = !drops && real != DType::F32 && heads.width.is_multiple_of(16) && heads.width <= 256;
    let mut all = vec![(&DELTA, KernelVariant::of(real))];
    if flash && hopper::fits(sm, heads.width) {
        all.extend(hopper::sources(real, heads.width));
    } else if flash {
        all.extend(flash::sources(real, heads.width));
    } else {
        all.push(plain::variant(real, heads.width));
    }
    all
}

/// Which tensor cores to use, where they are supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorCores {
    /// The best ones of this GPU.
    Best,
    /// The ones that every GPU from sm_80 on has.
    Sm80,
}

pub(super) fn forward(cuda: &CudaQueue, call: &ForwardArgs, cores: TensorCores) {
    let ForwardArgs { heads, out, q, k, v, dropout, .. } = call;
    if dropout.is_some() || !flash::supports(heads, &[out, q, k, v]) {
        plain::forward(cuda, call);
    } else if cores == TensorCores::Best && hopper::supports(cuda.gpu, call) {
        hopper::forward(cuda, call);
    } else {
        flash::forward(cuda, call);
    }
}

pub(super) fn backward(cuda: &CudaQueue, call: &BackwardArgs, cores: TensorCores) {
    let BackwardArgs { dq, dk, dv, dout, forward: ForwardArgs { heads, q, k, v, dropout, .. } } = call;
    if dropout.is_some() || !flash::supports(heads, &[dq, dk, dv, dout, q, k, v]) {
        let stats = prepare(cuda, call, 1.0);
        plain::backward(cuda, call, stats);
        return;
    }
    let stats = prepare(cuda, call, flash::LOG_SCALE);
    if cores == TensorCores::Best && hopper::supports(cuda.gpu, &call.forward) {
        hopper::backward(cuda, call, stats);
    } else {
        flash::backward(cuda, call, stats);
    }
}

/// What backward precomputes for every row and head, laid out by head: \[H, T\] in f32.
#[derive(Clone, Copy)]
struct RowStats<'m> {
    /// Sums that blocks share, and the counts that order them.
    shared: View<'m>,
    delta: View<'m>,
    lse: View<'m>,
}

/// Fills the scratch. The log-sum-exps are multiplied by `log_scale`.
fn prepare<'m>(cuda: &CudaQueue, call: &BackwardArgs<'m>, log_scale: f32) -> RowStats<'m> {
    let BackwardArgs { dout, forward: ForwardArgs { heads, out, lse, scratch, .. }, .. } = *call;
    let Heads { num_q, width, .. } = heads;
    let (tokens, scratch) = (out.rows, scratch.cast(DType::F32));
    assert!(
        scratch.bytes() as u64 >= cuda_scratch_bytes(tokens, num_q, width).0,
        "scratch is too small for attention's backward"
    );
    let (shared, each) = (hopper_fused_backward::shared_elems(tokens, num_q, width), tokens * num_q);
    let stats = RowStats {
        shared: scratch.slice(0, shared),
        delta: scratch.slice(shared, each),
        lse: scratch.slice(shared + each, each),
    };
    let real = out.view.dtype();
    let vectors = [&out, &dout].iter().all(|mat| aligned(mat)) && (width * real.size()).is_multiple_of(16);
    let step = if vectors { 16 / real.size() } else { 1 };
    let lanes = width.div_ceil(step).next_power_of_two().min(32);
    let kernel = cuda.kernel(&DELTA, real, "attention_delta");
    let launch = Launch::new((tokens * num_q).div_ceil(DELTA_THREADS / lanes), DELTA_THREADS);
    let args = lockstep_device::args![
        stats.delta,
        stats.lse,
        out.view,
        out.stride,
        dout.view,
        dout.stride,
        lse,
        tokens,
        num_q,
        width,
        lanes,
        u32::from(vectors),
        log_scale,
    ];
    // SAFETY: these are the kernel's parameters, in order; a row of a head is read within its matrices' [T, H h], and
    // the two results have a number for each.
    unsafe { cuda.launch(kernel, launch, args) };
    stats
}

/// Whether rows start at multiples of 16 bytes; then heads do too, if their width is a multiple of 16 bytes.
fn aligned(mat: &Mat) -> bool {
    mat.view.device_ptr().is_multiple_of(16) && (mat.stride * mat.view.dtype().size()).is_multiple_of(16)
}

/// The maximum number of tiles of `rows` rows that documents with these bounds can have.
fn max_tiles(tokens: usize, cu_seqlens: View, rows: usize) -> usize {
    tokens / rows + num_docs(cu_seqlens)
}

fn num_docs(cu_seqlens: View) -> usize {
    cu_seqlens.len().saturating_sub(1)
}

/// The window as a kernel argument: larger than any document if there is none.
fn window(heads: &Heads) -> i32 {
    heads.window.map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX))
}
