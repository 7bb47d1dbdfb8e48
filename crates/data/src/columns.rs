//! The known columns, and the names that files use for them.

use crate::{DataError, DataTask};

/// All columns that have a meaning. Prompts keep the others too, for reward functions.
pub(crate) const KNOWN: [&str; 21] = [
    "text",
    "messages",
    "prompt",
    "completion",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "input_ids",
    "labels",
    "completion_mask",
    "assistant_masks",
    "tools",
    "chat_template_kwargs",
    "chosen",
    "rejected",
    "chosen_ids",
    "rejected_ids",
    "margin",
];

/// The columns that determine the format of a row for supervised training, alone or in a pair.
pub(crate) const DECIDING: [&str; 8] =
    ["text", "messages", "prompt", "completion", "conversations", "instruction", "output", "input_ids"];

/// The columns that preference pairs use.
const OF_PAIRS: [&str; 8] =
    ["prompt", "chosen", "rejected", "chosen_ids", "rejected_ids", "margin", "tools", "chat_template_kwargs"];

/// The columns that prompts use. The others are kept as text.
const OF_PROMPTS: [&str; 3] = ["prompt", "tools", "chat_template_kwargs"];

/// A mapping between known columns and the names that files use for them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    /// Pairs of a known column and the file's name for it.
    renamed: Vec<(&'static str, String)>,
}

impl Columns {
    /// From `pairs` of a known column and the files' name for it. A later pair replaces an earlier one.
    pub fn new<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Columns, DataError> {
        let mut renamed: Vec<(&'static str, String)> = Vec::new();
        for (name, theirs) in pairs {
            let known = KNOWN.into_iter().find(|known| *known == name);
            let known = known.ok_or_else(|| DataError::UnknownColumn { name: name.into() })?;
            renamed.retain(|(earlier, _)| *earlier != known);
            renamed.push((known, theirs.into()));
        }
        Ok(Columns { renamed })
    }

    /// The known column that the file's column `theirs` maps to, if there is one.
    pub(crate) fn known(&self, theirs: &str) -> Option<&'static str> {
        if let Some((known, _)) = self.renamed.iter().find(|(_, name)| name == theirs) {
            return Some(known);
        }
        let taken = |known: &str| self.renamed.iter().any(|(name, _)| *name == known);
        KNOWN.into_iter().find(|known| *known == theirs && !taken(known))
    }

    /// Like [`Columns::known`], for the columns that rows of `task` use. Large datasets often have both conversations
    /// and pairs; only one of them is read.
    pub(crate) fn used(&self, theirs: &str, task: DataTask) -> Option<&'static str> {
        let is_used = |known: &&str| match task {
            DataTask::Sft => !OF_PAIRS.contains(known) || OF_PROMPTS.contains(known),
            DataTask::Preference(_) => OF_PAIRS.contains(known),
            DataTask::Prompt { .. } => OF_PROMPTS.contains(known),
        };
        self.known(theirs).filter(is_used)
    }

    /// The pairs of a known column and the files' name for it.
    pub(crate) fn renamed(&self) -> &[(&'static str, String)] {
        &self.renamed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renaming_a_column_frees_its_original_name() {
        let columns = Columns::new([("text", "body")]).unwrap();
        assert_eq!(columns.known("body"), Some("text"));
        assert_eq!(columns.known("text"), None);
        assert_eq!(columns.known("prompt"), Some("prompt"));
        assert!(Columns::new([("txt", "body")]).is_err());
    }

    #[test]
    fn a_task_reads_the_columns_that_it_uses() {
        let columns = Columns::new([("prompt", "question")]).unwrap();
        let preference = DataTask::Preference(crate::PreferenceLayout::Sequence);
        let prompt = DataTask::Prompt { max_prompt_length: 1 };
        for task in [DataTask::Sft, preference, prompt] {
            assert_eq!(columns.used("question", task), Some("prompt"));
            assert_eq!(columns.used("tools", task), Some("tools"));
            assert_eq!(columns.used("answer", task), None);
            assert_eq!(columns.used("messages", task).is_some(), task == DataTask::Sft);
            assert_eq!(columns.used("chosen", task).is_some(), task == preference);
        }
    }
}
