//! Which columns mean something, and what files call them.

use crate::DataError;

/// The columns that mean something here.
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

/// Those that make a row something by themselves, or in a pair.
pub(crate) const DECIDING: [&str; 8] =
    ["text", "messages", "prompt", "completion", "conversations", "instruction", "output", "input_ids"];

/// What the columns of a file are called here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    /// A known name, and the file's own for it.
    renamed: Vec<(&'static str, String)>,
}

impl Columns {
    /// `pairs` of a known name and what the files call it.
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

    /// What the file's column `theirs` is here, if it means something.
    pub(crate) fn known(&self, theirs: &str) -> Option<&'static str> {
        if let Some((known, _)) = self.renamed.iter().find(|(_, name)| name == theirs) {
            return Some(known);
        }
        let taken = |known: &str| self.renamed.iter().any(|(name, _)| *name == known);
        KNOWN.into_iter().find(|known| *known == theirs && !taken(known))
    }

    /// Known names with the files' own, as they were given.
    pub(crate) fn renamed(&self) -> &[(&'static str, String)] {
        &self.renamed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renamed_column_leaves_its_own_name_unknown() {
        let columns = Columns::new([("text", "body")]).unwrap();
        assert_eq!(columns.known("body"), Some("text"));
        assert_eq!(columns.known("text"), None);
        assert_eq!(columns.known("prompt"), Some("prompt"));
        assert!(Columns::new([("txt", "body")]).is_err());
    }
}
