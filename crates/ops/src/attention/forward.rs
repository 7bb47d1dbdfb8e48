//! Forward: an item is one query head of one document.

use lockstep_device::{CpuQueue, Isa, Real};

use super::block::{BlockMatmul, HeadRows, Operand, Panels, padded};
use super::{BLOCK_K, BLOCK_Q, ForwardArgs, HeadMask, Heads, is_visible};
use crate::dispatch::with_real;
use crate::math::{LANES, exp, fold, map_lanes, max, multiply};

pub(super) fn scratch_elems(max_doc: usize, width: usize) -> usize {
    let rows = max_doc.next_multiple_of(BLOCK_K);
    rows * width + rows * padded(width) + BLOCK_Q * width + BlockScratch::elems(width)
}

pub(super) fn run(cpu: &CpuQueue, call: &ForwardArgs) {
    // SAFETY: bounds are only read.
    let bounds = unsafe { call.cu_seqlens.as_slice::<u32>() };
    let num_docs = bounds.len().saturating_sub(1);
    let per_thread = call.scratch.len() / cpu.pool.num_threads();
    with_real!(call.q.view.dtype(), R => {
        cpu.pool.run(num_docs * call.heads.num_q, &|item, worker| {
            let (doc, head) = (item / call.heads.num_q, item % call.heads.num_q);
            let (first, end) = (bounds[doc] as usize, bounds[doc + 1] as usize);
            if first == end {
                return;
            }
            // SAFETY: a worker uses only its own part of the scratch.
            let scratch = unsafe { call.scratch.slice(worker * per_thread, per_thread).as_mut::<f32>() };
            forward_head::<R>(cpu.isa, call, (doc, first, end - first), head, scratch);
        });
    });
}

/// One head of document `doc`, whose `len` rows start at `first`.
fn forward_head<R: Real>(
    isa: Isa,
    call: &ForwardArgs,
    (doc, first, len): (usize, usize, usize),
    head: usize,
    scratch: &mut [f32],
) {
    let Heads { num_q, num_kv, width, .. } = call.heads;
    let kv_head = head / (num_q / num_kv);
    let k = HeadRows::new(&call.k, first, len, kv_head, width);
    let v = HeadRows::new(&call.v, first, len, kv_head, width);
    let out = HeadRows::new(&call.out, first, len, head, width);

    let rows_padded = len.next_multiple_of(BLOCK_K);
    let (k_panels, rest) = scratch.split_at_mut(rows_padded * width);
    let (v_panels, rest) = rest.split_at_mut(rows_padded * padded(width));
    let (k_panels, v_panels) = (k.transposed::<R>(isa, k_panels), v.natural::<R>(isa, v_panels));
    let keys =
        |first_k: usize| KeyBlock { k: k_panels.columns_from(first_k), v: v_panels.rows_from(first_k) };
    let (q_rows, rest) = rest.split_at_mut(BLOCK_Q * width);
    let mut scratch = BlockScratch::new(rest, width);
    let dropout = HeadMask::of(call, doc, head);

    for first_q in (0..len).step_by(BLOCK_Q) {
        let rows = BLOCK_Q.min(len - first_q);
        let q = HeadRows::new(&call.q, first + first_q, rows, head, width).rows::<R>(isa, q_rows);
        let block = QueryBlock { q, rows, position: first_q, advance: 1, heads: call.heads, dropout };
        // SAFETY: the blocks are panels that were packed above, for every key up to the last query's own.
        unsafe { block.attend(isa, &keys, &mut scratch) };
        isa.run(
            #[inline(always)]
            || {
                for i in 0..rows {
                    let lse = call.lse.slice((first + first_q + i) * num_q + head, 1);
                    // SAFETY: only this item writes this head's log-sum-exps and output rows.
                    let (lse, out) = unsafe { (lse.as_mut::<f32>(), out.row_mut::<R>(first_q + i)) };
                    lse[0] = scratch.state.largest[i] + scratch.state.sum[i].ln();
                    scratch.write_row(i, width, out);
                }
            },
        );
    }
}

/// `BLOCK_K` keys and values of one head of one document, in panels: keys transposed, values as stored.
#[derive(Clone, Copy)]
pub(super) struct KeyBlock {
    /// Panel p is \[h, NR\] and holds keys p·NR.. of the block as columns.
    pub(super) k: Panels,
    /// Panel p holds columns p·NR.. of the values.
    pub(super) v: Panels,
}

/// A thread's scratch for a block of queries: output sums, scores of a block of keys, and the state of the softmax.
pub(super) struct BlockScratch<'a> {
    sums: &'a mut [f32],
    scores: &'a mut [f32],
    state: SoftmaxState,
}

impl<'a> BlockScratch<'a> {
    pub(super) const fn elems(width: usize) -> usize {
        BLOCK_Q * width + BLOCK_Q * BLOCK_K
    }

    pub(super) fn new(scratch: &'a mut [f32], width: usize) -> BlockScratch<'a> {
        let (sums, rest) = scratch.split_at_mut(BLOCK_Q * width);
        BlockScratch { sums, scores: &mut rest[..BLOCK_Q * BLOCK_K], state: SoftmaxState::START }
    }

    /// The output of row `i`, after [`QueryBlock::attend`].
    #[inline(always)]
    pub(super) fn write_row<R: Real>(&self, i: usize, width: usize, out: &mut [R]) {
        let scale = 1.0 / self.state.sum[i];
        map_lanes(out, &self.sums[i * width..][..width], |sum| R::from_f32(sum * scale));
    }
}

/// Rows of queries that are processed together against the same keys.
#[derive(Clone, Copy)]
pub(super) struct QueryBlock {
    pub(super) q: Operand,
    /// At most `BLOCK_Q`.
    pub(super) rows: usize,
    /// The position of the first row in its document, and the distance from each row to the next.
    pub(super) position: usize,
    pub(super) advance: usize,
    pub(super) heads: Heads,
    pub(super) dropout: Option<HeadMask>,
}

impl QueryBlock {
    /// Leaves the unnormalized outputs and the state of the softmax in `scratch`. `keys` returns the block that starts
    /// with a key, a multiple of `BLOCK_K`.
    ///
    /// # Safety
    /// The queries are valid, and the blocks hold every key up to the last row's position.
    pub(super) unsafe fn attend(
        &self,
        isa: Isa,
        keys: &impl Fn(usize) -> KeyBlock,
        scratch: &mut BlockScratch,
    ) {
        let QueryBlock { q, rows, position, advance, heads, dropout } = *self;
        let width = heads.width;
        let BlockScratch { sums, scores, state } = scratch;
        *state = SoftmaxState::START;
        sums[..rows * width].fill(0.0);
        let end_k = position + (rows - 1) * advance + 1;
        for first_k in heads.key_blocks(position, end_k) {
            let (num_keys, block) = (BLOCK_K.min(end_k - first_k), keys(first_k));
            let visible = |i: usize| heads.visible_keys(position + i * advance, first_k).end;
            // SAFETY: guaranteed by the caller; scores and sums hold the block and overlap nothing.
            unsafe {
                let scores_matmul = BlockMatmul {
                    rows,
                    cols: num_keys,
                    depth: width,
                    a: q,
                    b: block.k,
                    c: scores.as_mut_ptr(),
                    c_row: BLOCK_K,
                    accumulate: false,
                };
                scores_matmul.run_columns_below(isa, visible);
            }
            isa.run(
                #[inline(always)]
                || softmax_block(scores, sums, &heads, state, (rows, position, advance), first_k),
            );
            if let Some(mask) = dropout {
                isa.run(
                    #[inline(always)]
                    || drop_block(scores, rows, &heads, &mask, position, first_k),
                );
            }
            // SAFETY: as above.
            unsafe {
                let values_matmul = BlockMatmul {
                    rows,
                    cols: width,
                    depth: num_keys,
                    a: Operand { ptr: scores.as_ptr(), row: BLOCK_K, col: 1 },
                    b: block.v,
                    c: sums.as_mut_ptr(),
                    c_row: width,
                    accumulate: true,
                };
                values_matmul.run_inner_below(isa, visible);
            }
        }
    }
}

/// Drops probabilities of a block after they were summed. The queries are at consecutive positions.
#[inline(always)]
fn drop_block(
    scores: &mut [f32],
    rows: usize,
    heads: &Heads,
    mask: &HeadMask,
    position: usize,
    first_k: usize,
) {
    let mut kept = [0f32; BLOCK_K];
    for i in 0..rows {
        let visible = heads.visible_keys(position + i, first_k);
        mask.fill(position + i, first_k, visible.clone(), &mut kept);
        for (score, kept) in scores[i * BLOCK_K..][visible.clone()].iter_mut().zip(&kept[visible]) {
            *score *= kept;
        }
    }
}

/// The running softmax of a block's rows: the largest score so far, and the sum of exponentials relative to it.
struct SoftmaxState {
    largest: [f32; BLOCK_Q],
    sum: [f32; BLOCK_Q],
}

impl SoftmaxState {
    const START: SoftmaxState = SoftmaxState { largest: [f32::NEG_INFINITY; BLOCK_Q], sum: [0.0; BLOCK_Q] };
}

/// Turns a block of scores into unnormalized probabilities, zero for keys that are not visible, and rescales the
/// running sums to the new maximum.
///
/// Computes the maxima of all rows before the exponentials, so that consecutive rows do not wait for each other.
#[inline(always)]
fn softmax_block(
    scores: &mut [f32],
    sums: &mut [f32],
    heads: &Heads,
    state: &mut SoftmaxState,
    (rows, position, advance): (usize, usize, usize),
    first_k: usize,
) {
    let Heads { width, scale, .. } = *heads;
    let scores = &mut scores.as_chunks_mut::<BLOCK_K>().0[..rows];
    let mut rescale = state.largest;
    for (i, row) in scores.iter_mut().enumerate() {
        let visible = heads.visible_keys(position + i * advance, first_k);
        if visible == (0..BLOCK_K) {
            row.iter_mut().for_each(|score| *score *= scale);
        } else {
            let is_visible = is_visible(&visible);
            for (score, key) in row.iter_mut().zip(0..) {
                *score = if is_visible(key) { *score * scale } else { f32::NEG_INFINITY };
            }
        }
        state.largest[i] = state.largest[i].max(max(row));
    }
    for (rescale, largest) in rescale[..rows].iter_mut().zip(&state.largest) {
        *rescale = exp(*rescale - largest);
    }
    for (i, row) in scores.iter_mut().enumerate() {
        let visible = heads.visible_keys(position + i * advance, first_k);
        if visible.is_empty() {
            row.fill(0.0);
            continue;
        }
        // Skip whole lanes of hidden keys, which would only add zeros.
        let (row, hidden) = row.split_at_mut(visible.end.next_multiple_of(LANES));
        hidden.fill(0.0);
        let largest = state.largest[i];
        let mut lanes = [0f32; LANES];
        for chunk in row.as_chunks_mut::<LANES>().0 {
            for (sum, score) in lanes.iter_mut().zip(chunk) {
                *score = exp(*score - largest);
                *sum += *score;
            }
        }
        state.sum[i] = state.sum[i] * rescale[i] + fold(lanes);
        multiply(&mut sums[i * width..][..width], rescale[i]);
    }
}
