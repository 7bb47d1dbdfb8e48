//! `lockstep train --dry-run`: the resolved configuration and the plan of a run. Trains nothing and writes nothing.
//!
//! The output is YAML, with the plan as comments: saved to a file, it is a configuration that runs the same way.

use lockstep_config::{AccumulationOrder, DeviceKind, Precision, Purpose, Recompute, RunConfig};
use lockstep_core::DType;
use lockstep_plan::cost::StrategyChoice;
use lockstep_plan::{ModelId, RecomputePolicy, RunPlan};

use crate::args::Train;
use crate::hub::Need;
use crate::plan::{AutoChoices, PlanSubject, explained, planned_device};
use crate::report::{self, Failure};
use crate::train;
use crate::{hub, launch, ranks};

/// A key with the value that was chosen for `auto`.
struct Choice {
    key: &'static str,
    value: String,
    /// Printed as a comment.
    note: String,
}

impl Choice {
    fn of(key: &'static str, value: impl ToString) -> Choice {
        Choice { key, value: value.to_string(), note: "chosen automatically".into() }
    }
}

pub(crate) fn run(args: &Train) -> Result<(), Failure> {
    let words = args.run.words();
    if args.launch.starts_ranks() {
        launch::check_not_a_rank()?;
    }
    let (mut config, _) = match launch::world(args)? {
        // Rank 0 prints for all.
        Some(world) if world.rank > 0 => return Ok(()),
        Some(world) => ranks::load(Purpose::Train, &words, &world)?,
        None => train::read(args)?.0.load(Purpose::Train)?,
    };
    hub::provide(&mut config, &mut String::new(), Need::Plan)?;
    let subject = PlanSubject::of(&config, None)?;
    subject.resolve_auto_sizes(&mut config);
    let chosen = subject.choose(&mut config)?;
    let plan = subject.plan(&config).map_err(|error| explained(*error, &config))?;
    report::print(&text(&config, &plan, &chosen))
}

fn text(config: &RunConfig, plan: &RunPlan, chosen: &AutoChoices) -> String {
    let mut text =
        String::from("# keys that differ from their defaults with their origin, and automatic choices\n");
    let choices = choices(config, plan, chosen);
    for (key, yaml) in &config.changed {
        if !choices.iter().any(|choice| choice.key == *key) {
            text.push_str(&with_origin(yaml, &config.origin(key).to_string()));
        }
    }
    for Choice { key, value, note } in &choices {
        text.push_str(&format!("{key}: {value}  # {note}\n"));
    }
    for note in &config.notes {
        text.push_str(&format!("# note: {note}\n"));
    }
    text.push('\n');
    for line in lockstep_plan::memory_table(plan).lines() {
        text.push_str(format!("# {line}").trim_end());
        text.push('\n');
    }
    text
}

/// A key with its origin as a comment: at the end of its line, or above a map.
fn with_origin(yaml: &str, origin: &str) -> String {
    match yaml.trim_end() {
        line if line.contains('\n') => format!("# {origin}\n{yaml}"),
        line => format!("{line}  # {origin}\n"),
    }
}

/// The values of keys that are set to `auto`, or are so by default.
fn choices(config: &RunConfig, plan: &RunPlan, chosen: &AutoChoices) -> Vec<Choice> {
    let mut choices = Vec::new();
    if config.device.kind == DeviceKind::Auto {
        let device = if planned_device(config) == DeviceKind::Cuda { "cuda" } else { "cpu" };
        choices.push(Choice::of("device", device));
    }
    if config.precision == Precision::Auto {
        let precision = match plan.input.storage {
            DType::F32 => "fp32",
            DType::F16 => "fp16",
            _ => "bf16",
        };
        choices.push(Choice::of("mixed_precision", precision));
    }
    if let Some(StrategyChoice { strategy, reason, .. }) = &chosen.strategy {
        let (value, note) = (strategy.to_string(), format!("chosen automatically. {reason}"));
        choices.push(Choice { key: "strategy", value, note });
    }
    if let Some(rows) = &chosen.rows {
        let (value, reason) = (rows.rows.to_string(), AutoChoices::reason_for_rows(rows));
        let note = format!("chosen automatically. {reason}");
        choices.push(Choice { key: "per_device_train_batch_size", value, note });
    }
    if config.plan.recompute == Recompute::Auto {
        let model = plan.input.model(ModelId::FIRST);
        choices.push(recompute(&model.recompute, model.shape.layers));
    }
    let sums_twice = plan.input.num_micro_batches > 1 && config.plan.world_size() > 1;
    if config.plan.accumulation_order == AccumulationOrder::Auto && sums_twice {
        let order = match plan.input.order {
            lockstep_plan::AccumulationOrder::Local => "local",
            lockstep_plan::AccumulationOrder::Reduced => "reduced",
        };
        choices.push(Choice::of("accumulation_order", order));
    }
    choices
}

/// The recomputation that fits into memory. Only `auto` can recompute some blocks more than others.
fn recompute(policy: &RecomputePolicy, layers: usize) -> Choice {
    let name = |recompute: lockstep_shape::Recompute| format!("{recompute:?}").to_lowercase();
    let RecomputePolicy { early, late, late_blocks } = *policy;
    let early_blocks = (layers as u32).saturating_sub(late_blocks);
    if early == late || late_blocks == 0 {
        return Choice::of("recompute", name(early));
    }
    if early_blocks == 0 {
        return Choice::of("recompute", name(late));
    }
    let note = format!("{} in the first {early_blocks} blocks, {} in the others", name(early), name(late));
    Choice { key: "recompute", value: "auto".into(), note }
}
