//! The prompts of a rollout, and the part of them that this rank completes.

use std::sync::Arc;

use lockstep_core::Step;
use lockstep_data::{Dataset, SampleOrder};
use serde_json::{Map, Value};

use crate::error::TrainError;

/// A prompt and the other columns of its row.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    /// Its index in the data set.
    pub(crate) row: u32,
    pub(crate) tokens: Vec<u32>,
    pub(crate) columns: Map<String, Value>,
}

impl Prompt {
    /// Reads the prompt of a row.
    pub(crate) fn read(dataset: &Dataset, row: u32) -> Result<Prompt, TrainError> {
        let doc = dataset.row_docs(row as usize)[0];
        let (tokens, _) = dataset.doc(doc)?;
        let columns = match serde_json::from_str(&dataset.columns_json(doc)?) {
            Ok(Value::Object(columns)) => columns,
            _ => Map::new(),
        };
        Ok(Prompt { row, tokens, columns })
    }

    /// The prompt's text: as it is in the data, or rendered from its messages.
    pub(crate) fn text(&self, rendered: impl FnOnce() -> String) -> String {
        match self.columns.get("prompt") {
            Some(Value::String(text)) => text.clone(),
            _ => rendered(),
        }
    }
}

/// The prompts of a rollout's number, over all ranks.
pub(crate) fn rows_of(order: &Arc<SampleOrder>, rollout: u64) -> Vec<u32> {
    let mut rows = Vec::new();
    order.rows(Step(rollout), &mut rows);
    rows
}

/// A prompt and the completions of it that this rank generates.
#[derive(Clone, Debug)]
pub(crate) struct PromptShare {
    pub(crate) prompt: Prompt,
    pub(crate) completions: usize,
    /// The number of the first one, over all ranks.
    pub(crate) first_sample: u32,
}

/// This rank's part of the completions of `rows`, `group` of each prompt. They are divided by completions, not by prompts,
/// so that ranks have equal work even if there are fewer prompts than ranks.
pub(crate) fn share_of(
    dataset: &Dataset,
    rows: &[u32],
    group: usize,
    first_sample: u32,
    share: Share,
) -> Result<Vec<PromptShare>, TrainError> {
    let mut parts: Vec<PromptShare> = Vec::new();
    let mut last = None;
    for sequence in share.first..share.end {
        let prompt = sequence / group;
        match parts.last_mut().filter(|_| last == Some(prompt)) {
            Some(part) => part.completions += 1,
            None => parts.push(PromptShare {
                prompt: Prompt::read(dataset, rows[prompt])?,
                completions: 1,
                first_sample: first_sample.wrapping_add(sequence as u32),
            }),
        }
        last = Some(prompt);
    }
    Ok(parts)
}

/// The part of `count` items that a rank works on: as equal as possible, in order. All ranks run as many rounds as the
/// rank with the largest part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) first: usize,
    pub(crate) end: usize,
    /// The size of the largest part.
    pub(crate) largest: usize,
}

impl Share {
    pub(crate) fn of(count: usize, rank: usize, world: usize) -> Share {
        let largest = count.div_ceil(world);
        let first = (rank * largest).min(count);
        Share { first, end: (first + largest).min(count), largest }
    }
}
