//! How this process speaks: a run on its own prints; a rank of a launcher of ours leaves what went wrong
//! in a file, for the launcher to tell last and once; a rank of another launcher puts its number in front.

use std::io::Write as _;
use std::path::PathBuf;

use lockstep_launch::{ErrorNote, names};

#[derive(Debug)]
pub(crate) struct Voice {
    rank: Option<u32>,
    error_file: Option<PathBuf>,
}

impl Voice {
    /// Never fails: it is needed to tell what failed.
    pub(crate) fn of_this_process() -> Voice {
        let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u32>().ok());
        let rank = number(names::RANK).filter(|_| number(names::WORLD_SIZE) > Some(1));
        Voice { rank, error_file: std::env::var_os(names::ERROR_FILE).map(PathBuf::from) }
    }

    /// Tells an error, with its remedy.
    pub(crate) fn error(&self, note: &ErrorNote) {
        if let Some(path) = &self.error_file {
            match note.write(path) {
                Ok(()) => return,
                // Something was told before, and is the cause of this.
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => return,
                Err(_) => {}
            }
        }
        let mut text = format!("error: {}\n", note.error);
        if let Some(hint) = &note.hint {
            text.push_str(&format!("hint: {}\n", uncapitalised(hint)));
        }
        self.print(&text);
    }

    /// Tells something that is no error, such as a refused connection.
    pub(crate) fn warn(&self, line: &str) {
        self.print(&format!("{line}\n"));
    }

    fn print(&self, text: &str) {
        // A launcher of ours adds the number itself.
        let prefix = match (self.rank, &self.error_file) {
            (Some(rank), None) => format!("[rank {rank}] "),
            _ => String::new(),
        };
        let lines: String = text.lines().map(|line| format!("{prefix}{line}\n")).collect();
        let _ = std::io::stderr().lock().write_all(lines.as_bytes());
    }
}

/// Hints come from many crates; on the screen they look alike.
fn uncapitalised(text: &str) -> String {
    let mut chars = text.chars();
    match (chars.next(), chars.clone().next()) {
        (Some(first), Some(second)) if second.is_lowercase() => first.to_lowercase().chain(chars).collect(),
        _ => text.into(),
    }
}
