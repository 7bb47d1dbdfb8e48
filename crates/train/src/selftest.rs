//! Self-test of whole training steps: compares a device with the CPU.
//!
//! `lockstep_ops::selftest` checks single operations. This checks that they work together: forward, backward, gradient
//! norm, update and, in half precision, the master weights.

use lockstep_config::RunConfig;
use lockstep_core::{Bytes, Rank};
use lockstep_device::{Device, Machine};
use lockstep_engine::{Engine, UpdateRule, UpdateSettings};
use lockstep_ops::selftest::Check;
use lockstep_plan::{ModelId, ParamState};
use lockstep_shape::{Architecture, Biases, ModelShape};

use crate::algorithms::sft::Sft;
use crate::bench::SyntheticBatch;
use crate::error::TrainError;
use crate::models::{ObjectiveNeeds, RunModels};
use crate::open::make_engine;
use crate::setup::plan_with;

const VOCAB: usize = 517;
const STEPS: u64 = 3;

/// Trains small models on the CPU and on `device`, and compares losses, norms, gradients and weights.
pub fn selftest_steps(device: Device, seed: u64, each: &mut dyn FnMut(Check)) -> Result<(), TrainError> {
    for (name, shape) in shapes()? {
        for precision in ["fp32", "bf16"] {
            for recompute in ["none", "full"] {
                let settings = [
                    "model=tiny".into(),
                    "max_length=129".into(),
                    "per_device_train_batch_size=3".into(),
                    "gradient_accumulation_steps=2".into(),
                    "packing=none".into(),
                    "output_dir=.".into(),
                    format!("mixed_precision={precision}"),
                    format!("recompute={recompute}"),
                ];
                let config = lockstep_config::load(None, &settings).expect("these settings are valid");
                let on_cpu = StepResults::on(&config, &shape, Machine::cpu(2), seed)?;
                let on_device = StepResults::on(&config, &shape, Machine { device, num_threads: 2 }, seed)?;
                let what = format!("training step, {name}, {precision}, recompute {recompute}");
                on_device.compare(&on_cpu, &what, precision == "fp32", each);
            }
        }
    }
    Ok(())
}

fn shapes() -> Result<Vec<(&'static str, ModelShape)>, TrainError> {
    let llama = ModelShape::named("tiny", VOCAB)?;
    let grouped = ModelShape { kv_heads: llama.heads / 2, ..llama.clone() };
    let biases = Biases { qkv: true, out: true, mlp: true };
    Ok(vec![
        ("LLaMA", llama),
        (
            "Qwen3 with a tied head",
            ModelShape { architecture: Architecture::Qwen3, tied: true, ..grouped.clone() },
        ),
        ("LLaMA with biases and GQA", ModelShape { biases, ..grouped }),
    ])
}

/// The results of a few training steps.
struct StepResults {
    losses: Vec<f64>,
    norms: Vec<f64>,
    tensors: Vec<Tensor>,
}

struct Tensor {
    name: String,
    /// The gradient of the first step.
    gradient: Vec<f64>,
    /// The weights after the last step.
    weights: Vec<f64>,
}

impl StepResults {
    fn on(
        config: &RunConfig,
        shape: &ModelShape,
        machine: Machine,
        seed: u64,
    ) -> Result<StepResults, TrainError> {
        let needs = ObjectiveNeeds::of(&Sft::default());
        let plan =
            plan_with((config, Rank(0)), &RunModels::single(shape), Bytes::ZERO, machine.into(), &needs)?;
        let micros = f64::from(plan.input.num_micro_batches);
        let mut engine = make_engine(config, plan, machine, None)?;
        engine.model_mut(ModelId::FIRST).initialise(seed)?;
        let mut synthetic = SyntheticBatch::new(VOCAB, 3, 128);
        let (mut losses, mut norms, mut gradients) = (Vec::new(), Vec::new(), Vec::new());
        for t in 1..=STEPS {
            let updates = UpdateSettings {
                t,
                lr: 1e-3,
                rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
                weight_decay: 0.1,
                max_norm: Some(1.0),
            };
            synthetic.start(micros);
            norms.push(engine.model_mut(ModelId::FIRST).train_step(&mut synthetic, &updates)?.grad_norm);
            losses.push(synthetic.loss);
            if t == 1 {
                gradients = read_all(&engine, ParamState::Grad)?;
            }
        }
        let weights = read_all(&engine, ParamState::Working)?;
        let tensors = gradients.into_iter().zip(weights);
        let tensors =
            tensors.map(|((name, gradient), (_, weights))| Tensor { name, gradient, weights }).collect();
        Ok(StepResults { losses, norms, tensors })
    }

    /// Gradients are compared after the first step, because Adam turns even a tiny difference into a full step. In half
    /// precision every matmul rounds its result, in an order that depends on the device.
    fn compare(&self, expected: &StepResults, what: &str, exact: bool, each: &mut dyn FnMut(Check)) {
        let (losses, norms, gradients, weights) =
            if exact { (1e-5, 1e-4, 1e-4, 1e-3) } else { (5e-3, 3e-2, 4e-2, 2e-2) };
        each(check(format!("{what}: losses"), losses, &self.losses, &expected.losses));
        each(check(format!("{what}: gradient norms"), norms, &self.norms, &expected.norms));
        let worst = |kind: &str, tolerance: f64, least: f64, pick: &dyn Fn(&Tensor) -> &Vec<f64>| {
            let pairs = self.tensors.iter().zip(&expected.tensors);
            // Tensors that are zero except for rounding have no meaningful relative error, such as the gradient of a
            // bias that softmax cancels. Their error is measured against the scale of the other tensors.
            let scale = expected
                .tensors
                .iter()
                .map(|t| norm(pick(t)) / (pick(t).len() as f64).sqrt())
                .fold(0.0, f64::max);
            let checks = pairs.map(|(found, expected)| {
                let (found, expected, name) = (pick(found), pick(expected), &found.name);
                let least = least * scale * (expected.len() as f64).sqrt();
                check_at(format!("{what}: {kind} {name}"), tolerance, found, expected, least)
            });
            let order = |check: &Check| if check.error.is_nan() { f64::INFINITY } else { check.error };
            checks.max_by(|a, b| order(a).total_cmp(&order(b))).expect("a model has tensors")
        };
        each(worst("gradient of", gradients, 1e-2, &|tensor| &tensor.gradient));
        each(worst("weights", weights, if exact { 1e-2 } else { 1e-1 }, &|tensor| &tensor.weights));
    }
}

/// Reads a state of every tensor, with the tensor's name.
fn read_all(engine: &Engine, state: ParamState) -> Result<Vec<(String, Vec<f64>)>, TrainError> {
    let units = engine.model(ModelId::FIRST).units().iter().enumerate();
    let tensors = units.flat_map(|(unit, shape)| shape.segments.iter().map(move |segment| (unit, segment)));
    tensors
        .map(|(unit, segment)| {
            let mut values = vec![0f32; segment.elems()];
            engine.model(ModelId::FIRST).read(unit, segment, state, 0..segment.elems(), &mut values)?;
            Ok((segment.name.clone(), values.into_iter().map(f64::from).collect()))
        })
        .collect()
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

fn check(name: String, tolerance: f64, found: &[f64], expected: &[f64]) -> Check {
    check_at(name, tolerance, found, expected, 0.0)
}

/// The error relative to the norm of `expected`, or to `least` if that is larger.
fn check_at(name: String, tolerance: f64, found: &[f64], expected: &[f64], least: f64) -> Check {
    let difference: Vec<f64> = found.iter().zip(expected).map(|(a, b)| a - b).collect();
    let error = norm(&difference) / norm(expected).max(least).max(1e-30);
    Check { name, error, tolerance, note: None }
}
