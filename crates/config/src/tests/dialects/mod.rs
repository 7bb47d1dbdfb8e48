//! Files and command lines of other trainers.

mod convert;
mod equal_meaning;
mod guide_configs;
mod guides;
mod hostile;
mod launch_lines;
mod messages;
mod mutated;
mod origins;
mod real_world;
mod schema;
mod translations;

use crate::{ConfigErrors, Inputs, LaunchLine, Loaded, Purpose, Source, load_inputs, translate_launch_line};

/// Splits a command line as a shell does: quotes and continued lines, nothing else.
pub(super) fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut quote, mut has_word) = (String::new(), None, false);
    for c in text.replace("\\\n", " ").chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '"' | '\'') => (quote, has_word) = (Some(c), true),
            (None, c) if c.is_whitespace() => {
                if has_word {
                    words.push(std::mem::take(&mut word));
                }
                has_word = false;
            }
            (_, c) => {
                word.push(c);
                has_word = true;
            }
        }
    }
    if has_word {
        words.push(word);
    }
    words
}

pub(super) fn launch_line(text: &str) -> LaunchLine {
    translate_launch_line(&words(text)).unwrap_or_else(|errors| panic!("{text}: {errors}"))
}

/// Loads files, a command line if it is not empty, and overrides.
pub(super) fn load_with(
    files: &[(&str, &str)],
    line: &str,
    overrides: &[&str],
) -> Result<Loaded, ConfigErrors> {
    let files: Vec<Source<'_>> = files.iter().map(|(name, text)| Source { name, text }).collect();
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
    let line = match line.is_empty() {
        true => None,
        false => Some(translate_launch_line(&words(line))?),
    };
    let inputs = Inputs { files: &files, launch_line: line.as_ref(), overrides: &overrides, variables: &[] };
    load_inputs(Purpose::Plan, &inputs)
}

/// Loads what must be accepted, with a model if the sources name none.
pub(super) fn accepted(files: &[(&str, &str)], line: &str, overrides: &[&str]) -> Loaded {
    load_with(files, line, overrides).unwrap_or_else(|errors| panic!("{files:?} {line}: {errors}"))
}

/// The errors of what must be refused.
pub(super) fn refused(files: &[(&str, &str)], line: &str, overrides: &[&str]) -> String {
    match load_with(files, line, overrides) {
        Ok(loaded) => panic!("{files:?} {line} was accepted: {:?}", loaded.config),
        Err(errors) => errors.to_string(),
    }
}
