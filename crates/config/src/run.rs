//! The typed and validated configuration of a run.

use std::collections::BTreeMap;

use crate::error::{ConfigError, ConfigErrors, Problem};
use crate::origin::Origin;
use crate::raw::RawConfig;
use crate::reader::Reader;
use crate::sections::{
    BatchConfig, DataConfig, DeviceConfig, EvalConfig, LrScaling, ModelConfig, OptimConfig, OutputConfig,
    PlanConfig, Precision,
};
use crate::settings;

/// The typed and validated configuration of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunConfig {
    pub model: ModelConfig,
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
    /// The value of every key as text, including defaults; see [`crate::changed_settings`].
    pub settings: BTreeMap<String, String>,
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

    /// Checks that there is training data, which planning does not need.
    pub fn check_trainable(&self) -> Result<(), ConfigErrors> {
        if !self.data.train_files.is_empty() || self.data.dataset.is_some() {
            return Ok(());
        }
        let what = "set `train_files` to a file, a folder or a list of them, or set `dataset_name`";
        Err(ConfigErrors(vec![ConfigError::new(Problem::Missing { key: "train_files", what }, Vec::new())]))
    }

    pub(crate) fn resolve(raw: RawConfig<'_>) -> Result<Self, ConfigErrors> {
        if raw.unreadable {
            return Err(ConfigErrors(raw.errors));
        }
        let settings = settings::of(&raw);
        let mut r = Reader::new(raw);
        let model = ModelConfig::read(&mut r);
        let data = DataConfig::read(&mut r, &model.source);
        let batch = BatchConfig::read(&mut r);
        let optim = OptimConfig::read(&mut r);
        let precision = Precision::read(&mut r);
        let device = DeviceConfig::read(&mut r);
        let eval = EvalConfig::read(&mut r, &precision);
        let plan = PlanConfig::read(&mut r);
        let output = OutputConfig::read(&mut r);
        note_scaling(&mut r, &optim, plan.world_size());
        let (errors, notes, origins) = r.finish();
        if errors.is_empty() {
            Ok(RunConfig {
                model,
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
                origins,
            })
        } else {
            Err(ConfigErrors(errors))
        }
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
