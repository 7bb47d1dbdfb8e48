//! The typed and validated configuration of a run.

use std::collections::BTreeMap;

use crate::error::{ConfigError, ConfigErrors, Problem};
use crate::origin::Origin;
use crate::raw::{RawConfig, Setting};
use crate::reader::{Finished, Reader};
use crate::sections::{
    AlgorithmConfig, AlgorithmName, BatchConfig, DataConfig, DeviceConfig, EvalConfig, LrScaling,
    ModelConfig, ModelSource, OptimConfig, OutputConfig, PlanConfig, Precision, check_compute_dtype,
};
use crate::settings;

/// What a configuration is loaded for, which determines the required keys besides the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Needs neither data nor an output folder.
    Plan,
    /// Needs training data.
    Prepare,
    /// Needs training data and an output folder.
    Train,
}

/// The typed and validated configuration of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunConfig {
    pub model: ModelConfig,
    pub algorithm: AlgorithmConfig,
    pub data: DataConfig,
    pub batch: BatchConfig,
    pub optim: OptimConfig,
    pub precision: Precision,
    pub device: DeviceConfig,
    pub eval: EvalConfig,
    pub plan: PlanConfig,
    pub output: OutputConfig,
    /// Notes for the user, such as keys without effect. Sentences without the final period.
    pub notes: Vec<String>,
    /// The value of every key of the algorithm as text, including defaults; see [`crate::changed_settings`].
    pub settings: BTreeMap<String, String>,
    /// The keys whose values differ from their defaults, in the order of the reference page, each with the YAML that
    /// sets it.
    pub changed: Vec<(&'static str, String)>,
    /// Where each key's value came from, by the key's canonical name.
    pub origins: BTreeMap<&'static str, Origin>,
}

impl RunConfig {
    /// Where the value of `key` (its canonical name) came from.
    pub fn origin(&self, key: &str) -> &Origin {
        self.origins.get(key).unwrap_or(&Origin::Default)
    }

    /// The rows of one optimizer step, over all ranks and micro-batches.
    pub fn global_batch_rows(&self) -> u64 {
        let per_rank = u64::from(self.batch.per_device_train_batch_size)
            * u64::from(self.batch.gradient_accumulation_steps);
        per_rank.saturating_mul(self.plan.world_size().into())
    }

    /// The highest learning rate of the schedule, after `lr_scaling`.
    pub fn peak_learning_rate(&self) -> f64 {
        self.optim.learning_rate * self.optim.lr_scaling.factor(self.plan.world_size())
    }

    /// Checks that there are training data and an output folder, which planning does not need.
    pub fn check_trainable(&self) -> Result<(), ConfigErrors> {
        let mut missing = Vec::new();
        if self.data.train_files.is_empty() && self.data.dataset.is_none() {
            missing.push(NO_DATA);
        }
        if self.output.output_dir.as_os_str().is_empty() {
            missing.push(NO_OUTPUT);
        }
        let error = |(key, what)| ConfigError::new(Problem::Missing { key, what }, Vec::new());
        match missing.is_empty() {
            true => Ok(()),
            false => Err(ConfigErrors(missing.into_iter().map(error).collect())),
        }
    }

    pub(crate) fn resolve(raw: RawConfig<'_>, purpose: Purpose) -> Result<Resolved, ConfigErrors> {
        if raw.unreadable {
            return Err(ConfigErrors(raw.errors));
        }
        // If the algorithm is unclear, errors about its keys would only distract.
        let is_unclear = raw.errors.iter().any(|e| matches!(e.problem, Problem::OtherCommand { .. }));
        let named = AlgorithmName::of(&raw).filter(|_| !is_unclear);
        let algorithm = AlgorithmName::of(&raw).unwrap_or(AlgorithmName::Sft);
        let changed = settings::changed(&raw, algorithm);
        let settings = settings::of(&raw, algorithm);
        let mut r = Reader::new(raw, algorithm);
        if named.is_some() {
            r.refuse_keys_of_other_algorithms();
        }
        let model = ModelConfig::read(&mut r);
        let data = DataConfig::read(&mut r, &model.source);
        let plan = PlanConfig::read(&mut r);
        let batch = BatchConfig::read(&mut r, plan.world_size());
        let optim = OptimConfig::read(&mut r);
        let precision = Precision::read(&mut r);
        check_compute_dtype(&mut r, &precision, model.load_in_4bit);
        let device = DeviceConfig::read(&mut r);
        let eval = EvalConfig::read(&mut r, &precision);
        let output = OutputConfig::read(&mut r);
        let algorithm = AlgorithmConfig::read(&mut r, &batch, plan.world_size());
        note_scaling(&mut r, &optim, plan.world_size());
        require(&mut r, purpose);
        let Finished { errors, notes, origins, given, given_origins } = r.finish();
        if !errors.is_empty() {
            return Err(ConfigErrors(errors));
        }
        let mut config = RunConfig {
            model,
            algorithm,
            data,
            batch,
            optim,
            precision,
            device,
            eval,
            plan,
            output,
            notes,
            settings,
            changed,
            origins,
        };
        if let ModelSource::Explicit(keys) = &config.model.source
            && let Some(hidden_size) = keys.get("hidden_size").and_then(serde_json::Value::as_u64)
        {
            config.resolve_auto_sizes(hidden_size);
        }
        Ok(Resolved { config, given, given_origins })
    }
}

/// A configuration with the values that it was resolved from.
pub(crate) struct Resolved {
    pub(crate) config: RunConfig,
    /// The value of each key that is given and in use.
    pub(crate) given: BTreeMap<&'static str, Setting>,
    /// Where each of them came from.
    pub(crate) given_origins: BTreeMap<&'static str, String>,
}

/// A missing key, and what to set.
type MissingKey = (&'static str, &'static str);

const NO_DATA: MissingKey =
    ("train_files", "set `train_files` to a file, a folder or a list of them, or set `dataset_name`");
const NO_OUTPUT: MissingKey = ("output_dir", "set `output_dir: outputs/first-run`, or set `experiment_name`");

/// Reports the keys that `purpose` needs and that are not set.
fn require(r: &mut Reader<'_>, purpose: Purpose) {
    if purpose != Purpose::Plan && !r.is_set("train_files") && !r.is_set("dataset_name") {
        r.missing(NO_DATA.0, NO_DATA.1);
    }
    if purpose == Purpose::Train && !r.is_set("output_dir") && !r.is_set("experiment_name") {
        r.missing(NO_OUTPUT.0, NO_OUTPUT.1);
    }
}

fn note_scaling(r: &mut Reader<'_>, optim: &OptimConfig, world: u32) {
    if optim.lr_scaling != LrScaling::None {
        let (rate, factor) = (optim.learning_rate, optim.lr_scaling.factor(world));
        let how = format!("{:?}", optim.lr_scaling).to_lowercase();
        r.note(format!(
            "`lr_scaling: {how}` multiplies the learning rate {rate:e} by {factor} for {world} ranks: {:e}",
            rate * factor
        ));
    }
}
