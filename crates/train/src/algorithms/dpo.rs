//! Direct preference optimization: the policy learns to prefer the chosen completion of each pair over the rejected
//! one, compared with a frozen reference model. The loss is the mean over all pairs of the step on all ranks.

use std::sync::Arc;

use lockstep_config::{DpoConfig, DpoLoss};
use lockstep_data::Batch;
use lockstep_engine::{Coefficients, Outputs};
use lockstep_plan::ModelId;

use super::dpo_loss::{PairLogProbs, PairLoss, coupled_losses, is_coupled, pair_loss};
use super::pairs::{Completion, completions};
use crate::objective::{Metrics, Objective, StepCounts};

/// Where the reference's log-probabilities come from.
#[derive(Clone, Debug)]
pub(crate) enum ReferenceLogProbs {
    /// A model that scores every step.
    Model(ModelId),
    /// One number per document of the data set, computed before the run.
    Precomputed(Arc<Vec<f64>>),
}

/// Direct preference optimization.
#[derive(Debug)]
pub(crate) struct Dpo {
    config: DpoConfig,
    policy: ModelId,
    reference: ReferenceLogProbs,
    /// The models that score a step: the reference, and the policy if a loss couples the pairs of the step.
    scorers: Vec<ModelId>,
    counts: StepCounts,
    /// For each micro-batch, the reference's log-probability of every document.
    reference_sums: Vec<Vec<f64>>,
    /// The same of the policy, with coupled losses.
    policy_sums: Vec<Vec<f64>>,
    /// With coupled losses: the pairs of this rank and, after scoring, their losses.
    pairs: Vec<PairLogProbs>,
    coupled: Vec<PairLoss>,
    sums: Sums,
}

/// Sums over the pairs of this rank.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    loss: f64,
    chosen_reward: f64,
    rejected_reward: f64,
    correct: f64,
    chosen_log_prob: f64,
    rejected_log_prob: f64,
}

impl Dpo {
    pub(crate) fn new(config: &DpoConfig, policy: ModelId, reference: ReferenceLogProbs) -> Dpo {
        let couples = config.losses.iter().any(|(loss, _)| is_coupled(*loss));
        let scored = match reference {
            ReferenceLogProbs::Model(model) => Some(model),
            ReferenceLogProbs::Precomputed(_) => None,
        };
        Dpo {
            config: config.clone(),
            policy,
            reference,
            scorers: scored.into_iter().chain(couples.then_some(policy)).collect(),
            counts: StepCounts::default(),
            reference_sums: Vec::new(),
            policy_sums: Vec::new(),
            pairs: Vec::new(),
            coupled: Vec::new(),
            sums: Sums::default(),
        }
    }

    fn couples(&self) -> bool {
        self.scorers.contains(&self.policy)
    }

    /// The log-probability of every completion of a batch.
    fn completion_sums(&self, batch: &Batch, log_probs: &[f32]) -> Vec<f64> {
        let all = completions(batch);
        let alpha = self.config.ld_alpha;
        all.iter().map(|completion| completion.log_prob(log_probs, alpha)).collect()
    }

    fn reference_of(&self, index: usize, batch: &Batch, doc: usize) -> f64 {
        match &self.reference {
            ReferenceLogProbs::Model(_) => self.reference_sums[index][doc],
            ReferenceLogProbs::Precomputed(all) => all[batch.samples[doc] as usize],
        }
    }

    /// The pairs of a batch, from the policy's log-probability of every completion.
    fn pairs_of(&self, index: usize, batch: &Batch, policy: &[f64]) -> Vec<PairLogProbs> {
        let all = completions(batch);
        let pair = |p: usize| PairLogProbs {
            policy: [policy[2 * p], policy[2 * p + 1]],
            reference: [2 * p, 2 * p + 1].map(|doc| self.reference_of(index, batch, doc)),
            lengths: [2 * p, 2 * p + 1].map(|doc| all[doc].length as f64),
        };
        (0..all.len() / 2).map(pair).collect()
    }

    /// The weighted sum of all losses of a pair. `at`: its index among the pairs of this rank in the step.
    fn loss_of(&self, pair: &PairLogProbs, at: usize) -> PairLoss {
        let mut total = PairLoss::default();
        for (loss, weight) in &self.config.losses {
            let one = match loss {
                DpoLoss::Sft => continue,
                _ if is_coupled(*loss) => continue,
                other => pair_loss(*other, &self.config, pair),
            };
            total.add(&one, *weight);
        }
        if let Some(coupled) = self.coupled.get(at) {
            total.add(coupled, 1.0);
        }
        total
    }

    /// The weight of the negative log-likelihood of the chosen completions, if it is one of the losses.
    fn sft_weight(&self) -> f64 {
        self.config.losses.iter().filter(|(loss, _)| *loss == DpoLoss::Sft).map(|(_, weight)| weight).sum()
    }

    /// The index of a micro-batch's first pair among the pairs of this rank.
    fn first_pair(&self, index: usize) -> usize {
        self.policy_sums.iter().take(index).map(|sums| sums.len() / 2).sum()
    }

    fn record(&mut self, pair: &PairLogProbs, loss: f64) {
        let beta = self.config.beta;
        let [chosen, rejected] = pair.ratios().map(|ratio| beta * ratio);
        self.sums.loss += loss;
        self.sums.chosen_reward += chosen;
        self.sums.rejected_reward += rejected;
        self.sums.correct += f64::from(u8::from(chosen > rejected));
        self.sums.chosen_log_prob += pair.policy[0];
        self.sums.rejected_log_prob += pair.policy[1];
    }
}

impl Objective for Dpo {
    fn scorers(&self) -> &[ModelId] {
        &self.scorers
    }

    fn exchanges_scores(&self) -> bool {
        self.couples()
    }

    fn begin(&mut self, counts: &StepCounts) {
        self.counts = *counts;
        self.reference_sums.clear();
        self.policy_sums.clear();
        self.pairs.clear();
        self.coupled.clear();
        self.sums = Sums::default();
    }

    fn scored(&mut self, model: ModelId, index: usize, batch: &Batch, outputs: Outputs<'_>) {
        let sums = self.completion_sums(batch, outputs.log_probs());
        if model == self.policy {
            let pairs = self.pairs_of(index, batch, &sums);
            self.pairs.extend(pairs);
            self.policy_sums.push(sums);
        } else {
            self.reference_sums.push(sums);
        }
    }

    fn score_exchange(&self) -> Vec<f64> {
        self.pairs.iter().flat_map(|pair| [pair.policy, pair.reference].concat()).collect()
    }

    fn scores_done(&mut self, of_ranks: &[Vec<f64>], own: usize) {
        if !self.couples() {
            return;
        }
        let pair =
            |n: &[f64]| PairLogProbs { policy: [n[0], n[1]], reference: [n[2], n[3]], lengths: [0.0; 2] };
        let all: Vec<PairLogProbs> = of_ranks.iter().flat_map(|n| n.chunks_exact(4).map(pair)).collect();
        let first: usize = of_ranks[..own].iter().map(|numbers| numbers.len() / 4).sum();
        self.coupled = vec![PairLoss::default(); self.pairs.len()];
        for (loss, weight) in self.config.losses.iter().filter(|(loss, _)| is_coupled(*loss)) {
            let losses = coupled_losses(*loss, &self.config, &all);
            let own = &losses[first..first + self.pairs.len()];
            self.coupled.iter_mut().zip(own).for_each(|(total, one)| total.add(one, *weight));
        }
    }

    fn coefficients(
        &mut self,
        index: usize,
        batch: &Batch,
        outputs: Option<Outputs<'_>>,
        out: &mut Coefficients<'_>,
    ) {
        let policy = match &outputs {
            Some(outputs) => self.completion_sums(batch, outputs.log_probs()),
            None => self.policy_sums[index].clone(),
        };
        let pairs = self.pairs_of(index, batch, &policy);
        let first = self.first_pair(index);
        let num_pairs = self.counts.pairs as f64;
        let sft = self.sft_weight() / self.counts.supervised_chosen.max(1) as f64;
        let all = completions(batch);
        let coefficients = out.log_probs();
        for (p, pair) in pairs.iter().enumerate() {
            let loss = self.loss_of(pair, first + p);
            for (side, slope) in loss.slopes.iter().enumerate() {
                let own_sft = if side == 0 { sft } else { 0.0 };
                let completion = &all[2 * p + side];
                completion.each_weight(self.config.ld_alpha, |token, weight| {
                    coefficients[token] = (slope * weight / num_pairs - own_sft) as f32;
                });
            }
            self.record(pair, loss.loss);
        }
    }

    fn outputs(&mut self, batch: &Batch, outputs: Outputs<'_>) {
        let sft = self.sft_weight();
        if sft != 0.0 {
            let chosen = completions(batch).into_iter().step_by(2);
            let sum: f64 = chosen.map(|completion| completion.log_prob(outputs.log_probs(), None)).sum();
            // `metrics` divides by the number of pairs.
            let per_token = self.counts.pairs as f64 / self.counts.supervised_chosen.max(1) as f64;
            self.sums.loss -= sft * sum * per_token;
        }
    }

    fn sums(&self) -> Vec<f64> {
        let s = &self.sums;
        vec![s.loss, s.chosen_reward, s.rejected_reward, s.correct, s.chosen_log_prob, s.rejected_log_prob]
    }

    fn metrics(&self, sums: &[f64], _: &[f64]) -> Metrics {
        let mean = |i: usize| sums[i] / self.counts.pairs as f64;
        Metrics {
            loss: mean(0),
            others: vec![
                ("rewards/chosen".into(), mean(1)),
                ("rewards/rejected".into(), mean(2)),
                ("rewards/accuracies".into(), mean(3)),
                ("rewards/margins".into(), mean(1) - mean(2)),
                ("logps/chosen".into(), mean(4)),
                ("logps/rejected".into(), mean(5)),
            ],
        }
    }
}

/// The sums of the reference over a data set's documents, as [`ReferenceLogProbs::Precomputed`] needs them.
pub(crate) fn document_log_probs(batch: &Batch, log_probs: &[f32], ld_alpha: Option<f64>) -> Vec<(u32, f64)> {
    let sums = completions(batch).into_iter().map(|completion: Completion| {
        (batch.samples[completion.doc], completion.log_prob(log_probs, ld_alpha))
    });
    sums.collect()
}
