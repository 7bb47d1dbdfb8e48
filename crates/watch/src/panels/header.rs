//! The name of the run, its state and progress, and the newest numbers.

use lockstep_observe::{RunState, human_duration};
use ratatui_core::style::Style;

use super::duration;
use crate::canvas::{BAD, BOLD, Canvas, DIM, GOOD, PLAIN, TITLE, WARN, fitted};
use crate::snapshot::Snapshot;

pub(crate) const ROWS: u16 = 3;

/// The columns that a name may fill.
const NAME_COLUMNS: usize = 28;

pub(crate) fn draw(snapshot: &Snapshot, canvas: &mut Canvas<'_>) {
    let (state, style) = state(snapshot);
    let name = fitted(snapshot.name(), NAME_COLUMNS.min(usize::from(canvas.width()) / 3));
    let progress = progress(snapshot);
    canvas.line(
        0,
        &[
            (" ", PLAIN),
            (name.trim_end(), BOLD),
            ("  ", PLAIN),
            (&state, style),
            ("  ", PLAIN),
            (&progress, PLAIN),
        ],
    );
    let (total, steps) = (snapshot.info.total_steps, snapshot.history.steps());
    let width = canvas.width().saturating_sub(2);
    if total > 0 {
        canvas.put(1, 1, &"─".repeat(usize::from(width)), DIM);
        let done = (steps as f64 / total as f64).clamp(0.0, 1.0);
        canvas.put(1, 1, &"━".repeat((done * f64::from(width)) as usize), GOOD);
    }
    match &snapshot.problem {
        Some(problem) => canvas.put(1, 2, problem, BAD),
        None => canvas.put(1, 2, &numbers(snapshot, usize::from(width)), TITLE),
    };
}

fn state(snapshot: &Snapshot) -> (String, Style) {
    let silent = || {
        snapshot.silent.map_or_else(String::new, |time| format!(", nothing written for {}", duration(time)))
    };
    match (snapshot.state, &snapshot.stop) {
        (RunState::Running, _) if snapshot.is_silent => (format!("running{}", silent()), WARN),
        (RunState::Running, _) => ("running".into(), GOOD),
        (RunState::Finished, _) => ("finished".into(), TITLE),
        (RunState::Stopped, Some(stop)) => {
            // `stopped by SIGTERM after step 4`, without what can be read in the log.
            (stop.split(';').next().unwrap_or_default().chars().take(60).collect(), BAD)
        }
        (RunState::Stopped, None) => (format!("stale{}", silent()), BAD),
        (RunState::Unknown, _) => (format!("unknown{}", silent()), WARN),
    }
}

fn progress(snapshot: &Snapshot) -> String {
    let (total, steps) = (snapshot.info.total_steps, snapshot.history.steps());
    let mut parts = vec![match total {
        0 => format!("step {steps}"),
        _ => format!("step {steps}/{total} ({:.0} %)", 100.0 * steps as f64 / total as f64),
    }];
    let epoch = snapshot.history.last_step.as_ref().and_then(|line| line.get("epoch"));
    parts.extend(epoch.map(|epoch| format!("epoch {epoch:.2}")));
    let step_seconds = snapshot.history.recent("step_seconds");
    if let (RunState::Running, Some(seconds)) = (snapshot.state, step_seconds.filter(|_| total > steps)) {
        parts.push(format!("ETA {}", human_duration(seconds * (total - steps) as f64)));
    }
    parts.join("  ")
}

/// The newest step, and means where single steps vary: as many numbers as fit.
fn numbers(snapshot: &Snapshot, width: usize) -> String {
    let history = &snapshot.history;
    let newest = |key: &str| history.last_step.as_ref().and_then(|line| line.get(key));
    let recent = |key: &str| history.column(key).and_then(|column| column.mean_of_newest(super::NEWEST));
    let evaluation = history.evaluations.back().and_then(|line| line.get("eval_loss"));
    let parts = [
        newest("loss").map(|loss| format!("loss {loss:.4}")),
        evaluation.map(|loss| format!("eval {loss:.4}")),
        newest("reward").map(|reward| format!("reward {reward:.3}")),
        recent("tokens_per_second").map(|speed| format!("{speed:.0} tok/s")),
        recent("step_seconds").map(|seconds| format!("{}/step", human_duration(seconds))),
        recent("mfu").map(|mfu| format!("MFU {:.1} %", 100.0 * mfu)),
        newest("learning_rate").map(|rate| format!("lr {rate:.2e}")),
        newest("grad_norm").map(|norm| format!("norm {norm:.2}")),
    ];
    let mut line = String::new();
    for part in parts.into_iter().flatten() {
        let gap = if line.is_empty() { "" } else { "  " };
        if line.chars().count() + gap.len() + part.chars().count() <= width {
            line = line + gap + &part;
        }
    }
    if history.steps() == 0 { "no step has been completed yet".into() } else { line }
}
