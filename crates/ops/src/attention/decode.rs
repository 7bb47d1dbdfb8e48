//! Decode: attention of new tokens over a KV cache.
//!
//! A layer's cache is a pool of pages. A page has the keys and values of some consecutive tokens of a document, for all
//! heads, and documents with a common prefix may share the pages of that prefix. Pages are whole blocks of keys, so
//! the cache has the blocks that forward has: a row's result has the same bits as in training, whether its document
//! was processed in one pass or token by token, and wherever its pages are.
//!
//! On the CPU, pages hold f32 panels as the matmuls read them, so a pass over the cache packs nothing.

use lockstep_core::DType;
use lockstep_device::{CpuQueue, Isa, Queue, Real, View};

use super::block::{HeadRows, Operand, Panels, padded};
use super::forward::{BlockScratch, KeyBlock, QueryBlock};
use super::{BLOCK_K, BLOCK_Q, Heads, cuda, cuda_kv_page_elems};
use crate::disjoint::assert_disjoint;
use crate::dispatch::with_real;
use crate::matmul::NR;
use crate::{Mat, reduce};

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;

/// The tokens of a page, unless there is a reason for larger ones: the smallest page wastes the least.
pub const KV_PAGE_TOKENS: usize = BLOCK_K;

/// One layer's keys and values: a pool of pages.
#[derive(Clone, Copy, Debug)]
pub struct KvCache<'m> {
    pub view: View<'m>,
    pub pages: usize,
    /// A power of two, at least [`KV_PAGE_TOKENS`].
    pub page_tokens: usize,
}

impl<'m> KvCache<'m> {
    fn page(&self, page: usize) -> View<'m> {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        let elems = self.view.len() / self.pages;
        self.view.slice(page * elems, elems)
    }
}

/// `out`\[T, H·h\] from the new tokens' q, k, v and the cached keys and values of their documents. The new k and v are
/// added to the cache.
#[derive(Clone, Copy, Debug)]
pub struct DecodeArgs<'m> {
    pub heads: Heads,
    pub out: Mat<'m>,
    pub q: Mat<'m>,
    pub k: Mat<'m>,
    pub v: Mat<'m>,
    /// Where the new tokens of each document start and end: \[documents + 1\] in u32.
    pub cu_seqlens: View<'m>,
    /// Each token's position in its document: \[T\] in u32. All earlier tokens are in the cache.
    pub positions: View<'m>,
    /// Each document's pages in the order of its tokens: \[documents, N\] in u32, where entries after the last token
    /// are not read. Documents may share pages, except those that the new tokens are stored in.
    pub page_tables: View<'m>,
    pub cache: KvCache<'m>,
    pub scratch: View<'m>,
}

/// The size of one layer's page on the CPU, in f32 elements.
pub fn kv_page_elems(num_kv: usize, width: usize, page_tokens: usize) -> usize {
    num_kv * head_elems(width, page_tokens)
}

fn head_elems(width: usize, page_tokens: usize) -> usize {
    page_tokens * (width + padded(width))
}

pub fn decode(queue: &Queue, call: DecodeArgs) {
    check(queue, &call);
    match queue {
        Queue::Cpu(cpu) => run(cpu, &call),
        Queue::Cuda(queue) => cuda::decode(queue, &call),
    }
}

/// Copies whole pages of one layer, one after the other, each as (from, to).
pub fn copy_pages(queue: &Queue, cache: KvCache, copies: &[(u32, u32)]) {
    for (from, to) in copies {
        reduce::copy(queue, cache.page(*to as usize), cache.page(*from as usize));
    }
}

fn check(queue: &Queue, call: &DecodeArgs) {
    let Heads { num_q, num_kv, width, .. } = call.heads;
    assert!(num_q.is_multiple_of(num_kv), "{num_q} query heads over {num_kv} key-value heads");
    for (mat, heads) in [(&call.q, num_q), (&call.out, num_q), (&call.k, num_kv), (&call.v, num_kv)] {
        assert_eq!((mat.rows, mat.cols), (call.q.rows, heads * width), "shapes of attention must match");
        assert_eq!(mat.view.dtype(), call.q.view.dtype(), "storage types must match");
    }
    let KvCache { view, pages, page_tokens } = call.cache;
    assert!(
        page_tokens.is_power_of_two() && page_tokens >= BLOCK_K,
        "a page of {page_tokens} tokens is not a power of two of at least {BLOCK_K}"
    );
    let elems = match queue {
        Queue::Cpu(_) => kv_page_elems(num_kv, width, page_tokens),
        Queue::Cuda(_) => cuda_kv_page_elems(num_kv, width, page_tokens, call.q.view.dtype()),
    };
    assert_eq!((view.len(), view.dtype()), (pages * elems, DType::F32), "size of the KV cache");
    let docs = call.cu_seqlens.len().saturating_sub(1);
    assert!(call.page_tables.len().is_multiple_of(docs.max(1)), "page tables must have the same length");
    assert_eq!(call.positions.len(), call.q.rows, "one position per token");
    for indices in [call.cu_seqlens, call.page_tables, call.positions] {
        assert_eq!(indices.dtype(), DType::U32, "cu_seqlens, page tables and positions must be u32");
    }
    let DecodeArgs { out, q, k, v, cu_seqlens, positions, page_tables, scratch, .. } = *call;
    assert_disjoint(
        &[out.view, view, scratch],
        &[q.view, k.view, v.view, cu_seqlens, positions, page_tables],
    );
}

/// An item is one key-value head of one document: it stores the new keys and values, then computes attention.
fn run(cpu: &CpuQueue, call: &DecodeArgs) {
    // SAFETY: bounds, positions and page tables are only read.
    let (bounds, positions, tables) = unsafe {
        (
            call.cu_seqlens.as_slice::<u32>(),
            call.positions.as_slice::<u32>(),
            call.page_tables.as_slice::<u32>(),
        )
    };
    let docs = bounds.len().saturating_sub(1);
    let table_len = tables.len() / docs.max(1);
    let KvCache { pages, page_tokens, .. } = call.cache;
    let per_thread = call.scratch.len() / cpu.pool.num_threads();
    let num_kv = call.heads.num_kv;
    with_real!(call.q.view.dtype(), R => {
        cpu.pool.run(docs * num_kv, &|item, worker| {
            let (doc, kv_head) = (item / num_kv, item % num_kv);
            let (first, end) = (bounds[doc] as usize, bounds[doc + 1] as usize);
            if first == end {
                return;
            }
            let past = positions[first] as usize;
            let used = (past + end - first).div_ceil(page_tokens);
            assert!(used <= table_len, "a document exceeds its page table");
            let table = &tables[doc * table_len..][..used];
            assert!(table.iter().all(|page| (*page as usize) < pages), "a page outside the KV cache");
            // SAFETY: a worker uses only its own part of the scratch.
            let scratch = unsafe { call.scratch.slice(worker * per_thread, per_thread).as_mut::<f32>() };
            let item = Item { call, first, len: end - first, table, past, kv_head };
            item.run::<R>(cpu.isa, scratch);
        });
    });
}

struct Item<'a, 'm> {
    call: &'a DecodeArgs<'m>,
    first: usize,
    len: usize,
    /// The document's pages, up to that of its last token.
    table: &'a [u32],
    past: usize,
    kv_head: usize,
}

impl<'m> Item<'_, 'm> {
    fn run<R: Real>(&self, isa: Isa, scratch: &mut [f32]) {
        let Heads { num_q, num_kv, width, .. } = self.call.heads;
        self.store::<R>();
        let keys = |first_k: usize| self.key_block(first_k);

        let group = num_q / num_kv;
        let (q_rows, rest) = scratch.split_at_mut(BLOCK_Q * width);
        let mut scratch = BlockScratch::new(rest, width);
        let heads = self.kv_head * group..(self.kv_head + 1) * group;
        if self.len == 1 && group <= BLOCK_Q {
            // For a single token, process all heads of a group together.
            let row = HeadRows::new(&self.call.q, self.first, 1, self.kv_head, group * width);
            let mut q = row.rows::<R>(isa, q_rows);
            q.row = width;
            let block = QueryBlock {
                q,
                rows: group,
                position: self.past,
                advance: 0,
                heads: self.call.heads,
                dropout: None,
            };
            // SAFETY: the pages hold every key up to this one.
            unsafe { block.attend(isa, &keys, &mut scratch) };
            for (i, head) in heads.enumerate() {
                self.write::<R>(&scratch, i, 0, head);
            }
            return;
        }
        for head in heads {
            for first_q in (0..self.len).step_by(BLOCK_Q) {
                let rows = BLOCK_Q.min(self.len - first_q);
                let q: Operand = HeadRows::new(&self.call.q, self.first + first_q, rows, head, width)
                    .rows::<R>(isa, q_rows);
                let position = self.past + first_q;
                let block =
                    QueryBlock { q, rows, position, advance: 1, heads: self.call.heads, dropout: None };
                // SAFETY: as above.
                unsafe { block.attend(isa, &keys, &mut scratch) };
                for i in 0..rows {
                    self.write::<R>(&scratch, i, first_q + i, head);
                }
            }
        }
    }

    /// This head's part of the page that holds a position: keys, then values.
    fn page_of(&self, position: usize) -> [View<'m>; 2] {
        let (width, page_tokens) = (self.call.heads.width, self.call.cache.page_tokens);
        let page = self.call.cache.page(self.table[position / page_tokens] as usize);
        let elems = head_elems(width, page_tokens);
        let (start, keys) = (self.kv_head * elems, page_tokens * width);
        [page.slice(start, keys), page.slice(start + keys, elems - keys)]
    }

    fn key_block(&self, first_k: usize) -> KeyBlock {
        let (width, page_tokens) = (self.call.heads.width, self.call.cache.page_tokens);
        let [k, v] = self.page_of(first_k);
        let k = Panels { ptr: k.as_ptr(), row: NR, panel: width * NR };
        let v = Panels { ptr: v.as_ptr(), row: NR, panel: page_tokens * NR };
        KeyBlock { k: k.columns_from(first_k % page_tokens), v: v.rows_from(first_k % page_tokens) }
    }

    /// Stores new keys as columns of their panels, and new values as rows of theirs.
    fn store<R: Real>(&self) {
        let (width, page_tokens) = (self.call.heads.width, self.call.cache.page_tokens);
        let keys = HeadRows::new(&self.call.k, self.first, self.len, self.kv_head, width);
        let values = HeadRows::new(&self.call.v, self.first, self.len, self.kv_head, width);
        for t in 0..self.len {
            let [k, v] = self.page_of(self.past + t);
            // SAFETY: no other document uses the pages of new tokens, and no other item this head of them.
            let (k, v) = unsafe { (k.as_mut::<f32>(), v.as_mut::<f32>()) };
            let at = (self.past + t) % page_tokens;
            let panel = &mut k[at / NR * width * NR..][..width * NR];
            for (j, key) in keys.row::<R>(t).iter().enumerate() {
                panel[j * NR + at % NR] = key.to_f32();
            }
            for (p, part) in values.row::<R>(t).chunks(NR).enumerate() {
                let row = &mut v[(p * page_tokens + at) * NR..][..NR];
                for (to, value) in row.iter_mut().zip(part) {
                    *to = value.to_f32();
                }
            }
        }
    }

    fn write<R: Real>(&self, scratch: &BlockScratch, row: usize, token: usize, head: usize) {
        let width = self.call.heads.width;
        let out = HeadRows::new(&self.call.out, self.first, self.len, head, width);
        // SAFETY: only this item writes this head of this document.
        scratch.write_row(row, width, unsafe { out.row_mut::<R>(token) });
    }
}
