//! The planned memory of a rank by kind, and what is used.

use lockstep_core::Bytes;
use lockstep_observe::Column;

use crate::canvas::{BAD, Canvas, DIM, GOOD, PLAIN, TITLE, WARN, fitted};
use crate::snapshot::Snapshot;

fn planned(snapshot: &Snapshot) -> Vec<(&str, u64)> {
    let all = snapshot.info.planned_memory_bytes.iter();
    all.map(|(kind, bytes)| (kind.as_str(), *bytes)).filter(|(_, bytes)| *bytes > 0).collect()
}

fn measured(snapshot: &Snapshot) -> Option<f64> {
    snapshot.history.column("memory_peak_bytes").and_then(Column::high)
}

pub(crate) fn rows(snapshot: &Snapshot) -> u16 {
    match (planned(snapshot).len(), measured(snapshot)) {
        (0, None) => 0,
        (kinds, _) => kinds as u16 + 2,
    }
}

pub(crate) fn draw(snapshot: &Snapshot, canvas: &mut Canvas<'_>) {
    let mut kinds = planned(snapshot);
    let total: u64 = kinds.iter().map(|(_, bytes)| bytes).sum();
    let plan = if total > 0 { format!("planned {}", Bytes(total)) } else { String::new() };
    canvas.title("memory of a rank", &plan);
    let (width, height) = (canvas.width(), canvas.height());
    let bar = width.saturating_sub(15 + 11);
    kinds.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let measured = measured(snapshot);
    kinds.truncate(usize::from(height.saturating_sub(1 + u16::from(measured.is_some()))));
    let most = measured.unwrap_or(0.0).max(total as f64).max(1.0);
    let mut y = 1;
    for (kind, bytes) in &kinds {
        canvas.put(1, y, &fitted(kind, 13), PLAIN);
        canvas.bar(15, y, bar, *bytes as f64 / most, DIM);
        canvas.put_right(width, y, &Bytes(*bytes).to_string(), PLAIN);
        y += 1;
    }
    if let Some(peak) = measured {
        let style = match peak / total as f64 {
            1.02.. => BAD,
            1.0.. => WARN,
            _ => GOOD,
        };
        canvas.put(1, y, "measured peak", TITLE);
        canvas.bar(15, y, bar, peak / most, style);
        canvas.put_right(width, y, &Bytes(peak as u64).to_string(), TITLE);
    }
}
