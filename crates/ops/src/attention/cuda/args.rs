//! The arguments that attention's kernels share, in the order in which all of them declare their parameters: outputs,
//! inputs, documents, heads.

use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::Arg;

use super::super::{BackwardArgs, DecodeArgs, ForwardArgs, Heads, KvCache};
use super::{RowStats, num_docs, window};
use crate::Mat;

/// Concatenates lists into as many arguments as the kernel has parameters.
pub(super) fn join<const N: usize>(lists: &[&[Arg]]) -> [Arg; N] {
    let count = lists.iter().map(|list| list.len()).sum::<usize>();
    assert_eq!(count, N, "one argument per parameter");
    let mut all = lists.iter().flat_map(|list| list.iter().copied());
    std::array::from_fn(|_| all.next().expect("N arguments were counted"))
}

/// q, k and v, each with its stride.
pub(super) fn qkv(call: &ForwardArgs) -> [Arg; 6] {
    let ForwardArgs { q, k, v, .. } = *call;
    args![q.view, q.stride, k.view, k.stride, v.view, v.stride]
}

/// q with its stride, then k and v with their common stride.
pub(super) fn qkv_one_stride(call: &ForwardArgs) -> [Arg; 5] {
    let ForwardArgs { q, k, v, .. } = *call;
    assert_eq!(k.stride, v.stride, "k and v must have the same stride");
    args![q.view, q.stride, k.view, v.view, k.stride]
}

/// The arguments of a forward kernel, with one of the lists above.
pub(super) fn forward<const N: usize>(call: &ForwardArgs, qkv: &[Arg]) -> [Arg; N] {
    let ForwardArgs { heads, out, lse, cu_seqlens, .. } = *call;
    join(&[&mat(out), &args![lse], qkv, &documents(cu_seqlens), &of_heads(&heads, heads.num_q)])
}

/// The arguments of a backward kernel that writes `gradients`. `sums` are additional arguments of some kernels.
pub(super) fn backward<const G: usize, const N: usize>(
    gradients: [Mat; G],
    call: &BackwardArgs,
    stats: RowStats,
    sums: &[Arg],
    qkv: &[Arg],
) -> [Arg; N] {
    let BackwardArgs { dout, forward: ForwardArgs { heads, q, cu_seqlens, .. }, .. } = *call;
    join(&[
        gradients.map(mat).as_flattened(),
        &mat(dout),
        &args![stats.lse, stats.delta],
        sums,
        qkv,
        &documents(cu_seqlens),
        &args![q.rows],
        &of_heads(&heads, heads.num_q),
    ])
}

/// The arguments of the kernel that stores new keys and values in the KV cache.
pub(super) fn store(call: &DecodeArgs) -> [Arg; 13] {
    let DecodeArgs { heads, k, v, .. } = *call;
    join(&[&cache(call), &mat(k), &mat(v), &places(call), &args![heads.num_kv]])
}

/// The arguments of kernels that read the KV cache. `num_heads` is the number of query heads or of key-value heads.
pub(super) fn decode(call: &DecodeArgs, num_heads: usize) -> [Arg; 16] {
    let DecodeArgs { heads, out, q, .. } = *call;
    join(&[&mat(out), &mat(q), &cache(call), &places(call), &of_heads(&heads, num_heads)])
}

/// The pool of pages, their number, and the logarithm of the tokens of a page.
fn cache(call: &DecodeArgs) -> [Arg; 3] {
    let KvCache { view, pages, page_tokens } = call.cache;
    args![view, pages, page_tokens.ilog2()]
}

/// Where the tokens of a decode batch are: page tables and their length, positions, documents.
fn places(call: &DecodeArgs) -> [Arg; 5] {
    let DecodeArgs { cu_seqlens, positions, page_tables, .. } = *call;
    let table_len = page_tables.len() / num_docs(cu_seqlens).max(1);
    join(&[&args![page_tables, table_len, positions], &documents(cu_seqlens)])
}

fn mat(mat: Mat) -> [Arg; 2] {
    args![mat.view, mat.stride]
}

/// The bounds of the documents, and their number.
fn documents(cu_seqlens: View) -> [Arg; 2] {
    args![cu_seqlens, num_docs(cu_seqlens)]
}

/// The number of heads, the query heads of a group, the scale of scores, the window.
fn of_heads(heads: &Heads, num_heads: usize) -> [Arg; 4] {
    args![num_heads, heads.num_q / heads.num_kv, heads.scale, window(heads)]
}
