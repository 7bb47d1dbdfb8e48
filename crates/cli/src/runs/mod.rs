//! `lockstep runs`: what runs have written, in words, tables and pictures.

mod diff;
mod list;
mod show;
mod summary;

use std::path::{Path, PathBuf};

use lockstep_core::{Fault, FaultClass};
use lockstep_observe::{RunFiles, Series, line_chart};

use crate::args::{Runs, RunsCommand};
use crate::output_file;
use crate::report::{self, Failure};
use crate::run_report;

use summary::RunSummary;

pub(crate) fn run(args: &Runs) -> Result<(), Failure> {
    match &args.command {
        RunsCommand::Ls { folder, json } => list::print(folder, *json),
        RunsCommand::Show { run, json, prometheus } => show::print(&open(run)?, *json, *prometheus),
        RunsCommand::Diff { left, right } => diff::print(&open(left)?, &open(right)?),
        RunsCommand::Plot { runs, metric, smooth, log, output } => {
            let svg = plot(runs, metric, *smooth as usize, *log)?;
            match output {
                Some(path) => output_file::write(path, &svg),
                None => report::print(&svg),
            }
        }
        RunsCommand::Report { run, output } => {
            let path = run_report::write(&open(run)?, output.as_deref())?;
            report::print(&format!("{}\n", path.display()))
        }
    }
}

fn plot(runs: &[PathBuf], metric: &str, smooth: usize, log: bool) -> Result<String, Failure> {
    let mut series = Vec::new();
    for path in runs {
        let run = RunSummary::read(&open(path)?)?;
        let points: Vec<(f64, f64)> =
            run.lines.iter().filter_map(|line| Some((line.step as f64, line.get(metric)?))).collect();
        if points.is_empty() {
            let (path, metric) = (path.clone(), metric.to_owned());
            return Err(Box::new(RunError::NoMetric { path, metric, known: run.keys() }));
        }
        series.push(Series { name: path.display().to_string(), points }.smoothed(smooth));
    }
    Ok(line_chart(metric, "step", &series, log))
}

pub(crate) fn open(path: &Path) -> Result<RunFiles, Failure> {
    RunFiles::open(path).ok_or_else(|| -> Failure { Box::new(RunError::NoRun { path: path.to_owned() }) })
}

/// Why a run cannot be shown.
#[derive(Debug)]
enum RunError {
    NoRun { path: PathBuf },
    NoMetric { path: PathBuf, metric: String, known: Vec<String> },
    Unreadable { path: PathBuf, cause: std::io::Error },
}

impl std::fmt::Display for RunError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RunError::NoRun { path } => write!(f, "{} is not the output folder of a run", path.display()),
            RunError::NoMetric { path, metric, .. } => {
                write!(f, "the metrics of {} have no `{metric}`", path.display())
            }
            RunError::Unreadable { path, cause } => {
                write!(f, "cannot read the metrics of {}: {cause}", path.display())
            }
        }
    }
}

impl std::error::Error for RunError {}

impl Fault for RunError {
    fn class(&self) -> FaultClass {
        match self {
            RunError::NoRun { .. } => FaultClass::InputMissing,
            RunError::NoMetric { .. } => FaultClass::BadConfig,
            RunError::Unreadable { .. } => FaultClass::BadData,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            RunError::NoRun { .. } => Some(
                "Give a folder with metrics.jsonl; `lockstep runs ls FOLDER` lists those below a folder."
                    .into(),
            ),
            RunError::NoMetric { known, .. } => Some(format!("It has {}.", known.join(", "))),
            RunError::Unreadable { .. } => None,
        }
    }
}
