//! The terminal: raw mode, the alternate screen, and the escape sequences that change what differs between two screens.
//! Whatever ends the program, the terminal is restored: the guard does it when it is dropped, and a panic before its
//! message is printed.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use ratatui_core::buffer::{Buffer, Cell};
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::stdio::{stdin, stdout};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

use crate::keys::keys;
use crate::view::Key;

const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[2J";
const LEAVE: &str = "\x1b[0m\x1b[?25h\x1b[?1049l";

/// How the terminal was before, while it is ours.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

fn before() -> MutexGuard<'static, Option<Termios>> {
    BEFORE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives the terminal back. Does nothing the second time.
fn restore() {
    if let Some(termios) = before().take() {
        let _ = io::stdout().write_all(LEAVE.as_bytes()).and_then(|()| io::stdout().flush());
        let _ = tcsetattr(stdin(), OptionalActions::Now, &termios);
    }
}

/// The size of the terminal that standard output is, if it is one: columns and rows.
pub fn terminal_size() -> Option<(u16, u16)> {
    let size = tcgetwinsize(stdout()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then_some((size.ws_col, size.ws_row))
}

/// The terminal while it shows the run.
#[derive(Debug)]
pub(crate) struct Terminal {
    shown: Buffer,
    coloured: bool,
}

impl Terminal {
    /// Whether both standard input and standard output are a terminal.
    pub(crate) fn is_there() -> bool {
        isatty(stdin()) && isatty(stdout())
    }

    pub(crate) fn open(coloured: bool) -> io::Result<Terminal> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let previous = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                restore();
                previous(info);
            }));
        });
        let termios = tcgetattr(stdin())?;
        let mut raw = termios.clone();
        raw.make_raw();
        *before() = Some(termios);
        let terminal = Terminal { shown: Buffer::empty(Rect::ZERO), coloured };
        tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        write(ENTER)?;
        Ok(terminal)
    }

    /// The area of the terminal now: it may have been resized.
    pub(crate) fn area(&self) -> Rect {
        let (width, height) = terminal_size().unwrap_or((80, 24));
        Rect::new(0, 0, width, height)
    }

    /// Shows a screen.
    pub(crate) fn show(&mut self, screen: Buffer) -> io::Result<()> {
        let mut out = String::new();
        if screen.area != self.shown.area {
            self.shown = Buffer::empty(screen.area);
            out.push_str("\x1b[0m\x1b[2J");
        }
        push_changes(&mut out, &self.shown, &screen, self.coloured);
        self.shown = screen;
        if out.is_empty() { Ok(()) } else { write(&out) }
    }

    /// Waits for keys, for at most `timeout`. `None`: the terminal has gone.
    pub(crate) fn keys(&self, timeout: Duration) -> Option<Vec<Key>> {
        let timeout = Timespec::try_from(timeout).ok();
        let stdin = stdin();
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        // A signal interrupts the wait; the caller looks for it.
        if !matches!(poll(&mut fds, timeout.as_ref()), Ok(1..)) {
            return Some(Vec::new());
        }
        let mut bytes = [0; 256];
        // Not through std's buffer, whose content `poll` does not see.
        match rustix::io::read(stdin, &mut bytes) {
            Ok(0) => None,
            Ok(len) => Some(keys(&bytes[..len])),
            Err(rustix::io::Errno::INTR) => Some(Vec::new()),
            Err(_) => None,
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore();
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// The escape sequences that turn one screen into another of the same size.
fn push_changes(out: &mut String, old: &Buffer, new: &Buffer, coloured: bool) {
    let mut cursor: Option<(u16, u16)> = None;
    let mut style = String::new();
    for (x, y, cell) in old.diff(new) {
        if cursor != Some((x, y)) {
            let _ = write!(out, "\x1b[{};{}H", y + 1, x + 1);
        }
        let wanted = style_of(cell, coloured);
        if wanted != style {
            out.push_str(&wanted);
            style = wanted;
        }
        out.push_str(cell.symbol());
        // The cursor's column after a wide character depends on the terminal.
        cursor = cell.symbol().is_ascii().then_some((x + 1, y));
    }
}

/// The sequence that sets a cell's style, whatever it was before.
fn style_of(cell: &Cell, coloured: bool) -> String {
    let mut out = "\x1b[0".to_owned();
    for (modifier, code) in [(Modifier::BOLD, ";1"), (Modifier::DIM, ";2"), (Modifier::REVERSED, ";7")] {
        if cell.modifier.contains(modifier) {
            out.push_str(code);
        }
    }
    if let Some(code) = colour_code(cell.fg).filter(|_| coloured) {
        let _ = write!(out, ";{code}");
    }
    out.push('m');
    out
}

/// The code of a foreground colour. The user's own terminal decides how the sixteen colours look.
fn colour_code(colour: Color) -> Option<u8> {
    Some(match colour {
        Color::Black => 30,
        Color::Red => 31,
        Color::Green => 32,
        Color::Yellow => 33,
        Color::Blue => 34,
        Color::Magenta => 35,
        Color::Cyan => 36,
        Color::Gray => 37,
        Color::DarkGray => 90,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use ratatui_core::style::Style;

    use super::*;

    #[test]
    fn only_changes_are_written() {
        let mut old = Buffer::empty(Rect::new(0, 0, 10, 2));
        let mut new = old.clone();
        let changes = |old: &Buffer, new: &Buffer, coloured| {
            let mut out = String::new();
            push_changes(&mut out, old, new, coloured);
            out
        };
        assert_eq!(changes(&old, &new, true), "");
        new.set_string(2, 1, "ab", Style::new().fg(Color::Red).add_modifier(Modifier::BOLD));
        new.set_string(4, 1, "c", Style::new());
        assert_eq!(changes(&old, &new, true), "\x1b[2;3H\x1b[0;1;31mab\x1b[0mc");
        assert_eq!(changes(&old, &new, false), "\x1b[2;3H\x1b[0;1mab\x1b[0mc");
        old = new.clone();
        new.set_string(3, 1, "x", Style::reset());
        assert_eq!(changes(&old, &new, true), "\x1b[2;4H\x1b[0mx");
        new.set_string(0, 0, "漢b", Style::new());
        assert_eq!(changes(&old, &new, true), "\x1b[1;1H\x1b[0m漢\x1b[1;3Hb\x1b[2;4Hx", "a wide character");
    }
}
