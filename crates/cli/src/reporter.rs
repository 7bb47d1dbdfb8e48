//! Where this process reports errors. A process on its own prints them. A rank that our launcher started writes its
//! error to a file, and the launcher prints the cause once, last. A rank of another launcher prints its number in
//! front of every line.

use std::io::Write as _;
use std::path::PathBuf;

use lockstep_launch::{ErrorNote, names};

#[derive(Debug)]
pub(crate) struct Reporter {
    rank: Option<u32>,
    error_file: Option<PathBuf>,
}

impl Reporter {
    /// Never fails: it is needed to report what failed.
    pub(crate) fn of_this_process() -> Reporter {
        let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u32>().ok());
        let rank = number(names::RANK).filter(|_| number(names::WORLD_SIZE) > Some(1));
        Reporter { rank, error_file: std::env::var_os(names::ERROR_FILE).map(PathBuf::from) }
    }

    /// Reports an error with its hint.
    pub(crate) fn error(&self, note: &ErrorNote) {
        if let Some(path) = &self.error_file {
            match note.write(path) {
                Ok(()) => return,
                // An earlier error is the cause of this one.
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

    /// Prints a line that is not an error, such as a refused connection.
    pub(crate) fn line(&self, line: &str) {
        self.print(&format!("{line}\n"));
    }

    fn print(&self, text: &str) {
        // Our own launcher adds the rank's number.
        let prefix = match (self.rank, &self.error_file) {
            (Some(rank), None) => format!("[rank {rank}] "),
            _ => String::new(),
        };
        let lines: String = text.lines().map(|line| format!("{prefix}{line}\n")).collect();
        let _ = std::io::stderr().lock().write_all(lines.as_bytes());
    }
}

/// Hints come from many crates. Print them all in the same form.
fn uncapitalised(text: &str) -> String {
    let mut chars = text.chars();
    match (chars.next(), chars.clone().next()) {
        (Some(first), Some(second)) if second.is_lowercase() => first.to_lowercase().chain(chars).collect(),
        _ => text.into(),
    }
}
