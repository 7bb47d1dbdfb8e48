//! Forward: an item is one query head of one document.

use lockstep_device::{CpuQueue, Isa, Real};

use super::block::{Head, Operand, Panels, Product, padded};
use super::{BLOCK_K, BLOCK_Q, ForwardArgs, HeadMask, Heads, is_seen};
use crate::dispatch::with_real;
use crate::math::{LANES, exp, fold, map_lanes, max, multiply};

pub(super) fn scratch_elems(max_doc: usize, width: usize) -> usize {
    let rows = max_doc.next_multiple_of(BLOCK_K);
    rows * width + rows * padded(width) + BLOCK_Q * width + Room::elems(width)
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
            one_head::<R>(cpu.isa, call, (doc, first, end - first), head, scratch);
        });
    });
}

/// One head of document `doc`, whose `len` rows start at `first`.
fn one_head<R: Real>(
    isa: Isa,
    call: &ForwardArgs,
    (doc, first, len): (usize, usize, usize),
    head: usize,
    scratch: &mut [f32],
) {
    let Heads { num_q, num_kv, width, .. } = call.heads;
    let kv_head = head / (num_q / num_kv);
    let k = Head::new(&call.k, first, len, kv_head, width);
    let v = Head::new(&call.v, first, len, kv_head, width);
    let out = Head::new(&call.out, first, len, head, width);

    let rows_padded = len.next_multiple_of(BLOCK_K);
    let (k_panels, rest) = scratch.split_at_mut(rows_padded * width);
    let (v_panels, rest) = rest.split_at_mut(rows_padded * padded(width));
    let keys = Keys { k: k.transposed::<R>(isa, k_panels), v: v.natural::<R>(isa, v_panels) };
    let (q_room, rest) = rest.split_at_mut(BLOCK_Q * width);
    let mut room = Room::new(rest, width);
    let dropout = HeadMask::of(call, doc, head);

    for first_q in (0..len).step_by(BLOCK_Q) {
        let rows = BLOCK_Q.min(len - first_q);
        let q = Head::new(&call.q, first + first_q, rows, head, width).rows::<R>(isa, q_room);
        let block = QueryBlock { q, rows, position: first_q, advance: 1, heads: call.heads, dropout };
        // SAFETY: the panels were packed above, for every key up to the last query's own.
        unsafe { block.attend(isa, &keys, &mut room) };
        isa.run(
            #[inline(always)]
            || {
                for i in 0..rows {
                    let lse = call.lse.slice((first + first_q + i) * num_q + head, 1);
                    // SAFETY: the item alone writes this head's log-sum-exps and output rows.
                    let (lse, out) = unsafe { (lse.as_mut::<f32>(), out.row_mut::<R>(first_q + i)) };
                    lse[0] = room.state.largest[i] + room.state.sum[i].ln();
                    room.write_row(i, width, out);
                }
            },
        );
    }
}

/// Keys and values of one head of one document, in panels: keys transposed, values as they are.
#[derive(Clone, Copy)]
pub(super) struct Keys {
    /// Panel p is \[h, NR\] and holds keys p·NR.. as columns.
    pub(super) k: Panels,
    /// Panel p holds columns p·NR.. of the values.
    pub(super) v: Panels,
}

/// A thread's room for a block of queries: what is summed, the scores of a block of keys, the softmax.
pub(super) struct Room<'a> {
    sums: &'a mut [f32],
    scores: &'a mut [f32],
    state: State,
}

impl<'a> Room<'a> {
    pub(super) const fn elems(width: usize) -> usize {
        BLOCK_Q * width + BLOCK_Q * BLOCK_K
    }

    pub(super) fn new(scratch: &'a mut [f32], width: usize) -> Room<'a> {
        let (sums, rest) = scratch.split_at_mut(BLOCK_Q * width);
        Room { sums, scores: &mut rest[..BLOCK_Q * BLOCK_K], state: State::START }
    }

    /// The output of row `i`, after [`QueryBlock::attend`].
    #[inline(always)]
    pub(super) fn write_row<R: Real>(&self, i: usize, width: usize, out: &mut [R]) {
        let scale = 1.0 / self.state.sum[i];
        map_lanes(out, &self.sums[i * width..][..width], |sum| R::from_f32(sum * scale));
    }
}

/// Rows of queries that pass over the same keys together.
#[derive(Clone, Copy)]
pub(super) struct QueryBlock {
    pub(super) q: Operand,
    /// At most `BLOCK_Q`.
    pub(super) rows: usize,
    /// Where the first row stands in its document, and how much further each next one.
    pub(super) position: usize,
    pub(super) advance: usize,
    pub(super) heads: Heads,
    pub(super) dropout: Option<HeadMask>,
}

impl QueryBlock {
    /// Leaves unnormalised outputs and the softmax's state in `room`.
    ///
    /// # Safety
    /// The queries are there, and the panels hold every key up to the last row's position.
    pub(super) unsafe fn attend(&self, isa: Isa, keys: &Keys, room: &mut Room) {
        let QueryBlock { q, rows, position, advance, heads, dropout } = *self;
        let width = heads.width;
        let Room { sums, scores, state } = room;
        *state = State::START;
        sums[..rows * width].fill(0.0);
        let visible = position + (rows - 1) * advance + 1;
        for first_k in heads.key_blocks(position, visible) {
            let num_keys = BLOCK_K.min(visible - first_k);
            let seen = |i: usize| heads.seen(position + i * advance, first_k).end;
            // SAFETY: guaranteed by the caller; scores and sums have room for the block and overlap nothing.
            unsafe {
                let of_scores = Product {
                    rows,
                    cols: num_keys,
                    depth: width,
                    a: q,
                    b: keys.k.columns_from(first_k),
                    c: scores.as_mut_ptr(),
                    c_row: BLOCK_K,
                    accumulate: false,
                };
                of_scores.of_seen_columns(isa, seen);
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
                let of_values = Product {
                    rows,
                    cols: width,
                    depth: num_keys,
                    a: Operand { ptr: scores.as_ptr(), row: BLOCK_K, col: 1 },
                    b: keys.v.rows_from(first_k),
                    c: sums.as_mut_ptr(),
                    c_row: width,
                    accumulate: true,
                };
                of_values.over_seen(isa, seen);
            }
        }
    }
}

/// Drops probabilities of a block after they were summed. Queries stand one after the other.
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
        let seen = heads.seen(position + i, first_k);
        mask.fill(position + i, first_k, seen.clone(), &mut kept);
        for (score, kept) in scores[i * BLOCK_K..][seen.clone()].iter_mut().zip(&kept[seen]) {
            *score *= kept;
        }
    }
}

/// The running softmax of a block's rows: the largest score so far, and the sum of exponentials relative to it.
struct State {
    largest: [f32; BLOCK_Q],
    sum: [f32; BLOCK_Q],
}

impl State {
    const START: State = State { largest: [f32::NEG_INFINITY; BLOCK_Q], sum: [0.0; BLOCK_Q] };
}

/// Turns a block of scores into unnormalised probabilities, zero for keys that are not seen, and rescales
/// the running sums to the new maximum.
///
/// First the maxima of all rows, then the exponentials: what the one waits for, the next row does not.
#[inline(always)]
fn softmax_block(
    scores: &mut [f32],
    sums: &mut [f32],
    heads: &Heads,
    state: &mut State,
    (rows, position, advance): (usize, usize, usize),
    first_k: usize,
) {
    let Heads { width, scale, .. } = *heads;
    let scores = &mut scores.as_chunks_mut::<BLOCK_K>().0[..rows];
    let mut rescale = state.largest;
    for (i, row) in scores.iter_mut().enumerate() {
        let seen = heads.seen(position + i * advance, first_k);
        if seen == (0..BLOCK_K) {
            row.iter_mut().for_each(|score| *score *= scale);
        } else {
            let is_seen = is_seen(&seen);
            for (score, key) in row.iter_mut().zip(0..) {
                *score = if is_seen(key) { *score * scale } else { f32::NEG_INFINITY };
            }
        }
        state.largest[i] = state.largest[i].max(max(row));
    }
    for (rescale, largest) in rescale[..rows].iter_mut().zip(&state.largest) {
        *rescale = exp(*rescale - largest);
    }
    for (i, row) in scores.iter_mut().enumerate() {
        let seen = heads.seen(position + i * advance, first_k);
        if seen.is_empty() {
            row.fill(0.0);
            continue;
        }
        // Whole lanes that nobody sees would add zeros.
        let (row, unseen) = row.split_at_mut(seen.end.next_multiple_of(LANES));
        unseen.fill(0.0);
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
