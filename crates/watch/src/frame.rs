//! The layout: a pure function from what is known and what is chosen to a screen.

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;

use crate::canvas::{Canvas, DIM, PLAIN};
use crate::panels::{charts, collectives, gpus, header, help, log, memory, phases, ranks};
use crate::snapshot::Snapshot;
use crate::view::View;

/// A smaller screen shows only that it is too small.
const LEAST: (u16, u16) = (40, 10);
/// From this width on, panels stand beside the charts.
const TWO_COLUMNS: u16 = 72;

type Rows = fn(&Snapshot) -> u16;
type Draw = fn(&Snapshot, &mut Canvas<'_>);

/// The panels beside the charts, in their order on the screen, and which one gets its rows first.
const PANELS: [(Rows, Draw, u8); 5] = [
    (phases::rows, phases::draw, 2),
    (memory::rows, memory::draw, 4),
    (ranks::rows, ranks::draw, 1),
    (collectives::rows, collectives::draw, 0),
    (gpus::rows, gpus::draw, 3),
];
/// A panel with fewer rows is left out.
const LEAST_ROWS: u16 = 3;

/// Draws the whole screen.
pub fn draw(snapshot: &Snapshot, view: &View, area: Rect, buffer: &mut Buffer) {
    let mut screen = Canvas::new(buffer, area);
    let (width, height) = (screen.width(), screen.height());
    if width < LEAST.0 || height < LEAST.1 {
        screen.put(0, 0, &format!("too small: needs {}x{}", LEAST.0, LEAST.1), PLAIN);
        return;
    }
    header::draw(snapshot, &mut screen.part(0, 0, width, header::ROWS));
    let log_rows = (height / 5).clamp(3, 14);
    let body = height - header::ROWS - log_rows - 1;
    let wanted: u16 = PANELS.iter().map(|(rows, ..)| rows(snapshot)).sum();
    let left = if width >= TWO_COLUMNS && wanted > 0 { width - side_width(width) } else { width };
    draw_charts(
        snapshot,
        view,
        &mut screen.part(0, header::ROWS, left.saturating_sub(u16::from(left < width)), body),
    );
    if left < width {
        draw_side(snapshot, &mut screen.part(left, header::ROWS, width - left, body));
    }
    log::draw(snapshot, &mut screen.part(0, height - log_rows - 1, width, log_rows));
    screen.put(0, height - 1, help::FOOTER, DIM);
    if view.help {
        help::draw(&mut screen);
    }
}

fn side_width(width: u16) -> u16 {
    (width * 2 / 5).clamp(40, 72).min(width - 30)
}

fn draw_charts(snapshot: &Snapshot, view: &View, canvas: &mut Canvas<'_>) {
    let (width, height) = (canvas.width(), canvas.height());
    let second = if height >= 12 { height * 2 / 5 } else { 0 };
    charts::draw_metric(snapshot, view, &mut canvas.part(0, 0, width, height - second));
    if second > 0 {
        charts::draw_throughput(snapshot, view, &mut canvas.part(0, height - second, width, second));
    }
}

fn draw_side(snapshot: &Snapshot, canvas: &mut Canvas<'_>) {
    let wanted = PANELS.map(|(rows, ..)| rows(snapshot));
    let rows = share_rows(wanted, PANELS.map(|(_, _, order)| order), canvas.height());
    let width = canvas.width();
    let mut y = 0;
    for ((_, draw, _), rows) in PANELS.iter().zip(rows).filter(|(_, rows)| *rows > 0) {
        draw(snapshot, &mut canvas.part(0, y, width, rows));
        y += rows;
    }
}

/// How many of `room` rows each panel gets: first the least that it needs, in the given order, then what it wants.
fn share_rows<const N: usize>(wanted: [u16; N], order: [u8; N], room: u16) -> [u16; N] {
    let mut by_order: Vec<usize> = (0..N).filter(|i| wanted[*i] > 0).collect();
    by_order.sort_by_key(|i| order[*i]);
    let (mut rows, mut left) = ([0; N], room);
    for i in &by_order {
        let least = wanted[*i].min(LEAST_ROWS);
        if least <= left {
            rows[*i] = least;
            left -= least;
        }
    }
    // One by one, so that no panel takes all that is left.
    while left > 0 {
        let Some(next) = by_order
            .iter()
            .filter(|i| rows[**i] > 0 && rows[**i] < wanted[**i])
            .min_by_key(|i| (rows[**i], order[**i]))
        else {
            break;
        };
        rows[*next] += 1;
        left -= 1;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_shared() {
        assert_eq!(share_rows([5, 8, 0], [1, 0, 2], 30), [5, 8, 0], "room for all");
        assert_eq!(share_rows([5, 8, 4], [1, 0, 2], 11), [4, 4, 3]);
        assert_eq!(share_rows([5, 8, 4], [1, 0, 2], 7), [3, 4, 0], "the last one is left out");
        assert_eq!(share_rows([5, 8, 4], [1, 0, 2], 2), [0, 0, 0]);
    }
}
