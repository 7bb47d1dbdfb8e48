//! The newest metrics of a run as Prometheus reads them.

use std::fmt::Write;

use crate::run_files::MetricsLine;

/// The text of a scrape: the newest step and the newest evaluation of a run, as gauges with the label `run`.
pub fn prometheus_text(run: &str, lines: &[MetricsLine]) -> String {
    let mut out = String::new();
    let newest = |evaluation| lines.iter().rev().find(|line| line.evaluation == evaluation);
    let run = label(run);
    for line in [newest(false), newest(true)].into_iter().flatten() {
        let step = if line.evaluation { "eval_step" } else { "step" };
        gauge(&mut out, step, &run, "", line.step as f64, true);
        for (key, value) in &line.numbers {
            gauge(&mut out, key, &run, "", *value, true);
        }
        for (key, values) in &line.lists {
            for (rank, value) in values.iter().enumerate() {
                gauge(&mut out, key, &run, &format!(",rank=\"{rank}\""), *value, rank == 0);
            }
        }
    }
    out
}

/// One sample, with its type before the first of a name.
fn gauge(out: &mut String, key: &str, run: &str, labels: &str, value: f64, is_first: bool) {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' };
    let name: String = "lockstep_".chars().chain(key.chars().map(allowed)).collect();
    if is_first {
        let _ = writeln!(out, "# TYPE {name} gauge");
    }
    let value = match value {
        _ if value.is_nan() => "NaN".into(),
        f64::INFINITY => "+Inf".into(),
        f64::NEG_INFINITY => "-Inf".into(),
        _ => value.to_string(),
    };
    let _ = writeln!(out, "{name}{{run=\"{run}\"{labels}}} {value}");
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
        let text = prometheus_text("a \"run\"", &lines);
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
}
