//! Causal attention over packed documents, forward and backward, without ever holding T×T.
//!
//! Query blocks and key blocks count from their document's start, scores outside the causal triangle
//! contribute exact zeros, and a row's softmax runs over its key blocks in order. So a row's result
//! depends on its document alone. Backward recomputes the probabilities from the kept log-sum-exp.

mod backward;
mod block;
mod extend;
mod forward;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::{Bytes, DType};
use lockstep_device::{Queue, View};

use crate::Mat;

pub use extend::{Cache, Extend, cache_elems, extend};

/// Query rows that move together through the key blocks: four row tiles.
const BLOCK_Q: usize = 48;
/// Keys of a block: part of the definition of a result, like the inner block of a product.
const BLOCK_K: usize = 64;

/// How a row of q, k, v and the output divides into heads. Query head i uses key-value head i / (H/G).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    pub num_q: usize,
    pub num_kv: usize,
    pub width: usize,
    /// Multiplies the scores: usually 1 / √width.
    pub scale: f32,
}

/// `out`\[T, H·h\] and `lse`\[T, H\] from q\[T, H·h\], k\[T, G·h\], v\[T, G·h\].
#[derive(Clone, Copy, Debug)]
pub struct Forward<'m> {
    pub heads: Heads,
    pub out: Mat<'m>,
    pub lse: View<'m>,
    pub q: Mat<'m>,
    pub k: Mat<'m>,
    pub v: Mat<'m>,
    /// Document starts and the end: \[documents + 1\] in u32.
    pub cu_seqlens: View<'m>,
    pub scratch: View<'m>,
}

/// Writes dq, dk, dv from the output's gradient and what forward kept.
#[derive(Clone, Copy, Debug)]
pub struct Backward<'m> {
    pub dq: Mat<'m>,
    pub dk: Mat<'m>,
    pub dv: Mat<'m>,
    pub dout: Mat<'m>,
    pub forward: Forward<'m>,
}

/// The scratch both directions need, for documents of at most `max_doc` tokens.
pub fn scratch_bytes(num_threads: usize, max_doc: usize, width: usize) -> Bytes {
    let per_thread = forward::scratch_elems(max_doc, width).max(backward::scratch_elems(max_doc, width));
    Bytes(4 * (num_threads * per_thread) as u64)
}

pub fn forward(queue: &Queue, call: Forward) {
    check(&call);
    for input in [&call.q, &call.k, &call.v] {
        call.out.view.assert_apart(&input.view);
    }
    forward::run(crate::cpu(queue), &call);
}

pub fn backward(queue: &Queue, call: Backward) {
    check(&call.forward);
    let f = &call.forward;
    for (gradient, of) in [(&call.dq, &f.q), (&call.dk, &f.k), (&call.dv, &f.v), (&call.dout, &f.out)] {
        assert_eq!((gradient.rows, gradient.cols), (of.rows, of.cols), "gradient shapes");
        assert_eq!(gradient.view.dtype(), of.view.dtype(), "one storage type");
    }
    for gradient in [&call.dq, &call.dk, &call.dv] {
        for input in [&f.q, &f.k, &f.v, &f.out, &call.dout] {
            gradient.view.assert_apart(&input.view);
        }
    }
    backward::run(crate::cpu(queue), &call);
}

fn check(call: &Forward) {
    let Heads { num_q, num_kv, width, .. } = call.heads;
    assert!(num_q.is_multiple_of(num_kv), "{num_q} query heads over {num_kv} key-value heads");
    let tokens = call.q.rows;
    for (mat, heads) in [(&call.q, num_q), (&call.out, num_q), (&call.k, num_kv), (&call.v, num_kv)] {
        assert_eq!((mat.rows, mat.cols), (tokens, heads * width), "attention shapes");
        assert_eq!(mat.view.dtype(), call.q.view.dtype(), "one storage type");
    }
    assert_eq!((call.lse.len(), call.lse.dtype()), (tokens * num_q, DType::F32), "lse per token and head");
    assert!(!call.cu_seqlens.is_empty() || tokens == 0, "documents have bounds");
}
