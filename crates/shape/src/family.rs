//! The programs of the model families. They all share one list of steps, in which QK norms and biases are optional
//! steps. Sliding windows need no step: the attention step looks up its layer's window.

use crate::lora::{AdapterSite, AdapterSteps};
use crate::program::with_recomputation;
use crate::{
    DropoutSite, ModelShape, Param, Program, ProgramStep, Programs, Projection, Recompute, RopeDirection,
    Slot, SlotCols, SlotRows, SlotSpec, UnitShape,
};

pub fn embed_programs(m: &ModelShape) -> Programs {
    Programs {
        forward: Program::new(vec![ProgramStep::Embed { y: Slot::Y, w: Param::Embedding }]),
        backward: Program::new(vec![ProgramStep::EmbedBack { dy: Slot::DX, w: Param::Embedding }]),
        recompute: Program::default(),
        fused: Program::default(),
        decode: Program::default(),
        saved: vec![],
        recomputed: vec![],
        specs: vec![SlotSpec::activation(Slot::Y, m.dim), SlotSpec::activation(Slot::DX, m.dim)],
    }
}

/// The first steps of a head: the rows it runs on, normalized.
fn head_input() -> [ProgramStep; 2] {
    let (x, w, rstd) = (Slot::XF.into(), Param::FinalNorm, Slot::RF);
    [ProgramStep::Pick { x: Slot::X, y: Slot::XF }, ProgramStep::Norm { x, w, y: Slot::NF.into(), rstd }]
}

/// The last steps of a head's backward: from the gradient of its normalized input to that of the residual stream.
fn head_input_back() -> [ProgramStep; 2] {
    let (x, w, rstd, dy) = (Slot::XF.into(), Param::FinalNorm, Slot::RF, Slot::DNF);
    let (add, recompute_output) = (false, false);
    [
        ProgramStep::NormBack { dy: dy.into(), x, w, rstd, dx: dy.into(), add, recompute_output },
        ProgramStep::PickBack { dy, dx: Slot::DX },
    ]
}

/// The slots of a head besides its logits.
fn head_specs(m: &ModelShape) -> Vec<SlotSpec> {
    let of_head = [Slot::XF, Slot::NF, Slot::DNF].map(|slot| SlotSpec::activation(slot, m.dim));
    let of_head = of_head.into_iter().chain([SlotSpec::statistic(Slot::RF, 1)]);
    let stream = [Slot::X, Slot::DX].map(|slot| SlotSpec::activation(slot, m.dim));
    stream.into_iter().chain(of_head.map(|spec| spec.with_rows(SlotRows::HeadRows))).collect()
}

/// The language-model head: final norm and output projection. A tied head reads and trains the embedding table.
pub fn head_programs(m: &ModelShape) -> Programs {
    let w = if m.tied { Param::Embedding } else { Param::LmHead };
    let (x, logits, dx) = (Slot::NF, Slot::Logits, Slot::DNF);
    let with_input = |step: ProgramStep| Program::new([&head_input()[..], &[step]].concat());
    let both = [&head_input()[..], &[ProgramStep::HeadFused { x, w, logits, dx }], &head_input_back()];
    let both = Program::new(both.concat());
    let logits_spec = SlotSpec::statistic(logits, m.vocab).with_rows(SlotRows::Chunk);
    Programs {
        forward: with_input(ProgramStep::HeadOutputs { x, w, logits }),
        backward: both.clone(),
        fused: both,
        decode: with_input(ProgramStep::HeadLogits { x, w, logits }),
        recompute: Program::default(),
        saved: vec![],
        recomputed: vec![],
        specs: head_specs(m).into_iter().chain([logits_spec]).collect(),
    }
}

/// A scalar head: final norm and a dot product. Backward recomputes the forward, which costs little.
pub fn score_head_programs(m: &ModelShape) -> Programs {
    let (x, w) = (Slot::NF, Param::Score);
    let (score, back) = (ProgramStep::Score { x, w }, ProgramStep::ScoreBack { x, w, dx: Slot::DNF });
    let program =
        |steps: &[ProgramStep], ends: &[ProgramStep]| Program::new([&head_input()[..], steps, ends].concat());
    Programs {
        forward: program(&[score], &[]),
        backward: program(&[back], &head_input_back()),
        fused: program(&[score, back], &head_input_back()),
        decode: Program::default(),
        recompute: Program::default(),
        saved: vec![],
        recomputed: vec![],
        specs: head_specs(m),
    }
}

/// The programs of a block. Frozen weights get no gradient, and activations that only they would need are not saved.
/// `shares`: documents of a micro-batch may share the rows of a common beginning.
pub fn block_programs(m: &ModelShape, block: &UnitShape, recompute: Recompute, shares: bool) -> Programs {
    let qk_norm = m.architecture.qk_norm();
    let forward = block_forward(m, block, shares);
    let backward = block_backward(m, block, recompute, shares);
    let mut all_saved = vec![Slot::N1, Slot::R1, Slot::Qkv];
    if qk_norm {
        all_saved.extend([Slot::Qn, Slot::Kn, Slot::Rq, Slot::Rk]);
    }
    all_saved.extend([Slot::O, Slot::Lse, Slot::X2, Slot::N2, Slot::R2, Slot::GateUp, Slot::S]);
    all_saved.extend([Slot::LoraQkv, Slot::LoraO, Slot::LoraGateUp]);
    // With full recomputation S exists only in backward, and with it what an adapter computes from it.
    all_saved.extend((recompute != Recompute::Full).then_some(Slot::LoraDown));
    // An output that SwiGLU's backward recomputes is not read from the saved activations.
    all_saved.retain(|slot| backward.iter().any(|step| step.reads().contains(slot)));

    let cheap = [Slot::N1, Slot::N2, Slot::Qn, Slot::Kn];
    let (saved, recomputed) = match recompute {
        Recompute::None => (all_saved, vec![]),
        Recompute::Selective => (all_saved.into_iter().filter(|s| !cheap.contains(s)).collect(), vec![]),
        Recompute::Full => (vec![], all_saved),
    };
    let recompute_program = match recompute {
        Recompute::Full => {
            // Backward recomputes S itself, so everything that needs it is left to backward.
            let is_unwanted = |step: &ProgramStep| {
                step.writes().iter().any(|slot| [Slot::Y, Slot::S, Slot::LoraDown].contains(slot))
                    || step.reads().contains(&Slot::S)
            };
            forward.iter().copied().filter(|step| !is_unwanted(step)).collect()
        }
        _ => vec![],
    };
    let available: Vec<Slot> = saved.iter().chain(&recomputed).copied().chain([Slot::X]).collect();
    let backward = with_recomputation(backward, &forward, &available);
    Programs {
        forward: Program::new(forward),
        recompute: Program::new(recompute_program),
        backward: Program::new(backward),
        fused: Program::default(),
        decode: Program::default(),
        saved,
        recomputed,
        specs: block_specs(m),
    }
}

fn block_specs(m: &ModelShape) -> Vec<SlotSpec> {
    let (d, q, kv, f) = (m.dim, m.q_width(), m.kv_width(), m.ffn);
    let activations = [
        (Slot::X, d),
        (Slot::Y, d),
        (Slot::DX, d),
        (Slot::N1, d),
        (Slot::Qkv, q + 2 * kv),
        (Slot::Qn, q),
        (Slot::Kn, kv),
        (Slot::O, q),
        (Slot::X2, d),
        (Slot::N2, d),
        (Slot::GateUp, 2 * f),
        (Slot::S, f),
        (Slot::DS, f),
        (Slot::DN, d),
        (Slot::DO, q),
        (Slot::DQkv, q + 2 * kv),
    ];
    let statistics =
        [(Slot::R1, 1), (Slot::R2, 1), (Slot::Rq, m.heads), (Slot::Rk, m.kv_heads), (Slot::Lse, m.heads)];
    let copies = [(Slot::PosQkv, q + 2 * kv), (Slot::PosO, q), (Slot::PosDO, q), (Slot::PosDQkv, q + 2 * kv)];
    let copies = copies.map(|(slot, width)| SlotSpec::activation(slot, width));
    let copies = copies.into_iter().chain([SlotSpec::statistic(Slot::PosLse, m.heads)]);
    let activations = activations.map(|(slot, width)| SlotSpec::activation(slot, width)).into_iter();
    let statistics = statistics.map(|(slot, width)| SlotSpec::statistic(slot, width));
    let adapters = m.lora.iter().flat_map(|lora| lora.slot_specs(d.max(q).max(f)));
    let copies = copies.map(|spec| spec.with_rows(SlotRows::Positions));
    activations.chain(statistics).chain(copies).chain(adapters).collect()
}

/// The columns of queries, keys and values in one slot.
fn qkv_cols(m: &ModelShape, slot: Slot) -> [SlotCols; 3] {
    let (q, kv) = (m.q_width(), m.kv_width());
    [
        SlotCols { slot, start: 0, len: q },
        SlotCols { slot, start: q, len: kv },
        SlotCols { slot, start: q + kv, len: kv },
    ]
}

/// The columns of gate and up in one slot.
fn gate_up_cols(m: &ModelShape) -> [SlotCols; 2] {
    let (slot, len) = (Slot::GateUp, m.ffn);
    [SlotCols { slot, start: 0, len }, SlotCols { slot, start: len, len }]
}

/// The matmuls that compute these columns of a slot from one input: a single one if their weights are adjacent in the
/// unit, otherwise one for each.
fn matmuls(block: &UnitShape, joined: Param, columns: &[SlotCols]) -> Vec<(Param, SlotCols)> {
    if block.extent(joined).is_some() {
        return vec![(joined, columns[0].slot.into())];
    }
    parts(joined, columns)
}

fn parts(joined: Param, columns: &[SlotCols]) -> Vec<(Param, SlotCols)> {
    joined.parts().iter().copied().zip(columns.iter().copied()).collect()
}

/// The matmuls whose weights are trained. If only some of the joined weights are, one matmul for each of those.
fn trained_matmuls(block: &UnitShape, joined: Param, columns: &[SlotCols]) -> Vec<(Param, SlotCols)> {
    let trained = |(param, _): &(Param, SlotCols)| param.parts().iter().all(|part| block.is_trained(*part));
    let whole = matmuls(block, joined, columns);
    if whole.iter().all(trained) {
        whole
    } else {
        parts(joined, columns).into_iter().filter(trained).collect()
    }
}

/// The columns of queries and keys that are rotated: one range if both are in one slot.
fn rotated_cols(m: &ModelShape, [q, k]: [SlotCols; 2]) -> Vec<SlotCols> {
    if q.slot == k.slot { vec![SlotCols { len: m.q_width() + m.kv_width(), ..q }] } else { vec![q, k] }
}

/// The operands of attention: the projections, or, for queries and keys with QK norm, their normalized copies.
fn attention_inputs(m: &ModelShape, qk_norm: bool) -> [SlotCols; 3] {
    let [q, k, v] = qkv_cols(m, Slot::Qkv);
    if qk_norm { [Slot::Qn.into(), Slot::Kn.into(), v] } else { [q, k, v] }
}

fn block_forward(m: &ModelShape, block: &UnitShape, shares: bool) -> Vec<ProgramStep> {
    let qk_norm = m.architecture.qk_norm();
    let [q, k, v] = qkv_cols(m, Slot::Qkv);
    let [q_in, k_in, v_in] = attention_inputs(m, qk_norm);
    let bias = |of: Projection, y: SlotCols| ProgramStep::Bias { y, b: Param::BiasOf(of) };
    let mut steps = vec![ProgramStep::Norm {
        x: Slot::X.into(),
        w: Param::InputNorm,
        y: Slot::N1.into(),
        rstd: Slot::R1,
    }];
    steps.extend(linears(m, block, (Param::Qkv, AdapterSite::Qkv), Slot::N1, &[q, k, v]));
    if m.biases.qkv {
        steps.extend([bias(Projection::Q, q), bias(Projection::K, k), bias(Projection::V, v)]);
    }
    if qk_norm {
        steps.push(ProgramStep::Norm { x: q, w: Param::QNorm, y: q_in, rstd: Slot::Rq });
        steps.push(ProgramStep::Norm { x: k, w: Param::KNorm, y: k_in, rstd: Slot::Rk });
    }
    steps.extend(
        rotated_cols(m, [q_in, k_in])
            .into_iter()
            .map(|x| ProgramStep::Rope { x, direction: RopeDirection::Forward }),
    );
    steps.push(ProgramStep::Attention { q: q_in, k: k_in, v: v_in, out: Slot::O, lse: Slot::Lse, shares });
    add_branch(m, block, &mut steps, DropoutSite::AttentionOut);
    let [g, u] = gate_up_cols(m);
    steps.push(ProgramStep::Norm {
        x: Slot::X2.into(),
        w: Param::PostNorm,
        y: Slot::N2.into(),
        rstd: Slot::R2,
    });
    steps.extend(linears(m, block, (Param::GateUp, AdapterSite::GateUp), Slot::N2, &[g, u]));
    if m.biases.mlp {
        steps.extend([bias(Projection::Gate, g), bias(Projection::Up, u)]);
    }
    steps.push(ProgramStep::SwiGlu { g, u, y: Slot::S });
    add_branch(m, block, &mut steps, DropoutSite::MlpOut);
    steps
}

/// The projections of one input, with their adapters. Adapters write their products first where every column of a matmul
/// has one: the matmul of the weights then accumulates onto them, which saves a pass over the output, and rounds the sum
/// once.
fn linears(
    m: &ModelShape,
    block: &UnitShape,
    (joined, site): (Param, AdapterSite),
    x: Slot,
    columns: &[SlotCols],
) -> Vec<ProgramStep> {
    let adapters = AdapterSteps::of(m.lora.as_ref(), block, site);
    let matmuls = matmuls(block, joined, columns);
    let first = adapters.as_ref().is_some_and(|adapters| adapters.is_complete());
    let weights = matmuls.into_iter().map(|(w, y)| ProgramStep::Linear {
        x: x.into(),
        w,
        y,
        residual: first.then_some(y),
    });
    let of_adapters = adapters.map(|adapters| {
        let start = |y: SlotCols| (!first).then_some(y);
        [adapters.hidden(x.into()), adapters.outputs(columns, start)].concat()
    });
    let of_adapters = of_adapters.unwrap_or_default();
    if first {
        of_adapters.into_iter().chain(weights).collect()
    } else {
        weights.chain(of_adapters).collect()
    }
}

/// Adds a branch to the residual stream: a projection with adapter, bias and dropout. Without dropout the matmul itself
/// accumulates onto the stream.
fn add_branch(m: &ModelShape, block: &UnitShape, steps: &mut Vec<ProgramStep>, site: DropoutSite) {
    let (x, of, adapters, y, residual) = match site {
        DropoutSite::AttentionOut => (Slot::O, Projection::O, AdapterSite::O, Slot::X2, Slot::X),
        _ => (Slot::S, Projection::Down, AdapterSite::Down, Slot::Y, Slot::X2),
    };
    let has_dropout = m.dropout.residual > 0.0;
    let start = (!has_dropout).then_some(residual.into());
    let adapters = AdapterSteps::of(m.lora.as_ref(), block, adapters);
    let has_adapter = adapters.is_some();
    if let Some(adapters) = adapters {
        steps.extend(adapters.hidden(x.into()));
        steps.extend(adapters.outputs(&[y.into()], |_| start));
    }
    let start = if has_adapter { Some(y.into()) } else { start };
    steps.push(ProgramStep::Linear { x: x.into(), w: of.weight().0, y: y.into(), residual: start });
    if of.has_bias(m.biases) {
        steps.push(ProgramStep::Bias { y: y.into(), b: Param::BiasOf(of) });
    }
    if has_dropout {
        steps.push(ProgramStep::Dropout { y, residual, site });
    }
}

/// The steps of forward in reverse. The gradient of a weight comes before that of the input, so that an operand
/// recomputed for it can be freed before the next large slot is needed. If the output of SwiGLU or of a norm is not
/// saved, its backward recomputes it over the gradient it has consumed, and the weight gradient comes after that.
fn block_backward(m: &ModelShape, block: &UnitShape, recompute: Recompute, shares: bool) -> Vec<ProgramStep> {
    let backward = BlockBackward { m, block, recompute, shares };
    let mut steps = backward.mlp();
    steps.extend(backward.attention());
    steps.retain(|step| !matches!(step, ProgramStep::BiasBack { b, .. } if !block.is_trained(*b)));
    steps
}

/// The gradients of an input: those of the weights' matmuls, of which the first defines dx, with those of the adapters.
fn input_grads(of_weights: Vec<ProgramStep>, adapters: Option<&AdapterSteps>, dx: Slot) -> Vec<ProgramStep> {
    let Some(adapters) = adapters else { return of_weights };
    if !adapters.can_start_dx() {
        return [of_weights, adapters.input_grads(dx.into(), false)].concat();
    }
    let accumulates = |step| match step {
        ProgramStep::LinearBackInput { dy, w, dx, .. } => {
            ProgramStep::LinearBackInput { dy, w, dx, add: true }
        }
        other => other,
    };
    let of_weights = of_weights.into_iter().map(accumulates).collect();
    [adapters.input_grads(dx.into(), true), of_weights].concat()
}

struct BlockBackward<'a> {
    m: &'a ModelShape,
    block: &'a UnitShape,
    recompute: Recompute,
    shares: bool,
}

/// A norm, as its backward sees it.
struct NormOperands {
    x: Slot,
    w: Param,
    y: Slot,
    rstd: Slot,
}

impl BlockBackward<'_> {
    fn mlp(&self) -> Vec<ProgramStep> {
        let [g, u] = gate_up_cols(self.m);
        let branch = self.branch();
        let is_trained = self.block.is_trained(Param::Down);
        let adapters = self.adapters(AdapterSite::Down);
        let recompute_output = (is_trained || adapters.is_some()) && self.recompute != Recompute::None;
        let down = |x: Slot| weight_back(branch, x, Param::Down);
        let mut steps = Vec::new();
        steps.extend(self.dropout(DropoutSite::MlpOut));
        steps.extend((is_trained && !recompute_output).then(|| down(Slot::S)));
        if let Some(adapters) = &adapters {
            steps.extend(adapters.hidden_grads(&[branch]));
            if !recompute_output {
                steps.extend(adapters.weight_grads(&[branch], Slot::S.into()));
            }
        }
        steps.extend(input_grads(
            vec![input_back(branch, Param::Down, Slot::DS, false)],
            adapters.as_ref(),
            Slot::DS,
        ));
        steps.push(ProgramStep::SwiGluBack { g, u, dy: Slot::DS, recompute_output });
        steps.extend((is_trained && recompute_output).then(|| down(Slot::DS)));
        if let Some(adapters) = adapters.filter(|_| recompute_output) {
            if self.recompute == Recompute::Full {
                steps.extend(adapters.hidden(Slot::DS.into()));
            }
            steps.extend(adapters.weight_grads(&[branch], Slot::DS.into()));
        }
        if self.m.biases.mlp {
            let [down, gate, up] = [(Projection::Down, branch), (Projection::Gate, g), (Projection::Up, u)];
            steps.extend([bias_back(down), bias_back(gate), bias_back(up)]);
        }
        let norm = NormOperands { x: Slot::X2, w: Param::PostNorm, y: Slot::N2, rstd: Slot::R2 };
        steps.extend(self.normed_linears((Param::GateUp, AdapterSite::GateUp), &[g, u], &norm));
        steps
    }

    fn attention(&self) -> Vec<ProgramStep> {
        let m = self.m;
        let qk_norm = m.architecture.qk_norm();
        let [q, k, v] = attention_inputs(m, qk_norm);
        let dqkv = qkv_cols(m, Slot::DQkv);
        let [dq, dk, dv] = dqkv;
        let branch = self.branch();
        let mut steps = Vec::new();
        steps.extend(self.dropout(DropoutSite::AttentionOut));
        steps.extend(self.block.is_trained(Param::O).then(|| weight_back(branch, Slot::O, Param::O)));
        let adapters = self.adapters(AdapterSite::O);
        if let Some(adapters) = &adapters {
            steps.extend(adapters.hidden_grads(&[branch]));
            steps.extend(adapters.weight_grads(&[branch], Slot::O.into()));
        }
        steps.extend(input_grads(
            vec![input_back(branch, Param::O, Slot::DO, false)],
            adapters.as_ref(),
            Slot::DO,
        ));
        let (out, lse, dout) = (Slot::O, Slot::Lse, Slot::DO);
        steps.push(ProgramStep::AttentionBack { q, k, v, out, lse, dout, dqkv, shares: self.shares });
        let rotated = rotated_cols(m, [dq, dk]).into_iter();
        steps.extend(rotated.map(|x| ProgramStep::Rope { x, direction: RopeDirection::Backward }));
        if m.biases.out {
            steps.push(bias_back((Projection::O, branch)));
        }
        if qk_norm {
            let [q, k, _] = qkv_cols(m, Slot::Qkv);
            let back = |dy: SlotCols, x: SlotCols, w: Param, rstd: Slot| {
                let (add, recompute_output) = (false, false);
                ProgramStep::NormBack { dy, x, w, rstd, dx: dy, add, recompute_output }
            };
            steps.push(back(dq, q, Param::QNorm, Slot::Rq));
            steps.push(back(dk, k, Param::KNorm, Slot::Rk));
        }
        if m.biases.qkv {
            let [q, k, v] = [(Projection::Q, dq), (Projection::K, dk), (Projection::V, dv)];
            steps.extend([bias_back(q), bias_back(k), bias_back(v)]);
        }
        let norm = NormOperands { x: Slot::X, w: Param::InputNorm, y: Slot::N1, rstd: Slot::R1 };
        steps.extend(self.normed_linears((Param::Qkv, AdapterSite::Qkv), &dqkv, &norm));
        steps
    }

    /// The gradient of a branch: that of the residual stream, or, with dropout, a masked copy in a free slot.
    fn branch(&self) -> SlotCols {
        if self.has_dropout() { Slot::DN.into() } else { Slot::DX.into() }
    }

    fn dropout(&self, site: DropoutSite) -> Option<ProgramStep> {
        self.has_dropout().then_some(ProgramStep::DropoutBack { dy: Slot::DX, dx: Slot::DN, site })
    }

    fn has_dropout(&self) -> bool {
        self.m.dropout.residual > 0.0
    }

    fn adapters(&self, site: AdapterSite) -> Option<AdapterSteps> {
        AdapterSteps::of(self.m.lora.as_ref(), self.block, site)
    }

    /// The gradients of adjacent weights and their adapters, of the normalized input they share, and of the norm.
    fn normed_linears(
        &self,
        (joined, site): (Param, AdapterSite),
        columns: &[SlotCols],
        norm: &NormOperands,
    ) -> Vec<ProgramStep> {
        let trained = trained_matmuls(self.block, joined, columns);
        let adapters = self.adapters(site);
        let is_needed = !trained.is_empty() || adapters.is_some();
        let recompute_output = self.recompute == Recompute::Selective && is_needed;
        let normed = if recompute_output { Slot::DN } else { norm.y };
        let mut weights: Vec<ProgramStep> =
            trained.into_iter().map(|(w, dy)| weight_back(dy, normed, w)).collect();
        let all = matmuls(self.block, joined, columns).into_iter().enumerate();
        let inputs = all.map(|(i, (w, dy))| input_back(dy, w, Slot::DN, i > 0)).collect();
        let inputs = input_grads(inputs, adapters.as_ref(), Slot::DN);
        let mut hidden = Vec::new();
        if let Some(adapters) = adapters {
            hidden = adapters.hidden_grads(columns);
            weights.extend(adapters.weight_grads(columns, normed.into()));
        }
        let norm = ProgramStep::NormBack {
            dy: Slot::DN.into(),
            x: norm.x.into(),
            w: norm.w,
            rstd: norm.rstd,
            dx: Slot::DX.into(),
            add: true,
            recompute_output,
        };
        if recompute_output {
            [hidden, inputs, vec![norm], weights].concat()
        } else {
            [hidden, weights, inputs, vec![norm]].concat()
        }
    }
}

fn weight_back(dy: SlotCols, x: Slot, w: Param) -> ProgramStep {
    ProgramStep::LinearBackWeight { dy, x: x.into(), w }
}

fn input_back(dy: SlotCols, w: Param, dx: Slot, add: bool) -> ProgramStep {
    ProgramStep::LinearBackInput { dy, w, dx: dx.into(), add }
}

fn bias_back((of, dy): (Projection, SlotCols)) -> ProgramStep {
    ProgramStep::BiasBack { dy, b: Param::BiasOf(of) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::units;
    use crate::{Architecture, Biases, Dropout, Freeze};

    /// The first block of a model in which the tensors that match these patterns are frozen.
    fn block(shape: &ModelShape, frozen: &[&str]) -> UnitShape {
        let freeze = Freeze::Matching(frozen.iter().map(ToString::to_string).collect());
        units(shape, &freeze, false).swap_remove(1)
    }

    const FROZEN: [&[&str]; 6] = [
        &[],
        &["*"],
        &["*norm"],
        &["*k_proj", "*up_proj"],
        &["*self_attn*"],
        &["*down_proj", "*o_proj", "*bias"],
    ];

    fn shapes() -> Vec<ModelShape> {
        let llama = ModelShape::named("tiny", 300).unwrap();
        let biases = Biases { qkv: true, out: true, mlp: true };
        vec![
            ModelShape { architecture: Architecture::Qwen3, tied: true, ..llama.clone() },
            ModelShape { architecture: Architecture::Qwen3, biases, ..llama.clone() },
            ModelShape { biases, ..llama.clone() },
            ModelShape { biases, dropout: Dropout { attention: 0.1, residual: 0.1 }, ..llama.clone() },
            with_padding(),
            ModelShape { ffn: 172, biases, ..llama.clone() },
            llama,
        ]
    }

    /// A shape with padding between all projections.
    fn with_padding() -> ModelShape {
        let tiny = ModelShape::named("tiny", 300).unwrap();
        ModelShape { dim: 60, heads: 3, kv_heads: 1, head_dim: 20, ffn: 50, ..tiny }
    }

    #[test]
    fn no_slot_is_read_before_it_is_written() {
        for (shape, frozen) in shapes().iter().flat_map(|shape| FROZEN.map(|frozen| (shape, frozen))) {
            let modes = [Recompute::None, Recompute::Selective, Recompute::Full];
            for (recompute, shares) in modes.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
                let p = block_programs(shape, &block(shape, frozen), recompute, shares);
                let check = |program: &Program, mut available: Vec<Slot>| {
                    for step in &program.steps {
                        for slot in step.reads() {
                            assert!(
                                available.contains(&slot),
                                "{recompute:?}: {step:?} reads {slot:?} too early"
                            );
                        }
                        available.extend(step.writes());
                    }
                    available
                };
                let after = check(&p.forward, vec![Slot::X]);
                assert!(after.contains(&Slot::Y) && p.saved.iter().all(|s| after.contains(s)));
                let after = check(&p.recompute, vec![Slot::X]);
                assert!(p.recomputed.iter().all(|s| after.contains(s)));
                let available =
                    p.saved.iter().chain(&p.recomputed).copied().chain([Slot::X, Slot::DX]).collect();
                check(&p.backward, available);
            }
        }
    }

    #[test]
    fn every_trained_weight_gets_exactly_one_gradient() {
        for (shape, frozen) in shapes().iter().flat_map(|shape| FROZEN.map(|frozen| (shape, frozen))) {
            let block = block(shape, frozen);
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                let p = block_programs(shape, &block, recompute, false);
                for segment in &block.segments {
                    let times = p.backward.steps.iter().filter(|s| match s {
                        ProgramStep::LinearBackWeight { w, .. } | ProgramStep::BiasBack { b: w, .. } => {
                            w.parts().contains(&segment.param)
                        }
                        // A frozen norm has the step too, for the gradient of its input.
                        ProgramStep::NormBack { w, .. } => *w == segment.param && segment.is_trained(),
                        _ => false,
                    });
                    assert_eq!(times.count(), usize::from(segment.is_trained()), "{}", segment.name);
                }
            }
        }
    }

    #[test]
    fn nothing_is_saved_for_frozen_weights() {
        let shape = ModelShape::named("tiny", 300).unwrap();
        let saved =
            |frozen: &[&str]| block_programs(&shape, &block(&shape, frozen), Recompute::None, false).saved;
        let without = |slots: &[Slot]| {
            saved(&[]).into_iter().filter(|slot| !slots.contains(slot)).collect::<Vec<Slot>>()
        };
        assert_eq!(saved(&["*down_proj"]), without(&[Slot::S]));
        assert_eq!(saved(&["*q_proj", "*k_proj", "*v_proj"]), without(&[Slot::N1]));
        assert_eq!(saved(&["*q_proj"]), without(&[]), "keys and values need it");
        assert_eq!(saved(&["*"]), without(&[Slot::N1, Slot::N2, Slot::S]));
    }

    /// Adjacent weights are joined, weights with padding between them are not.
    #[test]
    fn projections_of_one_input_are_one_matmul_if_adjacent() {
        let matmuls = |shape: &ModelShape| -> Vec<Param> {
            let linear =
                |s: &ProgramStep| if let ProgramStep::Linear { w, .. } = s { Some(*w) } else { None };
            block_programs(shape, &block(shape, &[]), Recompute::None, false)
                .forward
                .steps
                .iter()
                .filter_map(linear)
                .collect()
        };
        let llama = ModelShape::named("tiny", 300).unwrap();
        assert_eq!(matmuls(&llama), [Param::Qkv, Param::O, Param::GateUp, Param::Down]);
        use Param::*;
        assert_eq!(matmuls(&with_padding()), [Q, K, V, O, Gate, Up, Down]);
        assert_eq!(matmuls(&ModelShape { ffn: 170, ..llama }), [Qkv, O, Gate, Up, Down]);
        for name in ["15m", "90m", "300m", "1b", "7b"] {
            assert_eq!(matmuls(&ModelShape::named(name, 300).unwrap()), [Qkv, O, GateUp, Down], "{name}");
        }
    }

    #[test]
    fn the_gradient_of_a_shared_input_is_overwritten_once() {
        for shape in shapes() {
            let steps = block_programs(&shape, &block(&shape, &[]), Recompute::None, false).backward.steps;
            let into_dn: Vec<bool> = steps
                .iter()
                .filter_map(|s| match s {
                    ProgramStep::LinearBackInput { dx, add, .. } if dx.slot == Slot::DN => Some(*add),
                    _ => None,
                })
                .collect();
            assert_eq!(into_dn.iter().filter(|add| !**add).count(), 2, "gate and up, queries to values");
        }
    }

    #[test]
    fn parameter_counts_of_the_named_sizes() {
        let params = |name, vocab| -> u64 {
            let shape = ModelShape::named(name, vocab).unwrap();
            units(&shape, &Freeze::Nothing, false).iter().map(|u| u.params()).sum()
        };
        assert_eq!(params("15m", 4096), 8_335_008);
        assert_eq!(params("90m", 4096), 91_245_312);
        assert_eq!(params("7b", 32_000), 6_738_415_616);
    }

    #[test]
    fn groups_are_ordered_and_aligned() {
        for shape in shapes() {
            for unit in units(&shape, &Freeze::Nothing, false) {
                assert!(unit.segments.iter().all(|s| s.start % 256 == 0));
                assert!(
                    unit.segments.windows(2).all(|w| w[0].decay >= w[1].decay && w[0].start < w[1].start)
                );
                assert_eq!(unit.trained_elems, unit.elems);
            }
            let decaying = &units(&shape, &Freeze::Nothing, true)[1].segments;
            assert!(decaying.iter().all(|s| s.decay), "norms and biases decay if configured");
            let plain = &units(&shape, &Freeze::Nothing, false)[1];
            assert!(plain.segments.iter().all(|s| s.decay == (s.shape.len() == 2)));
            assert!(units(&shape, &Freeze::All, false).iter().all(|u| u.trained_elems == 0));
        }
    }
}
