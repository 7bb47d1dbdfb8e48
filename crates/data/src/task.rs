//! The kind of rows that a run needs.

use std::fmt;

/// What the rows of a dataset are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DataTask {
    /// Documents to imitate.
    #[default]
    Sft,
    /// Pairs of a chosen and a rejected completion of the same prompt.
    Preference(PreferenceLayout),
    /// Prompts that the model completes during training. A prompt of more than `max_prompt_length` tokens is dropped.
    Prompt { max_prompt_length: usize },
}

/// How the two documents of a preference pair are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreferenceLayout {
    /// For DPO: the completion's tokens are targets. A long document is truncated.
    Completion,
    /// For reward models: the whole sequence gets one score, at its last token. A pair with a document longer than
    /// `max_length` is dropped.
    Sequence,
}

impl DataTask {
    pub fn is_preference(self) -> bool {
        matches!(self, DataTask::Preference(_))
    }

    /// The fewest tokens of a document that can be used. A document whose targets are its next tokens needs two.
    pub(crate) fn min_doc_tokens(self) -> usize {
        match self {
            DataTask::Sft | DataTask::Preference(PreferenceLayout::Completion) => 2,
            DataTask::Preference(PreferenceLayout::Sequence) | DataTask::Prompt { .. } => 1,
        }
    }

    /// The positions that a document of `tokens` tokens takes in a batch, or in the cache of a model that completes it.
    pub(crate) fn positions(self, tokens: usize) -> usize {
        tokens - (self.min_doc_tokens() - 1)
    }

    /// The most tokens of a row. A pair has two documents of up to `max_length` tokens each.
    pub(crate) fn row_capacity(self, max_length: usize) -> usize {
        match self {
            DataTask::Sft => max_length,
            DataTask::Preference(_) => max_length.saturating_mul(2),
            DataTask::Prompt { max_prompt_length } => max_prompt_length,
        }
    }

    /// The name in the header of a prepared file.
    pub(crate) fn stored_name(self) -> &'static str {
        match self {
            DataTask::Sft => "sft",
            DataTask::Preference(PreferenceLayout::Completion) => "preference_completion",
            DataTask::Preference(PreferenceLayout::Sequence) => "preference_sequence",
            DataTask::Prompt { .. } => "prompt",
        }
    }

    /// The task with the stored name `name`; `max_prompt_length` is used by prompts only.
    pub(crate) fn from_stored(name: &str, max_prompt_length: usize) -> Option<DataTask> {
        let all = [
            DataTask::Sft,
            DataTask::Preference(PreferenceLayout::Completion),
            DataTask::Preference(PreferenceLayout::Sequence),
            DataTask::Prompt { max_prompt_length },
        ];
        all.into_iter().find(|task| task.stored_name() == name)
    }

    /// The columns that rows for this task need.
    pub(crate) fn needed_columns(self) -> &'static str {
        match self {
            DataTask::Sft => "`text`, `messages`, or `prompt` and `completion`",
            DataTask::Preference(_) => "`chosen` and `rejected`",
            DataTask::Prompt { .. } => "`prompt`",
        }
    }
}

/// Names the algorithms that have this task.
impl fmt::Display for DataTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DataTask::Sft => "supervised training",
            DataTask::Preference(PreferenceLayout::Completion) => "`algorithm: dpo`",
            DataTask::Preference(PreferenceLayout::Sequence) => "`algorithm: reward`",
            DataTask::Prompt { .. } => "an algorithm that generates completions (grpo, rloo, ppo)",
        })
    }
}
