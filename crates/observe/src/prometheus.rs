//! The newest metrics of a run as Prometheus reads them.

use std::collections::HashMap;
use std::fmt::Write;

use crate::run_files::MetricsLine;

/// A run as a monitoring system sees it.
#[derive(Clone, Copy, Debug)]
pub struct ScrapedRun<'a> {
    pub name: &'a str,
    pub lines: &'a [MetricsLine],
    /// Numbers that are not in the metrics, such as the age of the newest line.
    pub others: &'a [(&'a str, f64)],
}

/// The text of a scrape: the newest step and the newest evaluation of each run, as gauges with the label `run`.
pub fn prometheus_text(runs: &[ScrapedRun<'_>]) -> String {
    let mut gauges = Gauges::default();
    for run in runs {
        let label = label(run.name);
        let newest = |evaluation| run.lines.iter().rev().find(|line| line.evaluation == evaluation);
        for line in [newest(false), newest(true)].into_iter().flatten() {
            let step = if line.evaluation { "eval_step" } else { "step" };
            gauges.add(step, &label, "", line.step as f64);
            for (key, value) in &line.numbers {
                gauges.add(key, &label, "", *value);
            }
            for (key, values) in &line.lists {
                for (rank, value) in values.iter().enumerate() {
                    gauges.add(key, &label, &format!(",rank=\"{rank}\""), *value);
                }
            }
        }
        for (key, value) in run.others {
            gauges.add(key, &label, "", *value);
        }
    }
    gauges.text()
}

/// Samples by name, in the order in which the names first occur: all samples of a name must follow its type.
#[derive(Default)]
struct Gauges {
    names: Vec<String>,
    samples: HashMap<String, String>,
}

impl Gauges {
    fn add(&mut self, key: &str, run: &str, labels: &str, value: f64) {
        let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' };
        let name: String = "lockstep_".chars().chain(key.chars().map(allowed)).collect();
        let value = match value {
            _ if value.is_nan() => "NaN".into(),
            f64::INFINITY => "+Inf".into(),
            f64::NEG_INFINITY => "-Inf".into(),
            _ => value.to_string(),
        };
        if !self.samples.contains_key(&name) {
            self.names.push(name.clone());
        }
        let line = format!("{name}{{run=\"{run}\"{labels}}} {value}\n");
        self.samples.entry(name).or_default().push_str(&line);
    }

    fn text(&self) -> String {
        let mut out = String::new();
        for name in &self.names {
            let _ = write!(out, "# TYPE {name} gauge\n{}", self.samples[name]);
        }
        out
    }
}

/// Text inside the quotes of a label.
fn label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_step_and_evaluation() {
        let line = |step, evaluation, key: &str, value| MetricsLine {
            step,
            evaluation,
            numbers: vec![(key.into(), value)],
            lists: vec![],
        };
        let mut lines = vec![
            line(1, false, "loss", 3.0),
            line(1, true, "eval_loss", 2.5),
            line(2, false, "rewards/mean", f64::NAN),
        ];
        lines[2].lists.push(("rank_busy_seconds".into(), vec![0.5, 0.25]));
        let run = ScrapedRun { name: "a \"run\"", lines: &lines, others: &[] };
        let text = prometheus_text(&[run]);
        assert_eq!(
            text,
            "# TYPE lockstep_step gauge\nlockstep_step{run=\"a \\\"run\\\"\"} 2\n\
             # TYPE lockstep_rewards_mean gauge\nlockstep_rewards_mean{run=\"a \\\"run\\\"\"} NaN\n\
             # TYPE lockstep_rank_busy_seconds gauge\n\
             lockstep_rank_busy_seconds{run=\"a \\\"run\\\"\",rank=\"0\"} 0.5\n\
             lockstep_rank_busy_seconds{run=\"a \\\"run\\\"\",rank=\"1\"} 0.25\n\
             # TYPE lockstep_eval_step gauge\nlockstep_eval_step{run=\"a \\\"run\\\"\"} 1\n\
             # TYPE lockstep_eval_loss gauge\nlockstep_eval_loss{run=\"a \\\"run\\\"\"} 2.5\n"
        );
    }

    #[test]
    fn samples_of_several_runs_follow_one_type() {
        let run = |name| ScrapedRun { name, lines: &[], others: &[("age", 2.0), ("up", 1.0)] };
        assert_eq!(
            prometheus_text(&[run("a"), run("b")]),
            "# TYPE lockstep_age gauge\nlockstep_age{run=\"a\"} 2\nlockstep_age{run=\"b\"} 2\n\
             # TYPE lockstep_up gauge\nlockstep_up{run=\"a\"} 1\nlockstep_up{run=\"b\"} 1\n"
        );
    }
}
