//! Where panels draw: a part of the screen, with text that is cut at its edge and control characters shown as escapes.

use lockstep_observe::printable;
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier, Style};

/// Not `Style::new()`, which leaves the colour that a cell has.
pub(crate) const PLAIN: Style = Style::new().fg(Color::Reset);
pub(crate) const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
pub(crate) const DIM: Style = Style::new().fg(Color::DarkGray);
pub(crate) const TITLE: Style = Style::new().fg(Color::Cyan);
pub(crate) const GOOD: Style = Style::new().fg(Color::Green);
pub(crate) const WARN: Style = Style::new().fg(Color::Yellow);
pub(crate) const BAD: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);

/// Eighths of a cell, for bars.
const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];

/// A part of the screen.
pub(crate) struct Canvas<'a> {
    buffer: &'a mut Buffer,
    pub(crate) area: Rect,
}

impl<'a> Canvas<'a> {
    pub(crate) fn new(buffer: &'a mut Buffer, area: Rect) -> Canvas<'a> {
        let area = area.intersection(buffer.area);
        Canvas { buffer, area }
    }

    /// A part of this part, in its coordinates.
    pub(crate) fn part(&mut self, x: u16, y: u16, width: u16, height: u16) -> Canvas<'_> {
        let (left, top) = (self.area.x.saturating_add(x), self.area.y.saturating_add(y));
        let area = Rect { x: left, y: top, width, height }.intersection(self.area);
        Canvas { buffer: self.buffer, area }
    }

    pub(crate) fn width(&self) -> u16 {
        self.area.width
    }

    pub(crate) fn height(&self) -> u16 {
        self.area.height
    }

    /// Writes text from a cell on. Returns the column after it.
    pub(crate) fn put(&mut self, x: u16, y: u16, text: &str, style: Style) -> u16 {
        if x >= self.area.width || y >= self.area.height {
            return x;
        }
        let room = usize::from(self.area.width - x);
        // Longer lines would only be cut; they may be megabytes.
        let shown: String = printable(&text.chars().take(room).collect::<String>());
        let (end, _) = self.buffer.set_stringn(self.area.x + x, self.area.y + y, shown, room, style);
        end - self.area.x
    }

    /// Writes parts of a line one after another.
    pub(crate) fn line(&mut self, y: u16, parts: &[(&str, Style)]) -> u16 {
        parts.iter().fold(0, |x, (text, style)| self.put(x, y, text, *style))
    }

    /// Writes text that ends before column `end`.
    pub(crate) fn put_right(&mut self, end: u16, y: u16, text: &str, style: Style) {
        let text = printable(text);
        let width = text.chars().count() as u16;
        self.put(end.saturating_sub(width), y, &text, style);
    }

    /// A title in a rule over the whole width.
    pub(crate) fn title(&mut self, title: &str, note: &str) {
        let rule: String = "─".repeat(usize::from(self.area.width));
        self.put(0, 0, &rule, DIM);
        let end = if title.is_empty() { 1 } else { self.put(1, 0, &format!(" {title} "), TITLE) };
        let note = printable(note);
        let note_width = note.chars().count() as u16 + 2;
        if !note.is_empty() && end + note_width < self.area.width {
            self.put(self.area.width - note_width - 1, 0, &format!(" {note} "), PLAIN);
        }
    }

    /// A bar of `width` cells, filled to a share between 0 and 1.
    pub(crate) fn bar(&mut self, x: u16, y: u16, width: u16, share: f64, style: Style) {
        let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
        let eighths = (share * f64::from(width) * 8.0).round() as usize;
        let mut text: String = "█".repeat(eighths / 8);
        // Something that is not zero shows.
        let rest = if eighths == 0 && share > 0.0 { 1 } else { eighths % 8 };
        text.extend((rest > 0).then(|| EIGHTHS[rest]));
        self.put(x, y, &text, style);
    }

    /// Sets one cell.
    pub(crate) fn cell(&mut self, x: u16, y: u16, symbol: char, style: Style) {
        if x < self.area.width && y < self.area.height {
            let cell = &mut self.buffer[(self.area.x + x, self.area.y + y)];
            cell.set_char(symbol).set_style(style);
        }
    }

    /// Empties this part.
    pub(crate) fn clear(&mut self) {
        for position in self.area.positions() {
            self.buffer[position].reset();
        }
    }
}

/// Text of exactly `width` characters: cut, or filled with spaces.
pub(crate) fn fitted(text: &str, width: usize) -> String {
    let shown = printable(text);
    match shown.chars().count() {
        len if len > width => {
            let mut cut: String = shown.chars().take(width.saturating_sub(1)).collect();
            cut.extend((width > 0).then_some('…'));
            cut
        }
        len => shown + &" ".repeat(width - len),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(buffer: &Buffer) -> Vec<String> {
        let row = |y| (0..buffer.area.width).map(|x| buffer[(x, y)].symbol().to_owned()).collect();
        (0..buffer.area.height).map(row).collect()
    }

    #[test]
    fn text_is_cut_at_the_edge_and_shown_as_it_is() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 12, 3));
        let mut canvas = Canvas::new(&mut buffer, Rect::new(2, 1, 8, 1));
        canvas.put(0, 0, "a\x1b[2Jbcdefghijk", PLAIN);
        canvas.put(0, 5, "below", PLAIN);
        canvas.put(20, 0, "right", PLAIN);
        assert_eq!(lines(&buffer), ["            ", "  a\\u{1b}[  ", "            "]);
    }

    #[test]
    fn bars_and_fitted_text_have_their_width() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 4, 4));
        for (y, share) in [0.5, 1e-9, f64::NAN, 7.0].into_iter().enumerate() {
            Canvas::new(&mut buffer, Rect::new(0, y as u16, 4, 1)).bar(0, 0, 4, share, PLAIN);
        }
        assert_eq!(lines(&buffer), ["██  ", "▏   ", "    ", "████"]);
        assert_eq!([fitted("ab", 3), fitted("abcd", 3), fitted("a", 0)], ["ab ", "ab…", ""]);
    }
}
