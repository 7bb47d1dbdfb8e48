//! The texts that a configuration is read from, and positions in them.

use crate::error::{Excerpt, Position};
use crate::launch_line::LaunchLine;
use crate::origin::Origin;
use crate::secret;
use crate::yaml::{At, Input};

/// A text to read.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The file's name as the user typed it.
    pub name: &'a str,
    pub text: &'a str,
}

/// Everything that a run is configured by. Files must agree with each other; flags of the launch line replace the
/// values of files, except for DeepSpeed's, which they must agree with; overrides replace all of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inputs<'a> {
    /// Files of any dialect, in any order, including those that [`crate::referenced_files`] names.
    pub files: &'a [Source<'a>],
    /// The command line of another launcher.
    pub launch_line: Option<&'a LaunchLine>,
    /// `key=value`.
    pub overrides: &'a [String],
    /// Environment variables of the process, by name. Only those in [`crate::VARIABLES`] are read.
    pub variables: &'a [(String, String)],
}

/// Longer lines are not quoted: a file may have thousands of errors in one line, and each quotation goes through it.
const MAX_QUOTED_BYTES: usize = 16 << 10;

/// Where the lines of a text begin, so that thousands of errors can quote theirs in little time.
struct LineTable(Vec<usize>);

impl LineTable {
    fn of(text: &str) -> LineTable {
        let after_breaks =
            text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(idx, _)| idx + 1);
        LineTable(std::iter::once(0).chain(after_breaks).collect())
    }

    /// A line of the text of which this is the table, counted from 1, without its end.
    fn line<'t>(&self, text: &'t str, number: u32) -> Option<&'t str> {
        let idx = (number as usize).checked_sub(1)?;
        let (start, end) = (*self.0.get(idx)?, self.0.get(idx + 1).copied().unwrap_or(text.len()));
        let line = text.get(start..end)?;
        let line = line.strip_suffix('\n').unwrap_or(line);
        Some(line.strip_suffix('\r').unwrap_or(line))
    }
}

/// The texts, to describe positions in them.
pub(crate) struct Texts<'a> {
    pub(crate) files: Vec<Source<'a>>,
    /// The lines of each file.
    written: Vec<LineTable>,
    /// The text of each file with secrets hidden. It has the same lines.
    shown: Vec<(String, LineTable)>,
    pub(crate) overrides: &'a [String],
    pub(crate) launch_line: Option<&'a LaunchLine>,
    pub(crate) variables: Vec<(&'a str, &'a str)>,
}

fn with_lines(text: String) -> (String, LineTable) {
    let table = LineTable::of(&text);
    (text, table)
}

impl<'a> Texts<'a> {
    pub(crate) fn new(inputs: &Inputs<'a>) -> Self {
        // A byte order mark is not part of the first line.
        let stripped =
            |f: &Source<'a>| Source { text: f.text.strip_prefix('\u{feff}').unwrap_or(f.text), ..*f };
        let files: Vec<Source<'a>> = inputs.files.iter().map(stripped).collect();
        let pasted = inputs.launch_line.map_or(&[][..], |line| &line.variables[..]);
        let variables = inputs.variables.iter().chain(pasted);
        Texts {
            written: files.iter().map(|f| LineTable::of(f.text)).collect(),
            shown: files.iter().map(|f| with_lines(secret::redact(f.text))).collect(),
            files,
            overrides: inputs.overrides,
            launch_line: inputs.launch_line,
            variables: variables.map(|(name, value)| (name.as_str(), value.as_str())).collect(),
        }
    }

    pub(crate) fn origin(&self, at: At) -> Origin {
        match at.from {
            Input::File(idx) => {
                Origin::File { name: self.files[idx].name.to_owned(), line: at.line, column: at.column }
            }
            Input::Flag(idx) => Origin::Flag { text: secret::redact_setting(&self.overrides[idx]) },
            Input::Line(idx) => {
                let flag = self.launch_line.and_then(|line| line.flags.get(idx));
                Origin::Flag { text: flag.map_or_else(String::new, |flag| flag.typed()) }
            }
            Input::Variable(idx) => Origin::Variable { name: self.variables[idx].0.to_owned() },
            Input::PeerDefault(of) => Origin::PeerDefault { of },
            Input::Default => Origin::Default,
        }
    }

    /// The origin of a value that a source leaves to the rest of the configuration.
    pub(crate) fn auto(&self, at: At) -> Origin {
        Origin::Auto { at: Box::new(self.origin(at)) }
    }

    pub(crate) fn place(&self, at: At) -> Position {
        let file = at.from.file();
        let excerpt = file.and_then(|idx| self.excerpt(at, idx));
        Position { origin: self.origin(at), excerpt, file }
    }

    fn excerpt(&self, at: At, idx: usize) -> Option<Excerpt> {
        let (shown_text, shown_lines) = &self.shown[idx];
        let written = self.written[idx].line(self.files[idx].text, at.line)?;
        let shown = shown_lines.line(shown_text, at.line)?;
        if written.len() > MAX_QUOTED_BYTES {
            return None;
        }
        let same = written.chars().zip(shown.chars()).take_while(|(a, b)| a == b).count();
        let column = at.column as usize;
        // A hidden secret shifts the text after it, so count from the end there.
        let column = if column <= same + 1 {
            column
        } else {
            let from_end = (written.chars().count() + 1).saturating_sub(column);
            (shown.chars().count() + 1).saturating_sub(from_end).max(same + 1)
        };
        Some(Excerpt::new(at.line, shown, column as u32, at.width))
    }
}
