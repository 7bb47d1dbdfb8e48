//! How a run learns: where the batches of its steps come from, and the objective of each trained model.

use lockstep_ckpt::Checkpoint;
use lockstep_data::{Batch, StepBatches};
use lockstep_engine::Engine;
use lockstep_observe::{EvalRecord, NamedMetric};
use lockstep_plan::ModelId;

use crate::error::TrainError;
use crate::evaluate::Evaluator;
use crate::feed::Feed;
use crate::objective::{Objective, StepCounts};

/// The work of one optimizer step on this rank.
#[derive(Debug)]
pub(crate) struct StepWork {
    /// The micro-batches of the policy, and the rows and counts of the step.
    pub(crate) batches: StepBatches,
    /// The micro-batches of a model that does not see the same positions as the policy.
    pub(crate) others: Option<(ModelId, Vec<Batch>)>,
    /// The seconds of what this rank did to make it, as metrics: for a new rollout, `generate_seconds` and others.
    pub(crate) seconds: Vec<NamedMetric>,
}

impl StepWork {
    /// The micro-batches of a trained model.
    pub(crate) fn micro_batches(&self, model: ModelId) -> &[Batch] {
        match &self.others {
            Some((other, batches)) if *other == model => batches,
            _ => &self.batches.micro_batches,
        }
    }

    /// Counts over all ranks.
    pub(crate) fn counts(&self) -> StepCounts {
        let StepBatches { supervised, tokens, pairs, supervised_chosen, .. } = self.batches;
        StepCounts { supervised, tokens, pairs, supervised_chosen }
    }
}

/// How a run learns. All ranks call these methods in the same order: they may run phases of the engine.
pub(crate) trait Learner {
    /// The trained models; the policy is the first.
    fn trained(&self) -> &[ModelId] {
        &[ModelId::FIRST]
    }

    fn objective(&mut self, model: ModelId) -> &mut dyn Objective;

    /// Provides the work of the next step. Give it back with [`Learner::done`].
    fn next_work(&mut self, engine: &mut Engine) -> Result<StepWork, TrainError>;

    /// The factor of a trained model's learning rate.
    fn learning_rate_factor(&self, _model: ModelId) -> f64 {
        1.0
    }

    /// Takes the work back after a step of `seconds`. Returns notes for the user.
    fn done(&mut self, _work: StepWork, _seconds: f64) -> Vec<String> {
        Vec::new()
    }

    /// What the model has generated since the last call, as Markdown for trackers.
    fn samples(&mut self) -> Option<String> {
        None
    }

    /// Called after each step, with the number of completed steps.
    fn after_step(&mut self, _engine: &mut Engine, _step: u64) -> Result<(), TrainError> {
        Ok(())
    }

    /// Evaluates the model after `step` steps. `None`: there is nothing to evaluate on.
    fn evaluate(
        &mut self,
        engine: &mut Engine,
        step: u64,
        epoch: f64,
    ) -> Result<Option<EvalRecord>, TrainError>;

    /// Files that a checkpoint needs besides tensors and counters. Rank 0 writes them.
    fn checkpoint_files(&self) -> Vec<(String, Vec<u8>)> {
        Vec::new()
    }

    /// Continues from a checkpoint, whose tensors are loaded already.
    fn restore(&mut self, _checkpoint: &Checkpoint) -> Result<(), TrainError> {
        Ok(())
    }
}

/// The objective of a run: the algorithm's, or one of the caller's.
pub(crate) enum RunObjective<'a> {
    Algorithm(Box<dyn Objective>),
    Custom(&'a mut dyn Objective),
}

impl RunObjective<'_> {
    fn get(&mut self) -> &mut dyn Objective {
        match self {
            RunObjective::Algorithm(objective) => &mut **objective,
            RunObjective::Custom(objective) => &mut **objective,
        }
    }
}

/// Learns from a data set: supervised fine-tuning, reward models, preference optimization, and custom objectives.
pub(crate) struct DatasetLearner<'a> {
    pub(crate) objective: RunObjective<'a>,
    pub(crate) feed: Feed,
    pub(crate) evaluator: Option<Evaluator>,
    /// The objective on the evaluation data, if it depends on the data.
    pub(crate) eval_objective: Option<Box<dyn Objective>>,
    pub(crate) reference: Option<crate::reference::ReferenceSync>,
}

impl Learner for DatasetLearner<'_> {
    fn objective(&mut self, _: ModelId) -> &mut dyn Objective {
        self.objective.get()
    }

    fn next_work(&mut self, _: &mut Engine) -> Result<StepWork, TrainError> {
        Ok(StepWork { batches: self.feed.next()?, others: None, seconds: Vec::new() })
    }

    fn done(&mut self, work: StepWork, seconds: f64) -> Vec<String> {
        self.feed.done(work.batches, seconds).into_iter().collect()
    }

    fn after_step(&mut self, engine: &mut Engine, step: u64) -> Result<(), TrainError> {
        match &self.reference {
            Some(sync) => sync.after_step(engine, step),
            None => Ok(()),
        }
    }

    fn evaluate(
        &mut self,
        engine: &mut Engine,
        step: u64,
        epoch: f64,
    ) -> Result<Option<EvalRecord>, TrainError> {
        let Some(evaluator) = &mut self.evaluator else { return Ok(None) };
        let record = match &mut self.eval_objective {
            Some(objective) => evaluator.evaluate(engine, &mut **objective, step, epoch),
            None => evaluator.evaluate(engine, self.objective.get(), step, epoch),
        };
        record.map(Some)
    }
}
