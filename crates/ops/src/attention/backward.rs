//! Backward: an item is one key-value head of one document with all its query heads, so that dk and dv
//! are summed by one thread in a fixed order: over query heads, then query blocks.

use lockstep_device::{CpuQueue, Isa, Real};

use super::block::{Head, Operand, Product, padded};
use super::{BLOCK_K, BLOCK_Q, Backward, HeadMask, Heads};
use crate::dispatch::with_real;
use crate::math::{LANES, exp, sum2};
use crate::matmul::NR;

pub(super) fn scratch_elems(max_doc: usize, width: usize) -> usize {
    let rows = max_doc.next_multiple_of(BLOCK_K);
    2 * rows * width + 3 * rows * padded(width) + 5 * rows * width + rows + 2 * BLOCK_Q * BLOCK_K
}

pub(super) fn run(cpu: &CpuQueue, call: &Backward) {
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
            // SAFETY: a worker's part of the scratch is its own.
            let scratch = unsafe { forward.scratch.slice(worker * per_thread, per_thread).as_mut::<f32>() };
            one_group::<R>(cpu.isa, call, (doc, first, end - first), head, scratch);
        });
    });
}

fn one_group<R: Real>(
    isa: Isa,
    call: &Backward,
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
    let (q_natural, rest) = rest.split_at_mut(wide);
    let (dout_natural, rest) = rest.split_at_mut(wide);
    let (q_room, rest) = rest.split_at_mut(thin);
    let (dout_room, rest) = rest.split_at_mut(thin);
    let (dq, rest) = rest.split_at_mut(thin);
    let (dk, rest) = rest.split_at_mut(thin);
    let (dv, rest) = rest.split_at_mut(thin);
    let (dots, rest) = rest.split_at_mut(rows_padded);
    let (p, rest) = rest.split_at_mut(BLOCK_Q * BLOCK_K);
    let ds = &mut rest[..BLOCK_Q * BLOCK_K];

    k.pack_transposed::<R>(isa, k_transposed);
    v.pack_transposed::<R>(isa, v_transposed);
    k.pack_natural::<R>(isa, rows_padded, k_natural);
    dk[..len * width].fill(0.0);
    dv[..len * width].fill(0.0);

    for head in kv_head * group..(kv_head + 1) * group {
        let q = Head::new(&f.q, first, len, head, width);
        let dout = Head::new(&call.dout, first, len, head, width);
        let out = Head::new(&f.out, first, len, head, width);
        q.pack_natural::<R>(isa, rows_padded, q_natural);
        dout.pack_natural::<R>(isa, rows_padded, dout_natural);
        let q_rows = q.rows::<R>(isa, q_room);
        let dout_rows = dout.rows::<R>(isa, dout_room);
        for (i, dot) in dots.iter_mut().enumerate().take(len) {
            let (a, b) = (dout.row::<R>(i), out.row::<R>(i));
            *dot = isa.run(
                #[inline(always)]
                || dot_rows(a, b),
            );
        }
        dq[..len * width].fill(0.0);
        let dropout = HeadMask::of(f, doc, head);

        for first_q in (0..len).step_by(BLOCK_Q) {
            let rows = BLOCK_Q.min(len - first_q);
            for first_k in f.heads.key_blocks(first_q, first_q + rows) {
                let keys = BLOCK_K.min(first_q + rows - first_k);
                let of_block = |x: Operand| Operand { ptr: x.ptr.wrapping_add(first_q * x.row), ..x };
                let seen = |i: usize| f.heads.seen(first_q + i, first_k).end;
                // SAFETY: sizes as split above; p and ds overlap no operand.
                unsafe {
                    let panel = first_k / NR * width * NR;
                    let scores = Product {
                        rows,
                        cols: keys,
                        depth: width,
                        a: of_block(q_rows),
                        b: k_transposed.as_ptr().add(panel),
                        panel_elems: width * NR,
                        c: p.as_mut_ptr(),
                        c_row: BLOCK_K,
                        accumulate: false,
                    };
                    scores.of_seen_columns(isa, seen);
                    let (a, b, c) = (of_block(dout_rows), v_transposed.as_ptr().add(panel), ds.as_mut_ptr());
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
                        b: dout_natural.as_ptr().add(first_q * NR),
                        panel_elems: rows_padded * NR,
                        c: dv.as_mut_ptr().add(first_k * width),
                        c_row: width,
                        accumulate: true,
                    };
                    of_keys.over_seeing(isa, seeing);
                    let (b, c) = (q_natural.as_ptr().add(first_q * NR), dk.as_mut_ptr().add(first_k * width));
                    Product { a: by_key(ds), b, c, ..of_keys }.over_seeing(isa, seeing);
                    let of_queries = Product {
                        rows,
                        depth: keys,
                        a: Operand { ptr: ds.as_ptr(), row: BLOCK_K, col: 1 },
                        b: k_natural.as_ptr().add(first_k * NR),
                        c: dq.as_mut_ptr().add(first_q * width),
                        ..of_keys
                    };
                    of_queries.over_seen(isa, seen);
                }
            }
        }
        store::<R>(isa, &Head::new(&call.dq, first, len, head, width), dq, width);
    }
    store::<R>(isa, &Head::new(&call.dk, first, len, kv_head, width), dk, width);
    store::<R>(isa, &Head::new(&call.dv, first, len, kv_head, width), dv, width);
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
        for (j, (p, (ds, kept))) in p.iter_mut().zip(ds.iter_mut().zip(&kept)).enumerate() {
            let is_seen = j >= seen.start && j < seen.end;
            let probability = if is_seen { exp(p.mul_add(scale, -lse)) } else { 0.0 };
            let gradient = if is_seen { probability * (*ds * kept - dot) * scale } else { 0.0 };
            *p = probability * kept;
            *ds = gradient;
        }
    }
}

#[inline(always)]
fn dot_rows<R: Real>(a: &[R], b: &[R]) -> f32 {
    sum2(a, b, |a, b| a * b)
}

fn store<R: Real>(isa: Isa, to: &Head, from: &[f32], width: usize) {
    for i in 0..to.len() {
        // SAFETY: one item alone writes these heads of this document.
        let to = unsafe { to.row_mut::<R>(i) };
        let from = &from[i * width..][..width];
        isa.run(
            #[inline(always)]
            || {
                for (to, from) in to.iter_mut().zip(from) {
                    *to = R::from_f32(*from);
                }
            },
        );
    }
}
