//! Frozen tensors have no gradient, no optimizer state and no part in the norm, and do not change a bit of the others.

use lockstep_core::DType;
use lockstep_engine::{Engine, UpdateRule, UpdateSettings};
use lockstep_plan::{AccumulationOrder, ModelId, ParamState};
use lockstep_shape::{Architecture, Biases, Freeze, ModelShape, Recompute, Segment};
use lockstep_testkit::{
    CaseTraining, TestBatch, TestObjective, TestSetup, engine, pairwise_cases, run_case_with,
};

const UPDATES: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 1e-2,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.1,
    // No clipping: the norm includes trained tensors only, so the clip factor would differ.
    max_norm: None,
};

const PATTERNS: [&[&str]; 6] = [
    // Parts of two joined weights.
    &["*k_proj", "*up_proj"],
    // All matrices of the blocks.
    &["*self_attn*", "*mlp*"],
    &["*norm*", "*bias"],
    // Units below, between and above trained ones.
    &["*embed_tokens", "model.layers.0", "model.layers.2"],
    &["lm_head", "model.norm"],
    &["model.layers.*.mlp.down_proj", "*o_proj"],
];

fn tensors(engine: &Engine) -> Vec<(usize, Segment)> {
    let units = engine.model(ModelId::FIRST).units().iter().enumerate();
    units.flat_map(|(u, unit)| unit.segments.iter().map(move |s| (u, s.clone()))).collect()
}

fn read(engine: &Engine, (unit, segment): &(usize, Segment), state: ParamState) -> Option<Vec<f32>> {
    let mut values = vec![0f32; segment.elems()];
    let there =
        engine.model(ModelId::FIRST).read(*unit, segment, state, 0..segment.elems(), &mut values).unwrap();
    there.then_some(values)
}

fn window(num_micro_batches: u32, t: u64) -> TestObjective {
    TestObjective::new(
        (0..num_micro_batches).map(|m| TestBatch::random(&[20, 9, 30], 101, 10 * t + u64::from(m))).collect(),
    )
}

/// Compares with a run that trains all tensors and restores the weights of the frozen ones after every step.
fn assert_same_as_restored(shape: &ModelShape, frozen: &'static [&'static str], setup: TestSetup) {
    let words = format!("{frozen:?}, {setup:?}");
    let (mut part, mut all) = (engine(shape, &TestSetup { frozen, ..setup }), engine(shape, &setup));
    let freeze = Freeze::Matching(frozen.iter().map(ToString::to_string).collect());
    let everything = tensors(&all);
    let held: Vec<_> = everything.iter().filter(|(_, s)| freeze.freezes(&s.name)).collect();
    assert!(!held.is_empty(), "{words}");
    let start: Vec<_> = held.iter().map(|tensor| read(&all, tensor, ParamState::Working).unwrap()).collect();
    for t in 1..=3 {
        let updates = UpdateSettings { t, ..UPDATES };
        let [mut here, mut there] = [0, 1].map(|_| window(setup.num_micro_batches, t));
        let norm = part.model_mut(ModelId::FIRST).train_step(&mut here, &updates).unwrap().grad_norm;
        all.model_mut(ModelId::FIRST).train_step(&mut there, &updates).unwrap();
        assert!(here.log_probs == there.log_probs, "step {t}: log-probabilities differ: {words}");
        let mut squares = 0.0;
        for tensor in tensors(&part).iter().filter(|(_, s)| s.is_trained()) {
            let full = everything.iter().find(|(_, s)| s.name == tensor.1.name).unwrap();
            let gradient = read(&part, tensor, ParamState::Grad).unwrap();
            squares += gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>();
            for state in
                [ParamState::Grad, ParamState::Working, ParamState::Optimizer(0), ParamState::Optimizer(1)]
            {
                let [mine, theirs] = [read(&part, tensor, state), read(&all, full, state)];
                assert!(mine == theirs, "step {t}: {state:?} of {} differs: {words}", tensor.1.name);
            }
        }
        assert!((norm - squares.sqrt()).abs() <= 1e-6 * norm, "the norm includes frozen tensors: {words}");
        for ((unit, segment), values) in held.iter().zip(&start) {
            let elems = 0..segment.elems();
            all.model_mut(ModelId::FIRST).write(*unit, segment, ParamState::Working, elems, values).unwrap();
        }
    }
    for (tensor, values) in tensors(&part).iter().filter(|(_, s)| !s.is_trained()).zip(&start) {
        assert!(
            read(&part, tensor, ParamState::Grad).is_none()
                && read(&part, tensor, ParamState::Optimizer(0)).is_none()
        );
        // Frozen tensors have no master copy, so they are compared in the storage type.
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= b.abs() / 256.0;
        let mine = read(&part, tensor, ParamState::Working).unwrap();
        assert!(mine.iter().zip(values).all(close), "{} was changed: {words}", tensor.1.name);
    }
}

#[test]
fn freezing_does_not_change_the_other_tensors() {
    let tiny = ModelShape { layers: 3, ..ModelShape::named("tiny", 101).unwrap() };
    let biases = Biases { qkv: true, out: true, mlp: true };
    let shapes = [
        tiny.clone(),
        ModelShape { architecture: Architecture::Qwen3, biases, ..tiny.clone() },
        // No weights are joined.
        ModelShape { dim: 60, heads: 3, kv_heads: 1, head_dim: 20, ffn: 50, ..tiny },
    ];
    for (i, frozen) in PATTERNS.into_iter().enumerate() {
        for (j, recompute) in [Recompute::None, Recompute::Selective, Recompute::Full].into_iter().enumerate()
        {
            let storage = if (i + j) % 2 == 0 { DType::F32 } else { DType::BF16 };
            let num_micro_batches = 1 + (i + j) as u32 % 2;
            let order = if j == 1 { AccumulationOrder::Reduced } else { AccumulationOrder::Local };
            for shape in &shapes {
                assert_same_as_restored(
                    shape,
                    frozen,
                    TestSetup { recompute, storage, num_micro_batches, order, ..TestSetup::default() },
                );
            }
        }
    }
}

/// A frozen tied table is frozen for the head too.
#[test]
fn a_frozen_tied_table_is_not_trained_by_the_head() {
    let tied = ModelShape { layers: 2, tied: true, ..ModelShape::named("tiny", 101).unwrap() };
    assert_same_as_restored(&tied, &["*embed_tokens"], TestSetup::default());
    assert_same_as_restored(
        &tied,
        &["model.layers.0", "*norm*"],
        TestSetup { num_micro_batches: 2, ..TestSetup::default() },
    );
}

/// Trained and frozen flat parameters are sharded separately, in every memory tier.
#[test]
fn frozen_tensors_have_the_same_bits_under_every_strategy() {
    let rule = UPDATES.rule;
    for (offset, frozen) in [(0, PATTERNS[0]), (1, PATTERNS[3])] {
        let trained = CaseTraining { rule, frozen, ..CaseTraining::ADAMW };
        let mut plain = Vec::new();
        for case in pairwise_cases().into_iter().skip(offset).step_by(2) {
            let base = case.baseline();
            if !plain.iter().any(|(known, _)| *known == base) {
                plain.push((base, run_case_with(&base, trained)));
            }
            let (_, want) = plain.iter().find(|(known, _)| *known == base).expect("just run");
            assert!(run_case_with(&case, trained) == *want, "{case}: {frozen:?} differs from plain ddp");
        }
    }
}
