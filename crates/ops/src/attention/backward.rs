//! Backward: an item is one key-value head of one document with all its query heads, so that one thread sums dk and dv
//! in a fixed order: over query heads, then query blocks.

use lockstep_device::{CpuQueue, Isa, Real};

use super::block::{BlockMatmul, HeadRows, Operand, Panels, Sums, padded};
use super::{BLOCK_K, BLOCK_Q, BackwardArgs, HeadMask, Heads, is_visible};
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
            backward_group::<R>(cpu.isa, call, (doc, first, end - first), head, scratch);
        });
    });
}

/// The scratch of one item, divided into its buffers. Rows are padded to whole key blocks.
struct Scratch<'a> {
    k_transposed: &'a mut [f32],
    v_transposed: &'a mut [f32],
    k_natural: &'a mut [f32],
    q_natural: &'a mut [f32],
    dout_natural: &'a mut [f32],
    q_rows: &'a mut [f32],
    dout_rows: &'a mut [f32],
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    dots: &'a mut [f32],
    p: &'a mut [f32],
    ds: &'a mut [f32],
}

impl<'a> Scratch<'a> {
    fn new(mut rest: &'a mut [f32], len: usize, width: usize) -> Scratch<'a> {
        let rows = len.next_multiple_of(BLOCK_K);
        let (dense, panels, block) = (rows * width, rows * padded(width), BLOCK_Q * BLOCK_K);
        let mut take = |elems| rest.split_off_mut(..elems).expect("scratch_elems counts all buffers");
        Scratch {
            k_transposed: take(dense),
            v_transposed: take(dense),
            k_natural: take(panels),
            q_natural: take(panels),
            dout_natural: take(panels),
            q_rows: take(dense),
            dout_rows: take(dense),
            dq: take(dense),
            dk: take(dense),
            dv: take(dense),
            dots: take(rows),
            p: take(block),
            ds: take(block),
        }
    }
}

/// A key-value head's packed operands, and the sums of its gradients.
struct KeyHead {
    k_transposed: Panels,
    v_transposed: Panels,
    k_natural: Panels,
    dk: Sums,
    dv: Sums,
}

/// A query head's packed operands, the sum of its gradient, and what is known of each row.
struct QueryHead<'a> {
    q_rows: Operand,
    dout_rows: Operand,
    q_natural: Panels,
    dout_natural: Panels,
    dq: Sums,
    /// dout · out of each row.
    dots: &'a [f32],
    /// The log-sum-exps of all heads: \[rows, H\].
    lse: &'a [f32],
    head: usize,
    dropout: Option<HeadMask>,
}

/// All query heads of one key-value head of document `doc`, whose `len` rows start at `first`.
fn backward_group<R: Real>(
    isa: Isa,
    call: &BackwardArgs,
    (doc, first, len): (usize, usize, usize),
    kv_head: usize,
    scratch: &mut [f32],
) {
    let f = &call.forward;
    let Heads { num_q, num_kv, width, .. } = f.heads;
    let group = num_q / num_kv;
    let scratch = Scratch::new(scratch, len, width);
    let k = HeadRows::new(&f.k, first, len, kv_head, width);
    let v = HeadRows::new(&f.v, first, len, kv_head, width);
    let dk = HeadRows::new(&call.dk, first, len, kv_head, width);
    let dv = HeadRows::new(&call.dv, first, len, kv_head, width);
    // SAFETY: only this item writes these heads of this document, here and below.
    let (dk_sums, dv_sums) = unsafe { (dk.sums::<R>(isa, scratch.dk), dv.sums::<R>(isa, scratch.dv)) };
    let key_head = KeyHead {
        k_transposed: k.transposed::<R>(isa, scratch.k_transposed),
        v_transposed: v.transposed::<R>(isa, scratch.v_transposed),
        k_natural: k.natural::<R>(isa, scratch.k_natural),
        dk: dk_sums,
        dv: dv_sums,
    };
    for head in kv_head * group..(kv_head + 1) * group {
        let q = HeadRows::new(&f.q, first, len, head, width);
        let dout = HeadRows::new(&call.dout, first, len, head, width);
        let out = HeadRows::new(&f.out, first, len, head, width);
        let dq = HeadRows::new(&call.dq, first, len, head, width);
        let (q_natural, dout_natural) =
            (q.natural::<R>(isa, scratch.q_natural), dout.natural::<R>(isa, scratch.dout_natural));
        let (q_rows, dout_rows) = (q.rows::<R>(isa, scratch.q_rows), dout.rows::<R>(isa, scratch.dout_rows));
        isa.run(
            #[inline(always)]
            || {
                for (i, dot) in scratch.dots.iter_mut().enumerate().take(len) {
                    *dot = sum2(dout.row::<R>(i), out.row::<R>(i), |a, b| a * b);
                }
            },
        );
        let query_head = QueryHead {
            q_rows,
            dout_rows,
            q_natural,
            dout_natural,
            // SAFETY: as above.
            dq: unsafe { dq.sums::<R>(isa, scratch.dq) },
            dots: scratch.dots,
            // SAFETY: log-sum-exps are only read.
            lse: unsafe { f.lse.slice(first * num_q, len * num_q).as_slice::<f32>() },
            head,
            dropout: HeadMask::of(f, doc, head),
        };
        for first_q in (0..len).step_by(BLOCK_Q) {
            let rows = BLOCK_Q.min(len - first_q);
            for first_k in f.heads.key_blocks(first_q, first_q + rows) {
                let block = Block { first_q, first_k, rows, heads: &f.heads };
                // SAFETY: the operands and sums cover the whole document, and p and ds hold a block.
                unsafe { backward_block(isa, &block, &query_head, &key_head, scratch.p, scratch.ds) };
            }
        }
        // SAFETY: the sums are this head's, and their scratch is still valid.
        unsafe { dq.round::<R>(isa, query_head.dq) };
    }
    // SAFETY: as above.
    unsafe {
        dk.round::<R>(isa, key_head.dk);
        dv.round::<R>(isa, key_head.dv);
    }
}

/// A block of queries against a block of keys.
struct Block<'a> {
    first_q: usize,
    first_k: usize,
    rows: usize,
    heads: &'a Heads,
}

/// Adds the contribution of one block to dq, dk and dv. `p` and `ds` are scratch.
///
/// # Safety
/// The operands and sums cover the block's rows and keys; `p` and `ds` hold a block; nothing overlaps.
unsafe fn backward_block(
    isa: Isa,
    block: &Block,
    query_head: &QueryHead,
    key_head: &KeyHead,
    p: &mut [f32],
    ds: &mut [f32],
) {
    let &Block { first_q, first_k, rows, heads } = block;
    let &QueryHead { q_rows, dout_rows, q_natural, dout_natural, dq, .. } = query_head;
    let &KeyHead { k_transposed, v_transposed, k_natural, dk, dv } = key_head;
    let width = heads.width;
    let keys = BLOCK_K.min(first_q + rows - first_k);
    let of_block = |x: Operand| Operand { ptr: x.ptr.wrapping_add(first_q * x.row), ..x };
    let visible = |i: usize| heads.visible_keys(first_q + i, first_k).end;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let scores = BlockMatmul {
            rows,
            cols: keys,
            depth: width,
            a: of_block(q_rows),
            b: k_transposed.columns_from(first_k),
            c: p.as_mut_ptr(),
            c_row: BLOCK_K,
            accumulate: false,
        };
        scores.run_columns_below(isa, visible);
        let (a, b, c) = (of_block(dout_rows), v_transposed.columns_from(first_k), ds.as_mut_ptr());
        BlockMatmul { a, b, c, ..scores }.run_columns_below(isa, visible);
    }
    isa.run(
        #[inline(always)]
        || probabilities_and_gradient(p, ds, block, query_head),
    );
    // The first query of the block that sees key j of it.
    let first_query = |j: usize| (first_k + j).saturating_sub(first_q);
    // SAFETY: guaranteed by the caller.
    unsafe {
        let by_key = |x: &[f32]| Operand { ptr: x.as_ptr(), row: 1, col: BLOCK_K };
        let dv_matmul = BlockMatmul {
            rows: keys,
            cols: width,
            depth: rows,
            a: by_key(p),
            b: dout_natural.rows_from(first_q),
            c: dv.ptr.add(first_k * dv.row),
            c_row: dv.row,
            accumulate: true,
        };
        dv_matmul.run_inner_from(isa, first_query);
        let (b, c) = (q_natural.rows_from(first_q), dk.ptr.add(first_k * dk.row));
        BlockMatmul { a: by_key(ds), b, c, c_row: dk.row, ..dv_matmul }.run_inner_from(isa, first_query);
        let dq_matmul = BlockMatmul {
            rows,
            depth: keys,
            a: Operand { ptr: ds.as_ptr(), row: BLOCK_K, col: 1 },
            b: k_natural.rows_from(first_k),
            c: dq.ptr.add(first_q * dq.row),
            c_row: dq.row,
            ..dv_matmul
        };
        dq_matmul.run_inner_below(isa, visible);
    }
}

/// Replaces scores in `p` by probabilities, zero for keys that are hidden or dropped, and ∂L/∂p in `ds` by ∂L/∂(q·k).
/// Dropped keys still count in the softmax: they have a gradient through its sum.
#[inline(always)]
fn probabilities_and_gradient(p: &mut [f32], ds: &mut [f32], block: &Block, query_head: &QueryHead) {
    let Heads { num_q, scale, .. } = *block.heads;
    let &QueryHead { dots, lse, head, .. } = query_head;
    let mut kept = [1f32; BLOCK_K];
    for i in 0..block.rows {
        let p: &mut [f32; BLOCK_K] = (&mut p[i * BLOCK_K..][..BLOCK_K]).try_into().unwrap();
        let ds: &mut [f32; BLOCK_K] = (&mut ds[i * BLOCK_K..][..BLOCK_K]).try_into().unwrap();
        let visible = block.heads.visible_keys(block.first_q + i, block.first_k);
        let (lse, dot) = (lse[(block.first_q + i) * num_q + head], dots[block.first_q + i]);
        let (p, hidden_p) = p.split_at_mut(visible.end.next_multiple_of(LANES));
        let (ds, hidden_ds) = ds.split_at_mut(p.len());
        hidden_p.fill(0.0);
        hidden_ds.fill(0.0);
        if let Some(mask) = &query_head.dropout {
            mask.fill(block.first_q + i, block.first_k, visible.clone(), &mut kept);
        }
        let is_visible = is_visible(&visible);
        for ((p, (ds, kept)), key) in p.iter_mut().zip(ds.iter_mut().zip(&kept)).zip(0..) {
            let is_visible = is_visible(key);
            let probability = if is_visible { exp(p.mul_add(scale, -lse)) } else { 0.0 };
            let gradient = if is_visible { probability * (*ds * kept - dot) * scale } else { 0.0 };
            *p = probability * kept;
            *ds = gradient;
        }
    }
}
