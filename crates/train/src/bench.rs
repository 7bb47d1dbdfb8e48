//! Benchmarks a training step on random tokens: speed and memory.

use lockstep_plan::ModelId;
use std::time::Instant;

use lockstep_config::{AlgorithmConfig, RunConfig};
use lockstep_core::rng::{Purpose, RngStream};
use lockstep_core::{Bytes, Rank};
use lockstep_device::{Device, Machine};
use lockstep_engine::{Coefficients, EngineError, MicroBatch, Outputs, StepDriver, UpdateSettings};
use lockstep_shape::ModelShape;

use crate::adapter;
use crate::algorithms::sft::Sft;
use crate::error::TrainError;
use crate::models::{ObjectiveNeeds, RunModels};
use crate::open::make_engine;
use crate::optimizer::update_rule;
use crate::setup::plan_with;

/// The measurements of a step benchmark.
#[derive(Clone, Debug)]
pub struct StepSpeed {
    pub parameters: u64,
    pub tokens_per_step: usize,
    /// The duration of every step, including the first.
    pub seconds: Vec<f64>,
    pub losses: Vec<f64>,
    /// Floating-point operations of a step: 6 per token and parameter (without the embedding), and 6·L·T·d per token
    /// for attention.
    pub flops_per_step: f64,
    /// The planned device memory.
    pub planned: Bytes,
    /// The used device memory that the driver reports. `None` on the CPU.
    pub driver: Option<Bytes>,
    /// The arenas on the host.
    pub host: Bytes,
}

impl StepSpeed {
    /// The median duration, without the first `dropped` steps.
    pub fn median_seconds(&self, dropped: usize) -> f64 {
        let mut counted = self.seconds[dropped.min(self.seconds.len().saturating_sub(1))..].to_vec();
        counted.sort_by(f64::total_cmp);
        counted[counted.len() / 2]
    }
}

/// Runs `steps` steps of the configuration's plan on random tokens, which are the same in every step.
pub fn bench_step(
    config: &RunConfig,
    shape: &ModelShape,
    machine: Machine,
    steps: usize,
) -> Result<StepSpeed, TrainError> {
    if !matches!(config.algorithm, AlgorithmConfig::Sft | AlgorithmConfig::Clm) {
        return Err(TrainError::BenchAlgorithm { name: config.algorithm.name() });
    }
    let shape = &ModelShape { lora: adapter::configured(config, shape)?, ..shape.clone() };
    let needs = ObjectiveNeeds::of(&Sft::default());
    let plan = plan_with((config, Rank(0)), &RunModels::single(shape), Bytes::ZERO, machine.into(), &needs)?;
    let (planned, parameters) = (plan.device_bytes(), plan.input.models[0].params());
    let host = plan.host_bytes;
    let rows = config.batch.per_device_train_batch_size as usize;
    let mut synthetic = SyntheticBatch::new(shape.vocab, rows, config.data.max_length as usize - 1);
    let tokens_per_step = synthetic.tokens.len() * plan.input.num_micro_batches as usize;
    let micros = f64::from(plan.input.num_micro_batches);
    let mut engine = make_engine(config, plan, machine, None)?;
    engine.model_mut(ModelId::FIRST).initialise(config.batch.seed)?;
    let optim = &config.optim;
    let (mut seconds, mut losses) = (Vec::new(), Vec::new());
    for t in 1..=steps as u64 {
        let updates = UpdateSettings {
            t,
            lr: optim.learning_rate,
            rule: update_rule(optim),
            weight_decay: optim.weight_decay,
            max_norm: optim.max_grad_norm,
        };
        synthetic.start(micros);
        let start = Instant::now();
        engine.model_mut(ModelId::FIRST).train_step(&mut synthetic, &updates)?;
        seconds.push(start.elapsed().as_secs_f64());
        losses.push(synthetic.loss);
    }
    let embedding = (shape.vocab * shape.dim) as f64;
    let attention = 6.0 * (shape.layers * synthetic.length * shape.q_width()) as f64;
    // A tied embedding still counts, because the head multiplies by it.
    let multiplied = parameters as f64 - if shape.tied { 0.0 } else { embedding };
    let driver = match machine.device {
        Device::Cpu => None,
        Device::Cuda(gpu) => Some(gpu.total - gpu.free_bytes().map_err(EngineError::from)?),
    };
    Ok(StepSpeed {
        parameters,
        tokens_per_step,
        seconds,
        losses,
        flops_per_step: (6.0 * multiplied + attention) * tokens_per_step as f64,
        planned,
        driver,
        host,
    })
}

/// A micro-batch of random tokens. Every row is one document.
pub(crate) struct SyntheticBatch {
    tokens: Vec<u32>,
    targets: Vec<u32>,
    positions: Vec<u32>,
    bounds: Vec<u32>,
    samples: Vec<u32>,
    length: usize,
    coefficient: f32,
    pub(crate) loss: f64,
}

impl SyntheticBatch {
    pub(crate) fn new(vocab: usize, rows: usize, length: usize) -> SyntheticBatch {
        let stream = RngStream::new(1, Purpose::Sampling, 0, 0);
        let token = |i: u32| stream.block(i / 4)[i as usize % 4] % vocab as u32;
        let all = (rows * length) as u32;
        SyntheticBatch {
            tokens: (0..all).map(token).collect(),
            targets: (0..all).map(|i| token(all + i)).collect(),
            positions: (0..all).map(|i| i % length as u32).collect(),
            bounds: (0..=rows as u32).map(|row| row * length as u32).collect(),
            samples: (0..rows as u32).collect(),
            length,
            coefficient: 0.0,
            loss: 0.0,
        }
    }

    pub(crate) fn start(&mut self, micros: f64) {
        self.coefficient = (-1.0 / (micros * self.tokens.len() as f64)) as f32;
        self.loss = 0.0;
    }
}

impl StepDriver for SyntheticBatch {
    fn batch(&self, _: u32) -> MicroBatch<'_> {
        MicroBatch {
            tokens: &self.tokens,
            targets: &self.targets,
            positions: &self.positions,
            cu_seqlens: &self.bounds,
            samples: &self.samples,
            weights: &[],
            shared: &[],
        }
    }

    fn coefficients(&mut self, _: u32, _: Option<Outputs<'_>>, out: &mut Coefficients<'_>) {
        out.log_probs().fill(self.coefficient);
    }

    fn outputs(&mut self, _: u32, outputs: Outputs<'_>) {
        let coefficient = f64::from(self.coefficient);
        self.loss += outputs.log_probs().iter().map(|l| f64::from(*l) * coefficient).sum::<f64>();
    }
}
