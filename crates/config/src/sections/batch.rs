//! Batch sizes, the length of the run, and the seeds.

use crate::reader::Reader;

/// Batch sizes, the length of the run, and the seeds.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchConfig {
    /// Rows per rank and micro-batch.
    pub per_device_train_batch_size: u32,
    /// Micro-batches per optimizer step.
    pub gradient_accumulation_steps: u32,
    /// Optimizer steps; 0 only writes the model folder. `None`: `num_train_epochs` determines the steps.
    pub max_steps: Option<u64>,
    pub num_train_epochs: f64,
    pub dataloader_drop_last: bool,
    pub seed: u64,
    /// The value of `seed` unless set.
    pub data_seed: u64,
}

impl BatchConfig {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        let seed = r.count("seed", 0).unwrap_or(0);
        let data_seed = r.count("data_seed", 0).unwrap_or_else(|| {
            r.derived("data_seed", "seed");
            seed
        });
        BatchConfig {
            per_device_train_batch_size: r.count("per_device_train_batch_size", 1).unwrap_or(1),
            gradient_accumulation_steps: r.count("gradient_accumulation_steps", 1).unwrap_or(1),
            max_steps: read_max_steps(r),
            num_train_epochs: r.float("num_train_epochs", "above 0", |x| x > 0.0).unwrap_or(1.0),
            dataloader_drop_last: r.bool("dataloader_drop_last").unwrap_or(false),
            seed,
            data_seed,
        }
    }
}

fn read_max_steps(r: &mut Reader<'_>) -> Option<u64> {
    let node = r.node("max_steps")?;
    match node.integer() {
        Some(-1) => None,
        Some(n) if n >= 0 => u64::try_from(n).ok(),
        Some(_) => {
            r.out_of_range("max_steps", "at least 0, or -1 to use `num_train_epochs`", &node);
            None
        }
        None => {
            r.wrong_type("max_steps", "a whole number", &node);
            None
        }
    }
}
