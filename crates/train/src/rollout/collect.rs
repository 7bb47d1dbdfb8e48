//! Collects completions: the policy generates them, models and reward functions score them, and all ranks exchange them.

use std::sync::Arc;
use std::time::Instant;

use lockstep_config::{AlgorithmConfig, RunConfig};
use lockstep_data::{Dataset, Tokenizer};
use lockstep_engine::Engine;
use lockstep_observe::{EvalRecord, NamedMetric};
use lockstep_plan::{ModelId, ModelRole};

use super::completions_log::LoggedCompletion;
use super::generate::{PolicySampler, complete};
use super::prompts::{Prompt, Share, share_of};
use super::reward_functions::RewardFunctions;
use super::schedule::RolloutSchedule;
use super::score::{ScoreRounds, log_probs, values_at};
use super::sequence::{self, Sequence};
use super::statistics::{RewardNames, length_metrics, reward_metrics};
use super::{Advantages, Rollout};
use crate::algorithms::ppo::num_values;
use crate::error::TrainError;
use crate::learning::LearnerSources;

/// Tells the sampling of evaluations from that of training.
const EVALUATION_SEED: u64 = 0x6576_616c;

/// Completions of one call of [`Collector::collect`], of all ranks.
pub(crate) struct Collected {
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) notes: Vec<String>,
    /// The seconds of its parts on this rank.
    pub(crate) seconds: Vec<NamedMetric>,
}

/// Measures the parts of a rollout.
struct Stopwatch {
    last: Instant,
    seconds: Vec<NamedMetric>,
}

impl Stopwatch {
    fn start() -> Stopwatch {
        Stopwatch { last: Instant::now(), seconds: Vec::new() }
    }

    /// Ends the part that began with the last call.
    fn lap(&mut self, name: &'static str) {
        let now = Instant::now();
        self.seconds.push((name.into(), (now - self.last).as_secs_f64()));
        self.last = now;
    }
}

/// Generates completions and scores them.
pub(crate) struct Collector<'a> {
    config: &'a RunConfig,
    tokenizer: Arc<Tokenizer>,
    prompts: Arc<Dataset>,
    eval: Option<Arc<Dataset>>,
    rank: usize,
    world: usize,
    reference: Option<ModelId>,
    reward_model: Option<ModelId>,
    value: Option<ModelId>,
    functions: RewardFunctions,
    sampler: PolicySampler,
    rewards: RewardNames,
}

impl<'a> Collector<'a> {
    pub(crate) fn new(config: &'a RunConfig, sources: LearnerSources) -> Result<Collector<'a>, TrainError> {
        let (functions, rewards) = RewardFunctions::open(config, &sources.environment)?;
        let models = &sources.models;
        Ok(Collector {
            config,
            sampler: PolicySampler::new(config, models, &sources.tokenizer)?,
            tokenizer: sources.tokenizer,
            prompts: sources.dataset,
            eval: sources.eval.filter(|_| config.eval.evaluates()),
            rank: sources.rank.0 as usize,
            world: config.plan.world_size() as usize,
            reference: models.id(ModelRole::Reference),
            reward_model: models.id(ModelRole::Reward),
            value: models.id(ModelRole::Value),
            functions,
            rewards,
        })
    }

    /// The names and weights of the rewards.
    pub(crate) fn rewards(&self) -> &RewardNames {
        &self.rewards
    }

    /// Completes every prompt of `rows` `group` times and scores the completions. Samples are numbered from
    /// `first_sample` on, over all ranks. A collective call.
    pub(crate) fn collect(
        &mut self,
        engine: &mut Engine,
        rows: &[u32],
        group: usize,
        first_sample: u32,
    ) -> Result<Collected, TrainError> {
        let prompts = Arc::clone(&self.prompts);
        let sampling = (self.config.batch.seed, first_sample);
        let mut watch = Stopwatch::start();
        let (mut mine, notes) = self.complete_share(engine, &prompts, rows, group, sampling, &mut watch)?;
        let rounds = self.rounds(rows.len(), group);
        if let Some(reference) = self.reference {
            let scored = log_probs(engine, reference, &mine, rounds)?;
            mine.iter_mut().zip(scored).for_each(|(sequence, scored)| sequence.reference = scored);
        }
        if self.rescores_policy(engine) {
            let scored = log_probs(engine, ModelId::FIRST, &mine, rounds)?;
            mine.iter_mut().zip(scored).for_each(|(sequence, scored)| sequence.log_probs = scored);
        }
        if let Some(value) = self.value {
            let max_length = self.max_completion_length();
            let positions = move |sequence: &Sequence| {
                let first = sequence.prompt_len as usize - 1;
                first..first + num_values(sequence.completion().len(), max_length)
            };
            let scored = values_at(engine, value, &mine, rounds, &positions)?;
            mine.iter_mut().zip(scored).for_each(|(sequence, scored)| sequence.values = scored);
        }
        // Ranks wait for the slowest one here.
        let sequences = exchange(engine, &mine)?;
        watch.lap("score_seconds");
        Ok(Collected { sequences, notes, seconds: watch.seconds })
    }

    /// Generates this rank's share of the completions and gives them their rewards.
    fn complete_share(
        &mut self,
        engine: &mut Engine,
        dataset: &Dataset,
        rows: &[u32],
        group: usize,
        (seed, first_sample): (u64, u32),
        watch: &mut Stopwatch,
    ) -> Result<(Vec<Sequence>, Vec<String>), TrainError> {
        let share = Share::of(rows.len() * group, self.rank, self.world);
        let prompts = share_of(dataset, rows, group, first_sample, share)?;
        let mut mine = complete(engine, &self.sampler, &prompts, seed)?;
        watch.lap("generate_seconds");
        let notes = self.functions.score(&mut mine, &prompts, &self.tokenizer)?;
        if let Some(model) = self.reward_model {
            let last = |sequence: &Sequence| sequence.tokens.len() - 1..sequence.tokens.len();
            let scored = values_at(engine, model, &mine, self.rounds(rows.len(), group), &last)?;
            mine.iter_mut().zip(scored).for_each(|(one, score)| one.rewards.push(f64::from(score[0])));
        }
        watch.lap("reward_seconds");
        Ok((mine, notes))
    }

    fn rounds(&self, prompts: usize, group: usize) -> ScoreRounds {
        ScoreRounds {
            rows: self.config.batch.per_device_train_batch_size as usize,
            largest_share: Share::of(prompts * group, 0, self.world).largest,
        }
    }

    fn max_completion_length(&self) -> usize {
        self.config.algorithm.sampling().map_or(0, |sampling| sampling.max_completion_length as usize)
    }

    /// Whether the log-probabilities of generation are replaced by those of training. On CPUs both have the same bits. On
    /// GPUs they round differently, which matters where ratios are not 1 by definition.
    fn rescores_policy(&self, engine: &Engine) -> bool {
        let compares = !RolloutSchedule::of(self.config).is_on_policy() || self.reference.is_some();
        engine.plan().input.has_separate_memory() && compares
    }

    /// Completes all prompts of the evaluation data and measures their rewards. `None`: there are none.
    pub(crate) fn evaluate(
        &mut self,
        engine: &mut Engine,
        step: u64,
        epoch: f64,
    ) -> Result<Option<EvalRecord>, TrainError> {
        let Some(dataset) = self.eval.clone() else { return Ok(None) };
        let start = Instant::now();
        let group = self.eval_group();
        let rows: Vec<u32> = (0..dataset.num_rows() as u32).collect();
        let seed = self.config.batch.seed ^ EVALUATION_SEED;
        let mut watch = Stopwatch::start();
        let (mine, _) = self.complete_share(engine, &dataset, &rows, group, (seed, 0), &mut watch)?;
        let sequences = exchange(engine, &mine)?;
        let totals: Vec<Option<f64>> = sequences.iter().map(|one| self.rewards.total(one)).collect();
        let mut others = reward_metrics(&sequences, &totals, &self.rewards, group);
        others.extend(length_metrics(&sequences));
        let seconds = start.elapsed().as_secs_f64();
        Ok(Some(EvalRecord { step, epoch, seconds, others, ..EvalRecord::default() }))
    }

    /// Completions per prompt of the evaluation data.
    fn eval_group(&self) -> usize {
        let groups = match &self.config.algorithm {
            AlgorithmConfig::Grpo(grpo) => &grpo.groups,
            AlgorithmConfig::Rloo(rloo) => &rloo.groups,
            _ => return 1,
        };
        groups.num_generations_eval.unwrap_or(groups.num_generations) as usize
    }

    /// The completions of a rollout, for the log.
    pub(crate) fn logged(&self, rollout: &Rollout) -> Result<Vec<LoggedCompletion>, TrainError> {
        let logged = |(i, sequence): (usize, &Sequence)| {
            let prompt = Prompt::read(&self.prompts, sequence.prompt)?;
            let rewards = self.rewards.names.iter().zip(&sequence.rewards);
            Ok(LoggedCompletion {
                prompt: prompt.text(|| self.tokenizer.decode(sequence.prompt(), false).unwrap_or_default()),
                completion: self.tokenizer.decode(sequence.completion(), true)?,
                rewards: rewards.map(|(name, r)| (name.clone(), (!r.is_nan()).then_some(*r))).collect(),
                reward: self.rewards.total(sequence),
                advantage: match &rollout.advantages {
                    Advantages::Sequences(all) => Some(all[i]),
                    Advantages::Tokens { .. } => None,
                },
                truncated: sequence.truncated,
            })
        };
        rollout.sequences.iter().enumerate().map(logged).collect()
    }

    /// A few completions for the terminal: of the first rollout, or of all with `log_completions`.
    pub(crate) fn shown(&self, completions: &[LoggedCompletion], first: bool) -> Vec<String> {
        /// Characters of a prompt or completion.
        const SHOWN: usize = 160;
        let Some(sampling) = self.config.algorithm.sampling() else { return Vec::new() };
        let count = match (sampling.log_completions, first) {
            (true, _) => sampling.num_completions_to_print.map_or(completions.len(), |n| n as usize),
            (false, true) => 2,
            (false, false) => 0,
        };
        let brief = |text: &str| {
            let line: String = text.chars().take(SHOWN).collect();
            format!("{:?}{}", line, if text.chars().count() > SHOWN { "…" } else { "" })
        };
        let line = |one: &LoggedCompletion| {
            let reward = one.reward.map_or("none".into(), |reward| format!("{reward:.3}"));
            format!("completion: {} -> {} | reward {reward}", brief(&one.prompt), brief(&one.completion))
        };
        completions.iter().take(count).map(line).collect()
    }
}

/// Exchanges the sequences of all ranks, in rank order.
fn exchange(engine: &Engine, mine: &[Sequence]) -> Result<Vec<Sequence>, TrainError> {
    let all = engine.all_gather_bytes("a rollout", &sequence::to_bytes(mine))?;
    let parts = all.iter().map(|bytes| sequence::from_bytes(bytes, "another rank"));
    Ok(parts.collect::<Result<Vec<_>, _>>()?.concat())
}
