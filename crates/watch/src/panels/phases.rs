//! Where the time of a step goes.

use lockstep_observe::{Column, short_seconds};
use ratatui_core::style::{Color, Style};

use crate::canvas::{Canvas, PLAIN, fitted};
use crate::snapshot::Snapshot;

const WORK: Style = Style::new().fg(Color::Blue);
const WAITING: Style = Style::new().fg(Color::Magenta);
/// Shorter parts are not worth a row.
const LEAST_SHARE: f64 = 0.002;

/// The parts of a step and their seconds, in the order in which the run writes them.
fn parts(snapshot: &Snapshot) -> (Vec<(&str, f64)>, f64) {
    let history = &snapshot.history;
    let mean = |key: &str| history.per_step(key, super::NEWEST as u64);
    let step = mean("step_seconds").unwrap_or(0.0);
    let is_part = |column: &&Column| {
        !column.evaluation && column.key.ends_with("_seconds") && column.key != "step_seconds"
    };
    let columns = history.columns().iter().filter(is_part);
    let seconds = columns.filter_map(|column| Some((column.key.as_str(), mean(&column.key)?)));
    (seconds.filter(|(_, seconds)| *seconds > step * LEAST_SHARE).collect(), step)
}

pub(crate) fn rows(snapshot: &Snapshot) -> u16 {
    match parts(snapshot).0.len() {
        0 => 0,
        len => len as u16 + 1,
    }
}

pub(crate) fn draw(snapshot: &Snapshot, canvas: &mut Canvas<'_>) {
    let (mut parts, step) = parts(snapshot);
    // The longest ones if there is no room for all, in their own order.
    let mut by_length = parts.clone();
    by_length.sort_by(|a, b| b.1.total_cmp(&a.1));
    by_length.truncate(usize::from(canvas.height().saturating_sub(1)));
    parts.retain(|(key, _)| by_length.iter().any(|(other, _)| other == key));
    canvas.title("step", &short_seconds(step));
    let width = canvas.width();
    let bar = width.saturating_sub(15 + 10 + 6);
    let widest = parts.iter().map(|(_, seconds)| *seconds).fold(step, f64::max);
    for (y, (key, seconds)) in (1..).zip(&parts) {
        let name = key.trim_end_matches("_seconds").replace('_', " ");
        let style = if name.ends_with(" wait") { WAITING } else { WORK };
        canvas.put(1, y, &fitted(&name, 13), PLAIN);
        canvas.bar(15, y, bar, seconds / widest, style);
        canvas.put_right(width - 6, y, &short_seconds(*seconds), PLAIN);
        canvas.put_right(width, y, &format!("{:.0} %", 100.0 * seconds / step), PLAIN);
    }
}
