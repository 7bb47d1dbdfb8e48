//! Batch sizes, the length of the run, and the seeds.

use crate::error::Problem;
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
    /// `world`: the number of ranks.
    pub(crate) fn read(r: &mut Reader<'_>, world: u32) -> Self {
        let seed = r.count("seed", 0).unwrap_or(0);
        let data_seed = r.count("data_seed", 0).unwrap_or_else(|| {
            r.derived("data_seed", "seed");
            seed
        });
        let (per_device_train_batch_size, gradient_accumulation_steps) = read_factors(r, world.into());
        BatchConfig {
            per_device_train_batch_size,
            gradient_accumulation_steps,
            max_steps: read_max_steps(r),
            num_train_epochs: r.float("num_train_epochs", "above 0", |x| x > 0.0).unwrap_or(1.0),
            dataloader_drop_last: r.bool("dataloader_drop_last").unwrap_or(false),
            seed,
            data_seed,
        }
    }
}

/// The two factors of the batch. `train_batch_size` is checked if both are set, and determines what is not set.
fn read_factors(r: &mut Reader<'_>, world: u64) -> (u32, u32) {
    let micro_given = r.given("per_device_train_batch_size").is_some();
    let accumulation_given = r.given("gradient_accumulation_steps").is_some();
    let micro: u32 = r.count("per_device_train_batch_size", 1).unwrap_or(1);
    let accumulation: u32 = r.count("gradient_accumulation_steps", 1).unwrap_or(1);
    let Some(given) = r.given("train_batch_size") else { return (micro, accumulation) };
    let Some(total) = r.count::<u32>("train_batch_size", 1).map(u64::from) else {
        return (micro, accumulation);
    };
    let (wide_micro, wide_accumulation) = (u64::from(micro), u64::from(accumulation));
    let ranks = format!("{world} {}", if world == 1 { "rank" } else { "ranks" });
    let (divisor, factors) = match (micro_given, accumulation_given) {
        (true, true) => {
            if wide_micro.saturating_mul(wide_accumulation).saturating_mul(world) != total {
                let problem = Problem::BatchProduct {
                    total,
                    micro: wide_micro,
                    accumulation: wide_accumulation,
                    world,
                };
                r.fail(problem, given.key_at);
            }
            return (micro, accumulation);
        }
        (true, false) => (wide_micro.saturating_mul(world), format!("{micro} rows x {ranks}")),
        (false, true) => {
            (wide_accumulation.saturating_mul(world), format!("{accumulation} micro-batches x {ranks}"))
        }
        (false, false) => (world, ranks),
    };
    let quotient = total.checked_div(divisor).filter(|_| total.checked_rem(divisor) == Some(0));
    let Some(quotient) = quotient.and_then(|n| u32::try_from(n).ok()) else {
        r.fail(Problem::BatchNotDivisible { total, divisor, factors }, given.key_at);
        return (micro, accumulation);
    };
    match micro_given {
        true => {
            r.derived("gradient_accumulation_steps", "train_batch_size");
            (micro, quotient)
        }
        false => {
            r.derived("per_device_train_batch_size", "train_batch_size");
            (quotient, if accumulation_given { accumulation } else { 1 })
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
