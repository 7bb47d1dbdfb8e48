//! Which sequences of a rollout each step trains on.

use lockstep_config::{AlgorithmConfig, Groups, RunConfig};
use lockstep_core::rng::{Purpose, RngStream};

/// The size of a rollout, and how its sequences are divided into optimizer steps. The same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RolloutSchedule {
    /// Completions per prompt.
    pub(crate) group: usize,
    /// Sequences of a rollout, over all ranks.
    pub(crate) sequences: usize,
    /// Optimizer steps that use each sequence once.
    pub(crate) steps_per_pass: u64,
    /// How often each sequence is used: `num_iterations` or `num_ppo_epochs`.
    pub(crate) passes: u64,
    /// Whether every pass has an order of its own.
    shuffles_passes: bool,
    seed: u64,
}

impl RolloutSchedule {
    /// The schedule of a configuration whose algorithm generates.
    pub(crate) fn of(config: &RunConfig) -> RolloutSchedule {
        let batch = &config.batch;
        let (rows, accumulation) = (batch.per_device_train_batch_size, batch.gradient_accumulation_steps);
        let micro_batch = rows as usize * config.plan.world_size() as usize;
        let grouped = |groups: &Groups| RolloutSchedule {
            group: groups.num_generations as usize,
            sequences: micro_batch * groups.steps_per_generation as usize,
            steps_per_pass: u64::from(groups.steps_per_generation.div_ceil(accumulation)),
            passes: groups.num_iterations.into(),
            shuffles_passes: false,
            seed: batch.seed,
        };
        match &config.algorithm {
            AlgorithmConfig::Grpo(grpo) => grouped(&grpo.groups),
            AlgorithmConfig::Rloo(rloo) => grouped(&rloo.groups),
            AlgorithmConfig::Ppo(ppo) => RolloutSchedule {
                group: 1,
                sequences: micro_batch * accumulation as usize,
                steps_per_pass: ppo.num_mini_batches.into(),
                passes: ppo.num_ppo_epochs.into(),
                shuffles_passes: true,
                seed: batch.seed,
            },
            other => unreachable!("{} does not generate", other.name()),
        }
    }

    pub(crate) fn prompts(&self) -> usize {
        self.sequences / self.group
    }

    /// Optimizer steps per rollout.
    pub(crate) fn steps(&self) -> u64 {
        self.steps_per_pass * self.passes
    }

    /// The rollout that a step belongs to.
    pub(crate) fn rollout_of(&self, step: u64) -> u64 {
        step / self.steps()
    }

    /// Micro-batches of a rank per optimizer step, of `rows` sequences each.
    pub(crate) fn num_micro_batches(&self, rows: usize, world: usize) -> usize {
        let per_step = self.sequences.div_ceil(self.steps_per_pass as usize);
        per_step.div_ceil(rows * world)
    }

    /// Whether the policy that is trained has generated the sequences itself in every step: there is one step per
    /// rollout, so that all probability ratios are 1.
    pub(crate) fn is_on_policy(&self) -> bool {
        self.steps() == 1
    }

    /// The sequences of a step, over all ranks, in order.
    pub(crate) fn rows(&self, step: u64) -> Vec<u32> {
        let (rollout, in_rollout) = (self.rollout_of(step), step % self.steps());
        let (pass, part) = (in_rollout / self.steps_per_pass, in_rollout % self.steps_per_pass);
        let all = match self.steps_per_pass {
            1 => (0..self.sequences as u32).collect(),
            // Mix the groups of the rollout over its steps.
            _ => {
                let order = if self.shuffles_passes { pass } else { 0 };
                let stream = RngStream::new(self.seed, Purpose::RolloutOrder, rollout as u32, order as u32);
                stream.permutation(self.sequences)
            }
        };
        let per_step = self.sequences.div_ceil(self.steps_per_pass as usize);
        all.chunks(per_step).nth(part as usize).unwrap_or_default().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pass_uses_every_sequence_once() {
        let schedule = RolloutSchedule {
            group: 4,
            sequences: 24,
            steps_per_pass: 3,
            passes: 2,
            shuffles_passes: true,
            seed: 1,
        };
        assert_eq!((schedule.steps(), schedule.prompts(), schedule.rollout_of(7)), (6, 6, 1));
        let pass =
            |first: u64| -> Vec<u32> { (first..first + 3).flat_map(|step| schedule.rows(step)).collect() };
        for first in [0, 3, 6] {
            let mut all = pass(first);
            all.sort_unstable();
            assert_eq!(all, (0..24).collect::<Vec<u32>>());
        }
        assert!(pass(0) != pass(3) && pass(0) != pass(6));
        let same_order = RolloutSchedule { shuffles_passes: false, ..schedule };
        assert_eq!(same_order.rows(1), same_order.rows(4));
        assert_eq!(schedule.num_micro_batches(2, 2), 2);
    }
}
