//! Settings that must not change a bit: recompute, threads, the head chunk, the fused head, a document's position in a
//! pack. Settings that may change rounding only: the accumulation order, the split into micro-batches.

use lockstep_core::DType;
use lockstep_engine::{Engine, UpdateRule, UpdateSettings};
use lockstep_plan::{AccumulationOrder, MemoryTier, ModelId, ParamState};
use lockstep_shape::{Architecture, Biases, ModelShape, Recompute, SlidingWindow};
use lockstep_testkit::{TestBatch, TestObjective, TestSetup, engine};

const UPDATES: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 1e-2,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.1,
    max_norm: Some(1.0),
};

fn shapes() -> Vec<ModelShape> {
    let llama = ModelShape { vocab: 101, layers: 3, ..ModelShape::named("tiny", 101).unwrap() };
    let qwen = ModelShape { architecture: Architecture::Qwen3, tied: true, head_dim: 20, ..llama.clone() };
    let sliding = ModelShape {
        biases: Biases { qkv: true, out: true, mlp: true },
        window: Some(SlidingWindow { keys: 20, layers: vec![true, false, true] }),
        ..llama.clone()
    };
    vec![llama, qwen, sliding]
}

fn windows(vocab: usize) -> Vec<Vec<TestBatch>> {
    (0..3)
        .map(|s| {
            vec![
                TestBatch::random(&[50, 3, 70], vocab, 2 * s),
                TestBatch::random(&[1, 65, 64, 20], vocab, 2 * s + 1),
            ]
        })
        .collect()
}

/// Runs three steps and returns the bits of losses, norms and all states.
fn run(shape: &ModelShape, setup: &TestSetup) -> Vec<u64> {
    let mut engine = engine(shape, setup);
    let mut bits = Vec::new();
    for (s, micro_batches) in windows(shape.vocab).into_iter().enumerate() {
        let mut window = TestObjective::new(micro_batches);
        let report = engine
            .model_mut(ModelId::FIRST)
            .train_step(&mut window, &UpdateSettings { t: s as u64 + 1, ..UPDATES })
            .unwrap();
        bits.push(window.loss().to_bits());
        bits.push(report.grad_norm.to_bits());
    }
    bits.extend(state_bits(&engine));
    bits
}

fn state_bits(engine: &Engine) -> Vec<u64> {
    let mut bits = Vec::new();
    for (u, unit) in engine.model(ModelId::FIRST).units().iter().enumerate() {
        for segment in &unit.segments {
            for state in std::iter::once(ParamState::Working)
                .chain(engine.model(ModelId::FIRST).plan().optimizer.states())
            {
                let mut values = vec![0f32; segment.elems()];
                engine
                    .model(ModelId::FIRST)
                    .read(u, segment, state, 0..segment.elems(), &mut values)
                    .unwrap();
                bits.extend(values.iter().map(|v| u64::from(v.to_bits())));
            }
        }
    }
    bits
}

/// With poisoned memory the results are the same.
#[test]
fn poison_changes_no_bit() {
    let shape = &shapes()[0];
    let clean = TestSetup { num_micro_batches: 2, poison: false, ..TestSetup::default() };
    assert!(run(shape, &clean) == run(shape, &TestSetup { poison: true, ..clean }));
    for (poison, at_least) in [(false, 0), (true, clean.tokens * shape.dim)] {
        let mut engine = engine(shape, &TestSetup { poison, ..clean });
        let mut window = TestObjective::new(windows(shape.vocab).remove(0));
        engine.model_mut(ModelId::FIRST).train_step(&mut window, &UPDATES).unwrap();
        let found = engine.poisoned_words();
        assert!(found >= at_least && (found > 0) == poison, "{found} words");
    }
}

/// Batches for a device with its own memory are padded to whole blocks of tokens; the padding changes nothing.
#[test]
fn separate_device_memory_changes_no_bit() {
    for shape in shapes() {
        for coefficients_ahead in [true, false] {
            let here =
                TestSetup { num_micro_batches: 2, coefficients_ahead, tokens: 512, ..TestSetup::default() };
            let want = run(&shape, &here);
            for (optimizer_tier, optimizer_units_on_device) in
                [(MemoryTier::Device, 0), (MemoryTier::Host, 0), (MemoryTier::Host, 1)]
            {
                let setup =
                    TestSetup { separate_memory: true, optimizer_tier, optimizer_units_on_device, ..here };
                assert_eq!(
                    run(&shape, &setup),
                    want,
                    "{shape:?}, {optimizer_tier} but {optimizer_units_on_device}"
                );
            }
        }
    }
}

#[test]
fn recompute_threads_chunks_and_the_fused_head_change_no_bit() {
    for shape in shapes() {
        for storage in [DType::F32, DType::BF16, DType::F16] {
            let base = TestSetup { num_micro_batches: 2, storage, ..TestSetup::default() };
            let want = run(&shape, &base);
            let others = [
                ("selective", TestSetup { recompute: Recompute::Selective, ..base }),
                ("full", TestSetup { recompute: Recompute::Full, ..base }),
                (
                    "full, then selective",
                    TestSetup { recompute: Recompute::Full, late: Some((Recompute::Selective, 1)), ..base },
                ),
                (
                    "selective, then none",
                    TestSetup { recompute: Recompute::Selective, late: Some((Recompute::None, 2)), ..base },
                ),
                ("one thread", TestSetup { threads: 1, ..base }),
                ("five threads", TestSetup { threads: 5, ..base }),
                ("head in two passes", TestSetup { coefficients_ahead: false, ..base }),
                ("larger bounds", TestSetup { tokens: 512, max_doc: 300, ..base }),
            ];
            for (name, setup) in others {
                assert!(run(&shape, &setup) == want, "{name} changed bits in {storage}");
            }
        }
    }
}

/// A power of two only changes the exponents of gradients, so norms, optimizer states and weights have the same bits.
#[test]
fn a_power_of_two_loss_scale_changes_no_bit() {
    for shape in shapes() {
        let run = |scale: f64, max_norm| {
            let mut engine = engine(&shape, &TestSetup { num_micro_batches: 2, ..TestSetup::default() });
            engine.set_loss_scale(scale);
            let mut bits = Vec::new();
            for (s, micro_batches) in windows(shape.vocab).into_iter().enumerate() {
                let mut window = TestObjective::new(micro_batches);
                let updates = UpdateSettings { t: s as u64 + 1, max_norm, ..UPDATES };
                bits.push(
                    engine
                        .model_mut(ModelId::FIRST)
                        .train_step(&mut window, &updates)
                        .unwrap()
                        .grad_norm
                        .to_bits(),
                );
                bits.push(window.loss().to_bits());
            }
            bits.extend(state_bits(&engine));
            bits
        };
        for max_norm in [Some(0.1), Some(100.0), None] {
            let plain = run(1.0, max_norm);
            assert!(run(65536.0, max_norm) == plain, "{max_norm:?}");
            assert!(run(0.5, max_norm) == plain, "{max_norm:?}");
            // Any other factor changes the rounding.
            assert!(run(1000.0, max_norm) != plain, "{max_norm:?}");
        }
    }
}

/// A step that overflows fp16 is skipped, changes nothing, and the tensor is reported.
#[test]
fn an_overflowing_step_is_skipped_and_reported() {
    let shape = &shapes()[0];
    let mut engine = engine(shape, &TestSetup { storage: DType::F16, ..TestSetup::default() });
    let micro_batch = || TestObjective::new(vec![TestBatch::random(&[50, 3, 70], shape.vocab, 1)]);
    let report = engine.model_mut(ModelId::FIRST).train_step(&mut micro_batch(), &UPDATES).unwrap();
    assert!(!report.skipped);
    assert_eq!(engine.model(ModelId::FIRST).first_non_finite_gradient().unwrap(), None);
    let before = state_bits(&engine);
    engine.set_loss_scale(2f64.powi(60));
    let report = engine
        .model_mut(ModelId::FIRST)
        .train_step(&mut micro_batch(), &UpdateSettings { t: 2, ..UPDATES })
        .unwrap();
    assert!(report.skipped && !report.grad_norm.is_finite());
    assert!(state_bits(&engine) == before);
    assert_eq!(
        engine.model(ModelId::FIRST).first_non_finite_gradient().unwrap().as_deref(),
        Some("model.norm.weight")
    );
    // The next step with a smaller scale is not affected.
    engine.set_loss_scale(1024.0);
    let report = engine
        .model_mut(ModelId::FIRST)
        .train_step(&mut micro_batch(), &UpdateSettings { t: 2, ..UPDATES })
        .unwrap();
    assert!(!report.skipped);
    assert_eq!(engine.model(ModelId::FIRST).first_non_finite_gradient().unwrap(), None);
}

/// A head chunk that is a multiple of the matmul's inner block does not even change the head's weight gradient.
#[test]
fn head_chunks_of_whole_blocks_change_no_bit() {
    let shape = &shapes()[0];
    let micro_batch = || TestBatch::random(&[500, 460], shape.vocab, 3);
    let at = |head_chunk_tokens| {
        let setup = TestSetup { tokens: 1024, max_doc: 512, head_chunk_tokens, ..TestSetup::default() };
        let mut engine = engine(shape, &setup);
        let mut window = TestObjective::new(vec![micro_batch()]);
        engine.model_mut(ModelId::FIRST).train_step(&mut window, &UPDATES).unwrap();
        (window.log_probs, state_bits(&engine))
    };
    let (log_probs, states) = at(1024);
    assert!((log_probs.clone(), states) == at(384));
    // With any other chunk the log-probabilities are the same.
    assert!(log_probs == at(256).0);
    assert!(log_probs == at(7).0);
}

/// A document's log-probabilities have the same bits alone, first, last or between others.
#[test]
fn a_document_does_not_depend_on_its_pack() {
    for shape in shapes() {
        for storage in [DType::F32, DType::BF16, DType::F16] {
            let pack = TestBatch::random(&[50, 3, 70, 1, 65], shape.vocab, 9);
            let mut engine = engine(&shape, &TestSetup { storage, ..TestSetup::default() });
            let still = UpdateSettings { lr: 0.0, weight_decay: 0.0, ..UPDATES };
            let mut of = |docs: &[usize]| {
                let mut window = TestObjective::new(vec![pack.select(docs)]);
                engine.model_mut(ModelId::FIRST).train_step(&mut window, &still).unwrap();
                let (micro_batch, all) = (&window.micro_batches[0], &window.log_probs[0]);
                let bounds = micro_batch.cu_seqlens.windows(2);
                bounds.map(|w| all[w[0] as usize..w[1] as usize].to_vec()).collect::<Vec<_>>()
            };
            let whole = of(&[0, 1, 2, 3, 4]);
            for order in [&[4, 2, 0, 1, 3][..], &[2], &[3, 0], &[1, 4]] {
                for (log_probs, doc) in of(order).into_iter().zip(order) {
                    assert!(log_probs == whole[*doc], "document {doc} in {order:?}");
                }
            }
        }
    }
}

/// The same global batch in one, two or four micro-batches, with documents of different lengths, gives the same gradient
/// up to rounding, because the loss is divided by the tokens of all micro-batches.
#[test]
fn the_split_into_micro_batches_changes_only_rounding() {
    for shape in shapes() {
        let all = TestBatch::random(&[50, 3, 70, 1, 65, 20, 9, 30], shape.vocab, 5);
        let grads = |cut: &[&[usize]], order| {
            let setup = TestSetup { num_micro_batches: cut.len() as u32, order, ..TestSetup::default() };
            let mut engine = engine(&shape, &setup);
            let mut window = TestObjective::new(cut.iter().map(|docs| all.select(docs)).collect());
            let report = engine.model_mut(ModelId::FIRST).train_step(&mut window, &UPDATES).unwrap();
            let mut values = Vec::new();
            for (u, unit) in engine.model(ModelId::FIRST).units().iter().enumerate() {
                for segment in &unit.segments {
                    let mut grad = vec![0f32; segment.elems()];
                    engine
                        .model(ModelId::FIRST)
                        .read(u, segment, ParamState::Grad, 0..segment.elems(), &mut grad)
                        .unwrap();
                    values.extend(grad);
                }
            }
            (window.loss(), report.grad_norm, values)
        };
        let (loss, norm, whole) = grads(&[&[0, 1, 2, 3, 4, 5, 6, 7]], AccumulationOrder::Local);
        let cuts: [&[&[usize]]; 3] = [
            &[&[0, 1, 2, 3], &[4, 5, 6, 7]],
            &[&[0], &[1, 2], &[3], &[4, 5, 6, 7]],
            &[&[0, 1, 2, 3, 4, 5, 6, 7], &[]],
        ];
        for cut in cuts {
            for order in [AccumulationOrder::Local, AccumulationOrder::Reduced] {
                let (other_loss, other_norm, other) = grads(cut, order);
                assert!((loss - other_loss).abs() < 1e-6 * loss, "{cut:?} {order:?}");
                assert!((norm - other_norm).abs() < 1e-5 * norm, "{cut:?} {order:?}");
                let difference: f64 = whole.iter().zip(&other).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                assert!(difference.sqrt() < 1e-5 * norm, "{cut:?} {order:?}: {}", difference.sqrt());
            }
        }
    }
}
