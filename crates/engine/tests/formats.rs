//! Formats of masters, gradients and optimizer states: the same bits under every strategy and in every memory, and what
//! they mean.

use std::collections::BTreeSet;

use lockstep_config::StrategyName;
use lockstep_core::{DType, Mesh};
use lockstep_engine::{UpdateRule, UpdateSettings};
use lockstep_plan::{
    AccumulationOrder, BufferKind, MasterFormat, MemoryTier, ModelId, ParamState, StateFormat,
};
use lockstep_shape::ModelShape;
use lockstep_testkit::{
    Case, CaseTraining, TestBatch, TestObjective, TestSetup, assert_same_as_plain_ddp, engine,
    pairwise_cases, plan, read_state,
};

/// The cases that cover every pair of settings, with bf16 weights and one micro-batch, which some formats need.
fn cases() -> Vec<Case> {
    let mut seen = BTreeSet::new();
    let bf16 =
        |case: Case| Case { storage: DType::BF16, accumulation: (1, AccumulationOrder::Local), ..case };
    pairwise_cases().into_iter().map(bf16).filter(|case| seen.insert(case.to_string())).collect()
}

#[test]
fn weights_without_masters_and_bf16_states() {
    assert_same_as_plain_ddp(
        cases(),
        CaseTraining {
            masters: MasterFormat::None,
            grad_dtype: DType::BF16,
            states: StateFormat::Bf16,
            ..CaseTraining::ADAMW
        },
    );
}

#[test]
fn eight_bit_states() {
    assert_same_as_plain_ddp(cases(), CaseTraining { states: StateFormat::Int8, ..CaseTraining::ADAMW });
}

#[test]
fn eight_bit_states_of_lion_without_masters_and_with_frozen_tensors() {
    assert_same_as_plain_ddp(
        cases(),
        CaseTraining {
            rule: UpdateRule::Lion { betas: (0.9, 0.99) },
            frozen: &["*norm", "model.layers.1.mlp"],
            masters: MasterFormat::None,
            grad_dtype: DType::BF16,
            states: StateFormat::Int8,
        },
    );
}

#[test]
fn bf16_gradients_with_masters() {
    assert_same_as_plain_ddp(cases(), CaseTraining { grad_dtype: DType::BF16, ..CaseTraining::ADAMW });
}

const UPDATES: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 1e-2,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.1,
    max_norm: Some(1.0),
};

fn tiny() -> ModelShape {
    ModelShape { vocab: 101, layers: 2, ..ModelShape::named("tiny", 101).unwrap() }
}

/// Bytes per parameter of a state, in each memory.
fn bytes_per_param(setup: &TestSetup, state: ParamState) -> [f64; 3] {
    let plan = plan(&tiny(), setup);
    let params: usize = plan.input.models[0].units.iter().map(|unit| unit.elems).sum();
    [MemoryTier::Device, MemoryTier::Host, MemoryTier::Nvme].map(|tier| {
        let of_state =
            |kind: &BufferKind| matches!(kind, BufferKind::ParamState { state: one, .. } if *one == state);
        let buffers = plan.buffers.iter().filter(|buffer| buffer.tier == tier && of_state(&buffer.kind));
        buffers.map(|buffer| buffer.bytes().0).sum::<u64>() as f64 / params as f64
    })
}

/// A master takes two bytes where it lies beside its weight, and four elsewhere.
#[test]
fn masters_beside_their_weights_are_remainders() {
    use MemoryTier::{Device, Host, Nvme};
    let zero3 = TestSetup { storage: DType::BF16, strategy: StrategyName::Zero3, ..TestSetup::default() };
    for (params_tier, optimizer_tier, want) in [
        (Device, Device, [2.0, 0.0, 0.0]),
        (Device, Host, [0.0, 4.0, 0.0]),
        (Device, Nvme, [0.0, 0.0, 4.0]),
        (Host, Host, [0.0, 2.0, 0.0]),
        (Host, Nvme, [0.0, 0.0, 2.0]),
        (Nvme, Nvme, [0.0, 0.0, 2.0]),
    ] {
        let setup = TestSetup { params_tier, optimizer_tier, ..zero3 };
        let got = bytes_per_param(&setup, ParamState::Master);
        assert_eq!(got, want, "parameters {params_tier}, optimizer {optimizer_tier}");
    }
    let half = TestSetup { storage: DType::F16, ..zero3 };
    assert_eq!(bytes_per_param(&half, ParamState::Master), [4.0, 0.0, 0.0]);
}

/// The leanest formats take eight bytes a parameter, with AdamW: weights, gradients and two moments in bf16.
#[test]
fn the_leanest_formats_take_eight_bytes() {
    let spec = UPDATES.rule.spec();
    let setup = TestSetup {
        storage: DType::BF16,
        masters: MasterFormat::None,
        grad_dtype: DType::BF16,
        optimizer: spec.in_format(StateFormat::Bf16),
        ..TestSetup::default()
    };
    let states = [ParamState::Working, ParamState::Grad, ParamState::Optimizer(0), ParamState::Optimizer(1)];
    assert_eq!(states.map(|state| bytes_per_param(&setup, state)[0]), [2.0; 4]);
    assert_eq!(bytes_per_param(&setup, ParamState::Master), [0.0; 3]);
    let int8 = TestSetup { optimizer: spec.in_format(StateFormat::Int8), ..setup };
    assert_eq!(bytes_per_param(&int8, ParamState::Optimizer(0))[0], 1.0);
    assert_eq!(bytes_per_param(&int8, ParamState::Scales(0))[0], 4.0 / 256.0);
}

/// Gradients in bf16 are those in f32, rounded once.
#[test]
fn rounded_gradients_are_the_sums_rounded() {
    let gradients = |grad_dtype: DType, mesh: Mesh| {
        let setup = TestSetup { storage: DType::BF16, grad_dtype, mesh, ..TestSetup::default() };
        let mut engine = engine(&tiny(), &setup);
        let mut window = TestObjective::new(vec![TestBatch::random(&[20, 9], 101, 3)]);
        engine.model_mut(ModelId::FIRST).train_step(&mut window, &UPDATES).unwrap();
        read_state(&engine, ParamState::Grad)
    };
    let [whole, rounded] = [DType::F32, DType::BF16].map(|dtype| gradients(dtype, Mesh::SINGLE));
    let nearest_even = |g: &f32| {
        let bits = g.to_bits();
        f32::from_bits((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16)
    };
    let want: Vec<f32> = whole.iter().map(nearest_even).collect();
    assert!(rounded == want && rounded != whole);
}

/// Every format learns: after some steps on the same batch, losses are close to those with f32 throughout.
#[test]
fn every_format_learns() {
    let log_prob = |masters, grad_dtype, states| {
        let optimizer = UPDATES.rule.spec().in_format(states);
        let setup =
            TestSetup { storage: DType::BF16, masters, grad_dtype, optimizer, ..TestSetup::default() };
        let mut engine = engine(&tiny(), &setup);
        engine.set_seed(5);
        let mut sum = 0.0;
        for t in 1..=20 {
            let mut window = TestObjective::new(vec![TestBatch::random(&[20, 9], 101, 3)]);
            let updates = UpdateSettings { t, ..UPDATES };
            engine.model_mut(ModelId::FIRST).train_step(&mut window, &updates).unwrap();
            sum = window.log_probs.iter().flatten().sum::<f32>() / 29.0;
        }
        sum
    };
    let whole = log_prob(MasterFormat::F32, DType::F32, StateFormat::F32);
    assert!(whole > -1.0, "{whole}: the model did not learn the batch");
    for masters in [MasterFormat::F32, MasterFormat::None] {
        for grads in [DType::F32, DType::BF16] {
            for states in StateFormat::ALL {
                let got = log_prob(masters, grads, states);
                assert!((got - whole).abs() < 0.15, "{masters:?}, {grads}, {states:?}: {got}, not {whole}");
            }
        }
    }
}
