//! Low-rank adapters: their gradients follow from those of the merged weights, they cost no bit elsewhere, and they train
//! alike under every strategy.

use lockstep_core::DType;
use lockstep_core::rng::{Purpose, RngStream};
use lockstep_engine::{Engine, UpdateRule, UpdateSettings};
use lockstep_plan::{ModelId, ParamState};
use lockstep_shape::{ALL_LINEAR, Architecture, Biases, Lora, ModelShape, Recompute, Segment};
use lockstep_testkit::{
    CaseTraining, TestBatch, TestObjective, TestSetup, engine, pairwise_cases, run_case_of, score,
};

const UPDATES: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 1e-2,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.1,
    max_norm: None,
};

fn with_lora(base: &ModelShape, targets: &[&str], rank: usize, dropout: f64) -> ModelShape {
    let targets: Vec<String> = targets.iter().map(ToString::to_string).collect();
    let targets = Lora::targets_of(&targets, base.layers).unwrap();
    let lora = Lora { rank, alpha: 12.0, dropout, rank_stabilized: false, targets, modules_to_save: vec![] };
    ModelShape { lora: Some(lora), ..base.clone() }
}

fn shapes() -> Vec<ModelShape> {
    let tiny = ModelShape { layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    let biases = Biases { qkv: true, out: true, mlp: true };
    vec![
        tiny.clone(),
        ModelShape { architecture: Architecture::Qwen3, biases, tied: true, ..tiny.clone() },
        // No weights are joined.
        ModelShape { dim: 60, heads: 3, kv_heads: 1, head_dim: 20, ffn: 50, ..tiny },
    ]
}

fn tensors(engine: &Engine) -> Vec<(usize, Segment)> {
    let units = engine.model(ModelId::FIRST).units().iter().enumerate();
    units.flat_map(|(u, unit)| unit.segments.iter().map(move |s| (u, s.clone()))).collect()
}

fn read(engine: &Engine, name: &str, state: ParamState) -> Vec<f32> {
    let (unit, segment) = engine.model(ModelId::FIRST).find_tensor(name).unwrap();
    let mut values = vec![0f32; segment.elems()];
    assert!(
        engine.model(ModelId::FIRST).read(unit, segment, state, 0..segment.elems(), &mut values).unwrap()
    );
    values
}

fn write(engine: &mut Engine, name: &str, values: &[f32]) {
    let (unit, segment) = engine.model(ModelId::FIRST).find_tensor(name).unwrap();
    let (unit, segment) = (unit, segment.clone());
    let mut model = engine.model_mut(ModelId::FIRST);
    model.write(unit, &segment, ParamState::Working, 0..values.len(), values).unwrap();
}

/// B starts at zero, where A has no gradient: give it other values.
fn fill_b(engine: &mut Engine) {
    for (i, (_, segment)) in tensors(engine).into_iter().enumerate() {
        if segment.name.ends_with("lora_B.weight") {
            let value = |j: usize| ((i * 7919 + j * 104_729) % 2003) as f32 / 2003.0 * 0.2 - 0.1;
            write(engine, &segment.name, &(0..segment.elems()).map(value).collect::<Vec<_>>());
        }
    }
}

fn window() -> TestObjective {
    TestObjective::new(vec![TestBatch::random(&[20, 9, 30], 101, 5)])
}

fn step(engine: &mut Engine) -> (TestObjective, f64) {
    let mut objective = window();
    let report = engine.model_mut(ModelId::FIRST).train_step(&mut objective, &UPDATES).unwrap();
    (objective, report.grad_norm)
}

/// dL/dA = scale · Bᵀ·G and dL/dB = scale · G·Aᵀ, where G is the gradient of the merged weight W + scale · B·A.
#[test]
fn gradients_follow_from_those_of_merged_weights() {
    let targets: [&[&str]; 3] =
        [&[ALL_LINEAR], &["q_proj", "v_proj", "down_proj"], &["layers.1.*", "o_proj"]];
    for (i, base) in shapes().iter().enumerate() {
        for (j, recompute) in [Recompute::None, Recompute::Selective, Recompute::Full].into_iter().enumerate()
        {
            let (rank, targets) = ([8, 3, 16][(i + j) % 3], targets[j]);
            let shape = with_lora(base, targets, rank, 0.0);
            let scale = f64::from(shape.lora.as_ref().unwrap().scale());
            let setup = TestSetup { recompute, ..TestSetup::default() };
            let (mut adapted, mut merged) = (engine(&shape, &setup), engine(base, &setup));
            fill_b(&mut adapted);
            let mut pairs = Vec::new();
            for (_, segment) in tensors(&adapted).into_iter().filter(|(_, s)| !s.is_adapter()) {
                let mut weight = read(&adapted, &segment.name, ParamState::Working);
                let stem = segment.name.trim_end_matches(".weight");
                let part = |end: &str| {
                    let name = format!("{stem}.{end}.weight");
                    adapted.model(ModelId::FIRST).find_tensor(&name)?;
                    Some(read(&adapted, &name, ParamState::Working))
                };
                if let (Some(a), Some(b)) = (part("lora_A"), part("lora_B")) {
                    let cols = segment.shape[1];
                    for (at, value) in weight.iter_mut().enumerate() {
                        let (row, col) = (at / cols, at % cols);
                        let sum =
                            (0..rank).map(|k| f64::from(b[row * rank + k]) * f64::from(a[k * cols + col]));
                        *value = (f64::from(*value) + scale * sum.sum::<f64>()) as f32;
                    }
                    pairs.push((segment.clone(), a, b));
                }
                write(&mut merged, &segment.name, &weight);
            }
            assert!(!pairs.is_empty());
            let ((here, _), (there, _)) = (step(&mut adapted), step(&mut merged));
            let near = |a: &f32, b: &f32| (a - b).abs() <= 2e-4 * (1.0 + b.abs());
            let log_probs = here.log_probs.iter().flatten().zip(there.log_probs.iter().flatten());
            assert!(log_probs.into_iter().all(|(a, b)| near(a, b)), "{targets:?} {recompute:?}");
            for (segment, a, b) in pairs {
                let g = read(&merged, &segment.name, ParamState::Grad);
                let (rows, cols) = (segment.shape[0], segment.shape[1]);
                let g = |row: usize, col: usize| f64::from(g[row * cols + col]);
                let of_a = |at: usize| {
                    let (k, col) = (at / cols, at % cols);
                    (0..rows).map(|row| f64::from(b[row * rank + k]) * g(row, col)).sum::<f64>() * scale
                };
                let of_b = |at: usize| {
                    let (row, k) = (at / rank, at % rank);
                    (0..cols).map(|col| g(row, col) * f64::from(a[k * cols + col])).sum::<f64>() * scale
                };
                let stem = segment.name.trim_end_matches(".weight");
                assert_gradient(&adapted, &format!("{stem}.lora_A.weight"), rank * cols, &of_a);
                assert_gradient(&adapted, &format!("{stem}.lora_B.weight"), rows * rank, &of_b);
            }
        }
    }
}

fn assert_gradient(engine: &Engine, name: &str, len: usize, want: &dyn Fn(usize) -> f64) {
    let found = read(engine, name, ParamState::Grad);
    let want: Vec<f64> = (0..len).map(want).collect();
    let size = (want.iter().map(|x| x * x).sum::<f64>() / len as f64).sqrt();
    for (at, (found, want)) in found.iter().zip(&want).enumerate() {
        assert!((f64::from(*found) - want).abs() <= 1e-3 * size, "{name}[{at}]: {found}, expected {want}");
    }
}

/// New adapters do not change what the model computes, to the bit, because B is zero.
#[test]
fn new_adapters_change_nothing() {
    for storage in [DType::F32, DType::BF16] {
        let base = &shapes()[0];
        let setup = TestSetup { storage, ..TestSetup::default() };
        let adapted = step(&mut engine(&with_lora(base, &[ALL_LINEAR], 8, 0.0), &setup)).0;
        let plain = step(&mut engine(base, &setup)).0;
        assert!(adapted.log_probs == plain.log_probs, "{storage}");
    }
}

/// Recomputation, with and without dropout, changes no bit of the adapters' gradients.
#[test]
fn recomputation_changes_no_bit() {
    for base in shapes() {
        for dropout in [0.0, 0.3] {
            let shape = with_lora(&base, &[ALL_LINEAR], 8, dropout);
            let run = |recompute: Recompute| {
                let mut engine = engine(&shape, &TestSetup { recompute, ..TestSetup::default() });
                fill_b(&mut engine);
                engine.set_seed(11);
                let (objective, norm) = step(&mut engine);
                let trained = tensors(&engine).into_iter().filter(|(_, s)| s.is_trained());
                let grads: Vec<Vec<f32>> =
                    trained.map(|(_, s)| read(&engine, &s.name, ParamState::Grad)).collect();
                assert!(norm > 0.0);
                (objective.log_probs, grads)
            };
            let none = run(Recompute::None);
            assert!(run(Recompute::Selective) == none && run(Recompute::Full) == none, "dropout {dropout}");
        }
    }
}

/// Dropout reaches the adapters' inputs, and nothing else.
#[test]
fn dropout_changes_only_what_adapters_add() {
    let base = &shapes()[0];
    let run = |dropout: f64, fills: bool| {
        let mut engine = engine(&with_lora(base, &[ALL_LINEAR], 8, dropout), &TestSetup::default());
        if fills {
            fill_b(&mut engine);
        }
        engine.set_seed(11);
        step(&mut engine).0.log_probs
    };
    assert!(run(0.3, false) == run(0.0, false), "B is zero");
    assert!(run(0.3, true) != run(0.0, true));
}

/// The weights of a model with adapters are frozen: no gradient, no optimizer state, no change.
#[test]
fn weights_are_frozen() {
    let mut engine = engine(&with_lora(&shapes()[0], &["q_proj"], 4, 0.0), &TestSetup::default());
    let names: Vec<String> =
        tensors(&engine).into_iter().filter(|(_, s)| !s.is_adapter()).map(|(_, s)| s.name).collect();
    let before: Vec<_> = names.iter().map(|name| read(&engine, name, ParamState::Working)).collect();
    step(&mut engine);
    for (name, before) in names.iter().zip(before) {
        assert!(read(&engine, name, ParamState::Working) == before, "{name}");
        let (unit, segment) = engine.model(ModelId::FIRST).find_tensor(name).unwrap();
        assert!(!segment.is_trained());
        let mut none = [0f32; 1];
        assert!(
            !engine.model(ModelId::FIRST).read(unit, segment, ParamState::Grad, 0..1, &mut none).unwrap()
        );
    }
}

/// The same bits under every strategy, memory tier and carrier.
#[test]
fn adapters_have_the_same_bits_under_every_strategy() {
    let trained = CaseTraining::ADAMW;
    let tiny = ModelShape { layers: 3, ..ModelShape::named("tiny", 101).unwrap() };
    let shape = with_lora(&tiny, &["q_proj", "v_proj", "mlp.*"], 4, 0.1);
    let mut plain = Vec::new();
    for case in pairwise_cases().into_iter().step_by(2) {
        let base = case.baseline();
        if !plain.iter().any(|(known, _)| *known == base) {
            plain.push((base, run_case_of(&shape, &base, trained)));
        }
        let (_, want) = plain.iter().find(|(known, _)| *known == base).expect("just run");
        assert!(run_case_of(&shape, &case, trained) == *want, "{case}: adapters differ from plain ddp");
    }
}

/// Documents in which every token has four equally likely successors: no model reaches a loss below ln 4.
fn four_successors(documents: usize, seed: u64) -> TestBatch {
    const LENGTH: usize = 30;
    let total = documents * LENGTH;
    let draw = |index: usize, below: u64| {
        let stream = RngStream::new(seed, Purpose::Sampling, 0, 0);
        stream.below(index as u32, below) as u32
    };
    let (mut tokens, mut targets) = (Vec::new(), Vec::new());
    let mut token = draw(total, 101);
    for index in 0..total {
        let next = (7 * token + 11 * draw(index, 4) + 1) % 101;
        tokens.push(token);
        targets.push(next);
        token = next;
    }
    let bounds = (0..=documents).map(|d| (d * LENGTH) as u32).collect();
    TestBatch::new(tokens, targets, vec![1.0; total], bounds)
}

/// Adapters of full rank can express every update of their weights: training them ends where training the weights does.
#[test]
fn adapters_of_full_rank_reach_full_training() {
    const STEPS: u64 = 400;
    const OTHERS: &[&str] = &["*embed_tokens", "*norm", "*self_attn", "*gate_proj"];
    let base = ModelShape { layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    let full_rank = base.dim.min(base.ffn);
    let mut adapted = with_lora(&base, &["up_proj", "down_proj"], full_rank, 0.0);
    let lora = adapted.lora.as_mut().expect("just set");
    lora.alpha = full_rank as f64;
    // The head's random weights are too small for certain answers, so it is trained in both.
    lora.modules_to_save = vec!["lm_head".into()];
    let held_out = four_successors(8, 1);
    let trained = |shape: &ModelShape, frozen: &'static [&'static str], peak: f64| {
        let setup = TestSetup { frozen, evaluates: true, poison: false, ..TestSetup::default() };
        let mut engine = engine(shape, &setup);
        let loss = |engine: &mut Engine| {
            let log_probs = score(engine, &held_out);
            -log_probs.iter().sum::<f32>() / log_probs.len() as f32
        };
        let before = loss(&mut engine);
        for t in 1..=STEPS {
            let mut window = TestObjective::new(vec![four_successors(8, 1 + t)]);
            let lr = peak * (1.0 - (t - 1) as f64 / STEPS as f64);
            let updates = UpdateSettings { t, lr, weight_decay: 0.0, ..UPDATES };
            engine.model_mut(ModelId::FIRST).train_step(&mut window, &updates).unwrap();
        }
        (before, loss(&mut engine))
    };
    let (before, full) = trained(&base, OTHERS, 1e-2);
    let (same, lora) = trained(&adapted, &[], 2e-2);
    assert!(before == same && before > 4.0, "{before}, {same}");
    assert!(full < 2.0, "{full}: full training did not learn");
    assert!((lora / full - 1.0).abs() < 0.01, "adapters reach {lora}, full training {full}");
}
