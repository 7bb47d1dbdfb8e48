//! The models of a run: their roles, shapes and initial weights, and what the plan must provide for them.

use std::path::{Path, PathBuf};

use lockstep_ckpt::{AdapterFolder, ModelFolder};
use lockstep_config::{AlgorithmConfig, InitialWeights, ModelSource, RunConfig};
use lockstep_core::Bytes;
use lockstep_data::Tokenizer;
use lockstep_engine::Engine;
use lockstep_model::KernelBackend;
use lockstep_plan::{ModelId, ModelNeeds, ModelRole, RunNeeds, bounds, sequence_bounds};
use lockstep_shape::{Channels, Head, ModelShape, WeightFormat};

use crate::adapter;
use crate::algorithms::dpo_loss::is_coupled;
use crate::algorithms::policy_gradient::PolicyGradient;
use crate::error::TrainError;
use crate::objective::{Objective, coefficients_ahead};
use crate::reference::reference_sync;
use crate::rollout::schedule::RolloutSchedule;
use crate::rollout::{rollout_temperature, wanted_generation};
use crate::save;
use crate::setup::{folder_shape, model_shape};

/// One model of a run.
#[derive(Clone, Debug)]
pub(crate) struct RunModel {
    pub(crate) role: ModelRole,
    pub(crate) shape: ModelShape,
    /// The folder of its initial weights; `None`: they are random.
    pub(crate) folder: Option<PathBuf>,
    /// The folder of its adapters' initial weights; `None`: they are new.
    pub(crate) adapter: Option<PathBuf>,
    /// The model whose weights it uses, without that model's adapters.
    pub(crate) shares_weights_of: Option<ModelId>,
}

/// The models of a run, in the order of the plan. The first one is the policy.
#[derive(Clone, Debug)]
pub struct RunModels(pub(crate) Vec<RunModel>);

impl RunModels {
    /// The models that the configuration's algorithm needs. Reads the `config.json` of their folders.
    pub fn of(config: &RunConfig, tokenizer: &Tokenizer) -> Result<RunModels, TrainError> {
        let own_folder = match (&config.model.source, config.model.init) {
            (ModelSource::Folder(path), InitialWeights::Pretrained) => Some(path.clone()),
            _ => None,
        };
        let mut policy = model_shape(config, tokenizer)?;
        match (&config.algorithm, policy.head) {
            (AlgorithmConfig::Reward(_), _) => policy.head = Head::Score,
            (_, Head::LanguageModel) => {}
            (other, Head::Score) => return Err(TrainError::NeedsLanguageModel { algorithm: other.name() }),
        }
        policy.lora = adapter::configured(config, &policy)?;
        if policy.lora.is_some() && reference_sync(config).is_some() {
            return Err(TrainError::SyncWithAdapter);
        }
        if policy.lora.is_none() {
            check_trains(&policy)?;
        }
        let mut policy = RunModel::new(ModelRole::Policy, policy, own_folder);
        policy.adapter = config.model.lora.as_ref().and_then(|lora| lora.folder.clone());
        let mut models = vec![policy];
        if config.algorithm.has_reference() && !precomputes_reference(config) {
            models.push(reference(config, &models[0])?);
        }
        if let Some(path) = config.algorithm.reward_model() {
            models.push(scorer(ModelRole::Reward, path, tokenizer)?);
        }
        if let AlgorithmConfig::Ppo(ppo) = &config.algorithm {
            let path = ppo.value_model.as_deref().unwrap_or(&ppo.reward_model);
            let value = scorer(ModelRole::Value, path, tokenizer)?;
            check_trains(&value.shape)?;
            models.push(value);
        }
        let quantised = |model: &RunModel| model.shape.frozen_projections == WeightFormat::Nf4;
        if reference_sync(config).is_some() && models.iter().any(quantised) {
            return Err(TrainError::QuantisedReference { key: "sync_ref_model" });
        }
        if precomputes_reference(config) {
            // It is scored in the policy's memory.
            let reference = reference(config, &models[0])?;
            if quantised(&reference) != quantised(&models[0]) {
                return Err(TrainError::QuantisedReference { key: "precompute_ref_log_probs" });
            }
        }
        Ok(RunModels(models))
    }

    /// One model, with random weights.
    pub(crate) fn single(shape: &ModelShape) -> RunModels {
        RunModels(vec![RunModel::new(ModelRole::Policy, shape.clone(), None)])
    }

    pub(crate) fn policy(&self) -> &RunModel {
        &self.0[0]
    }

    /// The id of the model with a role.
    pub(crate) fn id(&self, role: ModelRole) -> Option<ModelId> {
        self.0.iter().position(|model| model.role == role).map(|i| ModelId(i as u8))
    }

    /// Opens the folders of all weights and checks that each fits its model.
    pub(crate) fn check_weights(&self) -> Result<(), TrainError> {
        for model in &self.0 {
            if let Some(path) = &model.folder {
                save::check_weights(&ModelFolder::open(path)?, &model.shape)?;
            }
            if let Some(path) = &model.adapter {
                adapter::check(&AdapterFolder::open(path)?, &model.shape)?;
            }
        }
        Ok(())
    }

    /// Loads or initialises the weights of one model. Returns the bytes that it read from files.
    pub(crate) fn load(&self, engine: &mut Engine, id: ModelId, seed: u64) -> Result<Bytes, TrainError> {
        self.0[id.0 as usize].load(engine, id, seed)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = ModelId> + use<> {
        (0..self.0.len() as u8).map(ModelId)
    }
}

impl RunModel {
    fn new(role: ModelRole, shape: ModelShape, folder: Option<PathBuf>) -> RunModel {
        RunModel { role, shape, folder, adapter: None, shares_weights_of: None }
    }

    /// Loads or initialises these weights as model `id` of an engine. Returns the bytes that it read from files.
    pub(crate) fn load(&self, engine: &mut Engine, id: ModelId, seed: u64) -> Result<Bytes, TrainError> {
        if self.shares_weights_of.is_some() {
            return Ok(Bytes::ZERO);
        }
        let mut read = Bytes::ZERO;
        match &self.folder {
            None => engine.model_mut(id).initialise(seed)?,
            Some(path) => {
                let folder = ModelFolder::open(path)?;
                save::load_weights(engine, id, &folder, seed)?;
                read += folder.bytes_read();
            }
        }
        if let Some(path) = &self.adapter {
            read += adapter::load(engine, id, path)?;
        }
        Ok(read)
    }
}

/// Weights in 4 bits are not trained themselves.
fn check_trains(shape: &ModelShape) -> Result<(), TrainError> {
    match shape.frozen_projections {
        WeightFormat::Storage => Ok(()),
        WeightFormat::Nf4 => Err(TrainError::TrainsQuantised),
    }
}

/// Whether the reference model's log-probabilities are computed before the run, so that it is not needed in it.
pub(crate) fn precomputes_reference(config: &RunConfig) -> bool {
    matches!(&config.algorithm, AlgorithmConfig::Dpo(dpo) if dpo.precompute_ref_log_probs)
}

/// The reference model: a folder of its own, or the same as the policy.
pub(crate) fn reference(config: &RunConfig, policy: &RunModel) -> Result<RunModel, TrainError> {
    let role = ModelRole::Reference;
    let Some(path) = config.algorithm.ref_model() else {
        // With adapters, the reference is the same model without them, and needs no memory for weights.
        let shape = ModelShape { lora: None, ..policy.shape.clone() };
        let shares_weights_of = policy.shape.lora.is_some().then_some(ModelId::FIRST);
        return Ok(RunModel { role, shape, adapter: None, shares_weights_of, ..policy.clone() });
    };
    let shape = folder_shape(path)?;
    let comparable = shape.head == Head::LanguageModel && shape.vocab == policy.shape.vocab;
    if !comparable {
        let (path, vocab, policy_vocab) = (path.to_path_buf(), shape.vocab, policy.shape.vocab);
        return Err(TrainError::OtherReference { path, vocab, policy_vocab });
    }
    Ok(RunModel::new(role, shape, Some(path.to_path_buf())))
}

/// A reward or value model. A value model may start from a language model, with a new head.
fn scorer(role: ModelRole, path: &Path, tokenizer: &Tokenizer) -> Result<RunModel, TrainError> {
    let mut shape = folder_shape(path)?;
    if shape.head == Head::LanguageModel && role == ModelRole::Reward {
        return Err(TrainError::NotARewardModel { path: path.to_path_buf() });
    }
    if tokenizer.vocab_size() > shape.vocab {
        return Err(TrainError::VocabularyTooSmall { tokenizer: tokenizer.vocab_size(), vocab: shape.vocab });
    }
    shape.head = Head::Score;
    Ok(RunModel::new(role, shape, Some(path.to_path_buf())))
}

/// What the policy's objective needs from the plan.
#[derive(Clone, Debug)]
pub(crate) struct ObjectiveNeeds {
    pub(crate) channels: Channels,
    /// The models that score each step.
    pub(crate) scorers: Vec<ModelId>,
    /// Whether coefficients are known before the head runs.
    pub(crate) coefficients_ahead: bool,
}

impl ObjectiveNeeds {
    pub(crate) fn of(objective: &dyn Objective) -> ObjectiveNeeds {
        ObjectiveNeeds {
            channels: objective.channels(),
            scorers: objective.scorers().to_vec(),
            coefficients_ahead: coefficients_ahead(objective, ModelId::FIRST),
        }
    }

    /// Those of the configured algorithm.
    pub(crate) fn of_algorithm(config: &RunConfig, models: &RunModels) -> ObjectiveNeeds {
        let policy = ModelId::FIRST;
        let needs = |channels, scorers: Vec<ModelId>, ahead: bool| {
            let coefficients_ahead = ahead || scorers.contains(&policy);
            ObjectiveNeeds { channels, scorers, coefficients_ahead }
        };
        match &config.algorithm {
            AlgorithmConfig::Sft | AlgorithmConfig::Clm => needs(Channels::LOG_PROB, vec![], true),
            AlgorithmConfig::Reward(_) => needs(Channels::VALUE, vec![], false),
            AlgorithmConfig::Dpo(dpo) => {
                let reference = models.id(ModelRole::Reference);
                let couples = dpo.losses.iter().any(|(loss, _)| is_coupled(*loss));
                needs(
                    Channels::LOG_PROB,
                    reference.into_iter().chain(couples.then_some(policy)).collect(),
                    false,
                )
            }
            AlgorithmConfig::Grpo(grpo) => {
                let loss = PolicyGradient::grpo(config, grpo);
                needs(loss.channels(), loss.scorers().to_vec(), loss.coefficients_ahead())
            }
            AlgorithmConfig::Rloo(rloo) => {
                let loss = PolicyGradient::rloo(config, rloo);
                needs(loss.channels(), vec![], loss.coefficients_ahead())
            }
            AlgorithmConfig::Ppo(ppo) => {
                // The value model's objective needs the outputs of its head.
                needs(PolicyGradient::ppo(config, ppo).channels(), vec![], false)
            }
        }
    }
}

/// What the plan must provide for a run.
pub(crate) fn run_needs<'a>(
    config: &RunConfig,
    models: &'a RunModels,
    objective: &ObjectiveNeeds,
    kernels: KernelBackend,
) -> RunNeeds<'a> {
    let generates = config.algorithm.algorithm().generates();
    let needs = models.ids().zip(&models.0).map(|(id, model)| {
        let is_policy = id == ModelId::FIRST;
        let has_score_head = model.shape.head == Head::Score;
        let scores = !is_policy || generates || config.eval.evaluates() || objective.scorers.contains(&id);
        ModelNeeds {
            role: model.role,
            shape: &model.shape,
            bounds: if has_score_head && generates { sequence_bounds(config) } else { bounds(config) },
            channels: match (is_policy, has_score_head) {
                (true, _) => objective.channels,
                (false, true) => Channels::VALUE,
                (false, false) => Channels::LOG_PROB,
            },
            scores,
            generation: (is_policy && generates).then(|| wanted_generation(config, &model.shape, kernels)),
            temperature: rollout_temperature(config),
            shares_weights_of: model.shares_weights_of,
        }
    });
    RunNeeds {
        models: needs.collect(),
        coefficients_ahead: objective.coefficients_ahead,
        num_micro_batches: match generates {
            true => {
                let world = config.plan.world_size() as usize;
                let rows = config.batch.per_device_train_batch_size as usize;
                RolloutSchedule::of(config).num_micro_batches(rows, world) as u32
            }
            false => config.batch.gradient_accumulation_steps,
        },
    }
}
