//! The known columns, and the names that files use for them.

use crate::DataError;

/// All columns that are read.
pub(crate) const KNOWN: [&str; 16] = [
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
];

/// The columns that determine the format of a row, alone or in a pair.
pub(crate) const DECIDING: [&str; 8] =
    ["text", "messages", "prompt", "completion", "conversations", "instruction", "output", "input_ids"];

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
}
