//! Every operation refuses operands of wrong shapes and types, and outputs that overlap its inputs. The checks come
//! before the choice of device, so what is refused here on the CPU is refused on a GPU as well.

use lockstep_core::DType;
use lockstep_core::rounding::RoundingBits;
use lockstep_device::{Queue, View};

use crate::adamw::{self, Hyperparams, ParamRange};
use crate::attention::{self, BackwardArgs, DecodeArgs, ForwardArgs, Heads, KvCache};
use crate::cross_entropy::{self, Channels};
use crate::dropout::{self, Mask, Site};
use crate::matmul::{self, Accumulate};
use crate::optimizer::{Params, RangeRounding, State};
use crate::rope::{self, Direction, Table};
use crate::testing::{Operands, TestArena, panic_message};
use crate::{Mat, bias, embedding, lion, reduce, rmsnorm, rows, score_head, sgd, swiglu};

const OVERLAP: &str = "operands overlap";

#[track_caller]
fn assert_refused(expected: &str, call: impl FnOnce(&Queue)) {
    let message = panic_message(|| call(&Queue::cpu(1)));
    assert!(message.contains(expected), "expected a message with {expected:?}: {message}");
}

fn f32s(arena: &TestArena, len: usize) -> View<'_> {
    arena.normals(len, DType::F32)
}

fn mat(arena: &TestArena, rows: usize, cols: usize) -> Mat<'_> {
    Mat::dense(f32s(arena, rows * cols), rows, cols)
}

/// Two matrices of the same shape, the second starting one element later: they overlap but are not the same.
fn shifted<'m>(arena: &'m TestArena, rows: usize, cols: usize) -> [Mat<'m>; 2] {
    let view = f32s(arena, rows * cols + 1);
    [0, 1].map(|start| Mat::dense(view.slice(start, rows * cols), rows, cols))
}

const STATE: &str = "states of a range must be f32 or bf16 of its length";

#[test]
fn updates() {
    let arena = TestArena::new(1);
    let [master, grad, m, v] = [(); 4].map(|()| f32s(&arena, 8));
    let working = Some(arena.normals(8, DType::BF16));
    let params = Params::Master { master, working };
    let good = ParamRange { params, grad, m: m.into(), v: v.into(), rounding: None, weight_decay: 0.0 };
    let update = |queue: &Queue, range: ParamRange| {
        adamw::update(queue, range, &Hyperparams::at(1, 0.1, (0.9, 0.9), 1e-8, 1.0), None)
    };
    update(&Queue::cpu(1), good);
    let (short, whole) = (f32s(&arena, 7), arena.input_u32(&[0; 8]));
    let with = |master, working| Params::Master { master, working };
    assert_refused(STATE, |queue| update(queue, ParamRange { m: short.into(), ..good }));
    assert_refused(STATE, |queue| update(queue, ParamRange { v: whole.into(), ..good }));
    assert_refused("gradients of a range", |queue| update(queue, ParamRange { grad: short, ..good }));
    assert_refused("master parameters must be f32", |queue| {
        update(queue, ParamRange { params: with(whole, None), ..good })
    });
    assert_refused("working copy", |queue| {
        update(queue, ParamRange { params: with(master, Some(short)), ..good })
    });
    assert_refused(OVERLAP, |queue| update(queue, ParamRange { params: with(grad, working), ..good }));
    assert_refused(OVERLAP, |queue| update(queue, ParamRange { m: v.into(), ..good }));
    assert_refused(OVERLAP, |queue| update(queue, ParamRange { m: grad.into(), ..good }));
    let over_master = Some(master.cast(DType::BF16).first(8));
    assert_refused(OVERLAP, |queue| update(queue, ParamRange { params: with(master, over_master), ..good }));
}

#[test]
fn updates_of_narrow_formats() {
    let arena = TestArena::new(1);
    let [master, grad, m, v] = [(); 4].map(|()| f32s(&arena, 8));
    let [weight, state] = [(); 2].map(|()| arena.normals(8, DType::BF16));
    let remainder = arena.input_raw(&[0i16; 8], DType::I16);
    let early = RangeRounding { bits: RoundingBits::new(1, 1, "a"), first_elem: 0 };
    let rounding = Some(early);
    let params = Params::Split { weight, remainder };
    let good = ParamRange { params, grad, m: m.into(), v: v.into(), rounding: None, weight_decay: 0.0 };
    let update = |queue: &Queue, range: ParamRange| {
        adamw::update(queue, range, &Hyperparams::at(1, 0.1, (0.9, 0.9), 1e-8, 1.0), None)
    };
    update(&Queue::cpu(1), good);
    let with = |params| ParamRange { params, ..good };
    assert_refused("weights with remainders must be bf16", |queue| {
        update(queue, with(Params::Split { weight: master, remainder }))
    });
    assert_refused("remainders must be i16", |queue| {
        update(queue, with(Params::Split { weight, remainder: remainder.first(7) }))
    });
    assert_refused(OVERLAP, |queue| {
        update(queue, with(Params::Split { weight, remainder: weight.cast(DType::I16) }))
    });
    assert_refused("weights without a master must be bf16", |queue| {
        update(queue, with(Params::Stochastic { weight: master }))
    });
    let stochastic = with(Params::Stochastic { weight });
    assert_refused("stochastic rounding needs random bits", |queue| update(queue, stochastic));
    update(&Queue::cpu(1), ParamRange { rounding, ..stochastic });
    let late = RangeRounding { first_elem: (1 << 32) - 7, ..early };
    assert_refused("2^32 elements", |queue| update(queue, ParamRange { rounding: Some(late), ..stochastic }));
    assert_refused("all states of a range must have the same format", |queue| {
        update(queue, ParamRange { m: state.into(), rounding, ..good })
    });
    let [m_codes, v_codes] = [(); 2].map(|()| arena.input_raw(&[0u8; 8], DType::U8));
    let [m_scale, v_scale] = [(); 2].map(|()| f32s(&arena, 1));
    let blockwise = |codes, absmax| State::Blockwise { codes, absmax };
    let codes = ParamRange { m: blockwise(m_codes, m_scale), v: blockwise(v_codes, v_scale), ..good };
    update(&Queue::cpu(1), codes);
    assert_refused("codes must be u8", |queue| {
        update(queue, ParamRange { m: blockwise(m_codes.first(7), m_scale), ..codes })
    });
    assert_refused("one f32 scale per block", |queue| {
        update(queue, ParamRange { m: blockwise(m_codes, m_scale.first(0)), ..codes })
    });
    assert_refused(OVERLAP, |queue| update(queue, ParamRange { m: blockwise(m_codes, v_scale), ..codes }));
}

#[test]
fn updates_with_momentum() {
    let arena = TestArena::new(1);
    let [master, grad, buffer, short] = [8, 8, 8, 7].map(|len| f32s(&arena, len));
    let working = Some(arena.normals(8, DType::BF16));
    let params = Params::Master { master, working };
    let with = |working| Params::Master { master, working };
    let (good, rates) = (
        sgd::ParamRange { params, grad, momentum: Some(buffer.into()), rounding: None, weight_decay: 0.0 },
        sgd::Hyperparams { lr: 0.1, momentum: 0.9, nesterov: true, clip: 1.0 },
    );
    let update = |queue: &Queue, range: sgd::ParamRange| sgd::update(queue, range, &rates, None);
    update(&Queue::cpu(1), good);
    assert_refused(STATE, |queue| update(queue, sgd::ParamRange { momentum: Some(short.into()), ..good }));
    assert_refused("gradients of a range", |queue| update(queue, sgd::ParamRange { grad: short, ..good }));
    assert_refused("working copy", |queue| {
        update(queue, sgd::ParamRange { params: with(Some(short)), ..good })
    });
    assert_refused(OVERLAP, |queue| update(queue, sgd::ParamRange { momentum: Some(grad.into()), ..good }));
    assert_refused(OVERLAP, |queue| update(queue, sgd::ParamRange { momentum: Some(master.into()), ..good }));
    let plain = sgd::Hyperparams { momentum: 0.0, nesterov: false, ..rates };
    assert_refused(OVERLAP, |queue| {
        sgd::update(queue, sgd::ParamRange { grad: master, momentum: None, ..good }, &plain, None)
    });

    let (good, rates) = (
        lion::ParamRange { params, grad, m: buffer.into(), rounding: None, weight_decay: 0.0 },
        lion::Hyperparams::new(0.1, (0.9, 0.99), 1.0),
    );
    let update = |queue: &Queue, range: lion::ParamRange| lion::update(queue, range, &rates, None);
    update(&Queue::cpu(1), good);
    assert_refused(STATE, |queue| update(queue, lion::ParamRange { m: short.into(), ..good }));
    assert_refused("working copy", |queue| {
        update(queue, lion::ParamRange { params: with(Some(short)), ..good })
    });
    assert_refused(OVERLAP, |queue| update(queue, lion::ParamRange { m: grad.into(), ..good }));
    assert_refused(OVERLAP, |queue| update(queue, lion::ParamRange { m: master.into(), ..good }));
    let over_state = Some(buffer.cast(DType::BF16).first(8));
    assert_refused(OVERLAP, |queue| update(queue, lion::ParamRange { params: with(over_state), ..good }));
}

#[test]
fn sums() {
    let arena = TestArena::new(1);
    let (x, leaves) = (f32s(&arena, 512), arena.output(2, DType::F64));
    assert_refused("one f64 leaf per block", |queue| reduce::squared_sum_leaves(queue, leaves.first(1), x));
    assert_refused("x must be f32", |queue| {
        reduce::squared_sum_leaves(queue, leaves, arena.input_u32(&[0; 512]))
    });
    let inside = x.cast(DType::F64).first(2);
    assert_refused(OVERLAP, |queue| reduce::squared_sum_leaves(queue, inside, x));
    assert_refused(OVERLAP, |queue| reduce::sum_leaves(queue, leaves.first(1), leaves));
    assert_refused(OVERLAP, |queue| reduce::add(queue, x.first(10), x.slice(9, 10)));
    assert_refused(OVERLAP, |queue| reduce::copy(queue, x.first(10), x.slice(9, 10)));
}

#[test]
fn biases() {
    let arena = TestArena::new(1);
    let (y, b, scratch) = (mat(&arena, 3, 4), f32s(&arena, 4), f32s(&arena, 4));
    assert_refused("one bias per column", |queue| bias::forward(queue, y, b.first(3)));
    assert_refused(OVERLAP, |queue| bias::forward(queue, y, y.row(2)));
    assert_refused(OVERLAP, |queue| bias::backward(queue, y.row(0), y, scratch));
    assert_refused(OVERLAP, |queue| bias::backward(queue, b, y, y.row(1)));
    assert_refused(OVERLAP, |queue| bias::backward(queue, b, y, b));
    assert_refused("scratch is too small for a bias gradient", |queue| {
        bias::backward(queue, b, y, scratch.first(3))
    });
}

#[test]
fn scores() {
    let arena = TestArena::new(1);
    let [x, dx] = [(); 2].map(|()| mat(&arena, 3, 4));
    let [y, c] = [(); 2].map(|()| f32s(&arena, 3));
    let [w, dw, scratch] = [(); 3].map(|()| f32s(&arena, 4));
    assert_refused("one weight per column", |queue| score_head::forward(queue, y, x, w.first(3)));
    assert_refused("one f32 score per token", |queue| score_head::forward(queue, y.first(2), x, w));
    assert_refused("one f32 score per token", |queue| score_head::forward(queue, y.cast(DType::U32), x, w));
    assert_refused(OVERLAP, |queue| score_head::forward(queue, x.view.first(3), x, w));
    assert_refused(OVERLAP, |queue| score_head::forward(queue, w.first(3), x, w));

    let good = score_head::BackwardArgs { dx, add_dx: false, dw: Some(dw), add_dw: false, c, x, w, scratch };
    score_head::backward(&Queue::cpu(1), good);
    score_head::backward(
        &Queue::cpu(1),
        score_head::BackwardArgs { dw: None, scratch: View::empty(), ..good },
    );
    for call in [
        score_head::BackwardArgs { dx: x, ..good },
        score_head::BackwardArgs { dx: x, dw: None, ..good },
        score_head::BackwardArgs { dw: Some(w), ..good },
        score_head::BackwardArgs { dw: Some(scratch), ..good },
        score_head::BackwardArgs { dw: Some(dx.row(1)), ..good },
        score_head::BackwardArgs { c: dx.view.first(3), ..good },
        score_head::BackwardArgs { c: scratch.first(3), ..good },
        score_head::BackwardArgs { scratch: x.view, ..good },
    ] {
        assert_refused(OVERLAP, |queue| score_head::backward(queue, call));
    }
    let short = score_head::BackwardArgs { scratch: scratch.first(3), ..good };
    assert_refused("scratch is too small for a score head's backward", |queue| {
        score_head::backward(queue, short)
    });
    let narrow = score_head::BackwardArgs { dx: mat(&arena, 3, 3), ..good };
    assert_refused("dx must match x", |queue| score_head::backward(queue, narrow));
    let none = score_head::BackwardArgs { dw: Some(dw.first(3)), ..good };
    assert_refused("the weight gradient must be f32, with the shape of the weight", |queue| {
        score_head::backward(queue, none)
    });
    let few = score_head::BackwardArgs { c: c.first(2), ..good };
    assert_refused("one f32 coefficient per token", |queue| score_head::backward(queue, few));
}

#[test]
fn likelihoods() {
    let arena = TestArena::new(1);
    let (logits, [logp, c]) = (mat(&arena, 3, 5), [(); 2].map(|()| f32s(&arena, 3)));
    let targets = arena.input_u32(&[0, 1, 2]);
    assert_refused("one target per token", |queue| {
        cross_entropy::forward(queue, logp, logits, targets.first(2), 1.0)
    });
    assert_refused(OVERLAP, |queue| {
        cross_entropy::forward(queue, logits.view.first(3), logits, targets, 1.0)
    });
    assert_refused(OVERLAP, |queue| {
        cross_entropy::forward(queue, targets.cast(DType::F32), logits, targets, 1.0)
    });
    assert_refused(OVERLAP, |queue| {
        cross_entropy::forward(queue, logp, logits, logits.view.cast(DType::U32).first(3), 1.0)
    });
    for inverse in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_refused("an inverse temperature of", |queue| {
            cross_entropy::forward(queue, logp, logits, targets, inverse)
        });
    }
    let both = |queue: &Queue, logp: View, c: View| {
        cross_entropy::forward_backward(queue, logp, logits, targets, c, 1.0, DType::F32);
    };
    assert_refused("one f32 coefficient per token", |queue| both(queue, logp, c.first(2)));
    assert_refused(OVERLAP, |queue| both(queue, logp, logp));
    assert_refused(OVERLAP, |queue| both(queue, logp, logits.view.slice(12, 3)));

    let [entropy, mean, c_entropy, short] = [3, 3, 3, 2].map(|len| f32s(&arena, len));
    let out = Channels { log_prob: logp, entropy: Some(entropy), mean_log_prob: Some(mean) };
    let with = Channels { log_prob: c, entropy: Some(c_entropy), mean_log_prob: None };
    let forward = |queue: &Queue, out: Channels| cross_entropy::forward(queue, out, logits, targets, 1.0);
    let both = |queue: &Queue, with: Channels| {
        cross_entropy::forward_backward(queue, out, logits, targets, with, 1.0, DType::F32);
    };
    assert_refused("one f32 output per token", |queue| {
        forward(queue, Channels { entropy: Some(short), ..out })
    });
    assert_refused("one f32 output per token", |queue| {
        forward(queue, Channels { mean_log_prob: Some(targets), ..out })
    });
    assert_refused(OVERLAP, |queue| forward(queue, Channels { entropy: Some(logp), ..out }));
    assert_refused(OVERLAP, |queue| forward(queue, Channels { mean_log_prob: Some(entropy), ..out }));
    assert_refused(OVERLAP, |queue| forward(queue, Channels { entropy: Some(logits.view.first(3)), ..out }));
    assert_refused("one f32 coefficient per token", |queue| {
        both(queue, Channels { entropy: Some(short), ..with })
    });
    assert_refused(OVERLAP, |queue| both(queue, Channels { entropy: Some(mean), ..with }));
    assert_refused(OVERLAP, |queue| both(queue, Channels { mean_log_prob: Some(logp), ..with }));
    assert_refused(OVERLAP, |queue| {
        both(queue, Channels { mean_log_prob: Some(logits.view.slice(1, 3)), ..with })
    });
    both(&Queue::cpu(1), with);
}

#[test]
fn dropouts() {
    let arena = TestArena::new(1);
    let [y, residual] = [(); 2].map(|()| mat(&arena, 3, 4));
    let (bounds, samples) = (arena.input_u32(&[0, 1, 3]), arena.input_u32(&[7, 8]));
    let mask = Mask { rate: 0.5, seed: 1, step: 2, layer: 0, site: Site::MlpOut, samples };
    for run in [dropout::forward, dropout::backward] {
        run(&Queue::cpu(1), y, residual, bounds, Some(&mask));
        let [one, other] = shifted(&arena, 3, 4);
        assert_refused(OVERLAP, |queue| run(queue, one, other, bounds, Some(&mask)));
        assert_refused("shapes of a dropout must match", |queue| {
            run(queue, y, mat(&arena, 3, 5), bounds, Some(&mask))
        });
        assert_refused("cu_seqlens must not be empty", |queue| {
            run(queue, y, residual, bounds.first(1), None)
        });
        assert_refused("cu_seqlens must be u32", |queue| run(queue, y, residual, f32s(&arena, 3), None));
        assert_refused("one sample per document", |queue| {
            run(queue, y, residual, bounds.first(2), Some(&mask))
        });
        let floats = Mask { samples: f32s(&arena, 2), ..mask };
        assert_refused("samples must be u32", |queue| run(queue, y, residual, bounds, Some(&floats)));
        let over = y.view.cast(DType::U32);
        assert_refused(OVERLAP, |queue| run(queue, y, residual, over.first(3), None));
        assert_refused(OVERLAP, |queue| {
            run(queue, y, residual, bounds, Some(&Mask { samples: over.first(2), ..mask }))
        });
    }
}

#[test]
fn embeddings() {
    let arena = TestArena::new(1);
    let (x, table, tokens) = (mat(&arena, 3, 4), mat(&arena, 5, 4), arena.input_u32(&[0, 1, 4]));
    assert_refused("shapes of an embedding must match", |queue| {
        embedding::forward(queue, x, table, tokens.first(2))
    });
    assert_refused("tokens", |queue| embedding::forward(queue, x, table, f32s(&arena, 3)));
    assert_refused(OVERLAP, |queue| embedding::forward(queue, table.row_range(1, 3), table, tokens));
    assert_refused(OVERLAP, |queue| embedding::forward(queue, x, table, x.view.cast(DType::U32).first(3)));
    let scratch = arena.input_u32(&[0; 6]);
    let backward = |queue: &Queue, dx: Mat, tokens: View, scratch: View| {
        embedding::backward(queue, table, dx, tokens, scratch);
    };
    backward(&Queue::cpu(1), x, tokens, scratch);
    assert_refused(OVERLAP, |queue| backward(queue, table.row_range(0, 3), tokens, scratch));
    assert_refused(OVERLAP, |queue| backward(queue, x, tokens, tokens));
    assert_refused(OVERLAP, |queue| backward(queue, x, tokens, table.view.first(6)));
    assert_refused("weight gradients", |queue| backward(queue, x, f32s(&arena, 3), scratch));
}

#[test]
fn norms() {
    let arena = TestArena::new(1);
    let [y, x, dy] = [(); 3].map(|()| mat(&arena, 3, 4));
    let ([w, dw], rstd, scratch) = ([(); 2].map(|()| f32s(&arena, 4)), f32s(&arena, 3), f32s(&arena, 12));
    let forward = |queue: &Queue, y, rstd, x, w| rmsnorm::forward(queue, y, rstd, x, w, 1e-5);
    let [one, other] = shifted(&arena, 3, 4);
    assert_refused(OVERLAP, |queue| forward(queue, one, rstd, other, w));
    assert_refused(OVERLAP, |queue| forward(queue, x, rstd, x, w));
    assert_refused(OVERLAP, |queue| forward(queue, y, x.view.first(3), x, w));
    assert_refused(OVERLAP, |queue| forward(queue, y, rstd, x, y.row(0)));
    assert_refused("one rstd per group", |queue| forward(queue, y, rstd.first(2), x, w));
    assert_refused("one rstd per group", |queue| forward(queue, y, rstd.cast(DType::U32), x, w));

    let good = rmsnorm::BackwardArgs { dx: y, add: false, recompute: false, dw, dy, x, rstd, w, scratch };
    rmsnorm::backward(&Queue::cpu(1), good);
    // dx may be dy itself, but must not overlap it partly.
    rmsnorm::backward(&Queue::cpu(1), rmsnorm::BackwardArgs { dx: dy, ..good });
    let overlaps = [
        rmsnorm::BackwardArgs { dx: one, dy: other, ..good },
        rmsnorm::BackwardArgs { dx: x, ..good },
        rmsnorm::BackwardArgs { dx: dy, add: true, ..good },
        rmsnorm::BackwardArgs { dx: dy, recompute: true, ..good },
        rmsnorm::BackwardArgs { dy: x, recompute: true, ..good },
        rmsnorm::BackwardArgs { dw: w, ..good },
        rmsnorm::BackwardArgs { dw: scratch.first(4), ..good },
        rmsnorm::BackwardArgs { dw: dy.row(0), ..good },
        rmsnorm::BackwardArgs { scratch: dy.view, ..good },
        rmsnorm::BackwardArgs { scratch: x.view, ..good },
        rmsnorm::BackwardArgs { rstd: y.view.first(3), ..good },
    ];
    for call in overlaps {
        assert_refused(OVERLAP, |queue| rmsnorm::backward(queue, call));
    }
    let short = rmsnorm::BackwardArgs { scratch: scratch.first(11), ..good };
    assert_refused("scratch is too small for a norm's backward", |queue| rmsnorm::backward(queue, short));
    assert_refused("the weight gradient must be f32, with the shape of the weight", |queue| {
        rmsnorm::backward(queue, rmsnorm::BackwardArgs { dw: dw.first(3), ..good })
    });
}

#[test]
fn rotations() {
    let arena = TestArena::new(1);
    let (x, positions) = (mat(&arena, 3, 8), arena.input_u32(&[0, 1, 4]));
    let table = Table { cos: f32s(&arena, 10), sin: f32s(&arena, 10), half: 2 };
    let rotate =
        |queue: &Queue, x, positions, table| rope::apply(queue, x, positions, table, Direction::Forward);
    rotate(&Queue::cpu(1), x, positions, table);
    assert_refused("one position per token", |queue| rotate(queue, x, positions.first(2), table));
    assert_refused("one position per token", |queue| rotate(queue, x, f32s(&arena, 3), table));
    assert_refused("8 columns in heads of 6", |queue| {
        rotate(queue, x, positions, Table { half: 3, ..table })
    });
    assert_refused("cos and sin must cover every position", |queue| {
        rotate(queue, x, positions, Table { sin: f32s(&arena, 8), ..table })
    });
    assert_refused("cos and sin must cover every position", |queue| {
        rotate(queue, x, positions, Table { cos: f32s(&arena, 11), ..table })
    });
    assert_refused(OVERLAP, |queue| rotate(queue, x, positions, Table { cos: x.view.first(10), ..table }));
    // The table has no angles for this position.
    assert_refused("position 5 of 5", |queue| rotate(queue, x, arena.input_u32(&[0, 5, 1]), table));
    assert_refused("position 4294967295 of 5", |queue| {
        rotate(queue, x, arena.input_u32(&[0, 1, u32::MAX]), table)
    });
}

#[test]
fn gates() {
    let arena = TestArena::new(1);
    let [g, u, y] = [(); 3].map(|()| mat(&arena, 3, 4));
    let [one, other] = shifted(&arena, 3, 4);
    assert_refused("shapes must match", |queue| swiglu::forward(queue, y, g, mat(&arena, 3, 5)));
    assert_refused(OVERLAP, |queue| swiglu::forward(queue, one, other, u));
    assert_refused(OVERLAP, |queue| swiglu::backward_in_place(queue, g, g, y));
    assert_refused(OVERLAP, |queue| swiglu::backward_and_recompute_in_place(queue, g, u, u));
}

#[test]
fn matmuls() {
    let arena = TestArena::new(1);
    let scratch = arena.output(matmul::scratch_bytes(1).0 as usize / 4, DType::F32);
    let [c, a, b, r] = [(); 4].map(|()| mat(&arena, 4, 4));
    let [one, other] = shifted(&arena, 4, 4);
    for run in [matmul::nt, matmul::nn, matmul::tn] {
        run(&Queue::cpu(1), c, a, b, Accumulate::Residual(r), scratch);
        // A and B may be the same matrix, and the residual may be C.
        run(&Queue::cpu(1), c, a, a, Accumulate::Residual(c), scratch);
        assert_refused("shapes of A", |queue| {
            run(queue, c, mat(&arena, 5, 5), b, Accumulate::Overwrite, scratch)
        });
        assert_refused("the residual must match C", |queue| {
            run(queue, c, a, b, Accumulate::Residual(mat(&arena, 4, 5)), scratch)
        });
        assert_refused(OVERLAP, |queue| run(queue, c, c, b, Accumulate::Overwrite, scratch));
        assert_refused(OVERLAP, |queue| run(queue, one, a, other, Accumulate::Overwrite, scratch));
        assert_refused(OVERLAP, |queue| run(queue, one, a, b, Accumulate::Residual(other), scratch));
        let inside = Mat::dense(scratch.slice(100, 16), 4, 4);
        assert_refused(OVERLAP, |queue| run(queue, inside, a, b, Accumulate::Overwrite, scratch));
        assert_refused(OVERLAP, |queue| run(queue, c, inside, b, Accumulate::Overwrite, scratch));
        assert_refused(OVERLAP, |queue| run(queue, c, a, b, Accumulate::Residual(inside), scratch));
    }
}

#[test]
fn attention_forward_and_backward() {
    let arena = TestArena::new(1);
    let heads = Heads { num_q: 2, num_kv: 1, width: 4, scale: 0.5, window: None };
    let scratch = arena.output(attention::scratch_bytes(1, 3, 4).0 as usize / 4, DType::F32);
    let [qkv, dqkv] = [(); 2].map(|()| mat(&arena, 3, 16));
    let [[q, k, v], [dq, dk, dv]] =
        [qkv, dqkv].map(|of| [of.columns(0, 8), of.columns(8, 4), of.columns(12, 4)]);
    let ([out, dout], lse) = ([(); 2].map(|()| mat(&arena, 3, 8)), f32s(&arena, 6));
    let cu_seqlens = arena.input_u32(&[0, 1, 3]);
    let good = ForwardArgs { heads, out, lse, q, k, v, cu_seqlens, dropout: None, scratch };
    attention::forward(&Queue::cpu(1), good);
    for call in [
        ForwardArgs { out: Mat::dense(scratch.first(24), 3, 8), ..good },
        ForwardArgs { out: q, ..good },
        ForwardArgs { lse: qkv.view.first(6), ..good },
        ForwardArgs { lse: out.view.first(6), ..good },
        ForwardArgs { scratch: qkv.view, ..good },
        ForwardArgs { cu_seqlens: out.view.cast(DType::U32).first(3), ..good },
    ] {
        assert_refused(OVERLAP, |queue| attention::forward(queue, call));
    }
    assert_refused("shapes of attention must match", |queue| {
        attention::forward(queue, ForwardArgs { k: q, ..good })
    });
    assert_refused("lse per token", |queue| {
        attention::forward(queue, ForwardArgs { lse: lse.first(5), ..good })
    });
    let floats = f32s(&arena, 3);
    assert_refused("cu_seqlens must be u32", |queue| {
        attention::forward(queue, ForwardArgs { cu_seqlens: floats, ..good })
    });

    let good = BackwardArgs { dq, dk, dv, dout, forward: good };
    attention::backward(&Queue::cpu(1), good);
    let forward = good.forward;
    for call in [
        BackwardArgs { dv: dk, ..good },
        BackwardArgs { dq: q, ..good },
        BackwardArgs { dk: k, ..good },
        BackwardArgs { dq: dout, ..good },
        BackwardArgs { forward: ForwardArgs { lse: dqkv.view.first(6), ..forward }, ..good },
        BackwardArgs { forward: ForwardArgs { scratch: dqkv.view, ..forward }, ..good },
    ] {
        assert_refused(OVERLAP, |queue| attention::backward(queue, call));
    }
    assert_refused("a gradient must have the shape of its tensor", |queue| {
        attention::backward(queue, BackwardArgs { dk: dq, ..good })
    });
}

#[test]
fn attention_decode() {
    let arena = TestArena::new(1);
    let heads = Heads { num_q: 2, num_kv: 1, width: 4, scale: 0.5, window: None };
    let view = arena.output(2 * attention::kv_page_elems(1, 4, 64), DType::F32);
    let (qkv, out) = (mat(&arena, 3, 16), mat(&arena, 3, 8));
    let [q, k, v] = [(0, 8), (8, 4), (12, 4)].map(|(start, cols)| qkv.columns(start, cols));
    let good = DecodeArgs {
        heads,
        out,
        q,
        k,
        v,
        cu_seqlens: arena.input_u32(&[0, 1, 3]),
        positions: arena.input_u32(&[0, 0, 1]),
        page_tables: arena.input_u32(&[1, 0]),
        cache: KvCache { view, pages: 2, page_tokens: 64 },
        scratch: arena.output(attention::scratch_bytes(1, 8, 4).0 as usize / 4, DType::F32),
    };
    attention::decode(&Queue::cpu(1), good);
    for call in [
        DecodeArgs { out: q, ..good },
        DecodeArgs { q: Mat::dense(view.first(24), 3, 8), ..good },
        DecodeArgs { out: Mat::dense(view.first(24), 3, 8), ..good },
        DecodeArgs { scratch: view, ..good },
        DecodeArgs { positions: out.view.cast(DType::U32).first(3), ..good },
    ] {
        assert_refused(OVERLAP, |queue| attention::decode(queue, call));
    }
    let floats = f32s(&arena, 3);
    assert_refused("one position per token", |queue| {
        attention::decode(queue, DecodeArgs { positions: good.positions.first(2), ..good })
    });
    assert_refused("cu_seqlens, page tables and positions must be u32", |queue| {
        attention::decode(queue, DecodeArgs { positions: floats, ..good })
    });
    assert_refused("page tables must have the same length", |queue| {
        attention::decode(queue, DecodeArgs { page_tables: floats, ..good })
    });
    for page_tokens in [32, 96] {
        assert_refused("is not a power of two of at least 64", |queue| {
            attention::decode(queue, DecodeArgs { cache: KvCache { page_tokens, ..good.cache }, ..good })
        });
    }
    for page in [2, u32::MAX] {
        let page_tables = arena.input_u32(&[1, page]);
        assert_refused("a page outside the KV cache", |queue| {
            attention::decode(queue, DecodeArgs { page_tables, ..good })
        });
        assert_refused("page", |queue| attention::copy_pages(queue, good.cache, &[(0, page)]));
    }
    assert_refused("a document exceeds its page table", |queue| {
        attention::decode(queue, DecodeArgs { positions: arena.input_u32(&[0, 63, 64]), ..good })
    });
    assert_refused(OVERLAP, |queue| attention::copy_pages(queue, good.cache, &[(1, 1)]));
}

#[test]
fn row_maps() {
    let arena = TestArena::new(1);
    let (of_rows, of_positions) = (mat(&arena, 3, 4), mat(&arena, 5, 4));
    let map = rows::RowMap {
        source: arena.input_u32(&[0, 1, 2, 0, 1]),
        offsets: arena.input_u32(&[0, 2, 4, 5]),
        entries: arena.input_u32(&[0, 3, 1, 4, 2]),
    };
    rows::sum(&Queue::cpu(1), of_rows, of_positions, &map);
    let short = rows::RowMap { source: map.source.first(4), ..map };
    assert_refused("shapes of a row map must match", |queue| rows::sum(queue, of_rows, of_positions, &short));
    let long = rows::RowMap { entries: arena.input_u32(&[0; 6]), ..map };
    assert_refused("a position has one row", |queue| rows::first(queue, of_rows, of_positions, &long));
    let narrow = mat(&arena, 3, 3);
    assert_refused("the same width", |queue| rows::expand_first(queue, of_positions, narrow, &map));
    let floats = rows::RowMap { source: f32s(&arena, 5), ..map };
    assert_refused("row maps must be u32", |queue| rows::sum(queue, of_rows, of_positions, &floats));
    let inside = of_positions.row_range(0, 3);
    assert_refused(OVERLAP, |queue| rows::sum(queue, inside, of_positions, &map));
}
