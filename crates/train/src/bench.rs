//! A training step on made-up tokens: how fast it is, and what it holds.

use lockstep_plan::ModelId;
use std::time::Instant;

use lockstep_config::RunConfig;
use lockstep_core::rng::{Purpose, RngStream};
use lockstep_core::{Bytes, Rank};
use lockstep_device::{Device, Machine};
use lockstep_engine::{Coefficients, EngineError, MicroBatch, Outputs, StepDriver, UpdateSettings};
use lockstep_shape::ModelShape;

use crate::error::TrainError;
use crate::objective::objective_needs;
use crate::open::make_engine;
use crate::optimizer::update_rule;
use crate::setup::{check_built, plan_with};
use crate::sft::Sft;

/// What was measured.
#[derive(Clone, Debug)]
pub struct StepSpeed {
    pub parameters: u64,
    pub tokens_per_step: usize,
    /// Of every step, the first among them.
    pub seconds: Vec<f64>,
    pub losses: Vec<f64>,
    /// Operations of a step: 6 for every parameter but the embedding's and every token, 6·L·T·d for attention.
    pub flops_per_step: f64,
    /// The device's memory: the plan's number, and what the driver says, where there is one.
    pub planned: Bytes,
    pub driver: Option<Bytes>,
    /// The host's arenas.
    pub host: Bytes,
}

impl StepSpeed {
    /// The median, without the first `dropped`.
    pub fn median_seconds(&self, dropped: usize) -> f64 {
        let mut counted = self.seconds[dropped.min(self.seconds.len().saturating_sub(1))..].to_vec();
        counted.sort_by(f64::total_cmp);
        counted[counted.len() / 2]
    }
}

/// Runs `steps` steps of the configuration's plan on tokens drawn at random, the same in every step.
pub fn bench_step(
    config: &RunConfig,
    shape: &ModelShape,
    machine: Machine,
    steps: usize,
) -> Result<StepSpeed, TrainError> {
    check_built(config)?;
    let plan = plan_with(config, shape, Bytes::ZERO, machine.into(), &objective_needs(&Sft::default()))?;
    let (planned, parameters) = (plan.device_bytes(), plan.input.models[0].params());
    let host = plan.host_bytes;
    let rows = config.batch.per_device_train_batch_size as usize;
    let mut made_up = MadeUp::new(shape.vocab, rows, config.data.max_length as usize - 1);
    let tokens_per_step = made_up.tokens.len() * plan.input.num_micro_batches as usize;
    let micros = f64::from(plan.input.num_micro_batches);
    let mut engine = make_engine(config, plan, Rank(0), machine, None)?;
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
        made_up.start(micros);
        let start = Instant::now();
        engine.model_mut(ModelId::FIRST).train_step(&mut made_up, &updates)?;
        seconds.push(start.elapsed().as_secs_f64());
        losses.push(made_up.loss);
    }
    let embedding = (shape.vocab * shape.dim) as f64;
    let attention = 6.0 * (shape.layers * made_up.length * shape.q_width()) as f64;
    // A tied table is still multiplied by, at the head.
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

/// Rows of random tokens, each a document.
pub(crate) struct MadeUp {
    tokens: Vec<u32>,
    targets: Vec<u32>,
    positions: Vec<u32>,
    bounds: Vec<u32>,
    samples: Vec<u32>,
    length: usize,
    coefficient: f32,
    pub(crate) loss: f64,
}

impl MadeUp {
    pub(crate) fn new(vocab: usize, rows: usize, length: usize) -> MadeUp {
        let stream = RngStream::new(1, Purpose::Sampling, 0, 0);
        let drawn = |i: u32| stream.block(i / 4)[i as usize % 4] % vocab as u32;
        let all = (rows * length) as u32;
        MadeUp {
            tokens: (0..all).map(drawn).collect(),
            targets: (0..all).map(|i| drawn(all + i)).collect(),
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

impl StepDriver for MadeUp {
    fn batch(&self, _: u32) -> MicroBatch<'_> {
        MicroBatch {
            tokens: &self.tokens,
            targets: &self.targets,
            positions: &self.positions,
            cu_seqlens: &self.bounds,
            samples: &self.samples,
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
