//! `lockstep runs ls`: a table of runs.

use std::fmt::Write;
use std::path::Path;

use lockstep_observe::RunFiles;
use serde_json::json;

use super::summary::{RunSummary, number, printable};
use crate::report::{self, Failure};

/// How deep to search below the folder.
const DEPTH: u32 = 3;

pub(super) fn print(folder: &Path, as_json: bool) -> Result<(), Failure> {
    let mut runs = Vec::new();
    for files in RunFiles::find(folder, DEPTH) {
        runs.push(RunSummary::read(&files)?);
    }
    let text = match as_json {
        true => runs.iter().map(|run| format!("{}\n", object(run))).collect(),
        false => table(folder, &runs),
    };
    report::print(&text)
}

fn object(run: &RunSummary) -> serde_json::Value {
    json!({
        "run": run.path, "name": run.info.name, "state": run.state().to_string(), "started": run.info.started,
        "step": run.steps(), "total_steps": run.info.total_steps, "loss": run.last_step().and_then(|line| line.get("loss")),
        "eval_loss": run.last_evaluation().and_then(|line| line.get("eval_loss")),
        "tokens_per_second": run.recent("tokens_per_second"), "ranks": run.info.ranks,
    })
}

fn table(folder: &Path, runs: &[RunSummary]) -> String {
    if runs.is_empty() {
        return format!("no runs in {}\n", folder.display());
    }
    let width = runs.iter().map(|run| printable(&run.path).chars().count()).max().unwrap_or(0).max(3);
    let mut out = format!(
        "{:width$}  state     {:>13}  {:>9}  {:>9}  {:>8}  started\n",
        "run", "step", "loss", "eval", "tok/s"
    );
    for run in runs {
        let steps = match run.info.total_steps {
            0 => run.steps().to_string(),
            total => format!("{}/{total}", run.steps()),
        };
        let shown = |value: Option<f64>| value.map_or_else(|| "-".into(), number);
        let speed = run.recent("tokens_per_second").map_or_else(|| "-".into(), |speed| format!("{speed:.0}"));
        let started = run.info.started.get(..16).unwrap_or("-").replace('T', " ");
        let _ = writeln!(
            out,
            "{:width$}  {:8}  {steps:>13}  {:>9}  {:>9}  {speed:>8}  {}",
            printable(&run.path),
            run.state(),
            shown(run.last_step().and_then(|line| line.get("loss"))),
            shown(run.last_evaluation().and_then(|line| line.get("eval_loss"))),
            printable(&started),
        );
    }
    out
}
