//! The sections of the page. One without anything to show is left out.

use lockstep_core::{Bytes, Elems};

use super::RunReport;
use super::html::{Cell, block, section, table, text};
use crate::chart::{Series, line_chart};
use crate::history::Column;
use crate::text::{number, one_line, printable, short_seconds};
use crate::time::human_duration;

/// Points over which lines are averaged, at most.
const SMOOTHING: usize = 20;
/// The newest evaluations in the table.
const EVALUATIONS: usize = 100;
/// Metrics that have a chart, if the run has them.
const CHARTS: [&str; 12] = [
    "loss",
    "reward",
    "rewards/margins",
    "rewards/accuracies",
    "accuracy",
    "kl",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "step_seconds",
    "mfu",
    "completions/mean_length",
];

fn label(raw: impl Into<String>) -> Cell {
    Cell::Text(raw.into())
}

fn value(raw: impl Into<String>) -> Cell {
    Cell::Number(raw.into())
}

pub(super) fn summary(run: &RunReport) -> String {
    let (info, history) = (&run.info, &run.history);
    let steps = match info.total_steps {
        0 => history.steps().to_string(),
        total => format!("{} of {total}", history.steps()),
    };
    let mut rows: Vec<(&str, String)> = vec![("state", run.state.to_string()), ("steps", steps)];
    rows.extend(run.stop.iter().map(|stop| ("end", stop.clone())));
    let newest = |key: &str| history.last_step.as_ref().and_then(|line| line.get(key));
    let mut add = |name, value: Option<String>| rows.extend(value.map(|value| (name, value)));
    add("epochs", newest("epoch").map(number));
    add("loss of the last step", newest("loss").map(number));
    let best = history.evaluation_column("eval_loss").and_then(Column::low);
    add("lowest loss of evaluations", best.map(number));
    add("tokens", newest("tokens_total").map(|tokens| format!("{tokens:.0}")));
    add(
        "tokens per second, newest tenth",
        history.recent("tokens_per_second").map(|speed| format!("{speed:.0}")),
    );
    let seconds = history.column("step_seconds").and_then(total);
    add("time of all steps", seconds.map(human_duration));
    add("energy of all GPUs", newest("energy_joules").map(|joules| format!("{:.3} kWh", joules / 3.6e6)));
    let known = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    add("started", known(&info.started));
    add("device of a rank", known(&info.device));
    add("ranks", (info.ranks > 0).then(|| info.ranks.to_string()));
    add("parameters", (info.parameters > 0).then(|| Elems(info.parameters).to_string()));
    add("version", known(&info.version));
    add("output folder", known(&run.path));
    let rows: Vec<Vec<Cell>> =
        rows.into_iter().map(|(name, value)| vec![label(name), label(value)]).collect();
    section("summary", "Summary", &table("The run and its newest metrics", &["what", "value"], &rows, false))
}

/// The sum of a column's values.
fn total(column: &Column) -> Option<f64> {
    let sum: f64 = column.buckets.iter().map(|bucket| bucket.sum()).sum();
    (sum > 0.0).then_some(sum)
}

pub(super) fn charts(run: &RunReport) -> String {
    let figures: String = CHARTS.iter().filter_map(|key| figure(run, key)).collect();
    if figures.is_empty() {
        return String::new();
    }
    section("charts", "Charts", &format!("<div class=\"charts\">\n{figures}</div>\n"))
}

/// A chart with its figures in words, for those who do not see it.
fn figure(run: &RunReport, key: &str) -> Option<String> {
    let column = run.history.column(key)?;
    let points = column.points((column.buckets.len() / 100).clamp(1, SMOOTHING));
    points.iter().find(|(_, y)| y.is_finite())?;
    let mut series = vec![Series { name: key.to_owned(), points }];
    let evaluated = run.history.evaluation_column(&format!("eval_{key}"));
    series.extend(evaluated.map(|column| Series { name: format!("eval_{key}"), points: column.points(1) }));
    let svg = line_chart(key, "step", &series, false);
    let words = [
        column
            .buckets
            .iter()
            .find_map(|bucket| bucket.mean())
            .map(|first| format!("first {}", number(first))),
        column.newest().map(|newest| format!("newest {}", number(newest))),
        column.low().map(|low| format!("lowest {}", number(low))),
        column.high().map(|high| format!("highest {}", number(high))),
    ];
    let words: Vec<String> = words.into_iter().flatten().collect();
    Some(format!(
        "<figure>{svg}<figcaption>{}: {}</figcaption></figure>\n",
        text(key),
        text(&words.join(", "))
    ))
}

pub(super) fn costs(run: &RunReport) -> String {
    let newest = (run.history.steps() / 10).max(1);
    let step = run.history.per_step("step_seconds", newest).filter(|seconds| *seconds > 0.0);
    let (Some(step), columns) = (step, run.history.columns()) else { return String::new() };
    let is_part = |column: &&Column| {
        !column.evaluation && column.key.ends_with("_seconds") && column.key != "step_seconds"
    };
    let seconds =
        |column: &Column| run.history.per_step(&column.key, newest).filter(|seconds| *seconds > 0.0);
    let columns = columns.iter().filter(is_part);
    let mut parts: Vec<(&str, f64)> =
        columns.filter_map(|column| Some((column.key.as_str(), seconds(column)?))).collect();
    if parts.is_empty() {
        return String::new();
    }
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let widest = parts[0].1;
    let row = |(key, seconds): &(&str, f64)| {
        let name = key.trim_end_matches("_seconds").replace('_', " ");
        let share = format!("{:.1} %", 100.0 * seconds / step);
        vec![label(name), value(short_seconds(*seconds)), value(share), Cell::Bar(seconds / widest)]
    };
    let mut rows: Vec<Vec<Cell>> = parts.iter().map(row).collect();
    rows.push(vec![label("step"), value(short_seconds(step)), value("100 %"), label("")]);
    let caption = "Means over the newest tenth of the steps and over the ranks. Parts overlap, so they need not add up to the step.";
    section("costs", "Costs of a step", &table(caption, &["phase", "seconds", "share", ""], &rows, true))
}

pub(super) fn memory(run: &RunReport) -> String {
    let planned: Vec<(&String, u64)> = run
        .info
        .planned_memory_bytes
        .iter()
        .map(|(kind, bytes)| (kind, *bytes))
        .filter(|(_, b)| *b > 0)
        .collect();
    if planned.is_empty() {
        return String::new();
    }
    let total: u64 = planned.iter().map(|(_, bytes)| bytes).sum();
    let widest = planned.iter().map(|(_, bytes)| *bytes).max().unwrap_or(1) as f64;
    let row = |(kind, bytes): &(&String, u64)| {
        vec![label(kind.as_str()), value(Bytes(*bytes).to_string()), Cell::Bar(*bytes as f64 / widest)]
    };
    let mut rows: Vec<Vec<Cell>> = planned.iter().map(row).collect();
    rows.push(vec![label("planned"), value(Bytes(total).to_string()), label("")]);
    let measured = run.history.column("memory_peak_bytes").and_then(Column::high);
    let words = measured.map_or_else(String::new, |peak| {
        let share = 100.0 * peak / total as f64;
        let text = format!("Measured peak: {}, {share:.1} % of the plan.", Bytes(peak as u64));
        format!("<p>{text}</p>\n")
    });
    let table = table("Planned memory of a rank at its peak, by kind", &["kind", "bytes", ""], &rows, true);
    section("memory", "Memory", &format!("{table}{words}"))
}

pub(super) fn ranks(run: &RunReport) -> String {
    let busy = run.history.rank_busy_seconds();
    let widest = busy.iter().copied().fold(0.0, f64::max);
    if busy.len() < 2 || widest <= 0.0 {
        return String::new();
    }
    let row = |(rank, seconds): (usize, &f64)| {
        vec![label(rank.to_string()), value(short_seconds(*seconds)), Cell::Bar(seconds / widest)]
    };
    let rows: Vec<Vec<Cell>> = busy.iter().enumerate().map(row).collect();
    let caption = "Time of a step in which each rank did not wait for others, mean of the newest steps";
    section("ranks", "Ranks", &table(caption, &["rank", "busy", ""], &rows, false))
}

pub(super) fn evaluations(run: &RunReport) -> String {
    let all = &run.history.evaluations;
    let keys: Vec<&str> = run
        .history
        .columns()
        .iter()
        .filter(|column| column.evaluation && column.key.starts_with("eval_"))
        .map(|column| column.key.as_str())
        .collect();
    if all.is_empty() || keys.is_empty() {
        return String::new();
    }
    let row = |line: &crate::run_files::MetricsLine| {
        let numbers = keys.iter().map(|key| value(line.get(key).map_or_else(|| "-".into(), number)));
        std::iter::once(value(line.step.to_string())).chain(numbers).collect::<Vec<Cell>>()
    };
    let rows: Vec<Vec<Cell>> = all.iter().skip(all.len().saturating_sub(EVALUATIONS)).map(row).collect();
    let heads: Vec<&str> = std::iter::once("step").chain(keys.iter().copied()).collect();
    section("evaluations", "Evaluations", &table("Evaluations during the run", &heads, &rows, false))
}

pub(super) fn completions(run: &RunReport) -> String {
    let one = |completion: &crate::run_files::Completion| {
        let reward =
            completion.reward.map_or_else(String::new, |reward| format!(", reward {}", number(reward)));
        format!(
            "<h3>Step {}{}</h3>\n<pre aria-label=\"prompt\">{}</pre>\n<pre aria-label=\"completion\">{}</pre>\n",
            completion.step,
            text(&reward),
            block(&shortened(&completion.prompt)),
            block(&shortened(&completion.completion)),
        )
    };
    section("completions", "Completions", &run.completions.iter().map(one).collect::<String>())
}

/// The beginning of a text that is too long for the page.
fn shortened(raw: &str) -> String {
    const CHARS: usize = 2000;
    match raw.char_indices().nth(CHARS) {
        Some((at, _)) => format!("{} …", &raw[..at]),
        None => raw.to_owned(),
    }
}

pub(super) fn configuration(run: &RunReport) -> String {
    let rows: Vec<Vec<Cell>> = run
        .info
        .settings
        .iter()
        .map(|(key, value)| vec![label(printable(key)), label(one_line(value))])
        .collect();
    let mut content = String::new();
    if !rows.is_empty() {
        content += &table("Settings that differ from their defaults", &["key", "value"], &rows, false);
    }
    if !run.info.config.is_empty() {
        content += &format!(
            "<details><summary>The configuration as it was written</summary>\n<pre>{}</pre>\n</details>\n",
            block(&run.info.config)
        );
    }
    section("configuration", "Configuration", &content)
}

pub(super) fn command(run: &RunReport) -> String {
    if run.info.command.is_empty() {
        return String::new();
    }
    let content = format!(
        "<p>Run it in the same folder, with the same data, or with another <code>output_dir</code>:</p>\n\
         <pre><code>{}</code></pre>\n",
        text(&run.info.command)
    );
    section("command", "Reproduce this run", &content)
}
