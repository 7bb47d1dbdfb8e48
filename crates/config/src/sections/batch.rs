//! Batch sizes, the length of the run, and the seeds.

use crate::error::Problem;
use crate::reader::Reader;
use crate::sections::AlgorithmName;

/// Batch sizes, the length of the run, and the seeds.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchConfig {
    /// Rows per rank and micro-batch.
    pub per_device_train_batch_size: u32,
    /// `per_device_train_batch_size: auto`: the cost model divides the rows of a step into micro-batches. Until it has,
    /// they are one micro-batch.
    pub chooses_rows: bool,
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
    /// Divides the rows of a rank and step into micro-batches of `rows` rows.
    pub fn set_rows(&mut self, rows: u32) {
        let all = self.per_device_train_batch_size * self.gradient_accumulation_steps;
        assert!(rows > 0 && all.is_multiple_of(rows), "{rows} rows do not divide {all}");
        (self.per_device_train_batch_size, self.gradient_accumulation_steps) = (rows, all / rows);
        self.chooses_rows = false;
    }

    /// `world`: the number of ranks.
    pub(crate) fn read(r: &mut Reader<'_>, world: u32) -> Self {
        let seed = r.count("seed", 0).unwrap_or(0);
        let data_seed = r.count("data_seed", 0).unwrap_or_else(|| {
            r.derived("data_seed", "seed");
            seed
        });
        let is_open = leaves_rows_open(r);
        let (per_device_train_batch_size, gradient_accumulation_steps) =
            read_factors(r, world.into(), is_open);
        let chooses_rows = is_open && !r.is_set("gradient_accumulation_steps");
        BatchConfig {
            per_device_train_batch_size,
            chooses_rows,
            gradient_accumulation_steps,
            max_steps: read_max_steps(r),
            num_train_epochs: r.float("num_train_epochs", "above 0", |x| x > 0.0).unwrap_or(1.0),
            dataloader_drop_last: r.bool("dataloader_drop_last").unwrap_or(false),
            seed,
            data_seed,
        }
    }
}

/// Whether `per_device_train_batch_size` is `auto`.
fn leaves_rows_open(r: &mut Reader<'_>) -> bool {
    r.given("per_device_train_batch_size").is_some_and(|given| given.node.text() == Some("auto"))
}

/// The total batch that `per_device_train_batch_size: auto` divides must be given, and rollouts have no such choice.
fn check_open_rows(r: &mut Reader<'_>) {
    let Some(node) = r.node("per_device_train_batch_size") else { return };
    if matches!(r.algorithm(), AlgorithmName::Grpo | AlgorithmName::Rloo | AlgorithmName::Ppo) {
        let rule = format!("a number with `algorithm: {}`, whose rollouts are made of it", r.algorithm());
        r.out_of_range("per_device_train_batch_size", rule, &node);
    } else if !r.is_set("train_batch_size") {
        r.missing("train_batch_size", "`per_device_train_batch_size: auto` divides it into micro-batches");
    }
}

/// The two factors of the batch. `train_batch_size` is checked if both are set, and determines what is not set.
fn read_factors(r: &mut Reader<'_>, world: u64, is_open: bool) -> (u32, u32) {
    if is_open {
        check_open_rows(r);
    }
    let micro_given = r.given("per_device_train_batch_size").is_some() && !is_open;
    let accumulation_given = r.given("gradient_accumulation_steps").is_some();
    let micro: u32 = if is_open { 1 } else { r.count("per_device_train_batch_size", 1).unwrap_or(1) };
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
