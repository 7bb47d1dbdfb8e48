//! `lockstep plan`: the memory, the predicted time and the schedule of a run.

mod cpu_rates;
mod explain;
mod machine;
mod rates_cache;
mod refusal;
mod subject;

use lockstep_config::{CarrierName, DeviceKind, Purpose, RunConfig, list_settings};
use lockstep_plan::cost::{
    MemoryCurve, curve_json, curve_svg, curve_text, memory_json, refusal_json, refusal_text, scaling_json,
    scaling_table, scaling_text, strategies_json, strategies_text, strategy_table, suggest_changes,
};
use lockstep_plan::{MemoryBreakdown, PlanError, RunPlan};
use lockstep_train::{MpiVersion, NumericsFingerprint, TrainError};
use serde_json::json;

use crate::args::Plan;
use crate::hub::Need;
use crate::report::{self, Failure};
use crate::train::boxed;
use crate::{foreign_launch, gpu, hub, mpi, output_file};

pub(crate) use refusal::explained;
pub(crate) use subject::{AutoChoices, PlanSubject};

/// Columns of the picture of memory in a terminal.
const CURVE_WIDTH: usize = 100;

pub(crate) fn run(args: &Plan) -> Result<(), Failure> {
    let paper = machine::paper(args)?;
    let world = machine::world_settings(args, paper.as_ref())?;
    let (mut config, _) = foreign_launch::read(&args.run.words(), &world)?.0.load(Purpose::Plan)?;
    hub::provide(&mut config, &mut String::new(), Need::Plan)?;
    let mut subject = PlanSubject::of(&config, paper)?;
    subject.resolve_auto_sizes(&mut config);
    if args.origins {
        return report::print(&origins(&config, args.json));
    }
    subject.use_measured_rates(&config);
    if args.explain_oom {
        return explain::run(&config, &subject, args.json);
    }
    // The tables compare what the configuration leaves open.
    let open = config.clone();
    subject.choose(&mut config)?;
    let plan = match subject.plan(&config) {
        Ok(plan) => plan,
        Err(error) => {
            if matches!(*error, TrainError::Plan(PlanError::OverBudget { .. })) {
                report::print(&comparison(&open, &subject, args.json)?.text)?;
            }
            return Err(boxed(*error));
        }
    };
    let curve = MemoryCurve::of_largest_phase(&plan);
    if let (Some(path), Some(curve)) = (&args.svg, &curve) {
        output_file::write(path, &curve_svg(curve, Some(subject.machine.budget)))?;
    }
    let mut compared = comparison(&open, &subject, args.json)?;
    if args.json {
        compared.json["memory"] = memory_json(&MemoryBreakdown::of(&plan));
        compared.json["memory_over_step"] = curve.as_ref().map(curve_json).into();
        compared.json["fingerprint"] = numerics(&config, &plan).hash().to_string().into();
        return report::print(&format!("{:#}\n", compared.json));
    }
    let mut text = compared.text;
    if let (true, Some(curve)) = (args.curve, &curve) {
        text.push_str(&format!("{}\n", curve_text(curve, CURVE_WIDTH)));
    }
    text.push_str(&lockstep_plan::memory_table(&plan));
    if args.schedule {
        for phase in &plan.phases {
            text.push('\n');
            text.push_str(&lockstep_plan::schedule_text(&plan, phase));
        }
    }
    text.push_str(&fingerprint(&config, &plan));
    report::print(&text)
}

/// The tables of the cost model, as text or JSON.
struct Comparison {
    text: String,
    json: serde_json::Value,
}

/// Compares strategies, scales a cluster on paper, and suggests changes if the run does not fit.
fn comparison(config: &RunConfig, subject: &PlanSubject, as_json: bool) -> Result<Comparison, Failure> {
    subject.with_workload(config, |workload, machine| {
        let table = strategy_table(workload, machine);
        let refusal = match table.choice.fits {
            true => None,
            false => suggest_changes(workload, machine),
        };
        let scaling = subject.paper.as_ref().map(|_| scaling_table(workload, machine));
        let json = json!({
            "comparison": strategies_json(&table),
            "rates": subject.basis,
            "refusal": refusal.as_ref().map(refusal_json),
            "scaling": scaling.as_ref().map(scaling_json),
        });
        if as_json {
            return Comparison { text: format!("{json:#}\n"), json };
        }
        let mut text = strategies_text(&table);
        text.push_str(&format!("{}\n\n", subject.basis));
        if let Some(refusal) = &refusal {
            text.push_str(&format!("{}\n", refusal_text(refusal)));
        }
        if let (Some(paper), Some(scaling)) = (&subject.paper, &scaling) {
            text.push_str(&format!("{paper}\n\n{}\n", scaling_text(scaling)));
        }
        Comparison { text, json }
    })
}

/// Every setting with its value and its origin.
fn origins(config: &RunConfig, as_json: bool) -> String {
    let settings = list_settings(config);
    if as_json {
        let row = |setting: &lockstep_config::ResolvedSetting| json!({ "key": setting.key, "value": setting.value, "origin": setting.origin.to_string() });
        return format!("{:#}\n", json!(settings.iter().map(row).collect::<Vec<_>>()));
    }
    // A long value, such as a prompt, does not widen the table.
    const MAX_VALUE: usize = 40;
    let width = |of: fn(&lockstep_config::ResolvedSetting) -> &str| {
        settings.iter().map(|setting| of(setting).chars().count()).max().unwrap_or(0)
    };
    let (keys, values) = (width(|s| &s.key), width(|s| &s.value).min(MAX_VALUE));
    let row = |setting: &lockstep_config::ResolvedSetting| {
        format!("{:keys$}  {:values$}  {}\n", setting.key, setting.value, setting.origin)
    };
    settings.iter().map(row).collect()
}

fn numerics(config: &RunConfig, plan: &RunPlan) -> NumericsFingerprint {
    let cuda = plan.input.has_separate_memory().then(gpu::versions);
    // Only ranks find out what `carrier: auto` becomes.
    let by_mpi = config.plan.carrier == CarrierName::Mpi;
    let mpi = by_mpi.then(|| MpiVersion(mpi::open().ok().map(|mpi| mpi.version.clone())));
    NumericsFingerprint::of(config, plan, cuda.as_ref(), mpi.as_ref())
}

/// The fingerprint of a run's numerics, with its fields.
fn fingerprint(config: &RunConfig, plan: &RunPlan) -> String {
    let numbers = numerics(config, plan);
    let known = if numbers.is_complete() { "" } else { ", incomplete" };
    let mut text =
        format!("\nfingerprint {}{known}: equal fingerprints and inputs give equal bits\n", numbers.hash());
    numbers.lines().for_each(|line| text.push_str(&format!("  {line}\n")));
    text
}

/// Resolves `device: auto`. A plan for `cuda` needs no GPU on this machine.
pub(crate) fn planned_device(config: &RunConfig) -> DeviceKind {
    match config.device.kind {
        DeviceKind::Auto if gpu::is_available() => DeviceKind::Cuda,
        DeviceKind::Auto => DeviceKind::Cpu,
        given => given,
    }
}
