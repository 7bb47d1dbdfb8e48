//! What keys do.

use crate::canvas::{BOLD, Canvas, PLAIN};

const KEYS: [(&str, &str); 7] = [
    ("q, Ctrl-C", "quit; the run goes on"),
    ("Tab, →, ↓", "next metric in the first chart"),
    ("Shift-Tab, ←, ↑", "previous metric"),
    ("l", "logarithmic axis"),
    ("+, -", "average over more or fewer points"),
    ("?, h", "this help"),
    ("Esc", "close it"),
];
const COLUMNS: u16 = 54;

pub(crate) const FOOTER: &str = " q quit  Tab metric  l log scale  + - smoothing  ? help";

pub(crate) fn draw(canvas: &mut Canvas<'_>) {
    let (width, height) = (COLUMNS.min(canvas.width()), (KEYS.len() as u16 + 2).min(canvas.height()));
    let (x, y) = ((canvas.width() - width) / 2, (canvas.height() - height) / 2);
    let mut panel = canvas.part(x, y, width, height);
    panel.clear();
    panel.title("keys", "");
    for (row, (keys, meaning)) in (1..).zip(KEYS) {
        panel.put(2, row, keys, BOLD);
        panel.put(20, row, meaning, PLAIN);
    }
    panel.part(0, height - 1, width, 1).title("", "");
}
