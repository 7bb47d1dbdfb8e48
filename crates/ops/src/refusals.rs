//! Every operation refuses operands of wrong shapes and types, and outputs that share memory with what they are made
//! of, in checks that come before it turns to a device: what is refused here is refused on a GPU as well.

use lockstep_core::DType;
use lockstep_device::{Queue, View};

use crate::adamw::{self, Range, Rates};
use crate::attention::{self, Backward, Cache, Extend, Forward, Heads};
use crate::cross_entropy::{self, Channels};
use crate::dropout::{self, Mask, Site};
use crate::matmul::{self, Init};
use crate::rope::{self, Table, Turn};
use crate::testing::{Bench, Operands, refusal};
use crate::{Mat, bias, embedding, lion, reduce, rmsnorm, score_head, sgd, swiglu};

const OVERLAP: &str = "operands overlap";

#[track_caller]
fn refused(expected: &str, call: impl FnOnce(&Queue)) {
    let message = refusal(|| call(&Queue::cpu(1)));
    assert!(message.contains(expected), "refused for another reason than {expected:?}: {message}");
}

fn f32s(bench: &Bench, len: usize) -> View<'_> {
    bench.normals(len, DType::F32)
}

fn mat(bench: &Bench, rows: usize, cols: usize) -> Mat<'_> {
    Mat::dense(f32s(bench, rows * cols), rows, cols)
}

/// The matrix of the same shape that starts an element later: it overlaps the first, but is not the same.
fn shifted<'m>(bench: &'m Bench, rows: usize, cols: usize) -> [Mat<'m>; 2] {
    let view = f32s(bench, rows * cols + 1);
    [0, 1].map(|start| Mat::dense(view.slice(start, rows * cols), rows, cols))
}

#[test]
fn updates() {
    let bench = Bench::new(1);
    let [master, grad, m, v] = [(); 4].map(|()| f32s(&bench, 8));
    let working = Some(bench.normals(8, DType::BF16));
    let good = Range { master, working, grad, m, v, weight_decay: 0.0 };
    let update = |queue: &Queue, range: Range| {
        adamw::update(queue, range, &Rates::at(1, 0.1, (0.9, 0.9), 1e-8, 1.0), None)
    };
    update(&Queue::cpu(1), good);
    let (short, whole) = (f32s(&bench, 7), bench.input_u32(&[0; 8]));
    refused("state of a range", |queue| update(queue, Range { m: short, ..good }));
    refused("state of a range", |queue| update(queue, Range { master: whole, ..good }));
    refused("working copy", |queue| update(queue, Range { working: Some(short), ..good }));
    refused(OVERLAP, |queue| update(queue, Range { master: grad, ..good }));
    refused(OVERLAP, |queue| update(queue, Range { m: v, ..good }));
    refused(OVERLAP, |queue| update(queue, Range { m: grad, ..good }));
    let over_master = Some(master.cast(DType::BF16).first(8));
    refused(OVERLAP, |queue| update(queue, Range { working: over_master, ..good }));
}

#[test]
fn updates_with_momentum() {
    let bench = Bench::new(1);
    let [master, grad, buffer, short] = [8, 8, 8, 7].map(|len| f32s(&bench, len));
    let working = Some(bench.normals(8, DType::BF16));
    let (good, rates) = (
        sgd::Range { master, working, grad, momentum: Some(buffer), weight_decay: 0.0 },
        sgd::Rates { lr: 0.1, momentum: 0.9, nesterov: true, clip: 1.0 },
    );
    let update = |queue: &Queue, range: sgd::Range| sgd::update(queue, range, &rates, None);
    update(&Queue::cpu(1), good);
    refused("state of a range", |queue| update(queue, sgd::Range { momentum: Some(short), ..good }));
    refused("state of a range", |queue| update(queue, sgd::Range { grad: short, ..good }));
    refused("working copy", |queue| update(queue, sgd::Range { working: Some(short), ..good }));
    refused(OVERLAP, |queue| update(queue, sgd::Range { momentum: Some(grad), ..good }));
    refused(OVERLAP, |queue| update(queue, sgd::Range { momentum: Some(master), ..good }));
    let plain = sgd::Rates { momentum: 0.0, nesterov: false, ..rates };
    refused(OVERLAP, |queue| {
        sgd::update(queue, sgd::Range { grad: master, momentum: None, ..good }, &plain, None)
    });

    let (good, rates) = (
        lion::Range { master, working, grad, m: buffer, weight_decay: 0.0 },
        lion::Rates::new(0.1, (0.9, 0.99), 1.0),
    );
    let update = |queue: &Queue, range: lion::Range| lion::update(queue, range, &rates, None);
    update(&Queue::cpu(1), good);
    refused("state of a range", |queue| update(queue, lion::Range { m: short, ..good }));
    refused("working copy", |queue| update(queue, lion::Range { working: Some(short), ..good }));
    refused(OVERLAP, |queue| update(queue, lion::Range { m: grad, ..good }));
    refused(OVERLAP, |queue| update(queue, lion::Range { m: master, ..good }));
    let over_state = Some(buffer.cast(DType::BF16).first(8));
    refused(OVERLAP, |queue| update(queue, lion::Range { working: over_state, ..good }));
}

#[test]
fn sums() {
    let bench = Bench::new(1);
    let (x, leaves) = (f32s(&bench, 512), bench.output(2, DType::F64));
    refused("a leaf per block", |queue| reduce::square_leaves(queue, leaves.first(1), x));
    refused("squares of f32", |queue| reduce::square_leaves(queue, leaves, bench.input_u32(&[0; 512])));
    let inside = x.cast(DType::F64).first(2);
    refused(OVERLAP, |queue| reduce::square_leaves(queue, inside, x));
    refused(OVERLAP, |queue| reduce::sum_leaves(queue, leaves.first(1), leaves));
    refused(OVERLAP, |queue| reduce::add(queue, x.first(10), x.slice(9, 10)));
    refused(OVERLAP, |queue| reduce::copy(queue, x.first(10), x.slice(9, 10)));
}

#[test]
fn biases() {
    let bench = Bench::new(1);
    let (y, b, scratch) = (mat(&bench, 3, 4), f32s(&bench, 4), f32s(&bench, 4));
    refused("a bias per column", |queue| bias::forward(queue, y, b.first(3)));
    refused(OVERLAP, |queue| bias::forward(queue, y, y.row(2)));
    refused(OVERLAP, |queue| bias::backward(queue, y.row(0), y, scratch));
    refused(OVERLAP, |queue| bias::backward(queue, b, y, y.row(1)));
    refused(OVERLAP, |queue| bias::backward(queue, b, y, b));
    refused("scratch of a bias gradient", |queue| bias::backward(queue, b, y, scratch.first(3)));
}

#[test]
fn scores() {
    let bench = Bench::new(1);
    let [x, dx] = [(); 2].map(|()| mat(&bench, 3, 4));
    let [y, c] = [(); 2].map(|()| f32s(&bench, 3));
    let [w, dw, scratch] = [(); 3].map(|()| f32s(&bench, 4));
    refused("a weight per column", |queue| score_head::forward(queue, y, x, w.first(3)));
    refused("a score per token", |queue| score_head::forward(queue, y.first(2), x, w));
    refused("a score per token", |queue| score_head::forward(queue, y.cast(DType::U32), x, w));
    refused(OVERLAP, |queue| score_head::forward(queue, x.view.first(3), x, w));
    refused(OVERLAP, |queue| score_head::forward(queue, w.first(3), x, w));

    let good = score_head::Backward { dx, add_dx: false, dw: Some(dw), add_dw: false, c, x, w, scratch };
    score_head::backward(&Queue::cpu(1), good);
    score_head::backward(&Queue::cpu(1), score_head::Backward { dw: None, scratch: View::empty(), ..good });
    for call in [
        score_head::Backward { dx: x, ..good },
        score_head::Backward { dx: x, dw: None, ..good },
        score_head::Backward { dw: Some(w), ..good },
        score_head::Backward { dw: Some(scratch), ..good },
        score_head::Backward { dw: Some(dx.row(1)), ..good },
        score_head::Backward { c: dx.view.first(3), ..good },
        score_head::Backward { c: scratch.first(3), ..good },
        score_head::Backward { scratch: x.view, ..good },
    ] {
        refused(OVERLAP, |queue| score_head::backward(queue, call));
    }
    let short = score_head::Backward { scratch: scratch.first(3), ..good };
    refused("scratch of a head's backward", |queue| score_head::backward(queue, short));
    let narrow = score_head::Backward { dx: mat(&bench, 3, 3), ..good };
    refused("gradient of the hidden state", |queue| score_head::backward(queue, narrow));
    let none = score_head::Backward { dw: Some(dw.first(3)), ..good };
    refused("weight gradient", |queue| score_head::backward(queue, none));
    let few = score_head::Backward { c: c.first(2), ..good };
    refused("a coefficient per token", |queue| score_head::backward(queue, few));
}

#[test]
fn likelihoods() {
    let bench = Bench::new(1);
    let (logits, [logp, c]) = (mat(&bench, 3, 5), [(); 2].map(|()| f32s(&bench, 3)));
    let targets = bench.input_u32(&[0, 1, 2]);
    refused("a target per token", |queue| cross_entropy::forward(queue, logp, logits, targets.first(2)));
    refused(OVERLAP, |queue| cross_entropy::forward(queue, logits.view.first(3), logits, targets));
    refused(OVERLAP, |queue| cross_entropy::forward(queue, targets.cast(DType::F32), logits, targets));
    refused(OVERLAP, |queue| {
        cross_entropy::forward(queue, logp, logits, logits.view.cast(DType::U32).first(3))
    });
    let both = |queue: &Queue, logp: View, c: View| {
        cross_entropy::forward_backward(queue, logp, logits, targets, c, DType::F32);
    };
    refused("a coefficient per token", |queue| both(queue, logp, c.first(2)));
    refused(OVERLAP, |queue| both(queue, logp, logp));
    refused(OVERLAP, |queue| both(queue, logp, logits.view.slice(12, 3)));

    let [entropy, mean, c_entropy, short] = [3, 3, 3, 2].map(|len| f32s(&bench, len));
    let out = Channels { log_prob: logp, entropy: Some(entropy), mean_log_prob: Some(mean) };
    let with = Channels { log_prob: c, entropy: Some(c_entropy), mean_log_prob: None };
    let forward = |queue: &Queue, out: Channels| cross_entropy::forward(queue, out, logits, targets);
    let both = |queue: &Queue, with: Channels| {
        cross_entropy::forward_backward(queue, out, logits, targets, with, DType::F32);
    };
    refused("an output per token", |queue| forward(queue, Channels { entropy: Some(short), ..out }));
    refused("an output per token", |queue| forward(queue, Channels { mean_log_prob: Some(targets), ..out }));
    refused(OVERLAP, |queue| forward(queue, Channels { entropy: Some(logp), ..out }));
    refused(OVERLAP, |queue| forward(queue, Channels { mean_log_prob: Some(entropy), ..out }));
    refused(OVERLAP, |queue| forward(queue, Channels { entropy: Some(logits.view.first(3)), ..out }));
    refused("a coefficient per token", |queue| both(queue, Channels { entropy: Some(short), ..with }));
    refused(OVERLAP, |queue| both(queue, Channels { entropy: Some(mean), ..with }));
    refused(OVERLAP, |queue| both(queue, Channels { mean_log_prob: Some(logp), ..with }));
    refused(OVERLAP, |queue| both(queue, Channels { mean_log_prob: Some(logits.view.slice(1, 3)), ..with }));
    both(&Queue::cpu(1), with);
}

#[test]
fn dropouts() {
    let bench = Bench::new(1);
    let [y, residual] = [(); 2].map(|()| mat(&bench, 3, 4));
    let (bounds, samples) = (bench.input_u32(&[0, 1, 3]), bench.input_u32(&[7, 8]));
    let mask = Mask { rate: 0.5, seed: 1, step: 2, layer: 0, site: Site::MlpOut, samples };
    for run in [dropout::forward, dropout::backward] {
        run(&Queue::cpu(1), y, residual, bounds, Some(&mask));
        let [one, other] = shifted(&bench, 3, 4);
        refused(OVERLAP, |queue| run(queue, one, other, bounds, Some(&mask)));
        refused("dropout shapes", |queue| run(queue, y, mat(&bench, 3, 5), bounds, Some(&mask)));
        refused("documents have bounds", |queue| run(queue, y, residual, bounds.first(1), None));
        refused("bounds of documents", |queue| run(queue, y, residual, f32s(&bench, 3), None));
        refused("a sample per document", |queue| run(queue, y, residual, bounds.first(2), Some(&mask)));
        let floats = Mask { samples: f32s(&bench, 2), ..mask };
        refused("samples", |queue| run(queue, y, residual, bounds, Some(&floats)));
        let over = y.view.cast(DType::U32);
        refused(OVERLAP, |queue| run(queue, y, residual, over.first(3), None));
        refused(OVERLAP, |queue| {
            run(queue, y, residual, bounds, Some(&Mask { samples: over.first(2), ..mask }))
        });
    }
}

#[test]
fn embeddings() {
    let bench = Bench::new(1);
    let (x, table, tokens) = (mat(&bench, 3, 4), mat(&bench, 5, 4), bench.input_u32(&[0, 1, 4]));
    refused("embedding shapes", |queue| embedding::forward(queue, x, table, tokens.first(2)));
    refused("tokens", |queue| embedding::forward(queue, x, table, f32s(&bench, 3)));
    refused(OVERLAP, |queue| embedding::forward(queue, table.row_range(1, 3), table, tokens));
    refused(OVERLAP, |queue| embedding::forward(queue, x, table, x.view.cast(DType::U32).first(3)));
    let scratch = bench.input_u32(&[0; 6]);
    let backward = |queue: &Queue, dx: Mat, tokens: View, scratch: View| {
        embedding::backward(queue, table, dx, tokens, scratch);
    };
    backward(&Queue::cpu(1), x, tokens, scratch);
    refused(OVERLAP, |queue| backward(queue, table.row_range(0, 3), tokens, scratch));
    refused(OVERLAP, |queue| backward(queue, x, tokens, tokens));
    refused(OVERLAP, |queue| backward(queue, x, tokens, table.view.first(6)));
    refused("weight gradients", |queue| backward(queue, x, f32s(&bench, 3), scratch));
}

#[test]
fn norms() {
    let bench = Bench::new(1);
    let [y, x, dy] = [(); 3].map(|()| mat(&bench, 3, 4));
    let ([w, dw], rstd, scratch) = ([(); 2].map(|()| f32s(&bench, 4)), f32s(&bench, 3), f32s(&bench, 12));
    let forward = |queue: &Queue, y, rstd, x, w| rmsnorm::forward(queue, y, rstd, x, w, 1e-5);
    let [one, other] = shifted(&bench, 3, 4);
    refused(OVERLAP, |queue| forward(queue, one, rstd, other, w));
    refused(OVERLAP, |queue| forward(queue, x, rstd, x, w));
    refused(OVERLAP, |queue| forward(queue, y, x.view.first(3), x, w));
    refused(OVERLAP, |queue| forward(queue, y, rstd, x, y.row(0)));
    refused("one rstd per group", |queue| forward(queue, y, rstd.first(2), x, w));
    refused("one rstd per group", |queue| forward(queue, y, rstd.cast(DType::U32), x, w));

    let good = rmsnorm::Backward { dx: y, add: false, again: false, dw, dy, x, rstd, w, scratch };
    rmsnorm::backward(&Queue::cpu(1), good);
    // In place of dy, whole; not beside it.
    rmsnorm::backward(&Queue::cpu(1), rmsnorm::Backward { dx: dy, ..good });
    let overlaps = [
        rmsnorm::Backward { dx: one, dy: other, ..good },
        rmsnorm::Backward { dx: x, ..good },
        rmsnorm::Backward { dx: dy, add: true, ..good },
        rmsnorm::Backward { dx: dy, again: true, ..good },
        rmsnorm::Backward { dy: x, again: true, ..good },
        rmsnorm::Backward { dw: w, ..good },
        rmsnorm::Backward { dw: scratch.first(4), ..good },
        rmsnorm::Backward { dw: dy.row(0), ..good },
        rmsnorm::Backward { scratch: dy.view, ..good },
        rmsnorm::Backward { scratch: x.view, ..good },
        rmsnorm::Backward { rstd: y.view.first(3), ..good },
    ];
    for call in overlaps {
        refused(OVERLAP, |queue| rmsnorm::backward(queue, call));
    }
    let short = rmsnorm::Backward { scratch: scratch.first(11), ..good };
    refused("scratch of a norm's backward", |queue| rmsnorm::backward(queue, short));
    refused("weight gradient", |queue| {
        rmsnorm::backward(queue, rmsnorm::Backward { dw: dw.first(3), ..good })
    });
}

#[test]
fn rotations() {
    let bench = Bench::new(1);
    let (x, positions) = (mat(&bench, 3, 8), bench.input_u32(&[0, 1, 4]));
    let table = Table { cos: f32s(&bench, 10), sin: f32s(&bench, 10), half: 2 };
    let turn = |queue: &Queue, x, positions, table| rope::apply(queue, x, positions, table, Turn::Forward);
    turn(&Queue::cpu(1), x, positions, table);
    refused("a position per token", |queue| turn(queue, x, positions.first(2), table));
    refused("a position per token", |queue| turn(queue, x, f32s(&bench, 3), table));
    refused("8 columns in heads of 6", |queue| turn(queue, x, positions, Table { half: 3, ..table }));
    refused("angles for every position", |queue| {
        turn(queue, x, positions, Table { sin: f32s(&bench, 8), ..table })
    });
    refused("angles for every position", |queue| {
        turn(queue, x, positions, Table { cos: f32s(&bench, 11), ..table })
    });
    refused(OVERLAP, |queue| turn(queue, x, positions, Table { cos: x.view.first(10), ..table }));
    // The table has no angles for it.
    refused("position 5 of 5", |queue| turn(queue, x, bench.input_u32(&[0, 5, 1]), table));
    refused("position 4294967295 of 5", |queue| turn(queue, x, bench.input_u32(&[0, 1, u32::MAX]), table));
}

#[test]
fn gates() {
    let bench = Bench::new(1);
    let [g, u, y] = [(); 3].map(|()| mat(&bench, 3, 4));
    let [one, other] = shifted(&bench, 3, 4);
    refused("one shape", |queue| swiglu::forward(queue, y, g, mat(&bench, 3, 5)));
    refused(OVERLAP, |queue| swiglu::forward(queue, one, other, u));
    refused(OVERLAP, |queue| swiglu::backward_in_place(queue, g, g, y));
    refused(OVERLAP, |queue| swiglu::backward_and_again_in_place(queue, g, u, u));
}

#[test]
fn products() {
    let bench = Bench::new(1);
    let scratch = bench.output(matmul::scratch_bytes(1).0 as usize / 4, DType::F32);
    let [c, a, b, r] = [(); 4].map(|()| mat(&bench, 4, 4));
    let [one, other] = shifted(&bench, 4, 4);
    for run in [matmul::nt, matmul::nn, matmul::tn] {
        run(&Queue::cpu(1), c, a, b, Init::Residual(r), scratch);
        // Factors may be one matrix, and a sum may be made in its place.
        run(&Queue::cpu(1), c, a, a, Init::Residual(c), scratch);
        refused("shapes of A", |queue| run(queue, c, mat(&bench, 5, 5), b, Init::Zero, scratch));
        refused("shape of the residual", |queue| {
            run(queue, c, a, b, Init::Residual(mat(&bench, 4, 5)), scratch)
        });
        refused(OVERLAP, |queue| run(queue, c, c, b, Init::Zero, scratch));
        refused(OVERLAP, |queue| run(queue, one, a, other, Init::Zero, scratch));
        refused(OVERLAP, |queue| run(queue, one, a, b, Init::Residual(other), scratch));
        let inside = Mat::dense(scratch.slice(100, 16), 4, 4);
        refused(OVERLAP, |queue| run(queue, inside, a, b, Init::Zero, scratch));
        refused(OVERLAP, |queue| run(queue, c, inside, b, Init::Zero, scratch));
        refused(OVERLAP, |queue| run(queue, c, a, b, Init::Residual(inside), scratch));
    }
}

#[test]
fn attentions() {
    let bench = Bench::new(1);
    let heads = Heads { num_q: 2, num_kv: 1, width: 4, scale: 0.5, window: None };
    let scratch = bench.output(attention::scratch_bytes(1, 3, 4).0 as usize / 4, DType::F32);
    let [qkv, dqkv] = [(); 2].map(|()| mat(&bench, 3, 16));
    let [[q, k, v], [dq, dk, dv]] =
        [qkv, dqkv].map(|of| [of.columns(0, 8), of.columns(8, 4), of.columns(12, 4)]);
    let ([out, dout], lse) = ([(); 2].map(|()| mat(&bench, 3, 8)), f32s(&bench, 6));
    let cu_seqlens = bench.input_u32(&[0, 1, 3]);
    let good = Forward { heads, out, lse, q, k, v, cu_seqlens, dropout: None, scratch };
    attention::forward(&Queue::cpu(1), good);
    for call in [
        Forward { out: Mat::dense(scratch.first(24), 3, 8), ..good },
        Forward { out: q, ..good },
        Forward { lse: qkv.view.first(6), ..good },
        Forward { lse: out.view.first(6), ..good },
        Forward { scratch: qkv.view, ..good },
        Forward { cu_seqlens: out.view.cast(DType::U32).first(3), ..good },
    ] {
        refused(OVERLAP, |queue| attention::forward(queue, call));
    }
    refused("attention shapes", |queue| attention::forward(queue, Forward { k: q, ..good }));
    refused("lse per token", |queue| attention::forward(queue, Forward { lse: lse.first(5), ..good }));
    let floats = f32s(&bench, 3);
    refused("bounds of documents", |queue| attention::forward(queue, Forward { cu_seqlens: floats, ..good }));

    let good = Backward { dq, dk, dv, dout, forward: good };
    attention::backward(&Queue::cpu(1), good);
    let forward = good.forward;
    for call in [
        Backward { dv: dk, ..good },
        Backward { dq: q, ..good },
        Backward { dk: k, ..good },
        Backward { dq: dout, ..good },
        Backward { forward: Forward { lse: dqkv.view.first(6), ..forward }, ..good },
        Backward { forward: Forward { scratch: dqkv.view, ..forward }, ..good },
    ] {
        refused(OVERLAP, |queue| attention::backward(queue, call));
    }
    refused("gradient shapes", |queue| attention::backward(queue, Backward { dk: dq, ..good }));
}

#[test]
fn caches() {
    let bench = Bench::new(1);
    let heads = Heads { num_q: 2, num_kv: 1, width: 4, scale: 0.5, window: None };
    let view = bench.output(attention::cache_elems(1, 4, 2, 8), DType::F32);
    let (qkv, out) = (mat(&bench, 3, 16), mat(&bench, 3, 8));
    let [q, k, v] = [(0, 8), (8, 4), (12, 4)].map(|(start, cols)| qkv.columns(start, cols));
    let good = Extend {
        heads,
        out,
        q,
        k,
        v,
        cu_seqlens: bench.input_u32(&[0, 1, 3]),
        positions: bench.input_u32(&[0, 0, 1]),
        slots: bench.input_u32(&[1, 0]),
        cache: Cache { view, slots: 2, capacity: 8 },
        scratch: bench.output(attention::scratch_bytes(1, 8, 4).0 as usize / 4, DType::F32),
    };
    attention::extend(&Queue::cpu(1), good);
    for call in [
        Extend { out: q, ..good },
        Extend { q: Mat::dense(view.first(24), 3, 8), ..good },
        Extend { out: Mat::dense(view.first(24), 3, 8), ..good },
        Extend { scratch: view, ..good },
        Extend { positions: out.view.cast(DType::U32).first(3), ..good },
    ] {
        refused(OVERLAP, |queue| attention::extend(queue, call));
    }
    let floats = f32s(&bench, 3);
    refused("a position per token", |queue| {
        attention::extend(queue, Extend { positions: good.positions.first(2), ..good })
    });
    refused("bounds, slots and positions", |queue| {
        attention::extend(queue, Extend { positions: floats, ..good })
    });
    refused("a slot per document", |queue| attention::extend(queue, Extend { slots: floats, ..good }));
}
