//! Where a value came from.

use std::fmt;

/// Where the value of a key came from. `Display` is what a listing of the settings prints beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// It is not set.
    Default,
    /// A file, by the name the user typed; line and column of the key, counted from 1.
    File { name: String, line: u32, column: u32 },
    /// A `key=value` of the command line, as typed.
    Flag { text: String },
    /// Another key determines it.
    Derived { from: &'static str },
    /// It is `auto` there: the rest of the configuration determines it.
    Auto { at: Box<Origin> },
    /// An environment variable.
    Variable { name: String },
    /// The default of the trainer that the launch line starts, such as `trl sft`, where it differs from ours.
    PeerDefault { of: &'static str },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File { name, line, column } => write!(f, "{}:{line}:{column}", printable(name)),
            Origin::Flag { text } => write!(f, "argument {}", printable(text)),
            Origin::Derived { from } => write!(f, "derived from {from}"),
            Origin::Auto { at } => write!(f, "auto ({at})"),
            Origin::Variable { name } => write!(f, "variable {}", printable(name)),
            Origin::PeerDefault { of } => write!(f, "default of {of}"),
        }
    }
}

/// Text from outside, made safe for one line of a terminal: control characters are escaped, long text is cut.
pub(crate) fn printable(text: &str) -> String {
    const MAX_CHARS: usize = 100;
    let mut out = String::new();
    for (idx, c) in text.chars().enumerate() {
        if idx == MAX_CHARS {
            out.push_str("...");
            break;
        }
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_read_like_places() {
        let file = Origin::File { name: "run.yaml".into(), line: 3, column: 1 };
        assert_eq!(file.to_string(), "run.yaml:3:1");
        assert_eq!(
            Origin::Flag { text: "learning_rate=1e-3".into() }.to_string(),
            "argument learning_rate=1e-3"
        );
        assert_eq!(Origin::Default.to_string(), "default");
        assert_eq!(Origin::Derived { from: "seed" }.to_string(), "derived from seed");
        assert_eq!(Origin::Auto { at: Box::new(file) }.to_string(), "auto (run.yaml:3:1)");
        assert_eq!(Origin::Variable { name: "NCCL_TIMEOUT".into() }.to_string(), "variable NCCL_TIMEOUT");
        assert_eq!(Origin::PeerDefault { of: "trl sft" }.to_string(), "default of trl sft");
    }

    #[test]
    fn outside_text_stays_on_its_line() {
        assert_eq!(printable("a\u{1b}[31m\nb"), "a\\u{1b}[31m\\nb");
        assert_eq!(printable(&"x".repeat(200)).len(), 103);
    }
}
