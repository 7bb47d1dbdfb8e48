//! Attention: over packed documents in training, over a KV cache in decode.
//!
//! Only scores of visible keys count as operations, and backward counts as two and a half times forward, so that rates
//! are comparable with published ones.

use std::ops::Range;

use lockstep_core::{Bytes, DType};
use lockstep_device::{MemoryError, Queue, View};

use super::StepShape;
use super::operand::{bounds, normals, numbers, zeros};
use super::runner::{Case, Runner};
use crate::Mat;
use crate::attention::{self, BackwardArgs, DecodeArgs, ForwardArgs, Heads, KvCache};

/// Packed documents of the same length.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    pub dtype: DType,
    pub docs: usize,
    pub length: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// How many keys a query sees, including its own; all if `None`.
    pub window: Option<usize>,
}

/// Documents with `past` tokens in the KV cache that get `new` more.
#[derive(Clone, Copy, Debug)]
pub struct DecodeShape {
    pub dtype: DType,
    pub docs: usize,
    pub past: usize,
    pub new: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub window: Option<usize>,
}

fn heads(num_q: usize, num_kv: usize, width: usize, window: Option<usize>) -> Heads {
    Heads { num_q, num_kv, width, scale: 1.0 / (width as f32).sqrt(), window }
}

/// Queries, keys and values, as columns of one matrix.
fn split_qkv<'m>(heads: &Heads, qkv: View<'m>, tokens: usize) -> [Mat<'m>; 3] {
    let (q, kv) = (heads.num_q * heads.width, heads.num_kv * heads.width);
    let qkv = Mat::dense(qkv, tokens, q + 2 * kv);
    [qkv.columns(0, q), qkv.columns(q, kv), qkv.columns(q + kv, kv)]
}

/// The total number of keys that queries at these positions of a document see.
fn num_visible_keys(positions: Range<usize>, window: Option<usize>) -> f64 {
    positions.map(|i| (i + 1).min(window.unwrap_or(usize::MAX))).sum::<usize>() as f64
}

impl AttentionShape {
    fn description(&self) -> String {
        let AttentionShape { docs, length, heads, kv_heads, head_dim, window, .. } = self;
        format!("{docs}×{length}, heads {heads}/{kv_heads}×{head_dim}{}", window_suffix(*window))
    }
}

impl DecodeShape {
    fn description(&self) -> String {
        let DecodeShape { docs, past, new, heads, kv_heads, head_dim, window, .. } = self;
        format!(
            "attention, {docs}×({past} + {new}), heads {heads}/{kv_heads}×{head_dim}{}",
            window_suffix(*window)
        )
    }
}

fn window_suffix(window: Option<usize>) -> String {
    window.map_or_else(String::new, |window| format!(", window {window}"))
}

pub(super) fn workspace_bytes(queue: &Queue, shape: &AttentionShape) -> Bytes {
    match queue {
        Queue::Cpu(_) => attention::scratch_bytes(queue.num_threads(), shape.length, shape.head_dim),
        Queue::Cuda(_) => {
            attention::cuda_scratch_bytes(shape.docs * shape.length, shape.heads, shape.head_dim)
        }
    }
}

pub(super) fn decode_workspace_bytes(queue: &Queue, shape: &DecodeShape) -> Bytes {
    match queue {
        Queue::Cpu(_) => {
            attention::scratch_bytes(queue.num_threads(), shape.past + shape.new, shape.head_dim)
        }
        Queue::Cuda(_) => Bytes::ZERO,
    }
}

pub(super) fn of_step(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    train(runner, &step.attention(), [step.forward_times(), step.layers])
}

/// Forward and backward; `calls_per_step` is how often a step runs each.
pub(super) fn train(
    runner: &Runner,
    shape: &AttentionShape,
    calls_per_step: [usize; 2],
) -> Result<(), MemoryError> {
    let AttentionShape { dtype, docs, length, window, .. } = *shape;
    let heads = heads(shape.heads, shape.kv_heads, shape.head_dim, window);
    let (tokens, q, kv) = (docs * length, heads.num_q * heads.width, heads.num_kv * heads.width);
    let scratch = runner.workspace();
    let flops = 4.0 * (docs * q) as f64 * num_visible_keys(0..length, window);
    let (in_bytes, out_bytes) = (tokens * (q + 2 * kv) * dtype.size(), tokens * q * dtype.size());
    let operands = || {
        [
            normals(tokens * (q + 2 * kv), dtype),
            normals(tokens * q, dtype),
            zeros(tokens * heads.num_q, DType::F32),
            bounds(docs, length),
        ]
    };
    let case = Case {
        name: format!("attention, forward, {}", shape.description()),
        calls_per_step: calls_per_step[0],
        bytes: in_bytes + out_bytes,
        flops,
    };
    runner.measure(case, operands(), |queue, [qkv, out, lse, cu_seqlens]| {
        let [q_mat, k, v] = split_qkv(&heads, qkv, tokens);
        let out = Mat::dense(out, tokens, q);
        let call = ForwardArgs { heads, out, lse, q: q_mat, k, v, cu_seqlens, dropout: None, scratch };
        attention::forward(queue, call);
    })?;
    let case = Case {
        name: format!("attention, backward, {}", shape.description()),
        calls_per_step: calls_per_step[1],
        bytes: 2 * in_bytes + 2 * out_bytes,
        flops: 2.5 * flops,
    };
    let [qkv, out, lse, cu_seqlens] = operands();
    let operands =
        [qkv, out, lse, cu_seqlens, zeros(tokens * (q + 2 * kv), dtype), normals(tokens * q, dtype)];
    runner.measure(case, operands, |queue, [qkv, out, lse, cu_seqlens, dqkv, dout]| {
        let [q_mat, k, v] = split_qkv(&heads, qkv, tokens);
        let [dq, dk, dv] = split_qkv(&heads, dqkv, tokens);
        let [out, dout] = [out, dout].map(|view| Mat::dense(view, tokens, q));
        let forward = ForwardArgs { heads, out, lse, q: q_mat, k, v, cu_seqlens, dropout: None, scratch };
        attention::backward(queue, BackwardArgs { dq, dk, dv, dout, forward });
    })
}

pub(super) fn decode(runner: &Runner, shape: &DecodeShape) -> Result<(), MemoryError> {
    let DecodeShape { dtype, docs, past, new, window, .. } = *shape;
    let heads = heads(shape.heads, shape.kv_heads, shape.head_dim, window);
    let Heads { num_q, num_kv, width, .. } = heads;
    let (tokens, capacity, q, kv) = (docs * new, past + new, num_q * width, num_kv * width);
    // The CPU's KV cache is f32.
    let page_tokens = attention::KV_PAGE_TOKENS;
    let (page_elems, stored) = if runner.on_gpu() {
        (attention::cuda_kv_page_elems(num_kv, width, page_tokens, dtype), dtype)
    } else {
        (attention::kv_page_elems(num_kv, width, page_tokens), DType::F32)
    };
    let pages = docs * capacity.div_ceil(page_tokens);
    let read = docs * window.map_or(capacity, |window| capacity.min(window + new - 1));
    let case = Case {
        name: shape.description(),
        calls_per_step: 0,
        bytes: 2 * read * kv * stored.size() + tokens * (2 * q + 2 * kv) * dtype.size(),
        flops: 4.0 * (docs * q) as f64 * num_visible_keys(past..capacity, window),
    };
    let operands = [
        normals(tokens * (q + 2 * kv), dtype),
        zeros(tokens * q, dtype),
        bounds(docs, new),
        numbers((0..tokens).map(|t| (past + t % new) as u32)),
        numbers(0..pages as u32),
        zeros(pages * page_elems, DType::F32),
    ];
    let scratch = runner.workspace();
    runner.measure(case, operands, |queue, [qkv, out, cu_seqlens, positions, page_tables, cache]| {
        let [q_mat, k, v] = split_qkv(&heads, qkv, tokens);
        let call = DecodeArgs {
            heads,
            out: Mat::dense(out, tokens, q),
            q: q_mat,
            k,
            v,
            cu_seqlens,
            positions,
            page_tables,
            cache: KvCache { view: cache, pages, page_tokens },
            scratch,
        };
        attention::decode(queue, call);
    })
}
