//! Groups of completions of the same prompt, and the generation batches that they form.

use crate::error::Problem;
use crate::reader::Reader;
use crate::sections::BatchConfig;

/// Groups and generation batches, for grpo and rloo alike. The names are TRL's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Completions per prompt, at least 2. Divides the generation batch.
    pub num_generations: u32,
    /// `None`: `num_generations`.
    pub num_generations_eval: Option<u32>,
    /// Micro-batches per generation batch.
    pub steps_per_generation: u32,
    pub num_iterations: u32,
}

impl Groups {
    pub(crate) fn read(r: &mut Reader<'_>, batch: &BatchConfig, world: u32) -> Self {
        let steps_per_generation = read_steps(r, batch, world);
        let groups = Groups {
            num_generations: r.count("num_generations", 2).unwrap_or(1),
            num_generations_eval: r.count("num_generations_eval", 1),
            steps_per_generation,
            num_iterations: r.count("num_iterations", 1).unwrap_or(1),
        };
        check_whole_steps(r, batch, groups.steps_per_generation);
        check_divisible(r, batch, world, groups);
        groups
    }
}

/// Reads `steps_per_generation`, or `generation_batch_size`, from which it follows.
fn read_steps(r: &mut Reader<'_>, batch: &BatchConfig, world: u32) -> u32 {
    r.prefer_flags(&["steps_per_generation", "generation_batch_size"]);
    let (steps_given, size_given) = (r.given("steps_per_generation"), r.given("generation_batch_size"));
    let steps: Option<u32> = r.count("steps_per_generation", 1);
    let size: Option<u64> = r.count("generation_batch_size", 1);
    if let (Some(steps), Some(size)) = (&steps_given, &size_given) {
        r.conflict(steps, size, "both set the size of a generation batch; keep one.");
    }
    let (Some(size), Some(given)) = (size, size_given) else {
        return steps.unwrap_or_else(|| {
            r.derived("steps_per_generation", "gradient_accumulation_steps");
            batch.gradient_accumulation_steps
        });
    };
    r.derived("steps_per_generation", "generation_batch_size");
    let micro_batch = u64::from(batch.per_device_train_batch_size) * u64::from(world);
    if !size.is_multiple_of(micro_batch) {
        let rule = format!(
            "a multiple of {micro_batch}: `per_device_train_batch_size` ({}) times {}",
            batch.per_device_train_batch_size,
            ranks(world)
        );
        r.out_of_range("generation_batch_size", rule, &given.node);
    }
    u32::try_from(size / micro_batch).unwrap_or(u32::MAX).max(1)
}

/// A generation batch is used by whole optimizer steps.
fn check_whole_steps(r: &mut Reader<'_>, batch: &BatchConfig, steps_per_generation: u32) {
    let accumulation = batch.gradient_accumulation_steps;
    if accumulation == 0 || steps_per_generation.is_multiple_of(accumulation) {
        return;
    }
    let (below, above) = (
        steps_per_generation / accumulation * accumulation,
        steps_per_generation.next_multiple_of(accumulation),
    );
    let fits = if below == 0 { format!("{above}") } else { format!("{below} or {above}") };
    let problem = Problem::OutOfRange {
        key: "steps_per_generation".into(),
        value: steps_per_generation.to_string(),
        rule: format!("a multiple of `gradient_accumulation_steps` ({accumulation})").into(),
        hint: format!("an optimizer step uses one generation batch: set {fits}.").into(),
    };
    r.fail_at_key(problem, &["steps_per_generation", "generation_batch_size", "gradient_accumulation_steps"]);
}

/// A generation batch consists of whole groups.
fn check_divisible(r: &mut Reader<'_>, batch: &BatchConfig, world: u32, groups: Groups) {
    let rows = u64::from(batch.per_device_train_batch_size);
    let others = u64::from(world).saturating_mul(groups.steps_per_generation.into());
    let (size, group) = (rows.saturating_mul(others), u64::from(groups.num_generations));
    if group < 2 || size.is_multiple_of(group) {
        return;
    }
    let group_sizes = nearest(group, size, |candidate| candidate >= 2 && size.is_multiple_of(candidate));
    let all_rows = nearest(rows, rows.saturating_add(group), |rows| {
        rows >= 1 && rows.saturating_mul(others).is_multiple_of(group)
    });
    let ways: Vec<String> = [("num_generations", group_sizes), ("per_device_train_batch_size", all_rows)]
        .into_iter()
        .filter(|(_, numbers)| !numbers.is_empty())
        .map(|(key, numbers)| format!("`{key}` to {numbers}"))
        .collect();
    let hint = format!(
        "it is `per_device_train_batch_size` ({rows}) times {} times `steps_per_generation` ({}). Set {}.",
        ranks(world),
        groups.steps_per_generation,
        ways.join(", or "),
    );
    let problem = Problem::NotDivisible {
        what: "generation batch",
        num_completions: size,
        key: "num_generations",
        divisor: group,
        hint,
    };
    let keys =
        ["num_generations", "generation_batch_size", "steps_per_generation", "per_device_train_batch_size"];
    r.fail_at_key(problem, &keys);
}

fn ranks(world: u32) -> String {
    format!("{world} rank{}", if world == 1 { "" } else { "s" })
}

/// The nearest numbers below and above `wanted` (at most `max`) that fit: "2 or 4".
pub(crate) fn nearest(wanted: u64, max: u64, fits: impl Fn(u64) -> bool) -> String {
    // Bounds the search: batches and groups are small numbers.
    const FAR: u64 = 1 << 16;
    let below = (wanted.saturating_sub(FAR)..wanted).rev().find(|number| fits(*number));
    let above = (wanted.saturating_add(1)..=max.min(wanted.saturating_add(FAR))).find(|number| fits(*number));
    let found: Vec<String> = below.into_iter().chain(above).map(|number| number.to_string()).collect();
    found.join(" or ")
}
