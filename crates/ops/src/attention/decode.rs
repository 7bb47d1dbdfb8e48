//! Decode: attention of new tokens over a KV cache.
//!
//! The cache holds keys and values in f32 panels, as the matmuls read them, so a pass over it packs nothing. The
//! arithmetic is that of forward: a row's result has the same bits as in training, whether its document was processed
//! in one pass or token by token.

use lockstep_core::DType;
use lockstep_device::{CpuQueue, Isa, Queue, Real, View};

use super::block::{HeadRows, Operand, Panels, padded};
use super::forward::{BlockScratch, Keys, QueryBlock};
use super::{BLOCK_K, BLOCK_Q, Heads, cuda, cuda_kv_cache_elems};
use crate::Mat;
use crate::disjoint::assert_disjoint;
use crate::dispatch::with_real;
use crate::matmul::NR;

/// One layer's keys and values for `slots` documents of up to `capacity` tokens each.
#[derive(Clone, Copy, Debug)]
pub struct KvCache<'m> {
    pub view: View<'m>,
    pub slots: usize,
    pub capacity: usize,
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
    /// Each document's slot in the cache: \[documents\] in u32.
    pub slots: View<'m>,
    pub cache: KvCache<'m>,
    pub scratch: View<'m>,
}

/// The size of one layer's KV cache on the CPU, in f32 elements.
pub fn kv_cache_elems(num_kv: usize, width: usize, slots: usize, capacity: usize) -> usize {
    slots * num_kv * head_elems(width, capacity)
}

fn head_elems(width: usize, capacity: usize) -> usize {
    capacity.next_multiple_of(BLOCK_K) * (width + padded(width))
}

pub fn decode(queue: &Queue, call: DecodeArgs) {
    check(queue, &call);
    match queue {
        Queue::Cpu(cpu) => run(cpu, &call),
        Queue::Cuda(queue) => cuda::decode(queue, &call),
    }
}

fn check(queue: &Queue, call: &DecodeArgs) {
    let Heads { num_q, num_kv, width, .. } = call.heads;
    assert!(num_q.is_multiple_of(num_kv), "{num_q} query heads over {num_kv} key-value heads");
    for (mat, heads) in [(&call.q, num_q), (&call.out, num_q), (&call.k, num_kv), (&call.v, num_kv)] {
        assert_eq!((mat.rows, mat.cols), (call.q.rows, heads * width), "shapes of attention must match");
        assert_eq!(mat.view.dtype(), call.q.view.dtype(), "storage types must match");
    }
    let KvCache { view, slots, capacity } = call.cache;
    let elems = match queue {
        Queue::Cpu(_) => kv_cache_elems(num_kv, width, slots, capacity),
        Queue::Cuda(_) => cuda_kv_cache_elems(num_kv, width, slots, capacity, call.q.view.dtype()),
    };
    assert_eq!((view.len(), view.dtype()), (elems, DType::F32), "size of the KV cache");
    assert_eq!(call.cu_seqlens.len(), call.slots.len() + 1, "one slot per document");
    assert_eq!(call.positions.len(), call.q.rows, "one position per token");
    for indices in [call.cu_seqlens, call.slots, call.positions] {
        assert_eq!(indices.dtype(), DType::U32, "cu_seqlens, slots and positions must be u32");
    }
    let DecodeArgs { out, q, k, v, cu_seqlens, positions, slots, scratch, .. } = *call;
    assert_disjoint(&[out.view, view, scratch], &[q.view, k.view, v.view, cu_seqlens, positions, slots]);
}

/// An item is one key-value head of one document: it stores the new keys and values, then computes attention.
fn run(cpu: &CpuQueue, call: &DecodeArgs) {
    // SAFETY: bounds, positions and slots are only read.
    let (bounds, positions, slots) = unsafe {
        (call.cu_seqlens.as_slice::<u32>(), call.positions.as_slice::<u32>(), call.slots.as_slice::<u32>())
    };
    let per_thread = call.scratch.len() / cpu.pool.num_threads();
    let num_kv = call.heads.num_kv;
    with_real!(call.q.view.dtype(), R => {
        cpu.pool.run(slots.len() * num_kv, &|item, worker| {
            let (doc, kv_head) = (item / num_kv, item % num_kv);
            let (first, end) = (bounds[doc] as usize, bounds[doc + 1] as usize);
            if first == end {
                return;
            }
            let (slot, past) = (slots[doc] as usize, positions[first] as usize);
            assert!(slot < call.cache.slots, "slot {slot} of {}", call.cache.slots);
            assert!(past + end - first <= call.cache.capacity, "a document exceeds the capacity of the KV cache");
            // SAFETY: a worker uses only its own part of the scratch.
            let scratch = unsafe { call.scratch.slice(worker * per_thread, per_thread).as_mut::<f32>() };
            let item = Item { call, first, len: end - first, slot, past, kv_head };
            item.run::<R>(cpu.isa, scratch);
        });
    });
}

struct Item<'a, 'm> {
    call: &'a DecodeArgs<'m>,
    first: usize,
    len: usize,
    slot: usize,
    past: usize,
    kv_head: usize,
}

impl Item<'_, '_> {
    fn run<R: Real>(&self, isa: Isa, scratch: &mut [f32]) {
        let Heads { num_q, num_kv, width, .. } = self.call.heads;
        let rows_padded = self.call.cache.capacity.next_multiple_of(BLOCK_K);
        let elems = head_elems(width, self.call.cache.capacity);
        let place = self.call.cache.view.slice((self.slot * num_kv + self.kv_head) * elems, elems);
        // SAFETY: each document has its own slot, and only this item uses this head of its slot.
        let (k, v) = unsafe { place.as_mut::<f32>() }.split_at_mut(rows_padded * width);
        self.store::<R>(k, v, rows_padded);
        let keys = Keys {
            k: Panels { ptr: k.as_ptr(), row: NR, panel: width * NR },
            v: Panels { ptr: v.as_ptr(), row: NR, panel: rows_padded * NR },
        };

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
            // SAFETY: the panels hold every key up to this one.
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

    /// Stores new keys as columns of their panels, and new values as rows of theirs.
    fn store<R: Real>(&self, k: &mut [f32], v: &mut [f32], rows_padded: usize) {
        let width = self.call.heads.width;
        let keys = HeadRows::new(&self.call.k, self.first, self.len, self.kv_head, width);
        let values = HeadRows::new(&self.call.v, self.first, self.len, self.kv_head, width);
        for t in 0..self.len {
            let at = self.past + t;
            let panel = &mut k[at / NR * width * NR..][..width * NR];
            for (j, key) in keys.row::<R>(t).iter().enumerate() {
                panel[j * NR + at % NR] = key.to_f32();
            }
            for (p, part) in values.row::<R>(t).chunks(NR).enumerate() {
                let row = &mut v[(p * rows_padded + at) * NR..][..NR];
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::attention::{ForwardArgs, forward, scratch_bytes};
    use crate::testing::{Operands, TestArena, bits, dtype};

    proptest! {
        /// Decoding in steps of any size, in any slots, beside any other documents, gives the bits of training.
        #[test]
        fn decode_has_the_bits_of_forward(
            num_kv in 1usize..3, group in 1usize..4, width in 1usize..70, storage in dtype(),
            window in prop_oneof![Just(None), (1usize..100).prop_map(Some)],
            lens in prop::collection::vec(1usize..150, 1..4), seed in any::<u64>(),
        ) {
            let arena = TestArena::new(seed);
            let queue = Queue::cpu(2);
            let heads = Heads { num_q: num_kv * group, num_kv, width, scale: 0.3, window };
            let (q_cols, kv_cols) = (heads.num_q * width, num_kv * width);
            let tokens: usize = lens.iter().sum();
            let [q, k, v] = [q_cols, kv_cols, kv_cols].map(|cols| arena.normals(tokens * cols, storage));
            let scratch = arena.output(scratch_bytes(2, 150, width).0 as usize / 4, DType::F32);
            let ends: Vec<usize> = lens.iter().scan(0, |end, len| { *end += len; Some(*end) }).collect();
            let bounds: Vec<u32> = [0].into_iter().chain(ends.iter().map(|e| *e as u32)).collect();
            let whole = arena.output(tokens * q_cols, storage);
            forward(&queue, ForwardArgs {
                heads,
                out: Mat::dense(whole, tokens, q_cols),
                lse: arena.output(tokens * heads.num_q, DType::F32),
                q: Mat::dense(q, tokens, q_cols),
                k: Mat::dense(k, tokens, kv_cols),
                v: Mat::dense(v, tokens, kv_cols),
                cu_seqlens: arena.input_u32(&bounds),
                dropout: None,
                scratch,
            });

            let slots = lens.len() + 1;
            let cache = arena.output(kv_cache_elems(num_kv, width, slots, 150), DType::F32);
            let cache = KvCache { view: cache, slots, capacity: 150 };
            let mut grown = vec![0; lens.len()];
            for pass in 0.. {
                // One token at a time, or many, or none yet.
                let steps = arena.indices(lens.len(), 3);
                let news: Vec<(usize, usize)> = (0..lens.len())
                    .map(|d| (d, [0, 1, 40][steps[d] as usize].min(lens[d] - grown[d])))
                    .filter(|(_, new)| *new > 0)
                    .collect();
                if grown == lens {
                    break;
                }
                prop_assert!(pass < 2000);
                let rows: usize = news.iter().map(|(_, new)| new).sum();
                let mut bounds = vec![0u32];
                let (mut positions, mut picked) = (vec![], vec![]);
                for (doc, new) in &news {
                    bounds.push(bounds.last().unwrap() + *new as u32);
                    positions.extend((grown[*doc]..grown[*doc] + new).map(|p| p as u32));
                    let start = ends[*doc] - lens[*doc];
                    picked.extend((grown[*doc]..grown[*doc] + new).map(|t| start + t));
                    grown[*doc] += new;
                }
                let arena = TestArena::new(seed ^ pass);
                let rows_of = |view: View, cols: usize| {
                    let mut all = vec![0f32; view.len()];
                    view.read_f32(&mut all).unwrap();
                    let picked: Vec<f32> =
                        picked.iter().flat_map(|t| all[t * cols..][..cols].to_vec()).collect();
                    arena.input(&picked, storage)
                };
                let out = arena.output(rows * q_cols, storage);
                decode(&queue, DecodeArgs {
                    heads,
                    out: Mat::dense(out, rows, q_cols),
                    q: Mat::dense(rows_of(q, q_cols), rows, q_cols),
                    k: Mat::dense(rows_of(k, kv_cols), rows, kv_cols),
                    v: Mat::dense(rows_of(v, kv_cols), rows, kv_cols),
                    cu_seqlens: arena.input_u32(&bounds),
                    positions: arena.input_u32(&positions),
                    slots: arena.input_u32(&news.iter().map(|(d, _)| slots as u32 - 1 - *d as u32).collect::<Vec<_>>()),
                    cache,
                    scratch,
                });
                for (row, t) in picked.iter().enumerate() {
                    prop_assert_eq!(bits(out.slice(row * q_cols, q_cols)), bits(whole.slice(t * q_cols, q_cols)));
                }
            }
        }
    }
}
