//! `load` as a whole: what it accepts, and how it words what it does not.

mod accepts;
mod messages;
mod never_panics;

use crate::{ConfigErrors, RunConfig, Source, load};

fn run(text: &str, overrides: &[&str]) -> Result<RunConfig, ConfigErrors> {
    let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
    load(Some(Source { name: "run.yaml", text }), &overrides)
}

/// A complete configuration with `text` after it.
fn accepted(text: &str, overrides: &[&str]) -> RunConfig {
    match run(&format!("model: 15m\noutput_dir: out\n{text}"), overrides) {
        Ok(config) => config,
        Err(errors) => panic!("{text}: {errors}"),
    }
}

/// The errors of a complete configuration with `text` after it, from line 3.
fn refused(text: &str, overrides: &[&str]) -> String {
    match run(&format!("model: 15m\noutput_dir: out\n{text}"), overrides) {
        Ok(config) => panic!("{text} was accepted: {config:?}"),
        Err(errors) => errors.to_string(),
    }
}
