//! `lockstep runs show`: one run.

use std::fmt::Write;

use lockstep_core::Bytes;
use lockstep_observe::{RunFiles, ScrapedRun, prometheus_text};
use serde_json::{Map, Value, json};

use super::summary::{RunSummary, number, one_line, printable};
use crate::report::{self, Failure};

pub(super) fn print(files: &RunFiles, as_json: bool, prometheus: bool) -> Result<(), Failure> {
    let run = RunSummary::read(files)?;
    let name = if run.info.name.is_empty() { &run.path } else { &run.info.name };
    match (as_json, prometheus) {
        (true, _) => report::print(&format!("{:#}\n", object(&run))),
        (_, true) => report::print(&prometheus_text(&[ScrapedRun { name, lines: &run.lines, others: &[] }])),
        _ => report::print(&text(&run)),
    }
}

fn object(run: &RunSummary) -> Value {
    let numbers = |line: Option<&lockstep_observe::MetricsLine>| -> Option<Map<String, Value>> {
        let line = line?;
        let step = std::iter::once(("step".to_owned(), line.step.into()));
        let number = |(key, value): &(String, f64)| (key.clone(), json!(value));
        Some(step.chain(line.numbers.iter().map(number)).collect())
    };
    json!({
        "run": run.path, "state": run.state().to_string(), "name": run.info.name, "started": run.info.started,
        "version": run.info.version, "settings": run.info.settings, "ranks": run.info.ranks, "device": run.info.device,
        "total_steps": run.info.total_steps, "parameters": run.info.parameters,
        "planned_memory_bytes": run.info.planned_memory_bytes, "last_step": numbers(run.last_step()),
        "last_evaluation": numbers(run.last_evaluation()), "config": run.info.config,
    })
}

fn text(run: &RunSummary) -> String {
    let info = &run.info;
    let mut out = format!("{}: {}", printable(&run.path), run.state());
    let _ = write!(out, " at step {}", run.steps());
    if info.total_steps > 0 {
        let _ = write!(out, " of {}", info.total_steps);
    }
    out.push('\n');
    if !info.started.is_empty() {
        let ranks = if info.ranks == 1 { "1 rank".into() } else { format!("{} ranks", info.ranks) };
        let _ = writeln!(out, "started {} on {ranks}, {}", printable(&info.started), printable(&info.device));
    }
    section(&mut out, "settings", info.settings.iter().map(|(key, value)| (printable(key), one_line(value))));
    let newest = |line: &lockstep_observe::MetricsLine| {
        let own = line.numbers.iter().filter(|(key, _)| !is_cost(key));
        own.map(|(key, value)| (printable(key), number(*value))).collect::<Vec<_>>()
    };
    if let Some(line) = run.last_step() {
        section(&mut out, "newest step", newest(line).into_iter());
    }
    if let Some(line) = run.last_evaluation() {
        let title = format!("newest evaluation, after step {}", line.step);
        section(&mut out, &title, newest(line).into_iter());
    }
    let costs = run.keys().into_iter().filter(|key| is_cost(key));
    let cost =
        |key: String| Some((key.clone(), cost_text(&key, run.recent(&key)?, run.recent("step_seconds"))));
    section(&mut out, "costs, mean of the last tenth of the steps", costs.filter_map(cost));
    let planned = info.planned_memory_bytes.iter().filter(|(_, bytes)| **bytes > 0);
    section(
        &mut out,
        "planned memory of a rank",
        planned.map(|(kind, bytes)| (printable(kind), Bytes(*bytes).to_string())),
    );
    out
}

/// Whether a key is about what a step costs.
fn is_cost(key: &str) -> bool {
    let is_time = key.ends_with("_seconds") && !key.starts_with("eval_");
    is_time || key.ends_with("_bytes") || matches!(key, "tflops" | "mfu" | "power_watts" | "energy_joules")
}

/// Seconds in milliseconds, with their share of the step.
fn cost_text(key: &str, value: f64, step_seconds: Option<f64>) -> String {
    match key {
        _ if key.ends_with("_bytes") => Bytes(value as u64).to_string(),
        "step_seconds" => format!("{:.3} ms", 1e3 * value),
        _ if key.ends_with("_seconds") => {
            let share = step_seconds.filter(|step| *step > 0.0).map(|step| 100.0 * value / step);
            format!(
                "{:.3} ms{}",
                1e3 * value,
                share.map_or_else(String::new, |share| format!("  {share:.1} %"))
            )
        }
        "mfu" => format!("{:.1} %", 100.0 * value),
        _ => number(value),
    }
}

fn section(out: &mut String, title: &str, rows: impl Iterator<Item = (String, String)>) {
    let rows: Vec<(String, String)> = rows.collect();
    if rows.is_empty() {
        return;
    }
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let _ = writeln!(out, "\n{title}");
    for (name, value) in rows {
        let _ = writeln!(out, "  {name:width$}  {value}");
    }
}
