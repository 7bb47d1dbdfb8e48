//! Decode on a GPU: stores the new keys and values in the KV cache, then computes attention of the new queries over it.
//!
//! One layer's cache is \[pages, G, 2, page_tokens, h\] in the storage type: for each head of a page its keys, then its
//! values. If there are few new tokens per document, the query heads of a group share the keys they load, and the warps of a block
//! divide the keys among themselves. If there are many, tiles are used as in training.

use lockstep_core::DType;
use lockstep_device::cuda::{CudaQueue, KernelSource, KernelVariant, Launch};

use super::super::DecodeArgs;
use super::{args, flash, num_docs, plain};

static DECODE: KernelSource = KernelSource {
    name: "attention_decode",
    text: concat!(include_str!("pages.cu"), include_str!("decode.cu")),
    defines: &[("THREADS", THREADS as u32)],
};

/// Threads of a block, in both kernels.
const THREADS: usize = 256;
/// With at most this many new tokens per document on average, tiles would be mostly empty.
const FEW_TOKENS: usize = 4;

/// The size of one layer's page on a GPU, in f32 elements.
pub fn cuda_kv_page_elems(num_kv: usize, width: usize, page_tokens: usize, storage: DType) -> usize {
    (num_kv * 2 * page_tokens * width * storage.size()).div_ceil(4)
}

/// Query heads that a block of `decode_attention` processes together; a thread holds its columns of all of them.
fn heads_per_block(group: usize, width: usize) -> usize {
    group.min(if width <= 256 { 8 } else { 4 })
}

fn variant(real: DType, width: usize, group: usize) -> KernelVariant {
    KernelVariant::of(real)
        .with("WIDTH", width as u32)
        .with("HEADS", heads_per_block(group, width) as u32)
        .with("DECODE_BYTES", decode_bytes(group, width) as u32)
}

/// A row of sums, a maximum and a sum of exponentials for each warp and head.
fn decode_bytes(group: usize, width: usize) -> usize {
    4 * (THREADS / 32) * heads_per_block(group, width) * (width + 2)
}

pub(super) fn source(real: DType, width: usize, group: usize) -> (&'static KernelSource, KernelVariant) {
    (&DECODE, variant(real, width, group))
}

pub(in super::super) fn decode(cuda: &CudaQueue, call: &DecodeArgs) {
    assert!(
        call.cache.view.is_empty() || call.cache.view.device_ptr().is_multiple_of(16),
        "the KV cache must start at a multiple of 16 bytes"
    );
    store(cuda, call);
    if call.q.rows <= FEW_TOKENS * num_docs(call.cu_seqlens) {
        decode_few_tokens(cuda, call);
    } else if flash::supports(&call.heads, &[&call.out, &call.q]) {
        flash::decode(cuda, call);
    } else {
        plain::decode(cuda, call);
    }
}

/// Stores the new tokens' k and v in the cache.
fn store(cuda: &CudaQueue, call: &DecodeArgs) {
    let DecodeArgs { heads, k, .. } = *call;
    let variant = variant(k.view.dtype(), heads.width, heads.num_q / heads.num_kv);
    let kernel = cuda.kernel_variant(&DECODE, variant, "decode_store_kv");
    let args = args::store(call);
    // SAFETY: these are the kernel's parameters, in order; it has a block per row of k and v, finds the row's document
    // within the bounds, and only writes to pages inside the cache.
    unsafe { cuda.launch(kernel, Launch::new(k.rows, THREADS), args) };
}

fn decode_few_tokens(cuda: &CudaQueue, call: &DecodeArgs) {
    let DecodeArgs { heads, q, .. } = *call;
    let group = heads.num_q / heads.num_kv;
    let kernel =
        cuda.kernel_variant(&DECODE, variant(q.view.dtype(), heads.width, group), "decode_attention");
    let at_once = heads_per_block(group, heads.width);
    let blocks = q.rows * heads.num_kv * group.div_ceil(at_once);
    let shared = decode_bytes(group, heads.width);
    let args = args::decode(call, heads.num_kv);
    // SAFETY: as in `store`: rows of q and out, and the cached keys and values of their documents.
    unsafe { cuda.launch(kernel, Launch { shared, ..Launch::new(blocks, THREADS) }, args) };
}
