//! Causal attention over packed documents, forward and backward, without ever storing a T×T matrix.
//!
//! Blocks of queries and keys are counted from their document's start. Keys that a query does not see (later ones, and
//! those before its sliding window) contribute exact zeros, and a row's softmax runs over its key blocks in order. So a
//! row's result depends only on its document. Blocks that no query of a query block sees are skipped. Backward
//! recomputes the probabilities from the saved log-sum-exp.

mod backward;
mod block;
mod cuda;
mod decode;
mod forward;
pub mod reference;
#[cfg(test)]
mod tests;

use std::ops::Range;

use lockstep_core::{Bytes, DType};
use lockstep_device::{Queue, View};

use crate::Mat;
use crate::disjoint::assert_disjoint;
use crate::dropout::{DocMask, Mask};

pub(crate) use cuda::TensorCores;
pub use cuda::{all_cuda_sources, cuda_kv_page_elems, cuda_scratch_bytes, model_cuda_sources};
pub use decode::{DecodeArgs, KV_PAGE_TOKENS, KvCache, copy_pages, decode, kv_page_elems};

/// Query rows that are processed together: four row tiles.
const BLOCK_Q: usize = 48;
/// Keys of a block. It determines the bits of results, like the inner block of a matmul.
const BLOCK_K: usize = 64;

/// How a row of q, k, v and the output divides into heads. Query head i uses key-value head i / (H/G).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    pub num_q: usize,
    pub num_kv: usize,
    pub width: usize,
    /// Multiplies the scores: usually 1 / √width.
    pub scale: f32,
    /// How many keys a query sees, including its own: key j for query i iff i − j < window. All if `None`.
    pub window: Option<usize>,
}

impl Heads {
    /// The first key that query i of a document sees.
    fn first_key(&self, i: usize) -> usize {
        self.window.map_or(0, |window| (i + 1).saturating_sub(window))
    }

    /// The key blocks that queries `[first_q, end_q)` see, by their first keys.
    fn key_blocks(&self, first_q: usize, end_q: usize) -> impl Iterator<Item = usize> + use<> {
        let first = self.first_key(first_q) / BLOCK_K * BLOCK_K;
        (first..end_q).step_by(BLOCK_K)
    }

    /// The keys of the block at `first_k` that query i sees.
    #[inline(always)]
    fn visible_keys(&self, i: usize, first_k: usize) -> Range<usize> {
        let within = |key: usize| key.saturating_sub(first_k).min(BLOCK_K);
        within(self.first_key(i))..within(i + 1)
    }
}

/// Whether a key of a block is visible, by its index in the block. Indices are as wide as scores, 32 bits: comparing
/// wider ones would take two vectors per vector of scores.
#[inline(always)]
fn is_visible(visible: &Range<usize>) -> impl Fn(u32) -> bool + use<> {
    let (start, count) = (visible.start as u32, (visible.end - visible.start) as u32);
    move |key| key.wrapping_sub(start) < count
}

/// `out`\[T, H·h\] and `lse`\[T, H\] from q\[T, H·h\], k\[T, G·h\], v\[T, G·h\].
#[derive(Clone, Copy, Debug)]
pub struct ForwardArgs<'m> {
    pub heads: Heads,
    pub out: Mat<'m>,
    pub lse: View<'m>,
    pub q: Mat<'m>,
    pub k: Mat<'m>,
    pub v: Mat<'m>,
    /// Document starts and the final end: \[documents + 1\] in u32.
    pub cu_seqlens: View<'m>,
    /// Applied to probabilities before they are multiplied by v; does not affect `lse`.
    pub dropout: Option<Mask<'m>>,
    pub scratch: View<'m>,
}

/// The mask of one head of one document.
#[derive(Clone, Copy)]
struct HeadMask {
    mask: DocMask,
    head: usize,
}

impl HeadMask {
    fn of(call: &ForwardArgs, doc: usize, head: usize) -> Option<HeadMask> {
        call.dropout.map(|mask| HeadMask { mask: mask.of_doc(doc), head })
    }

    /// Writes the factors of the visible keys of a block in query i's row. The rest of `out` is unchanged.
    #[inline(always)]
    fn fill(&self, i: usize, first_k: usize, visible: Range<usize>, out: &mut [f32; BLOCK_K]) {
        let first = visible.start / 4 * 4;
        self.mask.fill(self.head as u32, i, first_k + first, &mut out[first..visible.end.max(first)]);
    }
}

/// Computes dq, dk, dv from the output's gradient and the saved tensors of forward.
#[derive(Clone, Copy, Debug)]
pub struct BackwardArgs<'m> {
    pub dq: Mat<'m>,
    pub dk: Mat<'m>,
    pub dv: Mat<'m>,
    pub dout: Mat<'m>,
    pub forward: ForwardArgs<'m>,
}

/// The scratch that forward and backward need on the CPU, for documents of at most `max_doc` tokens.
pub fn scratch_bytes(num_threads: usize, max_doc: usize, width: usize) -> Bytes {
    let per_thread = forward::scratch_elems(max_doc, width).max(backward::scratch_elems(max_doc, width));
    Bytes(4 * (num_threads * per_thread) as u64)
}

pub fn forward(queue: &Queue, call: ForwardArgs) {
    forward_on(queue, call, TensorCores::Best);
}

/// Forward with a choice of tensor cores, which tests compare.
pub(crate) fn forward_on(queue: &Queue, call: ForwardArgs, cores: TensorCores) {
    check(&call);
    let ForwardArgs { out, lse, q, k, v, cu_seqlens, scratch, .. } = call;
    assert_disjoint(&[out.view, lse, scratch], &[q.view, k.view, v.view, cu_seqlens]);
    match queue {
        Queue::Cpu(cpu) => forward::run(cpu, &call),
        Queue::Cuda(cuda) => cuda::forward(cuda, &call, cores),
    }
}

pub fn backward(queue: &Queue, call: BackwardArgs) {
    backward_on(queue, call, TensorCores::Best);
}

pub(crate) fn backward_on(queue: &Queue, call: BackwardArgs, cores: TensorCores) {
    check_backward(&call);
    match queue {
        Queue::Cpu(cpu) => backward::run(cpu, &call),
        Queue::Cuda(cuda) => cuda::backward(cuda, &call, cores),
    }
}

fn check_backward(call: &BackwardArgs) {
    check(&call.forward);
    let f = &call.forward;
    for (gradient, of) in [(&call.dq, &f.q), (&call.dk, &f.k), (&call.dv, &f.v), (&call.dout, &f.out)] {
        assert_eq!(
            (gradient.rows, gradient.cols),
            (of.rows, of.cols),
            "a gradient must have the shape of its tensor"
        );
        assert_eq!(gradient.view.dtype(), of.view.dtype(), "storage types must match");
    }
    // The three may be columns of one matrix.
    call.dq.assert_disjoint(&call.dk);
    call.dq.assert_disjoint(&call.dv);
    call.dk.assert_disjoint(&call.dv);
    let inputs = [f.q.view, f.k.view, f.v.view, f.out.view, call.dout.view, f.lse, f.cu_seqlens];
    for gradient in [&call.dq, &call.dk, &call.dv] {
        assert_disjoint(&[gradient.view, f.scratch], &inputs);
    }
}

fn check(call: &ForwardArgs) {
    let Heads { num_q, num_kv, width, .. } = call.heads;
    assert!(num_q.is_multiple_of(num_kv), "{num_q} query heads over {num_kv} key-value heads");
    assert!(call.heads.window != Some(0), "a window of 0 hides a query from itself");
    if let Some(mask) = &call.dropout {
        assert!((0.0..1.0).contains(&mask.rate), "dropout at rate {}", mask.rate);
        assert_eq!(mask.samples.len() + 1, call.cu_seqlens.len(), "one sample per document");
        assert_eq!(mask.samples.dtype(), DType::U32, "samples must be u32");
    }
    let tokens = call.q.rows;
    for (mat, heads) in [(&call.q, num_q), (&call.out, num_q), (&call.k, num_kv), (&call.v, num_kv)] {
        assert_eq!((mat.rows, mat.cols), (tokens, heads * width), "shapes of attention must match");
        assert_eq!(mat.view.dtype(), call.q.view.dtype(), "storage types must match");
    }
    assert_eq!(
        (call.lse.len(), call.lse.dtype()),
        (tokens * num_q, DType::F32),
        "one f32 lse per token and head"
    );
    assert_eq!(call.cu_seqlens.dtype(), DType::U32, "cu_seqlens must be u32");
    assert!(!call.cu_seqlens.is_empty() || tokens == 0, "cu_seqlens must not be empty");
}
