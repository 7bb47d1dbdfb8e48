//! Which collectives are in flight, who takes part in them, and what the others are doing. In a run that hangs, this is
//! where one sees which rank the others wait for.

use lockstep_observe::{RankStatus, RunningOperation, short_seconds};
use ratatui_core::style::Style;

use super::duration;
use crate::canvas::{BAD, Canvas, DIM, PLAIN, WARN};
use crate::snapshot::Snapshot;

/// The lines of the panel at most.
const MOST: usize = 8;
/// Collectives that take longer than this are worth a look at the other ranks.
const LONG: f64 = 2.0;

/// The ranks that are in the same collective.
struct InFlight<'a> {
    operation: &'a str,
    ranks: Vec<u32>,
    seconds: f64,
}

fn collective(status: &RankStatus) -> Option<&RunningOperation> {
    status.operations.iter().find(|one| one.collective)
}

fn in_flight(statuses: &[RankStatus]) -> Vec<InFlight<'_>> {
    let mut all: Vec<InFlight<'_>> = Vec::new();
    for status in statuses.iter().filter(|status| status.is_new()) {
        let Some(one) = collective(status) else { continue };
        match all.iter_mut().find(|other| other.operation == one.operation) {
            Some(same) => {
                same.ranks.push(status.rank);
                same.seconds = same.seconds.max(one.seconds);
            }
            None => {
                let (operation, ranks) = (one.operation.as_str(), vec![status.rank]);
                all.push(InFlight { operation, ranks, seconds: one.seconds });
            }
        }
    }
    all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    all
}

/// The lines of the panel, the most important ones first.
fn lines(snapshot: &Snapshot) -> Vec<(String, String, Style)> {
    let statuses = &snapshot.ranks;
    let silent = statuses.iter().filter(|status| !status.is_new()).map(|status| {
        let doing = collective(status).or(status.operations.first());
        let doing = doing.map_or_else(String::new, |one| format!(", last in {}", one.operation));
        (format!("rank {} silent{doing}", status.rank), duration(status.age), BAD)
    });
    let mut lines: Vec<(String, String, Style)> = silent.collect();
    let in_flight = in_flight(statuses);
    let is_long = in_flight.iter().any(|one| one.seconds >= LONG);
    for one in &in_flight {
        let ranks = match &one.ranks[..] {
            [rank] => format!("rank {rank}"),
            all => format!("{} ranks", all.len()),
        };
        let style = if one.seconds >= LONG { WARN } else { PLAIN };
        lines.push((one.operation.to_owned(), format!("{ranks}  {}", short_seconds(one.seconds)), style));
    }
    let others = statuses.iter().filter(|status| status.is_new() && collective(status).is_none());
    for status in others {
        let longest = status.operations.iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let style = if is_long { WARN } else { DIM };
        lines.push(match longest {
            Some(one) => {
                (format!("rank {} in {}", status.rank, one.operation), short_seconds(one.seconds), style)
            }
            None => (format!("rank {} between operations", status.rank), String::new(), style),
        });
    }
    lines
}

/// The same number whatever the ranks are doing, so that nothing moves from frame to frame.
pub(crate) fn rows(snapshot: &Snapshot) -> u16 {
    match snapshot.ranks.len() {
        // One rank waits for nobody.
        _ if snapshot.info.ranks < 2 => 0,
        0 => 0,
        ranks => ranks.clamp(2, MOST) as u16 + 1,
    }
}

pub(crate) fn draw(snapshot: &Snapshot, canvas: &mut Canvas<'_>) {
    canvas.title("collectives in flight", &format!("{} ranks", snapshot.ranks.len()));
    let width = canvas.width();
    for (y, (left, right, style)) in (1..).zip(lines(snapshot)) {
        canvas.put(1, y, &left, style);
        let end = right.chars().count() as u16 + 1;
        if !right.is_empty() && end < width {
            canvas.put(width - end, y, &format!(" {right}"), style);
        }
    }
}
