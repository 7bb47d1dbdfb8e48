//! Tests of `load` as a whole: accepted configurations, and the texts of errors.

mod accepts;
mod messages;
mod never_panics;

use crate::{ConfigErrors, RunConfig, Source, load};

fn run(text: &str, overrides: &[&str]) -> Result<RunConfig, ConfigErrors> {
    let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
    load(Some(Source { name: "run.yaml", text }), &overrides)
}

/// Loads a complete configuration followed by `text`.
fn accepted(text: &str, overrides: &[&str]) -> RunConfig {
    match run(&format!("model: 15m\noutput_dir: out\n{text}"), overrides) {
        Ok(config) => config,
        Err(errors) => panic!("{text}: {errors}"),
    }
}

/// The errors of a complete configuration followed by `text`, which starts at line 3.
fn refused(text: &str, overrides: &[&str]) -> String {
    match run(&format!("model: 15m\noutput_dir: out\n{text}"), overrides) {
        Ok(config) => panic!("{text} was accepted: {config:?}"),
        Err(errors) => errors.to_string(),
    }
}
