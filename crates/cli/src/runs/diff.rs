//! `lockstep runs diff`: two runs side by side.

use std::collections::BTreeSet;
use std::fmt::Write;

use lockstep_observe::RunFiles;

use super::summary::{RunSummary, number, one_line, printable};
use crate::report::{self, Failure};

/// What is compared besides settings: the newest value, or a mean of the newest for what varies.
const NEWEST: [&str; 3] = ["loss", "grad_norm", "tokens_total"];
const RECENT: [&str; 3] = ["step_seconds", "tokens_per_second", "mfu"];

pub(super) fn print(left: &RunFiles, right: &RunFiles) -> Result<(), Failure> {
    let (left, right) = (RunSummary::read(left)?, RunSummary::read(right)?);
    report::print(&text(&left, &right))
}

fn text(left: &RunSummary, right: &RunSummary) -> String {
    let both = [left, right];
    let mut rows: Vec<[String; 3]> = Vec::new();
    let keys: BTreeSet<&String> = both.iter().flat_map(|run| run.info.settings.keys()).collect();
    for key in keys {
        let [a, b] = both.map(|run| run.info.settings.get(key).map_or("(default)", String::as_str));
        if a != b {
            rows.push([printable(key), one_line(a), one_line(b)]);
        }
    }
    let settings = rows.len();
    let mut row = |name: &str, of: &dyn Fn(&RunSummary) -> Option<f64>| {
        if let [a, b] = both.map(of)
            && (a.is_some() || b.is_some())
        {
            let shown = |value: Option<f64>| value.map_or_else(|| "-".into(), number);
            rows.push([name.to_owned(), shown(a), shown(b)]);
        }
    };
    row("step", &|run| Some(run.steps() as f64));
    for key in NEWEST {
        row(key, &|run| run.last_step()?.get(key));
    }
    row("eval_loss", &|run| run.last_evaluation()?.get("eval_loss"));
    for key in RECENT {
        row(key, &|run| run.recent(key));
    }
    let widths: [usize; 2] = [0, 1].map(|i| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0));
    let [name_width, left_width] = [widths[0].max(8), widths[1].max(left.path.chars().count())];
    let line = |[name, a, b]: &[String; 3]| {
        format!("{name:name_width$}  {a:left_width$}  {b}").trim_end().to_owned()
    };
    let mut out = String::new();
    let _ = writeln!(out, "{}", line(&["".into(), printable(&left.path), printable(&right.path)]));
    if settings == 0 {
        let _ = writeln!(out, "the settings are the same");
    }
    rows.iter().for_each(|row| {
        let _ = writeln!(out, "{}", line(row));
    });
    out
}
