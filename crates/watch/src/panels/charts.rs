//! The charts: the chosen metric, and the throughput.

use lockstep_observe::{Column, number};
use ratatui_core::style::{Color, Style};

use crate::canvas::{Canvas, DIM};
use crate::chart::{Chart, Line};
use crate::snapshot::Snapshot;
use crate::view::View;

const METRIC: Style = Style::new().fg(Color::Cyan);
const EVALUATION: Style = Style::new().fg(Color::Yellow);
const SPEED: Style = Style::new().fg(Color::Green);
const THROUGHPUT: &str = "tokens_per_second";

/// The chosen metric, and that of evaluations.
pub(crate) fn draw_metric(snapshot: &Snapshot, view: &View, canvas: &mut Canvas<'_>) {
    let key = view.shown_metric(&snapshot.history);
    draw(snapshot, view, key, METRIC, canvas);
}

pub(crate) fn draw_throughput(snapshot: &Snapshot, view: &View, canvas: &mut Canvas<'_>) {
    draw(snapshot, &View { log_scale: false, ..view.clone() }, THROUGHPUT, SPEED, canvas);
}

fn draw(snapshot: &Snapshot, view: &View, key: &str, style: Style, canvas: &mut Canvas<'_>) {
    let history = &snapshot.history;
    let mut lines = Vec::new();
    let column = history.column(key);
    if let Some(column) = column {
        // The values themselves stay visible behind their mean.
        if view.window() > 1 {
            lines.push(Line { points: column.points(1), style: DIM });
        }
        lines.push(Line { points: column.points(view.window()), style });
    }
    let evaluated = history.evaluation_column(&format!("eval_{key}"));
    lines.extend(evaluated.map(|column| Line { points: column.points(1), style: EVALUATION }));
    let mut title = key.to_owned();
    let mut add = |text: &str, wanted: bool| title.push_str(if wanted { text } else { "" });
    add(" and evaluation", evaluated.is_some());
    add(", log", view.log_scale);
    add(&format!(", mean of {}", view.window()), view.window() > 1);
    let note = column.and_then(Column::newest).map_or_else(String::new, number);
    Chart { title: &title, note: &note, lines, log_scale: view.log_scale }.draw(canvas);
}
