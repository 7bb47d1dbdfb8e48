//! Frozen weights in 4 bits: training has the bits of training with the weights that the codes stand for, everywhere.

use lockstep_config::StrategyName;
use lockstep_core::{DType, Mesh, Rank};
use lockstep_engine::Engine;
use lockstep_ops::nf4::{self, Quantised};
use lockstep_plan::{
    BufferKind, MemoryTier, ModelId, ModelPlan, ModelRole, ParamState, PlanInput, RunPlan, build,
};
use lockstep_shape::{Architecture, Biases, Lora, ModelShape, Recompute, Segment, WeightFormat};
use lockstep_testkit::{
    CarrierKind, Case, CaseTraining, TestBatch, TestSetup, TrainingTrace, engine, input, pairwise_cases,
    run_case_from, run_case_of, run_in_world, run_plan_in_world, score, score_with,
};

/// A model with adapters whose frozen projections have 4 bits.
fn nf4(base: &ModelShape) -> ModelShape {
    let targets = ["q_proj".to_string(), "v_proj".into(), "mlp.*".into()];
    let targets = Lora::targets_of(&targets, base.layers).unwrap();
    // A projection that is trained as a whole is not quantised.
    let modules_to_save = vec!["layers.1.self_attn.o_proj".to_string()];
    let lora = Lora { rank: 4, alpha: 12.0, dropout: 0.1, rank_stabilized: false, targets, modules_to_save };
    ModelShape { lora: Some(lora), frozen_projections: WeightFormat::Nf4, ..base.clone() }
}

fn plain(shape: &ModelShape) -> ModelShape {
    ModelShape { frozen_projections: WeightFormat::Storage, ..shape.clone() }
}

fn llama() -> ModelShape {
    ModelShape { layers: 3, ..ModelShape::named("tiny", 101).unwrap() }
}

/// Weights whose last block and last group of scales are incomplete, and blocks that cross rows. Nothing is joined.
fn odd() -> ModelShape {
    let biases = Biases { qkv: true, out: true, mlp: true };
    let architecture = Architecture::Qwen3;
    ModelShape { architecture, biases, dim: 60, heads: 3, kv_heads: 1, head_dim: 22, ffn: 333, ..llama() }
}

fn tensors(engine: &Engine, model: ModelId) -> impl Iterator<Item = (usize, Segment)> {
    let units = engine.model(model).units().iter().enumerate();
    units.flat_map(|(u, unit)| unit.segments.iter().map(move |s| (u, s.clone())))
}

fn quantised_tensors(engine: &Engine, model: ModelId) -> Vec<(usize, Segment)> {
    tensors(engine, model).filter(|(_, segment)| segment.quantised).collect()
}

/// A part of a tensor, from whichever rank holds it.
fn read(engine: &Engine, model: ModelId, unit: usize, segment: &Segment) -> Vec<f32> {
    let mut values = vec![0f32; segment.elems()];
    let all = 0..values.len();
    assert!(engine.model(model).read_whole(unit, segment, ParamState::Working, all, &mut values).unwrap());
    values
}

/// The weights that the codes of a model with random weights stand for, by name.
fn dequantised(shape: &ModelShape, storage: DType) -> Vec<(String, Vec<f32>)> {
    let engine = engine(shape, &TestSetup { storage, ..TestSetup::default() });
    let tensors = quantised_tensors(&engine, ModelId::FIRST).into_iter();
    let all: Vec<_> =
        tensors.map(|(unit, s)| (s.name.clone(), read(&engine, ModelId::FIRST, unit, &s))).collect();
    assert!(all.len() > shape.layers);
    all
}

/// Replaces tensors of a model in the storage type.
fn write(engine: &mut Engine, model: ModelId, tensors: &[(String, Vec<f32>)]) {
    for (name, values) in tensors {
        let (unit, segment) = engine.model(model).find_tensor(name).unwrap();
        let (unit, segment) = (unit, segment.clone());
        let all = 0..values.len();
        engine.model_mut(model).write(unit, &segment, ParamState::Working, all, values).unwrap();
    }
}

/// Random weights are those of a model in the storage type, quantised: codes, scales and all.
#[test]
fn random_weights_are_quantised() {
    for base in [llama(), odd()] {
        let shape = nf4(&base);
        let whole = engine(&plain(&shape), &TestSetup::default());
        for storage in [DType::F32, DType::BF16, DType::F16] {
            for (name, got) in dequantised(&shape, storage) {
                let (unit, segment) = whole.model(ModelId::FIRST).find_tensor(&name).unwrap();
                let weights = read(&whole, ModelId::FIRST, unit, segment);
                let quantised: Quantised = nf4::quantise(&lockstep_device::Pool::new(1), &weights);
                let mut want = vec![0f32; weights.len()];
                nf4::dequantise_on_host(
                    storage,
                    &quantised.codes,
                    &quantised.quantise_scales(),
                    0,
                    &mut want,
                );
                assert!(got == want, "{name} in {storage}");
                let far = got.iter().zip(&weights).filter(|(got, weight)| (*got - **weight).abs() > 0.02);
                assert!(got != weights && far.count() == 0, "{name}");
            }
        }
    }
}

/// Parts of any size are read alike on ranks that hold all of a tensor and on ranks that hold some of it.
#[test]
fn parts_are_read_under_every_sharding() {
    let shape = nf4(&odd());
    let want = dequantised(&shape, DType::F32);
    for ranks in [1, 2, 3] {
        let mesh = Mesh { replicate: 1, shard: ranks, per_node: ranks };
        let setup = TestSetup { strategy: StrategyName::Zero3, mesh, ..TestSetup::default() };
        run_in_world(&shape, &setup, CarrierKind::Thread, None, &|engine: &mut Engine| {
            for (name, want) in &want {
                let model = engine.model(ModelId::FIRST);
                let (unit, segment) = model.find_tensor(name).unwrap();
                for part in [0..want.len(), 63..65, 7..1000, want.len() - 1..want.len(), 256..256] {
                    let mut got = vec![0f32; part.len()];
                    let working = ParamState::Working;
                    assert!(model.read_whole(unit, segment, working, part.clone(), &mut got).unwrap());
                    assert!(got == want[part.clone()], "{name} {part:?} on {ranks} ranks");
                }
            }
        });
    }
}

/// The cases in which parameters are on the device; others are refused.
fn cases() -> impl Iterator<Item = Case> {
    pairwise_cases().into_iter().filter(|case| case.params == MemoryTier::Device)
}

/// A run has the same losses, norms, adapters and states, to the bit, as the same run whose frozen weights are what the
/// codes stand for, under every strategy, with any mesh, accumulation, recomputation, prefetch, offload and carrier.
#[test]
fn training_has_the_bits_of_dequantised_weights() {
    let mut covered = 0;
    for (base, step) in [(llama(), 1), (odd(), 4)] {
        let shape = nf4(&base);
        let mut known: Vec<(Case, TrainingTrace)> = Vec::new();
        for case in cases().step_by(step) {
            let baseline = case.baseline();
            if !known.iter().any(|(one, _)| *one == baseline) {
                let weights = dequantised(&shape, case.storage);
                let prepare = |engine: &mut Engine| write(engine, ModelId::FIRST, &weights);
                let trace = run_case_from(&plain(&shape), &baseline, CaseTraining::ADAMW, &prepare);
                known.push((baseline, trace));
            }
            let (_, want) = known.iter().find(|(one, _)| *one == baseline).expect("just run");
            let got = run_case_of(&shape, &case, CaseTraining::ADAMW);
            assert!(got == *want, "{case}: differs from training with dequantised weights");
            covered += 1;
        }
    }
    assert!(covered > 20, "{covered} cases");
}

/// Without adapters a frozen model is scored as if its weights were what the codes stand for.
#[test]
fn scoring_has_the_bits_of_dequantised_weights() {
    let batch = TestBatch::random(&[20, 9, 30], 101, 5);
    for base in [llama(), odd()] {
        let shape = ModelShape { lora: None, ..nf4(&base) };
        for storage in [DType::F32, DType::BF16] {
            let setup = TestSetup { storage, evaluates: true, frozen: &["*"], ..TestSetup::default() };
            let mut quantised = engine(&shape, &setup);
            let tensors = quantised_tensors(&quantised, ModelId::FIRST).into_iter();
            let weights: Vec<_> =
                tensors.map(|(u, s)| (s.name.clone(), read(&quantised, ModelId::FIRST, u, &s))).collect();
            let mut whole = engine(&plain(&shape), &setup);
            let before = score(&mut whole, &batch);
            write(&mut whole, ModelId::FIRST, &weights);
            assert!(score(&mut quantised, &batch) == score(&mut whole, &batch));
            assert!(score(&mut quantised, &batch) != before, "quantisation changes weights");
        }
    }
}

/// The reference of a policy with adapters uses the same codes.
#[test]
fn a_reference_shares_the_codes() {
    let shape = nf4(&llama());
    let reference = ModelId(1);
    let batch = TestBatch::random(&[20, 9, 30], 101, 5);
    for (strategy, ranks) in [(StrategyName::Ddp, 1), (StrategyName::Zero3, 2)] {
        let mesh = Mesh { replicate: 1, shard: ranks, per_node: ranks };
        let setup = TestSetup { strategy, mesh, evaluates: true, ..TestSetup::default() };
        let plan = with_shared_reference(&shape, &setup);
        let codes = plan
            .buffers
            .iter()
            .filter(|buffer| matches!(buffer.kind, BufferKind::ParamState { state: ParamState::Codes, .. }));
        assert_eq!(codes.count(), shape.layers);
        let scores = run_plan_in_world(&plan, &setup, CarrierKind::Thread, None, &|engine: &mut Engine| {
            // The adapters of the policy are not its reference's.
            let scored = score_with(engine, reference, &batch);
            let base = tensors(engine, reference).filter(|(_, segment)| !segment.is_adapter());
            let weights: Vec<_> =
                base.map(|(u, s)| (s.name.clone(), read(engine, reference, u, &s))).collect();
            (scored, weights)
        });
        for (scored, weights) in scores {
            let bare = ModelShape { lora: None, ..plain(&shape) };
            let alone = TestSetup { evaluates: true, ..TestSetup::default() };
            let mut whole = engine(&bare, &alone);
            write(&mut whole, ModelId::FIRST, &weights);
            assert!(score(&mut whole, &batch) == scored, "{strategy}");
        }
    }
}

fn with_shared_reference(shape: &ModelShape, setup: &TestSetup) -> RunPlan {
    let one = input(shape, setup);
    let settings = lockstep_testkit::settings(shape, setup);
    let reference: ModelPlan =
        one.models[0].without_adapters(ModelId::FIRST, ModelRole::Reference, &settings);
    let models = vec![one.models[0].clone(), reference];
    build(PlanInput { models, ..one }, Rank(0)).expect("a sound plan")
}

/// However many units there are, one of them exists dequantised.
#[test]
fn one_unit_is_dequantised_at_a_time() {
    for (strategy, ranks) in [(StrategyName::Ddp, 1), (StrategyName::Zero3, 2)] {
        let mesh = Mesh { replicate: 1, shard: ranks, per_node: ranks };
        let bytes = |layers: usize| {
            let shape = nf4(&ModelShape { layers, ..llama() });
            let setup = TestSetup {
                strategy,
                mesh,
                prefetch: 0,
                recompute: Recompute::Full,
                generates: Some((2, 64)),
                ..TestSetup::default()
            };
            let plan = lockstep_testkit::plan(&shape, &setup);
            let peak = |phase: &lockstep_plan::Phase| {
                let whole = |id: &&lockstep_plan::BufferId| {
                    let kind = plan.buffers[id.0 as usize].kind;
                    matches!(kind, BufferKind::UnshardedParams { unit, .. } if (1..=layers as u32).contains(&unit))
                };
                phase.memory.peak.iter().filter(whole).count()
            };
            plan.phases.iter().map(peak).collect::<Vec<_>>()
        };
        assert_eq!(bytes(2), bytes(6), "{strategy}");
        assert!(bytes(6).iter().all(|count| *count <= 1), "{strategy}");
    }
}
