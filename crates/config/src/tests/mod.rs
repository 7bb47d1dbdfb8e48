//! Tests of `load` as a whole: accepted configurations, and the texts of errors.

mod accepts;
mod algorithm_defaults;
mod algorithm_messages;
mod algorithms;
mod dialects;
mod messages;
mod never_panics;
mod quantisation;
mod reward_messages;

use crate::{AlgorithmName, ConfigErrors, RewardFunctionConfig, RewardFunctionKind, RunConfig, Source, load};

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

/// The lines that select an algorithm, with the keys that it requires.
fn minimal(algorithm: AlgorithmName) -> String {
    let required = match algorithm {
        AlgorithmName::Ppo => "reward_model_path: rm\n",
        AlgorithmName::Grpo | AlgorithmName::Rloo => "reward_funcs: exact_match\n",
        _ => "",
    };
    format!("algorithm: {algorithm}\n{required}")
}

/// A complete configuration of the algorithm with more lines.
fn with(algorithm: AlgorithmName, text: &str) -> RunConfig {
    accepted(&format!("{}{text}", minimal(algorithm)), &[])
}

fn reward_function(name: &str, kind: RewardFunctionKind) -> RewardFunctionConfig {
    RewardFunctionConfig { name: name.into(), kind, weight: 1.0 }
}

fn exact_match() -> RewardFunctionKind {
    RewardFunctionKind::ExactMatch { column: "answer".into(), extract: None, ignore_case: false }
}
