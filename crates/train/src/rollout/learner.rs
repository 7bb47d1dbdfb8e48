//! Learns from rollouts: generates one when the steps of the last are done, and prepares the batches of each step.

use std::sync::Arc;

use lockstep_ckpt::Checkpoint;
use lockstep_config::{AlgorithmConfig, PpoConfig, RlooConfig, RunConfig};
use lockstep_core::Rank;
use lockstep_data::{Batch, SampleOrder, StepBatches};
use lockstep_engine::Engine;
use lockstep_observe::{EvalRecord, NamedMetric};
use lockstep_plan::{ModelId, ModelRole};

use super::collect::Collector;
use super::completions_log::{self, CompletionsLog};
use super::prompts::rows_of;
use super::schedule::RolloutSchedule;
use super::sequence::{self, Sequence};
use super::statistics::{length_metrics, reward_metrics};
use super::{Advantages, Rollout};
use crate::algorithms::advantages::{group_relative, leave_one_out};
use crate::algorithms::policy_gradient::PolicyGradient;
use crate::algorithms::ppo::{PpoValue, estimate, mean_kl, next_kl_coef};
use crate::error::TrainError;
use crate::learner::{Learner, StepWork};
use crate::learning::LearnerSources;
use crate::objective::Objective;
use crate::reference::ReferenceSync;
use crate::train_state::TrainState;

/// The file of a checkpoint with the sequences of the current rollout.
const ROLLOUT_FILE: &str = "rollout.bin";

/// Learns from rollouts: GRPO, RLOO and PPO.
pub(crate) struct RolloutLearner<'a> {
    config: &'a RunConfig,
    schedule: RolloutSchedule,
    order: Arc<SampleOrder>,
    rank: usize,
    collector: Collector<'a>,
    policy: PolicyGradient,
    value: Option<(ModelId, PpoValue)>,
    trained: Vec<ModelId>,
    reference: Option<ReferenceSync>,
    /// The next step.
    step: u64,
    /// The current rollout and its number.
    current: Option<(u64, Arc<Rollout>)>,
    /// PPO: the coefficient of the KL penalty, which may follow a target.
    kl_coef: f64,
    log: Option<CompletionsLog>,
    /// The seconds of the parts of a rollout that was made for the next step.
    seconds: Vec<NamedMetric>,
    notes: Vec<String>,
    /// A few completions of a new rollout, for trackers.
    samples: Option<String>,
}

impl<'a> RolloutLearner<'a> {
    pub(crate) fn new(
        state: &TrainState<'a>,
        sources: LearnerSources,
        first_step: u64,
    ) -> Result<RolloutLearner<'a>, TrainError> {
        let config = state.config;
        let value = match (&config.algorithm, sources.models.id(ModelRole::Value)) {
            (AlgorithmConfig::Ppo(ppo), Some(id)) => Some((id, PpoValue::new(ppo))),
            _ => None,
        };
        let log =
            (sources.rank == Rank(0)).then(|| CompletionsLog::open(&config.output.output_dir, first_step));
        Ok(RolloutLearner {
            schedule: RolloutSchedule::of(config),
            order: Arc::clone(&state.order),
            rank: sources.rank.0 as usize,
            policy: match &config.algorithm {
                AlgorithmConfig::Grpo(grpo) => PolicyGradient::grpo(config, grpo),
                AlgorithmConfig::Rloo(rloo) => PolicyGradient::rloo(config, rloo),
                AlgorithmConfig::Ppo(ppo) => PolicyGradient::ppo(config, ppo),
                other => unreachable!("{} has no rollouts", other.name()),
            },
            trained: std::iter::once(ModelId::FIRST).chain(value.as_ref().map(|(id, _)| *id)).collect(),
            value,
            reference: sources.reference_sync(config),
            step: first_step,
            current: None,
            kl_coef: ppo(config).map_or(0.0, |ppo| ppo.kl_coef),
            log: log.transpose()?,
            seconds: Vec::new(),
            notes: Vec::new(),
            samples: None,
            collector: Collector::new(config, sources)?,
            config,
        })
    }

    /// Generates and scores the completions of a rollout.
    fn new_rollout(&mut self, engine: &mut Engine, index: u64) -> Result<Rollout, TrainError> {
        if let (Some(ppo), Some((_, last))) = (ppo(self.config), &self.current) {
            let kl = mean_kl(ppo, &last.sequences);
            self.kl_coef = next_kl_coef(ppo, self.kl_coef, kl, last.sequences.len());
        }
        let rows = rows_of(&self.order, index);
        let first_sample = (index * self.schedule.sequences as u64) as u32;
        let collected = self.collector.collect(engine, &rows, self.schedule.group, first_sample)?;
        self.notes.extend(collected.notes);
        self.seconds = collected.seconds;
        let rollout = self.with_advantages(collected.sequences);
        if let Some(log) = &mut self.log {
            let shown = self.collector.logged(&rollout)?;
            let first = self.step == 0;
            self.notes.extend(self.collector.shown(&shown, first));
            log.append(self.step + 1, &shown)?;
            self.samples = Some(completions_log::samples(&shown));
        }
        Ok(rollout)
    }

    /// Computes advantages and metrics. The same on all ranks.
    fn with_advantages(&self, sequences: Vec<Sequence>) -> Rollout {
        let names = self.collector.rewards();
        let mut totals: Vec<Option<f64>> = sequences.iter().map(|one| names.total(one)).collect();
        let group = self.schedule.group;
        let mut metrics = match &self.config.algorithm {
            AlgorithmConfig::Ppo(_) => Vec::new(),
            _ => reward_metrics(&sequences, &totals, names, group),
        };
        let advantages = match &self.config.algorithm {
            AlgorithmConfig::Grpo(grpo) => {
                Advantages::Sequences(group_relative(&totals, group, grpo.scale_rewards))
            }
            AlgorithmConfig::Rloo(rloo) => {
                rloo_rewards(rloo, &mut totals, &sequences);
                Advantages::Sequences(leave_one_out(&totals, group, rloo.normalize_advantages))
            }
            AlgorithmConfig::Ppo(ppo) => {
                let (advantages, own) = estimate(ppo, self.kl_coef, &sequences);
                metrics.extend(own);
                advantages
            }
            other => unreachable!("{} has no rollouts", other.name()),
        };
        metrics.extend(length_metrics(&sequences));
        Rollout { sequences, advantages, metrics }
    }

    /// The micro-batches of this rank for some sequences, filled by `push`.
    fn micro_batches(&self, rows: &[u32], push: impl Fn(&mut Batch, u32)) -> Vec<Batch> {
        let per_micro_batch = self.config.batch.per_device_train_batch_size as usize;
        let world = self.config.plan.world_size() as usize;
        let count = self.schedule.num_micro_batches(per_micro_batch, world);
        let batch = |index: usize| {
            let mut batch = Batch::default();
            batch.clear();
            let mut mine =
                rows.chunks(per_micro_batch).nth(index * world + self.rank).unwrap_or(&[]).to_vec();
            // Completions of one prompt follow each other, so that they share its rows.
            mine.sort_unstable();
            mine.into_iter().for_each(|row| push(&mut batch, row));
            batch
        };
        (0..count).map(batch).collect()
    }

    fn work(&self, rollout: &Rollout) -> StepWork {
        let rows = self.schedule.rows(self.step);
        let sequence = |row: u32| &rollout.sequences[row as usize];
        let micro_batches = self.micro_batches(&rows, |batch, row| {
            batch.push_document(&sequence(row).tokens, sequence(row).prompt_len as usize, row);
        });
        let others = self.value.as_ref().map(|(id, _)| {
            let push = |batch: &mut Batch, row: u32| {
                let first = sequence(row).prompt_len as usize - 1;
                let num_values = rollout.advantages.returns_of(row).len();
                batch.push_sequence(&sequence(row).tokens, first..first + num_values, row);
            };
            (*id, self.micro_batches(&rows, push))
        });
        let count =
            |tokens: fn(&Sequence) -> usize| rows.iter().map(|row| tokens(sequence(*row)) as u64).sum();
        let batches = StepBatches {
            step: self.step,
            supervised: count(|sequence| sequence.completion().len()),
            tokens: count(|sequence| sequence.tokens.len() - 1),
            micro_batches,
            rows,
            ..StepBatches::default()
        };
        StepWork { batches, others, seconds: Vec::new() }
    }
}

/// RLOO's rewards: clipped, and less the KL divergence of the completion from the reference, if it counts.
pub(crate) fn rloo_rewards(config: &RlooConfig, totals: &mut [Option<f64>], sequences: &[Sequence]) {
    for (total, sequence) in totals.iter_mut().zip(sequences) {
        // A masked completion has no tokens that count.
        let counts = !(config.mask_truncated_completions && sequence.truncated);
        let tokens = sequence.log_probs.iter().zip(&sequence.reference).filter(|_| counts);
        let kl: f64 = tokens.map(|(own, reference)| f64::from(*own) - f64::from(*reference)).sum();
        let clip = |total: f64| config.reward_clip_range.map_or(total, |(low, high)| total.clamp(low, high));
        *total = total.map(|total| clip(total) - config.beta * kl);
    }
}

fn ppo(config: &RunConfig) -> Option<&PpoConfig> {
    match &config.algorithm {
        AlgorithmConfig::Ppo(ppo) => Some(ppo),
        _ => None,
    }
}

impl Learner for RolloutLearner<'_> {
    fn trained(&self) -> &[ModelId] {
        &self.trained
    }

    fn objective(&mut self, model: ModelId) -> &mut dyn Objective {
        match &mut self.value {
            Some((id, value)) if *id == model => value,
            _ => &mut self.policy,
        }
    }

    fn learning_rate_factor(&self, model: ModelId) -> f64 {
        let own = ppo(self.config).and_then(|ppo| ppo.value_learning_rate);
        match own {
            Some(rate) if model != ModelId::FIRST => rate / self.config.optim.learning_rate,
            _ => 1.0,
        }
    }

    fn next_work(&mut self, engine: &mut Engine) -> Result<StepWork, TrainError> {
        let index = self.schedule.rollout_of(self.step);
        let rollout = match &self.current {
            Some((current, rollout)) if *current == index => Arc::clone(rollout),
            _ => Arc::new(self.new_rollout(engine, index)?),
        };
        self.current = Some((index, Arc::clone(&rollout)));
        let work = StepWork { seconds: std::mem::take(&mut self.seconds), ..self.work(&rollout) };
        if let Some((_, value)) = &mut self.value {
            value.set_step(Arc::clone(&rollout), &work.batches.rows);
        }
        self.policy.set_step(rollout, &work.batches.rows);
        self.step += 1;
        Ok(work)
    }

    fn done(&mut self, _: StepWork, _: f64) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    fn samples(&mut self) -> Option<String> {
        self.samples.take()
    }

    fn after_step(&mut self, engine: &mut Engine, step: u64) -> Result<(), TrainError> {
        self.reference.map_or(Ok(()), |sync| sync.after_step(engine, step))
    }

    fn evaluate(
        &mut self,
        engine: &mut Engine,
        step: u64,
        epoch: f64,
    ) -> Result<Option<EvalRecord>, TrainError> {
        self.collector.evaluate(engine, step, epoch)
    }

    /// The rollout, if later steps need it: an adaptive KL coefficient follows even a finished one.
    fn checkpoint_files(&self) -> Vec<(String, Vec<u8>)> {
        let adapts = ppo(self.config).is_some_and(|ppo| ppo.adaptive_kl.is_some());
        let unfinished = !self.step.is_multiple_of(self.schedule.steps());
        let Some((index, rollout)) = self.current.as_ref().filter(|_| unfinished || adapts) else {
            return Vec::new();
        };
        let mut bytes = index.to_le_bytes().to_vec();
        bytes.extend(self.kl_coef.to_le_bytes());
        bytes.extend(sequence::to_bytes(&rollout.sequences));
        vec![(ROLLOUT_FILE.into(), bytes)]
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        let path = checkpoint.path().join(ROLLOUT_FILE);
        let origin = path.display().to_string();
        let damaged = || TrainError::DamagedRollout { origin: origin.clone() };
        let unfinished = !self.step.is_multiple_of(self.schedule.steps());
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(_) if !unfinished => return Ok(()),
            Err(cause) => return Err(TrainError::Input { path, cause }),
        };
        let eight = |at: usize| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).ok_or_else(damaged);
        let (index, kl_coef) = (u64::from_le_bytes(eight(0)?), f64::from_le_bytes(eight(8)?));
        let sequences = sequence::from_bytes(&bytes[16..], &origin)?;
        let same_size = sequences.len() == self.schedule.sequences;
        if !same_size || self.step > 0 && index != self.schedule.rollout_of(self.step - 1) {
            return Err(TrainError::ResumeMismatch {
                path: checkpoint.path().to_path_buf(),
                what: "sequences per rollout",
                then: sequences.len().to_string(),
                now: self.schedule.sequences.to_string(),
            });
        }
        self.kl_coef = kl_coef;
        self.current = Some((index, Arc::new(self.with_advantages(sequences))));
        Ok(())
    }
}
