//! Every setting of a run with its value and its origin, for `lockstep plan --origins`.

use crate::keys::KEYS;
use crate::origin::Origin;
use crate::run::RunConfig;
use crate::sections::{EvalStrategy, Precision, Recompute, Warmup};

/// A setting of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedSetting {
    /// The key; a part of a map has its own row, such as `model.hidden_size`.
    pub key: String,
    /// The value that the run uses, as text; `null` if there is none.
    pub value: String,
    pub origin: Origin,
}

/// All settings of the algorithm, in the order of the reference page, including defaults.
pub fn list_settings(config: &RunConfig) -> Vec<ResolvedSetting> {
    let mut rows = Vec::new();
    let algorithm = config.algorithm.algorithm();
    for key in KEYS.iter().filter(|key| key.is_for(algorithm)) {
        let origin = config.origin(key.name).clone();
        let inside = format!("{}.", key.name);
        let parts = config.settings.iter().filter(|(name, _)| name.starts_with(&inside));
        let parts: Vec<_> = parts.map(|(name, value)| (name.clone(), value.clone())).collect();
        if !parts.is_empty() {
            let row = |(key, value)| ResolvedSetting { key, value, origin: origin.clone() };
            rows.extend(parts.into_iter().map(row));
            continue;
        }
        let given = || config.settings.get(key.name).cloned().unwrap_or_else(|| "null".into());
        let value = match matches!(origin, Origin::Derived { .. } | Origin::Auto { .. }) {
            true => derived_value(config, key.name).unwrap_or_else(given),
            false => given(),
        };
        rows.push(ResolvedSetting { key: key.name.to_owned(), value, origin });
    }
    rows
}

/// The value of a key that other keys determine.
fn derived_value(config: &RunConfig, key: &str) -> Option<String> {
    Some(match key {
        "per_device_train_batch_size" => config.batch.per_device_train_batch_size.to_string(),
        "gradient_accumulation_steps" => config.batch.gradient_accumulation_steps.to_string(),
        "data_seed" => config.batch.data_seed.to_string(),
        "strategy" => config.plan.strategy.to_string(),
        "reduce_bucket_size" => config.plan.reduce_bucket_size.to_string(),
        "recompute" => match config.plan.recompute {
            Recompute::None => "none".into(),
            Recompute::Selective => "selective".into(),
            Recompute::Full => "full".into(),
            Recompute::Auto => "auto".into(),
        },
        "mixed_precision" => match config.precision {
            Precision::Auto => "auto".into(),
            Precision::F32 => "fp32".into(),
            Precision::Bf16 => "bf16".into(),
            Precision::F16(_) => "fp16".into(),
        },
        "device" => format!("{:?}", config.device.kind).to_lowercase(),
        "init" => format!("{:?}", config.model.init).to_lowercase(),
        "warmup_steps" => match config.optim.warmup {
            Warmup::Steps(steps) => steps.to_string(),
            Warmup::Ratio(ratio) => ratio.to_string(),
        },
        "eval_strategy" => match config.eval.when {
            EvalStrategy::No => "no".into(),
            EvalStrategy::Steps(_) => "steps".into(),
            EvalStrategy::Epoch => "epoch".into(),
        },
        "greater_is_better" => config.eval.greater_is_better.to_string(),
        "output_dir" => config.output.output_dir.display().to_string(),
        _ => return None,
    })
}

impl RunConfig {
    /// Whether another configuration is the same run: equal in everything but origins, notes and the text of settings.
    pub fn is_same_run(&self, other: &RunConfig) -> bool {
        self.model == other.model
            && self.algorithm == other.algorithm
            && self.data == other.data
            && self.batch == other.batch
            && self.optim == other.optim
            && self.precision == other.precision
            && self.device == other.device
            && self.eval == other.eval
            && self.plan == other.plan
            && self.output == other.output
    }

    /// Fills in the values that a DeepSpeed file sets to `auto` and that depend on the model's hidden size, with
    /// transformers' formula. For a model that the configuration describes, this has already been done.
    pub fn resolve_auto_sizes(&mut self, hidden_size: u64) {
        if matches!(self.origin("reduce_bucket_size"), Origin::Auto { .. }) {
            let elems = hidden_size.saturating_mul(hidden_size);
            self.plan.reduce_bucket_size = elems;
            self.settings.insert("reduce_bucket_size".into(), elems.to_string());
        }
    }
}
