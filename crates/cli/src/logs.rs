//! `lockstep logs`: reads a training log of this or another program.

use std::fmt::Write;
use std::io::Read;
use std::path::{Path, PathBuf};

use lockstep_core::{Fault, FaultClass};
use lockstep_observe::{LoggedStep, Series, line_chart, read_log};
use serde_json::{Map, Value};

use crate::args::Logs;
use crate::output_file;
use crate::report::{self, Failure};

/// Larger files are not logs of steps.
const MAX_BYTES: u64 = 4 << 30;

#[derive(Debug)]
enum LogError {
    Unreadable { path: PathBuf, cause: std::io::Error },
    NoSteps { path: PathBuf },
}

impl std::fmt::Display for LogError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LogError::Unreadable { path, cause } => write!(f, "cannot read {}: {cause}", path.display()),
            LogError::NoSteps { path } => write!(f, "{} has no line with a loss", path.display()),
        }
    }
}

impl std::error::Error for LogError {}

impl Fault for LogError {
    fn class(&self) -> FaultClass {
        FaultClass::BadData
    }

    fn hint(&self) -> Option<String> {
        let hint =
            "Lines such as `step 12 | loss: 3.4567`, `Step: 12, Loss: 3.45` and `{'loss': 3.45}` are read.";
        matches!(self, LogError::NoSteps { .. }).then(|| hint.into())
    }
}

pub(crate) fn run(args: &Logs) -> Result<(), Failure> {
    let text = read(&args.file)
        .map_err(|cause| -> Failure { Box::new(LogError::Unreadable { path: args.file.clone(), cause }) })?;
    let steps = read_log(&text);
    if steps.is_empty() {
        return Err(Box::new(LogError::NoSteps { path: args.file.clone() }));
    }
    if let Some(path) = &args.svg {
        let points = steps.iter().map(|step| (step.step as f64, step.numbers[0].1)).collect();
        let series = Series { name: args.file.display().to_string(), points };
        output_file::write(path, &line_chart("loss", "step", &[series], false))?;
    }
    report::print(&if args.json { objects(&steps) } else { table(&steps) })
}

fn read(path: &Path) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    match path.to_str() {
        Some("-") => std::io::stdin().lock().take(MAX_BYTES).read_to_end(&mut bytes)?,
        _ => std::fs::File::open(path)?.take(MAX_BYTES).read_to_end(&mut bytes)?,
    };
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn objects(steps: &[LoggedStep]) -> String {
    let object = |step: &LoggedStep| {
        let numbers = step.numbers.iter().map(|(key, value)| ((*key).to_owned(), Value::from(*value)));
        let all: Map<String, Value> =
            std::iter::once(("step".to_owned(), step.step.into())).chain(numbers).collect();
        format!("{}\n", Value::Object(all))
    };
    steps.iter().map(object).collect()
}

fn table(steps: &[LoggedStep]) -> String {
    let mut keys: Vec<&str> = Vec::new();
    for (key, _) in steps.iter().flat_map(|step| &step.numbers) {
        if !keys.contains(key) {
            keys.push(key);
        }
    }
    let mut out = format!("{:>8}", "step");
    keys.iter().for_each(|key| {
        let _ = write!(out, "  {key:>17}");
    });
    out.push('\n');
    for step in steps {
        let _ = write!(out, "{:>8}", step.step);
        for key in &keys {
            let value = step
                .numbers
                .iter()
                .find(|(name, _)| name == key)
                .map_or_else(String::new, |(_, v)| v.to_string());
            let _ = write!(out, "  {value:>17}");
        }
        out.truncate(out.trim_end().len());
        out.push('\n');
    }
    out
}
