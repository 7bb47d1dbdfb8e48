//! `lockstep watch`: a run in a terminal, while it trains or afterwards, from the files of its output folder alone.
//!
//! [`RunReader`] polls the files for a [`Snapshot`], keys change a [`View`], and [`draw`] is a pure function from both to
//! a screen. [`watch`] does this until a key or a signal ends it; [`frame_text`] draws one frame as text.
//!
//! Screens are buffers of `ratatui-core`. Its widgets are not used: the panels here need a title, bars and one kind of
//! chart, whose lines may have gaps. Neither is a terminal library: what is needed of one is raw mode, the size and a
//! dozen escape sequences.
//!
//! GPUs are read by the caller, because this crate has no device code. It never changes a run.

#![forbid(unsafe_code)]

mod canvas;
mod chart;
mod frame;
mod keys;
mod panels;
mod snapshot;
mod terminal;
#[cfg(test)]
mod tests;
mod view;

use std::io;
use std::time::{Duration, Instant};

use lockstep_core::failpoint;
use lockstep_observe::RunFiles;
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;

pub use frame::draw;
pub use snapshot::{GpuStatus, RunReader, Snapshot};
pub use terminal::terminal_size;
pub use view::{Key, View};

use terminal::Terminal;

/// How long a key or a signal may wait.
const LATENCY: Duration = Duration::from_millis(100);

/// What [`watch`] needs from its caller.
pub struct WatchOptions<'a> {
    /// The time between two looks at the files.
    pub interval: Duration,
    pub coloured: bool,
    /// Reads the GPUs of this machine.
    pub gpus: &'a mut dyn FnMut() -> Vec<GpuStatus>,
    /// Whether a signal has asked the program to end.
    pub ends: &'a mut dyn FnMut() -> bool,
}

/// Whether there is a terminal to show a run in.
pub fn has_terminal() -> bool {
    Terminal::is_there()
}

/// Shows a run until a key or a signal ends it.
pub fn watch(files: RunFiles, options: WatchOptions<'_>) -> io::Result<()> {
    let mut terminal = Terminal::open(options.coloured)?;
    let (mut reader, mut view) = (RunReader::new(files), View::default());
    let WatchOptions { interval, gpus, ends, .. } = options;
    let mut read_at = Instant::now();
    let mut snapshot = reader.read(gpus());
    loop {
        let area = terminal.area();
        let mut screen = Buffer::empty(area);
        draw(snapshot, &view, area, &mut screen);
        terminal.show(screen)?;
        failpoint::pass("watch.frame");
        // Until something changes.
        loop {
            if ends() {
                return Ok(());
            }
            let Some(pressed) = terminal.keys(LATENCY) else { return Ok(()) };
            let go_on = pressed.iter().all(|key| view.press(*key, &snapshot.history));
            if !go_on {
                return Ok(());
            }
            if read_at.elapsed() >= interval {
                snapshot = reader.read(gpus());
                read_at = Instant::now();
                break;
            }
            if !pressed.is_empty() || terminal.area() != area {
                break;
            }
        }
    }
}

/// One frame as plain text.
pub fn frame_text(snapshot: &Snapshot, view: &View, (width, height): (u16, u16)) -> String {
    let area = Rect::new(0, 0, width, height);
    let mut screen = Buffer::empty(area);
    draw(snapshot, view, area, &mut screen);
    let mut out = String::new();
    for y in 0..height {
        let mut skipped = 0;
        let mut line = String::new();
        for x in 0..width {
            // A wide character takes two cells, of which the second is not printed.
            if skipped > 0 {
                skipped -= 1;
                continue;
            }
            let symbol = screen[(x, y)].symbol();
            skipped = ratatui_core::buffer::CellWidth::cell_width(symbol).saturating_sub(1);
            line.push_str(symbol);
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}
