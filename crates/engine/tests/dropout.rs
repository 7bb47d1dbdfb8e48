//! Dropout masks depend only on the seed, the step and the sample. So recompute, packing, micro-batches, threads and
//! ranks do not change gradients. Scoring uses no dropout.

use lockstep_core::{DType, Mesh, Rank};
use lockstep_engine::{Engine, UpdateRule, UpdateSettings};
use lockstep_plan::{ModelId, ParamState};
use lockstep_shape::{Architecture, Biases, Dropout, ModelShape, Recompute};
use lockstep_testkit::{CarrierKind, TestBatch, TestObjective, TestSetup, engine, run_in_world, score};

const STILL: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 0.0,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.0,
    max_norm: None,
};

fn shapes() -> Vec<ModelShape> {
    let biases = Biases { qkv: true, out: true, mlp: true };
    let dropout = Dropout { attention: 0.2, residual: 0.1 };
    let llama = ModelShape { vocab: 101, dropout, ..ModelShape::named("tiny", 101).unwrap() };
    vec![
        ModelShape { dropout: Dropout { residual: 0.0, ..dropout }, ..llama.clone() },
        ModelShape { dropout: Dropout { attention: 0.0, ..dropout }, ..llama.clone() },
        ModelShape { biases, architecture: Architecture::Qwen3, tied: true, ..llama },
    ]
}

/// Documents whose sample indices differ from their positions in the batch.
fn batch(seed: u64) -> TestBatch {
    let mut micro_batch = TestBatch::random(&[50, 3, 70, 20], 101, seed);
    micro_batch.samples = vec![900, 17, 4, 33];
    micro_batch
}

/// Values by name.
type Tensors = Vec<(String, Vec<f32>)>;

fn grads(engine: &Engine) -> Tensors {
    let mut all = Vec::new();
    for (u, unit) in engine.model(ModelId::FIRST).units().iter().enumerate() {
        for segment in &unit.segments {
            let mut values = vec![0.0; segment.elems()];
            assert!(
                engine
                    .model(ModelId::FIRST)
                    .read(u, segment, ParamState::Grad, 0..segment.elems(), &mut values)
                    .unwrap()
            );
            all.push((segment.name.clone(), values));
        }
    }
    all
}

/// One step: log-probabilities and gradients.
fn step(engine: &mut Engine, micro_batches: Vec<TestBatch>, t: u64) -> (Vec<Vec<f32>>, Tensors) {
    let mut window = TestObjective::new(micro_batches);
    engine.model_mut(ModelId::FIRST).train_step(&mut window, &UpdateSettings { t, ..STILL }).unwrap();
    (window.log_probs.clone(), grads(engine))
}

fn assert_near(got: &Tensors, want: &Tensors, tolerance: f64) {
    for ((name, got), (_, want)) in got.iter().zip(want) {
        let norm = |xs: &mut dyn Iterator<Item = f64>| xs.map(|x| x * x).sum::<f64>().sqrt();
        let difference = norm(&mut got.iter().zip(want).map(|(g, w)| f64::from(*g) - f64::from(*w)));
        let size = norm(&mut want.iter().map(|w| f64::from(*w)));
        assert!(difference <= tolerance * size, "{name}: {difference:e} of {size:e}");
    }
}

#[test]
fn recompute_and_threads_do_not_change_masks() {
    for shape in shapes() {
        for storage in [DType::F32, DType::BF16] {
            let run = |recompute, threads| {
                let mut engine =
                    engine(&shape, &TestSetup { recompute, threads, storage, ..TestSetup::default() });
                engine.set_seed(5);
                step(&mut engine, vec![batch(1)], 3)
            };
            let kept = run(Recompute::None, 2);
            assert!(kept == run(Recompute::Selective, 1), "selective, {storage:?}");
            assert!(kept == run(Recompute::Full, 3), "full, {storage:?}");
        }
    }
}

#[test]
fn masks_depend_on_seed_step_and_sample_but_not_on_packing() {
    for shape in shapes() {
        let mut engine = engine(&shape, &TestSetup::default());
        let mut run = |seed, t, micro_batch: TestBatch| {
            engine.set_seed(seed);
            step(&mut engine, vec![micro_batch], t).0.remove(0)
        };
        let whole = run(5, 3, batch(1));
        assert_eq!(whole, run(5, 3, batch(1)));
        assert_ne!(whole, run(6, 3, batch(1)));
        assert_ne!(whole, run(5, 4, batch(1)));
        let other = TestBatch { samples: vec![901, 17, 4, 33], ..batch(1) };
        let changed = run(5, 3, other);
        assert_ne!(whole[..50], changed[..50]);
        assert_eq!(whole[50..], changed[50..]);
        // A document alone or in another order has the same bits.
        assert_eq!(whole[53..123], run(5, 3, batch(1).select(&[2])));
        let turned = run(5, 3, batch(1).select(&[2, 0]));
        assert_eq!((&whole[53..123], &whole[..50]), (&turned[..70], &turned[70..]));
    }
}

/// That dropout preserves the mean is tested with the operation itself: after norms and softmax, the mean of many passes
/// is not the pass without dropout.
#[test]
fn scoring_uses_no_dropout() {
    for shape in shapes() {
        let mut engine = engine(&shape, &TestSetup { evaluates: true, ..TestSetup::default() });
        let micro_batch = batch(1);
        let before = score(&mut engine, &micro_batch);
        assert_ne!(before, step(&mut engine, vec![micro_batch.clone()], 1).0[0], "training uses dropout");
        assert_eq!(before, score(&mut engine, &micro_batch), "training left no mask behind");
    }
}

/// Central differences of the loss, with the mask fixed by seed, step and samples.
#[test]
fn gradients_match_finite_differences_under_a_fixed_mask() {
    for shape in shapes() {
        let mut engine = engine(&shape, &TestSetup::default());
        engine.set_seed(9);
        let loss = |engine: &mut Engine| {
            let mut window = TestObjective::new(vec![batch(2)]);
            engine
                .model_mut(ModelId::FIRST)
                .train_step(&mut window, &UpdateSettings { t: 2, ..STILL })
                .unwrap();
            window.loss()
        };
        loss(&mut engine);
        let grads = grads(&engine);
        let units = engine.model(ModelId::FIRST).units().to_vec();
        let squares: f64 = grads.iter().flat_map(|(_, g)| g).map(|g| f64::from(*g).powi(2)).sum();
        // The slope along the gradient is its norm.
        let mut at = |by: f64| {
            let mut all = grads.iter();
            for (u, unit) in units.iter().enumerate() {
                for segment in &unit.segments {
                    let (range, grad) = (0..segment.elems(), &all.next().unwrap().1);
                    let mut values = vec![0.0; segment.elems()];
                    assert!(
                        engine
                            .model(ModelId::FIRST)
                            .read(u, segment, ParamState::Working, range.clone(), &mut values)
                            .unwrap()
                    );
                    values.iter_mut().zip(grad).for_each(|(v, g)| *v += (by * f64::from(*g)) as f32);
                    engine
                        .model_mut(ModelId::FIRST)
                        .write(u, segment, ParamState::Working, range, &values)
                        .unwrap();
                }
            }
            loss(&mut engine)
        };
        let step = 2e-3 / squares.sqrt();
        let (above, below) = (at(step), at(-2.0 * step));
        let slope = (above - below) / (2.0 * step);
        assert!((slope / squares - 1.0).abs() < 1e-2, "slope {slope}, norm {squares}");
    }
}

#[test]
fn micro_batches_and_ranks_do_not_change_masks() {
    let shape = shapes().remove(2);
    let whole = batch(1);
    let denominator = whole.tokens.len() as f64;
    let one = {
        let mut engine = engine(&shape, &TestSetup::default());
        engine.set_seed(5);
        step(&mut engine, vec![whole.clone()], 3).1
    };
    let split = {
        let mut engine = engine(&shape, &TestSetup { num_micro_batches: 2, ..TestSetup::default() });
        engine.set_seed(5);
        step(&mut engine, vec![whole.select(&[2, 1]), whole.select(&[3, 0])], 3).1
    };
    assert_near(&split, &one, 2e-5);
    let setup = TestSetup { mesh: Mesh::on_one_node(2, 1), ..TestSetup::default() };
    let ranks = run_in_world(&shape, &setup, CarrierKind::Thread, None, &|engine: &mut Engine| {
        engine.set_seed(5);
        let mine = if engine.rank() == Rank(0) { [2, 1] } else { [3, 0] };
        let mut window = TestObjective { denominator, ..TestObjective::new(vec![whole.select(&mine)]) };
        engine.model_mut(ModelId::FIRST).train_step(&mut window, &UpdateSettings { t: 3, ..STILL }).unwrap();
        grads(engine)
    });
    assert!(ranks[0] == ranks[1]);
    assert_near(&ranks[0], &one, 2e-5);
}
