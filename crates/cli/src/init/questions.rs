//! Asks questions on a terminal, one line each. Enter accepts the default, and a bad answer is asked for once more.

use std::io::BufRead;

use super::InitError;

/// How questions are answered that no flag answers.
pub(super) enum Asking<'a> {
    Questions {
        input: &'a mut dyn BufRead,
        show: &'a mut dyn FnMut(&str),
    },
    /// With the default.
    Defaults,
    /// Not at all.
    FlagsOnly,
}

/// One question.
pub(super) struct Question<'a> {
    /// The flag that answers it.
    pub(super) flag: &'static str,
    pub(super) text: &'a str,
    pub(super) default: String,
    /// What is wrong with an answer.
    pub(super) check: &'a dyn Fn(&str) -> Result<(), String>,
}

impl Question<'_> {
    /// The answer: that of the flag if it was given.
    pub(super) fn answer(self, given: Option<&str>, asking: &mut Asking<'_>) -> Result<String, InitError> {
        let Question { flag, text, default, check } = self;
        if let Some(value) = given {
            let bad = |problem| InitError::BadAnswer { flag, value: value.into(), problem };
            return check(value).map(|()| value.to_owned()).map_err(bad);
        }
        let (input, show) = match asking {
            Asking::Defaults => return Ok(default),
            Asking::FlagsOnly => return Err(InitError::NoTerminal { flags: vec![flag] }),
            Asking::Questions { input, show } => (input, show),
        };
        loop {
            show(&format!("{text} [{default}]: "));
            let mut line = String::new();
            if input.read_line(&mut line).map_or(true, |bytes| bytes == 0) {
                show("\n");
                return Err(InitError::Cancelled);
            }
            let answer = if line.trim().is_empty() { default.as_str() } else { line.trim() };
            match check(answer) {
                Ok(()) => return Ok(answer.to_owned()),
                Err(problem) => show(&format!("  {problem}\n")),
            }
        }
    }
}
