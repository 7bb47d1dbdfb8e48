//! Head outputs other than the log-probability: gradients match finite differences, and no strategy changes a bit.

use lockstep_config::StrategyName;
use lockstep_core::{DType, Mesh};
use lockstep_engine::{Coefficients, Engine, MicroBatch, Outputs, StepDriver, UpdateRule, UpdateSettings};
use lockstep_plan::{AccumulationOrder, MemoryTier, ModelId, ParamState};
use lockstep_shape::{Channel, Channels, Head, ModelShape, Segment};
use lockstep_testkit::{CarrierKind, TestBatch, TestObjective, TestSetup, engine, run_in_world};

const MODEL: ModelId = ModelId::FIRST;

const STILL: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 0.0,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.0,
    max_norm: None,
};

/// L = Σ over tokens and channels of a function of that output, which returns its value and its derivative.
struct PerChannel<F> {
    micro_batches: Vec<TestBatch>,
    channels: Channels,
    loss: F,
    total: f64,
}

impl<F: Fn(Channel, usize, f32) -> (f64, f32)> StepDriver for PerChannel<F> {
    fn batch(&self, micro_batch: u32) -> MicroBatch<'_> {
        batch(&self.micro_batches[micro_batch as usize])
    }

    fn coefficients(&mut self, _: u32, outputs: Option<Outputs<'_>>, out: &mut Coefficients<'_>) {
        let outputs = outputs.expect("they come after the head's forward");
        for channel in self.channels.iter() {
            let values = outputs.get(channel).iter().enumerate();
            for (slope, (token, value)) in out.get(channel).iter_mut().zip(values) {
                *slope = (self.loss)(channel, token, *value).1;
            }
        }
    }

    fn outputs(&mut self, _: u32, outputs: Outputs<'_>) {
        for channel in self.channels.iter() {
            let values = outputs.get(channel).iter().enumerate();
            self.total += values.map(|(token, value)| (self.loss)(channel, token, *value).0).sum::<f64>();
        }
    }
}

fn batch(micro_batch: &TestBatch) -> MicroBatch<'_> {
    MicroBatch {
        tokens: &micro_batch.tokens,
        targets: &micro_batch.targets,
        positions: &micro_batch.positions,
        cu_seqlens: &micro_batch.cu_seqlens,
        samples: &micro_batch.samples,
        weights: &[],
        shared: &[],
    }
}

/// (v − y)², with a different target y for every token.
fn regression(_: Channel, token: usize, value: f32) -> (f64, f32) {
    let error = value - (token as f32 * 0.7).sin();
    (f64::from(error).powi(2), 2.0 * error)
}

/// A different smooth function for each channel.
fn mixed(channel: Channel, token: usize, value: f32) -> (f64, f32) {
    let weight = 0.1 + (token % 5) as f32 * 0.05;
    match channel {
        Channel::LogProb => (f64::from(-weight * value), -weight),
        Channel::Entropy => (f64::from(weight * value * value), 2.0 * weight * value),
        Channel::MeanLogProb => (f64::from(0.3 * weight * value), 0.3 * weight),
        Channel::Value => unreachable!("a language model has none"),
    }
}

fn score_model() -> ModelShape {
    ModelShape { head: Head::Score, layers: 2, ..ModelShape::named("tiny", 101).unwrap() }
}

fn micro_batches(count: u32, seed: u64) -> Vec<TestBatch> {
    (0..count).map(|m| TestBatch::random(&[20, 9, 14], 101, seed + u64::from(m))).collect()
}

/// The loss with the current weights.
fn loss(
    engine: &mut Engine,
    micro_batches: &[TestBatch],
    of: impl Fn(Channel, usize, f32) -> (f64, f32),
) -> f64 {
    let channels = engine.model(MODEL).plan().channels;
    let mut total = 0.0;
    for micro_batch in micro_batches {
        let mut add = |outputs: Outputs<'_>| {
            for channel in channels.iter() {
                let values = outputs.get(channel).iter().enumerate();
                total += values.map(|(token, value)| of(channel, token, *value).0).sum::<f64>();
            }
        };
        engine.model_mut(MODEL).score(batch(micro_batch), &mut add).unwrap();
    }
    total
}

fn tensors(engine: &Engine) -> Vec<(usize, Segment)> {
    let units = engine.model(MODEL).units().iter().enumerate();
    units.flat_map(|(u, unit)| unit.segments.iter().map(move |s| (u, s.clone()))).collect()
}

fn read(engine: &Engine, (unit, segment): &(usize, Segment), state: ParamState) -> Vec<f32> {
    let mut values = vec![0f32; segment.elems()];
    assert!(engine.model(MODEL).read(*unit, segment, state, 0..segment.elems(), &mut values).unwrap());
    values
}

/// Asserts that the slope of the loss along the gradient of each tensor is the length of that gradient.
fn assert_gradients_match_slopes(
    shape: &ModelShape,
    setup: &TestSetup,
    of: impl Fn(Channel, usize, f32) -> (f64, f32) + Copy,
    what: &str,
) {
    let mut engine = engine(shape, setup);
    let all = micro_batches(setup.num_micro_batches, 5);
    let channels = setup.channels;
    let mut driver = PerChannel { micro_batches: all.clone(), channels, loss: of, total: 0.0 };
    engine.model_mut(MODEL).train_step(&mut driver, &STILL).unwrap();
    let here = loss(&mut engine, &all, of);
    assert!(
        (driver.total - here).abs() <= 1e-9 * here.abs(),
        "{what}: the outputs of a step differ from those of a score"
    );
    for tensor in tensors(&engine) {
        let (gradient, start) =
            (read(&engine, &tensor, ParamState::Grad), read(&engine, &tensor, ParamState::Working));
        let length = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        assert!(length > 0.0, "{what}: no gradient of {}", tensor.1.name);
        let size = start.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>().sqrt();
        let step = 1e-3 * size / length;
        let mut at = |sign: f64| {
            let moved: Vec<f32> = start
                .iter()
                .zip(&gradient)
                .map(|(w, g)| (f64::from(*w) + sign * step * f64::from(*g)) as f32)
                .collect();
            let (unit, segment) = &tensor;
            let elems = 0..segment.elems();
            engine
                .model_mut(MODEL)
                .write(*unit, segment, ParamState::Working, elems.clone(), &moved)
                .unwrap();
            let there = loss(&mut engine, &all, of);
            engine.model_mut(MODEL).write(*unit, segment, ParamState::Working, elems, &start).unwrap();
            there
        };
        let slope = (at(1.0) - at(-1.0)) / (2.0 * step);
        let error = (slope / (length * length) - 1.0).abs();
        assert!(
            error < 0.05,
            "{what}: {} has a gradient of {length:e} and a slope of {slope:e}",
            tensor.1.name
        );
    }
}

#[test]
fn gradients_of_a_scalar_head_match_finite_differences() {
    let setup = TestSetup {
        channels: Channels::VALUE,
        coefficients_ahead: false,
        evaluates: true,
        num_micro_batches: 2,
        ..TestSetup::default()
    };
    assert_gradients_match_slopes(&score_model(), &setup, regression, "a scalar head");
    let tied = ModelShape { tied: true, ..score_model() };
    assert_gradients_match_slopes(
        &tied,
        &TestSetup { separate_memory: true, ..setup },
        regression,
        "a scalar head, separate memory",
    );
}

#[test]
fn gradients_of_entropy_and_mean_match_finite_differences() {
    let shape = ModelShape { layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    let channels = Channels::of(&[Channel::LogProb, Channel::Entropy, Channel::MeanLogProb]);
    let setup = TestSetup { channels, coefficients_ahead: false, evaluates: true, ..TestSetup::default() };
    assert_gradients_match_slopes(&shape, &setup, mixed, "three channels");
    assert_gradients_match_slopes(
        &shape,
        &TestSetup { separate_memory: true, ..setup },
        mixed,
        "three channels, separate memory",
    );
    let two = Channels::of(&[Channel::LogProb, Channel::MeanLogProb]);
    assert_gradients_match_slopes(&shape, &TestSetup { channels: two, ..setup }, mixed, "two channels");
    for (temperature, channels) in [(0.7, channels), (1.6, Channels::LOG_PROB)] {
        let setup = TestSetup { temperature, channels, ..setup };
        assert_gradients_match_slopes(&shape, &setup, mixed, &format!("temperature {temperature}"));
    }
}

/// Halving the temperature is doubling the weights of the head, to the bit; and the gradient with respect to the
/// doubled weights is half of the other.
#[test]
fn the_temperature_divides_the_logits() {
    let shape = ModelShape { layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    let channels = Channels::of(&[Channel::LogProb, Channel::Entropy, Channel::MeanLogProb]);
    let run = |temperature: f32, factor: f32| {
        let setup = TestSetup { channels, temperature, coefficients_ahead: false, ..TestSetup::default() };
        let mut engine = engine(&shape, &setup);
        let head =
            tensors(&engine).into_iter().find(|(_, segment)| segment.name == "lm_head.weight").unwrap();
        let weights: Vec<f32> =
            read(&engine, &head, ParamState::Working).iter().map(|w| w * factor).collect();
        let elems = 0..weights.len();
        engine.model_mut(MODEL).write(head.0, &head.1, ParamState::Working, elems, &weights).unwrap();
        let micro_batches = micro_batches(1, 4);
        let mut driver = PerChannel { micro_batches, channels, loss: mixed, total: 0.0 };
        engine.model_mut(MODEL).train_step(&mut driver, &STILL).unwrap();
        let gradient: Vec<f32> =
            read(&engine, &head, ParamState::Grad).iter().map(|gradient| gradient * factor).collect();
        (driver.total, gradient)
    };
    assert!(run(0.5, 1.0) == run(1.0, 2.0));
}

/// Channels without coefficients change nothing.
#[test]
fn log_probabilities_have_the_same_bits_with_other_channels() {
    let shape = ModelShape { layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    let run = |channels: Channels| {
        let mut engine = engine(&shape, &TestSetup { channels, evaluates: true, ..TestSetup::default() });
        let mut window = TestObjective::new(micro_batches(1, 3));
        engine.model_mut(MODEL).train_step(&mut window, &UpdateSettings { lr: 1e-2, ..STILL }).unwrap();
        (window.log_probs, lockstep_testkit::score(&mut engine, &micro_batches(1, 9)[0]))
    };
    let all = Channels::of(&[Channel::LogProb, Channel::Entropy, Channel::MeanLogProb]);
    let (one, other) = (run(Channels::LOG_PROB), run(all));
    assert!(one.0 == other.0, "the step's log-probabilities differ");
    // The update used another kernel, whose gradient may round differently.
    let close = one.1.iter().zip(&other.1).all(|(a, b)| (a - b).abs() < 1e-4);
    assert!(close, "the next step's log-probabilities differ too much");
}

/// The loss of a scalar regression falls, and its bits are those of plain ddp on the same mesh, wherever states and
/// parameters live.
#[test]
fn a_scalar_regression_has_the_same_bits_under_every_strategy() {
    let shape = score_model();
    let updates = |t: u64| UpdateSettings { t, lr: 3e-3, weight_decay: 0.1, max_norm: Some(1.0), ..STILL };
    for storage in [DType::F32, DType::BF16] {
        let setup = TestSetup {
            channels: Channels::VALUE,
            coefficients_ahead: false,
            storage,
            num_micro_batches: 2,
            order: AccumulationOrder::Reduced,
            threads: 1,
            ..TestSetup::default()
        };
        let run = |setup: TestSetup| {
            let dir = tempfile::tempdir().unwrap();
            run_in_world(&shape, &setup, CarrierKind::Thread, Some(dir.path()), &|engine| {
                let mut trace: Vec<f64> = Vec::new();
                for t in 1..=12 {
                    let micro_batches = micro_batches(2, 100 + u64::from(engine.rank().0));
                    let channels = Channels::VALUE;
                    let mut driver = PerChannel { micro_batches, channels, loss: regression, total: 0.0 };
                    let report = engine.model_mut(MODEL).train_step(&mut driver, &updates(t)).unwrap();
                    trace.extend([report.grad_norm, driver.total]);
                }
                let weights: Vec<f32> = tensors(engine)
                    .iter()
                    .flat_map(|(unit, segment)| {
                        let mut values = vec![0f32; segment.elems()];
                        let elems = 0..segment.elems();
                        engine
                            .model(MODEL)
                            .read_whole(*unit, segment, ParamState::Working, elems, &mut values)
                            .unwrap();
                        values
                    })
                    .collect();
                (trace, weights)
            })
        };
        let ddp = run(TestSetup { mesh: Mesh::on_one_node(2, 1), ..setup });
        let (first, last) = (ddp[0].0[1], ddp[0].0[23]);
        assert!(last < 0.7 * first, "{storage}: the loss went from {first} to {last}");
        let mesh = Mesh::on_one_node(1, 2);
        for (strategy, tier) in [
            (StrategyName::Zero1, MemoryTier::Device),
            (StrategyName::Zero2, MemoryTier::Host),
            (StrategyName::Zero3, MemoryTier::Device),
            (StrategyName::Zero3, MemoryTier::Nvme),
            (StrategyName::ShardGradOp, MemoryTier::Host),
        ] {
            let params_tier = if strategy == StrategyName::Zero3 { tier } else { MemoryTier::Device };
            let other = run(TestSetup { strategy, mesh, optimizer_tier: tier, params_tier, ..setup });
            assert!(other == ddp, "{strategy:?} with states on {tier} differs from ddp, {storage}");
        }
    }
}
