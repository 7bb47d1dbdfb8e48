//! Several models of different families and sizes in one engine: one is trained while another is scored.

use lockstep_config::StrategyName;
use lockstep_core::{Mesh, Rank};
use lockstep_engine::{Engine, UpdateRule, UpdateSettings};
use lockstep_plan::{MemoryTier, ModelId, ModelRole, ParamState, PlanInput, RunPlan, build};
use lockstep_shape::{Architecture, ModelShape};
use lockstep_testkit::{
    CarrierKind, TestBatch, TestObjective, TestSetup, input, model, run_in_world, run_plan_in_world,
    score_with,
};

const POLICY: ModelId = ModelId(0);
const REFERENCE: ModelId = ModelId(1);
const VALUE: ModelId = ModelId(2);

const UPDATES: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 1e-2,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.1,
    max_norm: Some(1.0),
};

fn policy() -> ModelShape {
    ModelShape { layers: 2, ..ModelShape::named("tiny", 101).unwrap() }
}

/// A model of another family: wider and deeper, with another vocabulary and other rotary angles.
fn reference() -> ModelShape {
    let tiny = ModelShape::named("tiny", 77).unwrap();
    ModelShape {
        architecture: Architecture::Qwen3,
        layers: 3,
        dim: 96,
        heads: 6,
        kv_heads: 3,
        head_dim: 16,
        ffn: 128,
        tied: true,
        ..tiny
    }
}

fn micro_batch(vocab: usize, seed: u64) -> TestBatch {
    TestBatch::random(&[20, 9], vocab, seed)
}

/// A plan with the policy of `setup`, a reference with longer micro-batches, and a value model with other placements.
fn plan(setup: &TestSetup) -> RunPlan {
    let longer = TestSetup { tokens: 512, max_doc: 200, generates: None, ..*setup };
    let whole = TestSetup {
        strategy: StrategyName::Ddp,
        params_tier: MemoryTier::Device,
        optimizer_tier: MemoryTier::Device,
        tokens: 256,
        ..*setup
    };
    // The workspace of the wider model is enough for all.
    let one = input(&reference(), &longer);
    let models = vec![
        model(ModelRole::Policy, &policy(), setup),
        model(ModelRole::Reference, &reference(), &longer),
        model(ModelRole::Value, &policy(), &whole),
    ];
    build(PlanInput { models, ..one }, Rank(0)).expect("a valid plan")
}

fn train(engine: &mut Engine, id: ModelId, vocab: usize, t: u64) -> (u64, Vec<Vec<f32>>) {
    let mut window = TestObjective::new(vec![micro_batch(vocab, 100 * t + u64::from(engine.rank().0))]);
    window.denominator *= f64::from(engine.plan().input.mesh.world_size());
    let report = engine.model_mut(id).train_step(&mut window, &UpdateSettings { t, ..UPDATES }).unwrap();
    (report.grad_norm.to_bits(), window.log_probs)
}

fn weights(engine: &Engine, id: ModelId) -> Vec<u32> {
    let model = engine.model(id);
    let mut bits = Vec::new();
    for (u, unit) in model.units().iter().enumerate() {
        for segment in &unit.segments {
            let mut values = vec![0f32; segment.elems()];
            assert!(
                model.read_whole(u, segment, ParamState::Working, 0..segment.elems(), &mut values).unwrap()
            );
            bits.extend(values.iter().map(|v| v.to_bits()));
        }
    }
    bits
}

/// Norms and log-probabilities of a model's steps.
type StepResults = Vec<(u64, Vec<Vec<f32>>)>;
/// The policy's steps, the reference's scores, the policy's weights.
type PolicyAndReference = (StepResults, Vec<Vec<f32>>, Vec<u32>);

/// Trains the policy and scores the reference after each step. Returns the results of both.
fn train_and_score(engine: &mut Engine) -> (PolicyAndReference, Vec<u32>) {
    let (mut steps, mut scores) = (Vec::new(), Vec::new());
    let at_start = weights(engine, REFERENCE);
    for t in 1..=3 {
        steps.push(train(engine, POLICY, policy().vocab, t));
        let seed = 7 * t + u64::from(engine.rank().0);
        // Longer than the policy's bounds allow.
        let long = TestBatch::random(&[150, 180], reference().vocab, seed);
        scores.push(score_with(engine, REFERENCE, &long));
        if t == 2 {
            train(engine, VALUE, policy().vocab, 1);
        }
    }
    // After running another model, reads return the weights of the requested model.
    score_with(engine, REFERENCE, &micro_batch(reference().vocab, 1));
    let policy = weights(engine, POLICY);
    assert!(weights(engine, REFERENCE) == at_start, "scoring changed the reference");
    ((steps, scores, policy), weights(engine, VALUE))
}

/// The policy alone, with the same initial weights.
fn policy_alone(setup: &TestSetup, nvme_dir: &std::path::Path) -> Vec<(StepResults, Vec<u32>)> {
    run_in_world(&policy(), setup, CarrierKind::Thread, Some(nvme_dir), &|engine| {
        let steps = (1..=3).map(|t| train(engine, POLICY, policy().vocab, t)).collect();
        (steps, weights(engine, POLICY))
    })
}

/// The reference alone.
fn reference_alone(setup: &TestSetup) -> Vec<Vec<Vec<f32>>> {
    let setup = TestSetup { tokens: 512, max_doc: 200, evaluates: true, ..*setup };
    run_in_world(&reference(), &setup, CarrierKind::Thread, None, &|engine| {
        // The initial weights of an engine's second model.
        engine.model_mut(ModelId::FIRST).initialise(8).unwrap();
        let rank = u64::from(engine.rank().0);
        let long = |t: u64| TestBatch::random(&[150, 180], reference().vocab, 7 * t + rank);
        (1..=3).map(|t| score_with(engine, ModelId::FIRST, &long(t))).collect()
    })
}

/// One model is trained while the other is scored, with the same results as if each were alone: under zero3, on one rank,
/// with states and parameters on the host and on NVMe.
#[test]
fn models_of_two_families_share_an_engine() {
    let zero3 = TestSetup {
        strategy: StrategyName::Zero3,
        mesh: Mesh::on_one_node(1, 2),
        threads: 1,
        ..TestSetup::default()
    };
    let setups = [
        TestSetup { threads: 2, ..TestSetup::default() },
        zero3,
        TestSetup { optimizer_tier: MemoryTier::Host, params_tier: MemoryTier::Host, ..zero3 },
        TestSetup { optimizer_tier: MemoryTier::Nvme, params_tier: MemoryTier::Nvme, ..zero3 },
        TestSetup { optimizer_tier: MemoryTier::Host, ..TestSetup::default() },
        TestSetup { separate_memory: true, optimizer_tier: MemoryTier::Host, ..TestSetup::default() },
    ];
    for setup in setups {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(&setup);
        assert_eq!(plan.phases.len(), 3, "two are trained, one is scored");
        let both = run_plan_in_world(&plan, &setup, CarrierKind::Thread, Some(dir.path()), &train_and_score);
        let (policies, references) =
            (policy_alone(&setup, dir.path()), reference_alone(&zero_params(&setup)));
        for (rank, ((steps, scores, policy), value)) in both.iter().enumerate() {
            let words = format!("{} of {setup:?}", Rank(rank as u32));
            assert!(*steps == policies[rank].0, "the policy's steps differ on {words}");
            assert!(*policy == policies[rank].1, "the policy's weights differ on {words}");
            assert!(*scores == references[rank], "the reference's scores differ on {words}");
            assert!(value != policy, "the value model has the policy's weights on {words}");
        }
    }
}

/// The same setup with parameters on the device, for a model that is only scored.
fn zero_params(setup: &TestSetup) -> TestSetup {
    TestSetup { params_tier: MemoryTier::Device, optimizer_tier: MemoryTier::Device, ..*setup }
}

#[test]
#[should_panic(expected = "model 1 of a plan of 1")]
fn an_unknown_model_id_panics() {
    lockstep_testkit::engine(&policy(), &TestSetup::default()).model(REFERENCE);
}
