//! Compares the whole model with PyTorch and transformers: log-probabilities of every token, the gradient of every
//! parameter, ten AdamW steps. `goldens/README.md` describes how the files were made.

use lockstep_core::DType;
use lockstep_engine::{Engine, UpdateRule, UpdateSettings};
use lockstep_plan::{ModelId, ParamState};
use lockstep_shape::{Biases, ModelShape, Recompute, Rope};
use lockstep_testkit::{Golden, TestObjective, TestSetup, engine};

const CASES: [&str; 11] = [
    "llama-untied",
    "llama-tied",
    "llama-llama3",
    "llama-biases",
    "mistral",
    "mistral-full-linear",
    "qwen2",
    "qwen2-window-yarn",
    "qwen3",
    "qwen3-tied",
    "qwen3-window-yarn",
];
const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];
const STILL: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 0.0,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.0,
    max_norm: None,
};

fn load(engine: &mut Engine, golden: &Golden) {
    let units = engine.model(ModelId::FIRST).units().to_vec();
    for (u, unit) in units.iter().enumerate() {
        for segment in &unit.segments {
            let mut values = vec![0.0; segment.elems()];
            golden.folder.read_f32(&segment.name, &segment.shape, 0..segment.elems(), &mut values).unwrap();
            engine
                .model_mut(ModelId::FIRST)
                .write(u, segment, ParamState::Working, 0..segment.elems(), &values)
                .unwrap();
        }
    }
}

fn tensors(engine: &Engine, state: ParamState) -> Vec<(String, Vec<f32>)> {
    let mut all = Vec::new();
    for (u, unit) in engine.model(ModelId::FIRST).units().iter().enumerate() {
        for segment in &unit.segments {
            let mut values = vec![0.0; segment.elems()];
            assert!(
                engine
                    .model(ModelId::FIRST)
                    .read(u, segment, state, 0..segment.elems(), &mut values)
                    .unwrap()
            );
            all.push((segment.name.clone(), values));
        }
    }
    all
}

fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |xs: &mut dyn Iterator<Item = f64>| xs.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(g, w)| f64::from(*g) - f64::from(*w)));
    difference / norm(&mut want.iter().map(|w| f64::from(*w))).max(1e-30)
}

/// The log softmax of the golden logits.
fn log_softmax(golden: &Golden) -> Vec<f32> {
    let rows = golden.f32("logits");
    rows.chunks(golden.shape.vocab)
        .flat_map(|row| {
            let largest = row.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
            let sum: f64 = row.iter().map(|x| f64::from(x - largest).exp()).sum();
            row.iter().map(move |x| (f64::from(x - largest) - sum.ln()) as f32)
        })
        .collect()
}

/// The engine does not return logits, so every vocabulary entry is used as the target once: that gives
/// log softmax(logits), entry by entry.
fn all_log_probs(engine: &mut Engine, golden: &Golden) -> Vec<f32> {
    let batch = golden.batch();
    let (tokens, vocab) = (batch.tokens.len(), golden.shape.vocab);
    let mut all = vec![0.0; tokens * vocab];
    for target in 0..vocab {
        let mut micro_batch = batch.clone();
        micro_batch.targets.fill(target as u32);
        let mut window = TestObjective::new(vec![micro_batch]);
        engine.model_mut(ModelId::FIRST).train_step(&mut window, &STILL).unwrap();
        for (t, log_prob) in window.log_probs[0].iter().enumerate() {
            all[t * vocab + target] = *log_prob;
        }
    }
    all
}

#[test]
fn logits_match_to_1e_5() {
    for case in CASES {
        let golden = Golden::open(case);
        let mut engine = engine(&golden.shape, &TestSetup::default());
        load(&mut engine, &golden);
        let error = relative_error(&all_log_probs(&mut engine, &golden), &log_softmax(&golden));
        assert!(error < 1e-5, "{case}: {error:e}");
    }
}

/// Without the features of its family, the logits of a golden model are wrong. So the goldens test those features.
#[test]
fn goldens_depend_on_the_features_of_each_family() {
    let window = |shape: &mut ModelShape| shape.window = None;
    let rope = |shape: &mut ModelShape| shape.rope = Rope::plain(shape.rope.theta);
    let biases = |shape: &mut ModelShape| shape.biases = Biases::default();
    type Remove = fn(&mut ModelShape);
    let all: [(&str, Remove); 10] = [
        ("mistral", window),
        ("qwen2-window-yarn", window),
        ("qwen3-window-yarn", window),
        ("mistral-full-linear", rope),
        ("qwen2-window-yarn", rope),
        ("qwen3-window-yarn", rope),
        ("llama-llama3", rope),
        ("llama-biases", biases),
        ("qwen2", biases),
        ("qwen3-window-yarn", biases),
    ];
    for (case, remove) in all {
        let mut golden = Golden::open(case);
        let whole = golden.shape.clone();
        remove(&mut golden.shape);
        assert_ne!(golden.shape, whole, "{case}");
        let mut engine = engine(&golden.shape, &TestSetup::default());
        load(&mut engine, &golden);
        let mut window = TestObjective::new(vec![golden.batch()]);
        engine.model_mut(ModelId::FIRST).train_step(&mut window, &STILL).unwrap();
        let error = relative_error(&window.log_probs[0], &golden.f32("logp"));
        assert!(error > 1e-3, "{case}: {error:e}");
    }
}

#[test]
fn half_precision_folders_load() {
    for case in ["llama-tied-f16", "qwen3-tied-bf16"] {
        let golden = Golden::open(case);
        let mut engine = engine(&golden.shape, &TestSetup::default());
        load(&mut engine, &golden);
        let error = relative_error(&all_log_probs(&mut engine, &golden), &log_softmax(&golden));
        assert!(error < 1e-5, "{case}: {error:e}");
    }
}

#[test]
fn every_gradient_matches_to_1e_4() {
    for case in CASES {
        let golden = Golden::open(case);
        for recompute in RECOMPUTE {
            let mut engine = engine(&golden.shape, &TestSetup { recompute, ..TestSetup::default() });
            load(&mut engine, &golden);
            let mut window = TestObjective::new(vec![golden.batch()]);
            engine.model_mut(ModelId::FIRST).train_step(&mut window, &STILL).unwrap();
            let loss = f64::from(golden.f32("loss")[0]);
            assert!((window.loss() - loss).abs() < 1e-5 * loss, "{case}: loss {} not {loss}", window.loss());
            assert!(relative_error(&window.log_probs[0], &golden.f32("logp")) < 1e-5, "{case}");
            for (name, grad) in tensors(&engine, ParamState::Grad) {
                let error = relative_error(&grad, &golden.f32(&format!("grad.{name}")));
                assert!(error < 1e-4, "{case} {recompute:?} {name}: {error:e}");
            }
        }
    }
}

/// Losses, norms and weights with warmup, a cosine schedule, weight decay on matrices only, clipping and two
/// micro-batches.
#[test]
fn ten_adamw_steps_match() {
    for case in CASES {
        let golden = Golden::open(case);
        let (losses, norms, rates) =
            (golden.f32("steps.losses"), golden.f32("steps.grad_norms"), golden.f32("steps.lr"));
        let mut engine = engine(&golden.shape, &TestSetup { num_micro_batches: 2, ..TestSetup::default() });
        load(&mut engine, &golden);
        for (s, micro_batches) in golden.step_batches().into_iter().enumerate() {
            let mut window = TestObjective::new(micro_batches.to_vec());
            let updates = UpdateSettings {
                t: s as u64 + 1,
                lr: f64::from(rates[s]),
                weight_decay: 0.1,
                max_norm: Some(1.0),
                ..STILL
            };
            let report = engine.model_mut(ModelId::FIRST).train_step(&mut window, &updates).unwrap();
            let loss = f64::from(losses[s]);
            assert!(
                (window.loss() - loss).abs() < 1e-4 * loss.abs(),
                "{case} step {s}: {} not {loss}",
                window.loss()
            );
            let norm = f64::from(norms[s]);
            assert!(
                (report.grad_norm - norm).abs() < 1e-3 * norm,
                "{case} step {s}: norm {}",
                report.grad_norm
            );
        }
        for (name, weights) in tensors(&engine, ParamState::Working) {
            let error = relative_error(&weights, &golden.f32(&format!("steps.final.{name}")));
            assert!(error < 2e-4, "{case} {name}: {error:e}");
        }
    }
}

/// Losses with bf16 and fp16 storage follow those of f32 within rounding. fp16, with a loss scale, is closer.
#[test]
fn losses_in_half_precision_are_close_to_f32() {
    for (storage, scale, within) in [(DType::BF16, 1.0, 3e-2), (DType::F16, 1024.0, 4e-3)] {
        for case in CASES {
            let golden = Golden::open(case);
            let (losses, rates) = (golden.f32("steps.losses"), golden.f32("steps.lr"));
            let mut engine =
                engine(&golden.shape, &TestSetup { num_micro_batches: 2, storage, ..TestSetup::default() });
            load(&mut engine, &golden);
            engine.set_loss_scale(scale);
            for (s, micro_batches) in golden.step_batches().into_iter().enumerate() {
                let mut window = TestObjective::new(micro_batches.to_vec());
                let lr = f64::from(rates[s]);
                let updates =
                    UpdateSettings { t: s as u64 + 1, lr, weight_decay: 0.1, max_norm: Some(1.0), ..STILL };
                assert!(
                    !engine.model_mut(ModelId::FIRST).train_step(&mut window, &updates).unwrap().skipped,
                    "{case} step {s}"
                );
                let (found, loss) = (window.loss(), f64::from(losses[s]));
                assert!(
                    (found - loss).abs() < within * loss,
                    "{storage} {case} step {s}: {found} not {loss}"
                );
            }
        }
    }
}
