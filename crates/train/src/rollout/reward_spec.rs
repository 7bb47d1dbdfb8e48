//! The reward functions of the configuration in the terms of `lockstep_rewards`.

use lockstep_config::{self as config, RewardFunctionKind};
use lockstep_rewards::{
    EnvVar, ExactMatch, Format, Http, LengthPenalty, NumberSource, NumericMatch, Program, RegexSearch,
    RepetitionPenalty, RewardContext, RewardSpec, RewardToken,
};

use crate::error::TrainError;

/// The function that the configuration describes.
pub(crate) fn spec(kind: &RewardFunctionKind, environment: &RewardContext) -> Result<RewardSpec, TrainError> {
    Ok(match kind {
        RewardFunctionKind::ExactMatch { column, extract, ignore_case } => {
            RewardSpec::ExactMatch(ExactMatch {
                column: column.clone(),
                extract: extract.clone(),
                ignore_case: *ignore_case,
            })
        }
        RewardFunctionKind::NumericMatch { column, tolerance, source } => {
            RewardSpec::NumericMatch(NumericMatch {
                column: column.clone(),
                tolerance: *tolerance,
                source: match source {
                    config::NumberSource::Last => NumberSource::Last,
                    config::NumberSource::Boxed => NumberSource::Boxed,
                    config::NumberSource::After(marker) => NumberSource::After(marker.clone()),
                },
            })
        }
        RewardFunctionKind::Format { pattern } => RewardSpec::Format(Format { pattern: pattern.clone() }),
        RewardFunctionKind::Regex { pattern } => RewardSpec::Regex(RegexSearch { pattern: pattern.clone() }),
        RewardFunctionKind::LengthPenalty { max_length, buffer } => {
            RewardSpec::LengthPenalty(LengthPenalty { max_length: *max_length, buffer: *buffer })
        }
        RewardFunctionKind::RepetitionPenalty { ngram_size, max_penalty } => {
            RewardSpec::RepetitionPenalty(RepetitionPenalty {
                ngram_size: *ngram_size as usize,
                max_penalty: *max_penalty,
            })
        }
        RewardFunctionKind::Program(program) => RewardSpec::Program(Program {
            timeout_s: program.timeout_s,
            workers: program.workers as usize,
            env: program.env.iter().map(|name| EnvVar::parse(name)).collect(),
            max_restarts: program.max_restarts,
            ..Program::new(program.command.clone())
        }),
        RewardFunctionKind::Http(http) => RewardSpec::Http(Http {
            timeout_s: http.timeout_s,
            token: http.token_env.as_deref().map(|name| token(name, environment)).transpose()?,
            ..Http::new(&http.url)
        }),
    })
}

fn token(name: &str, environment: &RewardContext) -> Result<RewardToken, TrainError> {
    let value = environment.environment.iter().find(|(key, _)| key == name);
    let text = value.and_then(|(_, value)| value.to_str()).unwrap_or_default();
    RewardToken::new(text).ok_or_else(|| TrainError::NoRewardToken { variable: name.to_owned() })
}
