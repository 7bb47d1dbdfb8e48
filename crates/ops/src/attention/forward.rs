//! Forward: an item is one query head of one document.

use lockstep_device::{CpuQueue, Isa, Real};

use super::block::{Head, Operand, padded, product};
use super::{BLOCK_K, BLOCK_Q, Forward, Heads};
use crate::dispatch::with_real;
use crate::math::{LANES, exp, fold, max};
use crate::matmul::NR;

pub(super) fn scratch_elems(max_doc: usize, width: usize) -> usize {
    let rows = max_doc.next_multiple_of(BLOCK_K);
    rows * width + rows * padded(width) + 2 * BLOCK_Q * width + BLOCK_Q * BLOCK_K
}

pub(super) fn run(cpu: &CpuQueue, call: &Forward) {
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
            // SAFETY: a worker's part of the scratch is its own.
            let scratch = unsafe { call.scratch.slice(worker * per_thread, per_thread).as_mut::<f32>() };
            one_head::<R>(cpu.isa, call, first, end - first, head, scratch);
        });
    });
}

fn one_head<R: Real>(isa: Isa, call: &Forward, first: usize, len: usize, head: usize, scratch: &mut [f32]) {
    let Heads { num_q, num_kv, width, .. } = call.heads;
    let kv_head = head / (num_q / num_kv);
    let q = Head::new(&call.q, first, len, head, width);
    let k = Head::new(&call.k, first, len, kv_head, width);
    let v = Head::new(&call.v, first, len, kv_head, width);
    let out = Head::new(&call.out, first, len, head, width);

    let rows_padded = len.next_multiple_of(BLOCK_K);
    let (k_panels, rest) = scratch.split_at_mut(rows_padded * width);
    let (v_panels, rest) = rest.split_at_mut(rows_padded * padded(width));
    let (q_room, rest) = rest.split_at_mut(BLOCK_Q * width);
    let (sums, rest) = rest.split_at_mut(BLOCK_Q * width);
    let scores = &mut rest[..BLOCK_Q * BLOCK_K];
    k.pack_transposed::<R>(isa, k_panels);
    v.pack_natural::<R>(isa, rows_padded, v_panels);

    for first_q in (0..len).step_by(BLOCK_Q) {
        let rows = BLOCK_Q.min(len - first_q);
        let q_rows = Head::new(&call.q, first + first_q, rows, head, width).rows::<R>(isa, q_room);
        let mut state = [RowState { largest: f32::NEG_INFINITY, sum: 0.0 }; BLOCK_Q];
        sums[..rows * width].fill(0.0);
        for first_k in call.heads.key_blocks(first_q, rows) {
            let keys = BLOCK_K.min(len - first_k).min(first_q + rows - first_k);
            // SAFETY: sizes as split above; scores and sums overlap no operand.
            unsafe {
                let panels = k_panels.as_ptr().add(first_k / NR * width * NR);
                product(
                    isa,
                    (rows, keys, width),
                    q_rows,
                    panels,
                    width * NR,
                    scores.as_mut_ptr(),
                    BLOCK_K,
                    false,
                );
            }
            isa.run(
                #[inline(always)]
                || softmax_block(scores, sums, &call.heads, &mut state[..rows], first_q, first_k),
            );
            // SAFETY: as above.
            unsafe {
                let probabilities = Operand { ptr: scores.as_ptr(), row: BLOCK_K, col: 1 };
                let panels = v_panels.as_ptr().add(first_k * NR);
                let apart = rows_padded * NR;
                product(
                    isa,
                    (rows, width, keys),
                    probabilities,
                    panels,
                    apart,
                    sums.as_mut_ptr(),
                    width,
                    true,
                );
            }
        }
        for (i, state) in state.iter().enumerate().take(rows) {
            let lse = call.lse.slice((first + first_q + i) * num_q + head, 1);
            let scale = 1.0 / state.sum;
            // SAFETY: the item alone writes this head's log-sum-exps and output rows.
            let (lse, out) = unsafe { (lse.as_mut::<f32>(), out.row_mut::<R>(first_q + i)) };
            lse[0] = state.largest + state.sum.ln();
            for (out, sum) in out.iter_mut().zip(&sums[i * width..]) {
                *out = R::from_f32(sum * scale);
            }
        }
    }
    debug_assert_eq!(q.len(), len);
}

/// The running softmax of a row.
#[derive(Clone, Copy)]
struct RowState {
    largest: f32,
    sum: f32,
}

/// Turns a block of scores into unnormalised probabilities, zero for keys that are not seen, and rescales
/// the running sums to the new maximum.
#[inline(always)]
fn softmax_block(
    scores: &mut [f32],
    sums: &mut [f32],
    heads: &Heads,
    state: &mut [RowState],
    first_q: usize,
    first_k: usize,
) {
    let Heads { width, scale, .. } = *heads;
    for (i, state) in state.iter_mut().enumerate() {
        let row: &mut [f32; BLOCK_K] = (&mut scores[i * BLOCK_K..][..BLOCK_K]).try_into().unwrap();
        let seen = heads.seen(first_q + i, first_k);
        for (j, score) in row.iter_mut().enumerate() {
            *score = if j >= seen.start && j < seen.end { *score * scale } else { f32::NEG_INFINITY };
        }
        if seen.is_empty() {
            row.fill(0.0);
            continue;
        }
        let largest = state.largest.max(max(row));
        let rescale = exp(state.largest - largest);
        let mut lanes = [0f32; LANES];
        for chunk in row.as_chunks_mut::<LANES>().0 {
            for (sum, score) in lanes.iter_mut().zip(chunk) {
                *score = exp(*score - largest);
                *sum += *score;
            }
        }
        state.sum = state.sum * rescale + fold(lanes);
        state.largest = largest;
        for sum in &mut sums[i * width..][..width] {
            *sum *= rescale;
        }
    }
}
