//! Decode gives the bits of forward for any placement of pages, and with pages that several documents share.

use lockstep_core::DType;
use lockstep_device::{Queue, View};
use proptest::prelude::*;

use super::{DecodeArgs, KV_PAGE_TOKENS, KvCache, copy_pages, decode, kv_page_elems};
use crate::Mat;
use crate::attention::{ForwardArgs, Heads, forward, scratch_bytes};
use crate::testing::{Operands, TestArena, bits, dtype};

/// Documents of at most this many tokens.
const LONGEST: usize = 150;

/// Packed documents, and their attention in one pass.
struct Pack<'a> {
    heads: Heads,
    storage: DType,
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
    whole: View<'a>,
    scratch: View<'a>,
}

impl<'a> Pack<'a> {
    fn new(arena: &'a TestArena, heads: Heads, storage: DType, lens: &[usize]) -> Pack<'a> {
        let (q_cols, kv_cols) = (heads.num_q * heads.width, heads.num_kv * heads.width);
        let tokens: usize = lens.iter().sum();
        let [q, k, v] = [q_cols, kv_cols, kv_cols].map(|cols| arena.normals(tokens * cols, storage));
        let scratch = arena.output(scratch_bytes(2, LONGEST, heads.width).0 as usize / 4, DType::F32);
        let whole = arena.output(tokens * q_cols, storage);
        let bounds: Vec<u32> = (0..=lens.len()).map(|n| lens[..n].iter().sum::<usize>() as u32).collect();
        let call = ForwardArgs {
            heads,
            out: Mat::dense(whole, tokens, q_cols),
            lse: arena.output(tokens * heads.num_q, DType::F32),
            q: Mat::dense(q, tokens, q_cols),
            k: Mat::dense(k, tokens, kv_cols),
            v: Mat::dense(v, tokens, kv_cols),
            cu_seqlens: arena.input_u32(&bounds),
            dropout: None,
            scratch,
        };
        forward(&Queue::cpu(2), call);
        Pack { heads, storage, q, k, v, whole, scratch }
    }

    fn cache(&self, arena: &'a TestArena, pages: usize, page_tokens: usize) -> KvCache<'a> {
        let elems = pages * kv_page_elems(self.heads.num_kv, self.heads.width, page_tokens);
        KvCache { view: arena.output(elems, DType::F32), pages, page_tokens }
    }

    /// Decodes some rows: for each document the rows, its length before, and its page table. Asserts that the outputs
    /// have the bits of forward.
    fn decode(&self, seed: u64, cache: KvCache, docs: &[(std::ops::Range<usize>, usize, &[u32])]) {
        let Heads { num_q, num_kv, width, .. } = self.heads;
        let arena = TestArena::new(seed);
        let picked: Vec<usize> = docs.iter().flat_map(|(rows, ..)| rows.clone()).collect();
        let rows_of = |view: View, cols: usize| {
            let mut all = vec![0f32; view.len()];
            view.read_f32(&mut all).unwrap();
            let rows: Vec<f32> = picked.iter().flat_map(|t| all[t * cols..][..cols].to_vec()).collect();
            Mat::dense(arena.input(&rows, self.storage), picked.len(), cols)
        };
        let mut bounds = vec![0u32];
        let (mut positions, mut tables) = (vec![], vec![]);
        for (rows, past, table) in docs {
            bounds.push(bounds[bounds.len() - 1] + rows.len() as u32);
            positions.extend((*past..past + rows.len()).map(|position| position as u32));
            // Entries after the last token are not read.
            tables.extend((0..5).map(|i| table.get(i).copied().unwrap_or(u32::MAX)));
        }
        let q_cols = num_q * width;
        let out = arena.output(picked.len() * q_cols, self.storage);
        let call = DecodeArgs {
            heads: self.heads,
            out: Mat::dense(out, picked.len(), q_cols),
            q: rows_of(self.q, q_cols),
            k: rows_of(self.k, num_kv * width),
            v: rows_of(self.v, num_kv * width),
            cu_seqlens: arena.input_u32(&bounds),
            positions: arena.input_u32(&positions),
            page_tables: arena.input_u32(&tables),
            cache,
            scratch: self.scratch,
        };
        decode(&Queue::cpu(2), call);
        for (row, t) in picked.iter().enumerate() {
            let [out, whole] = [(out, row), (self.whole, *t)].map(|(x, row)| x.slice(row * q_cols, q_cols));
            assert_eq!(bits(out), bits(whole), "row {t}");
        }
    }
}

fn heads() -> impl Strategy<Value = Heads> {
    let window = prop_oneof![Just(None), (1usize..100).prop_map(Some)];
    (1usize..3, 1usize..4, 1usize..70, window).prop_map(|(num_kv, group, width, window)| Heads {
        num_q: num_kv * group,
        num_kv,
        width,
        scale: 0.3,
        window,
    })
}

fn page_tokens() -> impl Strategy<Value = usize> {
    prop_oneof![Just(KV_PAGE_TOKENS), Just(2 * KV_PAGE_TOKENS)]
}

proptest! {
    /// Decoding in steps of any size, in any pages, beside any other documents, gives the bits of training.
    #[test]
    fn decode_has_the_bits_of_forward(
        heads in heads(), storage in dtype(), page_tokens in page_tokens(),
        lens in prop::collection::vec(1..LONGEST, 1..4), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let pack = Pack::new(&arena, heads, storage, &lens);
        let per_doc = LONGEST.div_ceil(page_tokens);
        let pages = lens.len() * per_doc + 1;
        let cache = pack.cache(&arena, pages, page_tokens);
        // Pages in an order of no meaning: a permutation, because 7 does not divide the number of pages (4 to 10).
        let mut all = (0..pages).map(|i| ((i * if pages == 7 { 5 } else { 7 } + 3) % pages) as u32);
        let tables: Vec<Vec<u32>> = lens.iter().map(|_| all.by_ref().take(per_doc).collect()).collect();
        let starts: Vec<usize> = (0..lens.len()).map(|doc| lens[..doc].iter().sum()).collect();
        let mut cached = vec![0; lens.len()];
        for pass in 0u64.. {
            if cached == lens {
                break;
            }
            prop_assert!(pass < 2000);
            // One token at a time, or many, or none yet.
            let steps = arena.indices(lens.len(), 3);
            let mut docs = vec![];
            for (doc, len) in lens.iter().enumerate() {
                let new = [0, 1, 40][steps[doc] as usize].min(len - cached[doc]);
                if new > 0 {
                    let first = starts[doc] + cached[doc];
                    docs.push((first..first + new, cached[doc], &tables[doc][..]));
                }
                cached[doc] += new;
            }
            pack.decode(seed ^ pass, cache, &docs);
        }
    }

    /// A second document that starts with the same tokens uses the first one's whole pages, and a copy of the page
    /// where they part.
    #[test]
    fn documents_share_the_pages_of_a_prefix(
        heads in heads(), storage in dtype(), page_tokens in page_tokens(), shared in 1..LONGEST,
        new in 1usize..40, seed in any::<u64>(),
    ) {
        let (arena, len) = (TestArena::new(seed), LONGEST.min(shared + new));
        // Both documents are the same, so that one pack has the expected rows of both.
        let pack = Pack::new(&arena, heads, storage, &[len]);
        let per_doc = LONGEST.div_ceil(page_tokens) as u32;
        let cache = pack.cache(&arena, 2 * per_doc as usize, page_tokens);
        let first: Vec<u32> = (0..per_doc).rev().collect();
        let whole = shared / page_tokens;
        let second: Vec<u32> =
            first[..whole].iter().copied().chain(per_doc..2 * per_doc).take(per_doc as usize).collect();
        // The first document goes on before the second starts: the copy has tokens that are not shared.
        let middle = (shared + 3).min(len);
        pack.decode(seed, cache, &[(0..shared, 0, &first)]);
        if middle > shared {
            pack.decode(seed ^ 1, cache, &[(shared..middle, shared, &first)]);
        }
        if shared % page_tokens > 0 {
            copy_pages(&Queue::cpu(2), cache, &[(first[whole], second[whole])]);
        }
        let mut docs = vec![(middle..len, middle, &first[..]), (shared..len, shared, &second[..])];
        docs.retain(|(rows, ..)| !rows.is_empty());
        pack.decode(seed ^ 2, cache, &docs);
    }
}
