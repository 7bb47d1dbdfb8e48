//! Chooses how a run learns, from its algorithm.

use std::sync::Arc;

use lockstep_config::{AlgorithmConfig, RunConfig};
use lockstep_core::Rank;
use lockstep_data::{Dataset, Tokenizer};
use lockstep_engine::Engine;
use lockstep_plan::{ModelId, ModelRole};
use lockstep_rewards::RewardContext;

use crate::algorithms::dpo::{Dpo, ReferenceLogProbs};
use crate::algorithms::reward::RewardModel;
use crate::algorithms::sft::Sft;
use crate::error::TrainError;
use crate::evaluate::Evaluator;
use crate::feed::Feed;
use crate::learner::{DatasetLearner, Learner, RunObjective};
use crate::models::RunModels;
use crate::objective::Objective;
use crate::reference::{ReferenceSync, precompute, reference_sync};
use crate::rollout::RolloutLearner;
use crate::setup::PreparedRun;
use crate::train_state::TrainState;

/// What a learner is made of, besides the configuration.
pub(crate) struct LearnerSources {
    pub(crate) rank: Rank,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) dataset: Arc<Dataset>,
    pub(crate) eval: Option<Arc<Dataset>>,
    pub(crate) models: RunModels,
    /// The environment of the process, which reward programs get a part of.
    pub(crate) environment: RewardContext,
}

impl LearnerSources {
    pub(crate) fn of(prepared: &PreparedRun) -> LearnerSources {
        LearnerSources {
            rank: prepared.rank,
            tokenizer: Arc::clone(&prepared.tokenizer),
            dataset: Arc::clone(&prepared.dataset),
            eval: prepared.eval.clone(),
            models: prepared.models.clone(),
            environment: prepared.environment.clone(),
        }
    }

    /// How the reference model follows the policy, if it does.
    pub(crate) fn reference_sync(&self, config: &RunConfig) -> Option<ReferenceSync> {
        let reference = self.models.id(ModelRole::Reference)?;
        let sync = reference_sync(config)?;
        Some(ReferenceSync { policy: ModelId::FIRST, reference, sync })
    }
}

/// How a run learns, before its models are loaded.
pub(crate) enum Learning<'a> {
    FromData {
        objective: RunObjective<'a>,
        /// The objective on the evaluation data, if it depends on the data.
        eval_objective: Option<Box<dyn Objective>>,
    },
    FromRollouts,
}

impl<'a> Learning<'a> {
    /// Chooses by the algorithm; a custom objective replaces that of `sft`. With `precompute_ref_log_probs` this scores
    /// the data with the reference, which uses the policy's memory. A collective call.
    pub(crate) fn choose(
        config: &RunConfig,
        engine: &mut Engine,
        sources: &LearnerSources,
        custom: Option<&'a mut dyn Objective>,
        note: &mut dyn FnMut(&str),
    ) -> Result<Learning<'a>, TrainError> {
        if let Some(custom) = custom {
            return Ok(Learning::FromData { objective: RunObjective::Custom(custom), eval_objective: None });
        }
        let mut on = |data: &Arc<Dataset>, engine: &mut Engine| -> Result<Box<dyn Objective>, TrainError> {
            Ok(match &config.algorithm {
                AlgorithmConfig::Reward(reward) => Box::new(RewardModel::new(reward, Arc::clone(data))),
                AlgorithmConfig::Dpo(dpo) => {
                    let reference = match sources.models.id(ModelRole::Reference) {
                        Some(reference) => ReferenceLogProbs::Model(reference),
                        None => {
                            let sums = precompute(config, dpo, engine, &sources.models, data, note)?;
                            ReferenceLogProbs::Precomputed(sums)
                        }
                    };
                    Box::new(Dpo::new(dpo, ModelId::FIRST, reference))
                }
                _ => Box::new(Sft::default()),
            })
        };
        if config.algorithm.algorithm().generates() {
            return Ok(Learning::FromRollouts);
        }
        let objective = RunObjective::Algorithm(on(&sources.dataset, engine)?);
        let eval = sources.eval.as_ref().filter(|_| config.eval.evaluates());
        let eval_objective = eval.map(|data| on(data, engine)).transpose()?;
        Ok(Learning::FromData { objective, eval_objective })
    }

    /// The learner of the steps from `first_step` on.
    pub(crate) fn learner(
        self,
        state: &TrainState<'a>,
        sources: LearnerSources,
        first_step: u64,
    ) -> Result<Box<dyn Learner + 'a>, TrainError> {
        let config = state.config;
        let (objective, eval_objective) = match self {
            Learning::FromData { objective, eval_objective } => (objective, eval_objective),
            Learning::FromRollouts => return Ok(Box::new(RolloutLearner::new(state, sources, first_step)?)),
        };
        let eval = sources.eval.clone().filter(|_| config.eval.evaluates());
        Ok(Box::new(DatasetLearner {
            objective,
            eval_objective,
            feed: Feed::new(
                config,
                &sources.dataset,
                &state.order,
                sources.rank,
                first_step,
                state.total_steps,
            ),
            evaluator: eval.map(|data| Evaluator::new(config, data)),
            reference: sources.reference_sync(config),
        }))
    }
}
