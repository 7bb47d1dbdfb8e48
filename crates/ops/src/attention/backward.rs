//! Backward: an item is one key-value head of one document with all its query heads, so that dk and dv
//! are summed by one thread in a fixed order: over query heads, then query blocks.

use lockstep_device::{CpuQueue, Isa, Real};

use super::block::{Head, Operand, Product, padded};
use super::{BLOCK_K, BLOCK_Q, BackwardArgs, HeadMask, Heads, is_seen};
use crate::dispatch::with_real;
use crate::math::{LANES, exp, sum2};

pub(super) fn scratch_elems(max_doc: usize, width: usize) -> usize {
    let rows = max_doc.next_multiple_of(BLOCK_K);
    2 * rows * width + 3 * rows * padded(width) + 5 * rows * width + rows + 2 * BLOCK_Q * BLOCK_K
}

pub(super) fn run(cpu: &CpuQueue, call: &BackwardArgs) {
    let forward = &call.forward;
    // SAFETY: bounds are only read.
    let bounds = unsafe { forward.cu_seqlens.as_slice::<u32>() };
    let num_docs = bounds.len().saturating_sub(1);
    let per_thread = forward.scratch.len() / cpu.pool.num_threads();
    with_real!(forward.q.view.dtype(), R => {
        cpu.pool.run(num_docs * forward.heads.num_kv, &|item, worker| {
            let (doc, head) = (item / forward.heads.num_kv, item % forward.heads.num_kv);
            let (first, end) = (bounds[doc] as usize, bounds[doc + 1] as usize);
            if first == end {
                return;
            }
            // SAFETY: a worker uses only its own part of the scratch.
            let scratch = unsafe { forward.scratch.slice(worker * per_thread, per_thread).as_mut::<f32>() };
            one_group::<R>(cpu.isa, call, (doc, first, end - first), head, scratch);
        });
    });
}

fn one_group<R: Real>(
    isa: Isa,
    call: &BackwardArgs,
    (doc, first, len): (usize, usize, usize),
    kv_head: usize,
    scratch: &mut [f32],
) {
    let f = &call.forward;
    let Heads { num_q, num_kv, width, .. } = f.heads;
    let group = num_q / num_kv;
    let k = Head::new(&f.k, first, len, kv_head, width);
    let v = Head::new(&f.v, first, len, kv_head, width);
    // SAFETY: log-sum-exps are only read.
    let lse = unsafe { f.lse.slice(first * num_q, len * num_q).as_slice::<f32>() };

    let rows_padded = len.next_multiple_of(BLOCK_K);
    let (thin, wide) = (rows_padded * width, rows_padded * padded(width));
    let (k_transposed, rest) = scratch.split_at_mut(thin);
    let (v_transposed, rest) = rest.split_at_mut(thin);
    let (k_natural, rest) = rest.split_at_mut(wide);
    let (q_panels, rest) = rest.split_at_mut(wide);
    let (dout_panels, rest) = rest.split_at_mut(wide);
    let (q_room, rest) = rest.split_at_mut(thin);
    let (dout_room, rest) = rest.split_at_mut(thin);
    let (dq_room, rest) = rest.split_at_mut(thin);
    let (dk_room, rest) = rest.split_at_mut(thin);
    let (dv_room, rest) = rest.split_at_mut(thin);
    let (dots, rest) = rest.split_at_mut(rows_padded);
    let (p, rest) = rest.split_at_mut(BLOCK_Q * BLOCK_K);
    let ds = &mut rest[..BLOCK_Q * BLOCK_K];

    let k_transposed = k.transposed::<R>(isa, k_transposed);
    let v_transposed = v.transposed::<R>(isa, v_transposed);
    let k_natural = k.natural::<R>(isa, k_natural);
    let dk_head = Head::new(&call.dk, first, len, kv_head, width);
    let dv_head = Head::new(&call.dv, first, len, kv_head, width);
    // SAFETY: one item alone writes these heads of this document, here and below.
    let (dk, dv) = unsafe { (dk_head.sums::<R>(isa, dk_room), dv_head.sums::<R>(isa, dv_room)) };

    for head in kv_head * group..(kv_head + 1) * group {
        let q = Head::new(&f.q, first, len, head, width);
        let dout = Head::new(&call.dout, first, len, head, width);
        let out = Head::new(&f.out, first, len, head, width);
        let q_natural = q.natural::<R>(isa, q_panels);
        let dout_natural = dout.natural::<R>(isa, dout_panels);
        let q_rows = q.rows::<R>(isa, q_room);
        let dout_rows = dout.rows::<R>(isa, dout_room);
        isa.run(
            #[inline(always)]
            || {
                for (i, dot) in dots.iter_mut().enumerate().take(len) {
                    *dot = sum2(dout.row::<R>(i), out.row::<R>(i), |a, b| a * b);
                }
            },
        );
        let dq_head = Head::new(&call.dq, first, len, head, width);
        // SAFETY: as above.
        let dq = unsafe { dq_head.sums::<R>(isa, dq_room) };
        let dropout = HeadMask::of(f, doc, head);

        for first_q in (0..len).step_by(BLOCK_Q) {
            let rows = BLOCK_Q.min(len - first_q);
            for first_k in f.heads.key_blocks(first_q, first_q + rows) {
                let keys = BLOCK_K.min(first_q + rows - first_k);
                let of_block = |x: Operand| Operand { ptr: x.ptr.wrapping_add(first_q * x.row), ..x };
                let seen = |i: usize| f.heads.seen(first_q + i, first_k).end;
                // SAFETY: sizes as split above; p and ds overlap no operand.
                unsafe {
                    let scores = Product {
                        rows,
                        cols: keys,
                        depth: width,
                        a: of_block(q_rows),
                        b: k_transposed.columns_from(first_k),
                        c: p.as_mut_ptr(),
                        c_row: BLOCK_K,
                        accumulate: false,
                    };
                    scores.of_seen_columns(isa, seen);
                    let (a, b, c) =
                        (of_block(dout_rows), v_transposed.columns_from(first_k), ds.as_mut_ptr());
                    Product { a, b, c, ..scores }.of_seen_columns(isa, seen);
                }
                let block = Block { first_q, first_k, rows, heads: &f.heads, dropout };
                let lse_of = |i: usize| lse[(first_q + i) * num_q + head];
                isa.run(
                    #[inline(always)]
                    || probabilities_and_gradient(p, ds, &block, lse_of, dots),
                );
                // The first query of the block that sees key j of it.
                let seeing = |j: usize| (first_k + j).saturating_sub(first_q);
                // SAFETY: as above; the three sums overlap no operand.
                unsafe {
                    let by_key = |x: &[f32]| Operand { ptr: x.as_ptr(), row: 1, col: BLOCK_K };
                    let of_keys = Product {
                        rows: keys,
                        cols: width,
                        depth: rows,
                        a: by_key(p),
                        b: dout_natural.rows_from(first_q),
                        c: dv.ptr.add(first_k * dv.row),
                        c_row: dv.row,
                        accumulate: true,
                    };
                    of_keys.over_seeing(isa, seeing);
                    let (b, c) = (q_natural.rows_from(first_q), dk.ptr.add(first_k * dk.row));
                    Product { a: by_key(ds), b, c, c_row: dk.row, ..of_keys }.over_seeing(isa, seeing);
                    let of_queries = Product {
                        rows,
                        depth: keys,
                        a: Operand { ptr: ds.as_ptr(), row: BLOCK_K, col: 1 },
                        b: k_natural.rows_from(first_k),
                        c: dq.ptr.add(first_q * dq.row),
                        c_row: dq.row,
                        ..of_keys
                    };
                    of_queries.over_seen(isa, seen);
                }
            }
        }
        // SAFETY: the sums of this head, in the room they were given.
        unsafe { dq_head.round::<R>(isa, dq) };
    }
    // SAFETY: as above.
    unsafe {
        dk_head.round::<R>(isa, dk);
        dv_head.round::<R>(isa, dv);
    }
}

struct Block<'a> {
    first_q: usize,
    first_k: usize,
    rows: usize,
    heads: &'a Heads,
    dropout: Option<HeadMask>,
}

/// p: scores to probabilities, zero for keys that are not seen or dropped. ds: ∂L/∂p to ∂L/∂(q·k). What is
/// dropped still counts in the softmax: it has a gradient through the sum.
#[inline(always)]
fn probabilities_and_gradient(
    p: &mut [f32],
    ds: &mut [f32],
    block: &Block,
    lse_of: impl Fn(usize) -> f32,
    dots: &[f32],
) {
    let scale = block.heads.scale;
    let mut kept = [1f32; BLOCK_K];
    for i in 0..block.rows {
        let p: &mut [f32; BLOCK_K] = (&mut p[i * BLOCK_K..][..BLOCK_K]).try_into().unwrap();
        let ds: &mut [f32; BLOCK_K] = (&mut ds[i * BLOCK_K..][..BLOCK_K]).try_into().unwrap();
        let seen = block.heads.seen(block.first_q + i, block.first_k);
        let (lse, dot) = (lse_of(i), dots[block.first_q + i]);
        let (p, unseen_p) = p.split_at_mut(seen.end.next_multiple_of(LANES));
        let (ds, unseen_ds) = ds.split_at_mut(p.len());
        unseen_p.fill(0.0);
        unseen_ds.fill(0.0);
        if let Some(mask) = &block.dropout {
            mask.fill(block.first_q + i, block.first_k, seen.clone(), &mut kept);
        }
        let is_seen = is_seen(&seen);
        for ((p, (ds, kept)), key) in p.iter_mut().zip(ds.iter_mut().zip(&kept)).zip(0..) {
            let is_seen = is_seen(key);
            let probability = if is_seen { exp(p.mul_add(scale, -lse)) } else { 0.0 };
            let gradient = if is_seen { probability * (*ds * kept - dot) * scale } else { 0.0 };
            *p = probability * kept;
            *ds = gradient;
        }
    }
}
