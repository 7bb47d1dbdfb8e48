//! Samples for tests.

use serde_json::{Map, Value, json};

use crate::error::RewardError;
use crate::function::{Sample, ScoreReport};
use crate::spec::{RewardContext, RewardSpec, open};

/// A row with this `answer`.
pub(crate) fn row(answer: Value) -> Map<String, Value> {
    let Value::Object(row) = json!({ "question": "?", "answer": answer }) else { unreachable!() };
    row
}

pub(crate) fn sample<'a>(completion: &'a str, columns: &'a Map<String, Value>) -> Sample<'a> {
    Sample { prompt: "What is it?", completion, completion_ids: &[1, 2, 3], columns, truncated: false }
}

/// The reward of one completion for a row with this answer.
pub(crate) fn reward_of(
    spec: &RewardSpec,
    completion: &str,
    answer: Value,
) -> Result<Option<f64>, RewardError> {
    let columns = row(answer);
    let mut function = open("tested", spec, &RewardContext::default())?;
    Ok(function.score(&[sample(completion, &columns)])?[0])
}

/// The report on completions of these token ids.
pub(crate) fn report_of_ids(spec: &RewardSpec, ids: &[&[u32]]) -> ScoreReport {
    let columns = row(Value::Null);
    let mut function = open("tested", spec, &RewardContext::default()).unwrap();
    let samples: Vec<Sample<'_>> =
        ids.iter().map(|ids| Sample { completion_ids: ids, ..sample("", &columns) }).collect();
    function.score_each(&samples)
}
