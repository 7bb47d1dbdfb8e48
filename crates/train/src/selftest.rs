//! Whole training steps on a device, against the CPU: does the machine compute what training needs?
//!
//! Operations are checked one by one in `lockstep_ops::selftest`; this checks that they are put together rightly:
//! forward, backward, norm, update and, in half precision, the master copies.

use lockstep_config::RunConfig;
use lockstep_core::{Bytes, Rank};
use lockstep_device::{Device, Machine};
use lockstep_engine::{Engine, Updates};
use lockstep_ops::selftest::Check;
use lockstep_plan::State;
use lockstep_shape::{Architecture, Biases, ModelShape};

use crate::bench::MadeUp;
use crate::error::TrainError;
use crate::run::make_engine;
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
                let config = lockstep_config::load(None, &settings).expect("these settings are right");
                let on_cpu = Trained::on(&config, &shape, Machine::cpu(2), seed)?;
                let there = Trained::on(&config, &shape, Machine { device, num_threads: 2 }, seed)?;
                // In half precision every product rounds its result, each machine in its own order.
                let (numbers, tensors) = if precision == "fp32" { (1e-5, 1e-4) } else { (5e-3, 4e-2) };
                let what = format!("training step, {name}, {precision}, recompute {recompute}");
                each(check(format!("{what}: losses"), numbers, &there.losses, &on_cpu.losses));
                each(check(
                    format!("{what}: gradient norms"),
                    numbers.max(1e-4),
                    &there.norms,
                    &on_cpu.norms,
                ));
                each(there.worst(&on_cpu, &what, tensors));
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
        ("LLaMA with biases and shared heads", ModelShape { biases, ..grouped }),
    ])
}

/// What came of a few steps.
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// Of every tensor: the last gradient, and the weights.
    tensors: Vec<(String, [Vec<f64>; 2])>,
}

impl Trained {
    fn on(
        config: &RunConfig,
        shape: &ModelShape,
        machine: Machine,
        seed: u64,
    ) -> Result<Trained, TrainError> {
        let plan = plan_with(config, shape, Bytes::ZERO, machine.into(), true)?;
        let micros = f64::from(plan.input.micros);
        let mut engine = make_engine(config, plan, Rank(0), machine, None)?;
        engine.initialise(seed)?;
        let mut made_up = MadeUp::new(VOCAB, 3, 128);
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for t in 1..=STEPS {
            let updates = Updates {
                t,
                lr: 1e-3,
                betas: (0.9, 0.95),
                eps: 1e-8,
                weight_decay: 0.1,
                max_norm: Some(1.0),
            };
            made_up.start(micros);
            norms.push(engine.train_step(&mut made_up, &updates)?.grad_norm);
            losses.push(made_up.loss);
        }
        let mut tensors = Vec::new();
        for (unit, shape) in engine.units().iter().enumerate() {
            for segment in &shape.segments {
                let states = [State::Grad, State::Working];
                let read = states.map(|state| read(&engine, unit, segment, state));
                let [gradient, weights] = read;
                tensors.push((segment.name.clone(), [gradient?, weights?]));
            }
        }
        Ok(Trained { losses, norms, tensors })
    }

    /// The tensor that differs most.
    fn worst(&self, right: &Trained, what: &str, tolerance: f64) -> Check {
        let pairs = self.tensors.iter().zip(&right.tensors).flat_map(|((name, found), (_, right))| {
            let kinds = ["gradient of", "weights"].into_iter().zip(found.iter().zip(right));
            kinds.map(move |(kind, (found, right))| {
                check(format!("{what}: {kind} {name}"), tolerance, found, right)
            })
        });
        let order = |check: &Check| if check.error.is_nan() { f64::INFINITY } else { check.error };
        pairs.max_by(|a, b| order(a).total_cmp(&order(b))).expect("a model has tensors")
    }
}

fn read(
    engine: &Engine,
    unit: usize,
    segment: &lockstep_shape::Segment,
    state: State,
) -> Result<Vec<f64>, TrainError> {
    let mut values = vec![0f32; segment.elems()];
    engine.read(unit, segment, state, 0..segment.elems(), &mut values)?;
    Ok(values.into_iter().map(f64::from).collect())
}

fn check(name: String, tolerance: f64, found: &[f64], right: &[f64]) -> Check {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let apart = norm(&mut found.iter().zip(right).map(|(a, b)| a - b));
    let error = apart / norm(&mut right.iter().copied()).max(1e-30);
    Check { name, error, tolerance, note: None }
}
