//! How long each rank of a step did not wait for others. The one that takes longest slows all others down.

use lockstep_observe::short_seconds;

use crate::canvas::{Canvas, GOOD, PLAIN, WARN};
use crate::snapshot::Snapshot;

/// A rank that is busy for so much longer than the median is a straggler.
const STRAGGLES: f64 = 1.2;

pub(crate) fn rows(snapshot: &Snapshot) -> u16 {
    match snapshot.history.rank_busy_seconds().len() {
        0 | 1 => 0,
        ranks => ranks as u16 + 1,
    }
}

pub(crate) fn draw(snapshot: &Snapshot, canvas: &mut Canvas<'_>) {
    let busy = snapshot.history.rank_busy_seconds();
    let mut sorted = busy.clone();
    sorted.sort_by(f64::total_cmp);
    let median = sorted[sorted.len() / 2];
    let most = sorted[sorted.len() - 1].max(f64::MIN_POSITIVE);
    let mut shown: Vec<(usize, f64)> = busy.into_iter().enumerate().collect();
    let room = usize::from(canvas.height().saturating_sub(1));
    let note = match shown.len() {
        len if len > room => format!("{room} slowest of {len}"),
        len => len.to_string(),
    };
    if shown.len() > room {
        shown.sort_by(|a, b| b.1.total_cmp(&a.1));
        shown.truncate(room);
        shown.sort_by_key(|(rank, _)| *rank);
    }
    canvas.title("busy ranks", &note);
    let width = canvas.width();
    let bar = width.saturating_sub(9 + 10 + 8);
    for (y, (rank, seconds)) in (1..).zip(shown) {
        let more = if median > 0.0 { seconds / median } else { 1.0 };
        let (style, mark) = if more >= STRAGGLES { (WARN, "◀ ") } else { (GOOD, "") };
        canvas.put(1, y, &format!("rank {rank}"), if mark.is_empty() { PLAIN } else { WARN });
        canvas.bar(9, y, bar, seconds / most, style);
        canvas.put_right(width - 8, y, &short_seconds(seconds), PLAIN);
        canvas.put_right(width, y, &format!("{mark}{:+.0} %", 100.0 * (more - 1.0)), style);
    }
}
