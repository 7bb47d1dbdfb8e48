//! The end of the log.

use ratatui_core::style::Style;

use crate::canvas::{BAD, Canvas, DIM, PLAIN};
use crate::snapshot::Snapshot;

pub(crate) fn draw(snapshot: &Snapshot, canvas: &mut Canvas<'_>) {
    canvas.title("log", "");
    let room = usize::from(canvas.height().saturating_sub(1));
    let newest = &snapshot.log[snapshot.log.len().saturating_sub(room)..];
    for (y, line) in (1..).zip(newest) {
        let (time, message) = parts(line);
        canvas.line(y, &[(" ", PLAIN), (time, DIM), (" ", PLAIN), (message, style(message))]);
    }
    if newest.is_empty() {
        canvas.put(1, 1, "nothing yet", DIM);
    }
}

/// The time of day and the message of a line such as `2026-03-01T09:05:07.250Z step 1 | …`.
fn parts(line: &str) -> (&str, &str) {
    match line.split_once(' ') {
        Some((time, message)) if time.len() == 24 && time.is_ascii() => (&time[11..19], message),
        _ => ("", line),
    }
}

fn style(message: &str) -> Style {
    if message.starts_with("stopped") || message.starts_with("warning") { BAD } else { PLAIN }
}
