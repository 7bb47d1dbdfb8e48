//! Where templates are found: beside the tokenizer, as transformers keeps them, or as the user gives
//! one.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::tokenizer::{CONFIG, TEMPLATE, TEMPLATE_DIR, beside, read};
use crate::{DataError, Tokenizer};

use super::TemplateFault;

/// Where a chat template comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TemplateSource {
    /// The tokenizer's own.
    #[default]
    Tokenizer,
    /// A file with a template, or a folder with a tokenizer's files.
    Path(PathBuf),
    /// The template itself.
    Inline(String),
    /// The one for models that never had another: `role: content` lines.
    Builtin,
}

/// `role: content` lines, where the assistant's end with the tokenizer's end token.
pub(crate) const BUILTIN: &str = include_str!("builtin.jinja");

/// The name of a template that has no other.
pub(crate) const DEFAULT: &str = "default";

/// A template's text, and what to call it.
#[derive(Debug)]
pub(crate) struct Named {
    /// `default`, `tool_use`, or any other name that its author gave.
    pub(crate) name: String,
    pub(crate) origin: String,
    pub(crate) text: String,
}

/// The templates of `source`, at least one.
pub(crate) fn find(source: &TemplateSource, tokenizer: &Tokenizer) -> Result<Vec<Named>, DataError> {
    let single = |origin: String, text: String| vec![Named { name: DEFAULT.into(), origin, text }];
    match source {
        TemplateSource::Builtin => Ok(single("`builtin`".into(), BUILTIN.into())),
        TemplateSource::Inline(text) => Ok(single("`chat_template`".into(), text.clone())),
        TemplateSource::Tokenizer => among(tokenizer.files(), tokenizer.folder()),
        TemplateSource::Path(path) if path.is_dir() => among(&beside(path)?, Some(path)),
        TemplateSource::Path(path) => {
            let bytes = read(path)?.ok_or_else(|| DataError::NoChatTemplate { path: Some(path.clone()) })?;
            let origin = path.display().to_string();
            Ok(single(origin.clone(), text(origin, bytes)?))
        }
    }
}

/// The templates among a tokenizer's files. Files of their own win over `tokenizer_config.json`.
fn among(files: &[(String, Vec<u8>)], folder: Option<&Path>) -> Result<Vec<Named>, DataError> {
    let origin = |file: &str| folder.map_or_else(|| file.to_string(), |f| f.join(file).display().to_string());
    let mut found = Vec::new();
    for (file, bytes) in files {
        let name = match file.strip_prefix(TEMPLATE_DIR).and_then(|name| name.strip_prefix('/')) {
            Some(name) => name.strip_suffix(".jinja").unwrap_or(name),
            None if file == TEMPLATE => DEFAULT,
            None => continue,
        };
        let text = text(origin(file), bytes.clone())?;
        found.push(Named { name: name.into(), origin: origin(file), text });
    }
    if found.is_empty()
        && let Some((_, bytes)) = files.iter().find(|(file, _)| file == CONFIG)
    {
        found = in_config(bytes, origin(CONFIG))?;
    }
    if found.is_empty() {
        return Err(DataError::NoChatTemplate { path: folder.map(Path::to_path_buf) });
    }
    Ok(found)
}

/// `chat_template` of a `tokenizer_config.json`: one, or several with names.
fn in_config(bytes: &[u8], origin: String) -> Result<Vec<Named>, DataError> {
    let malformed = |why: String| DataError::TokenizerMalformed { path: origin.clone().into(), why };
    let config: Value = serde_json::from_slice(bytes).map_err(|e| malformed(e.to_string()))?;
    let named = |name: &str, text: &Value| {
        let text = text.as_str().ok_or_else(|| malformed(format!("template `{name}` is not a string")))?;
        Ok(Named { name: name.into(), origin: origin.clone(), text: text.into() })
    };
    match &config["chat_template"] {
        Value::Null => Ok(Vec::new()),
        Value::Array(list) => list
            .iter()
            .map(|entry| {
                let name = entry["name"].as_str();
                named(
                    name.ok_or_else(|| malformed("a chat template has no name".into()))?,
                    &entry["template"],
                )
            })
            .collect(),
        Value::Object(by_name) => by_name.iter().map(|(name, text)| named(name, text)).collect(),
        text => Ok(vec![named(DEFAULT, text)?]),
    }
}

fn text(origin: String, bytes: Vec<u8>) -> Result<String, DataError> {
    String::from_utf8(bytes).map_err(|e| {
        let line = 1 + e.as_bytes()[..e.utf8_error().valid_up_to()].iter().filter(|b| **b == b'\n').count();
        let why = "it is not UTF-8".to_string();
        DataError::ChatTemplate(TemplateFault { origin, line: Some(line), why, raised: false })
    })
}

/// More templates than this are not what someone wrote for a model.
const MAX_TEMPLATES: usize = 64;

/// The names of the files in a folder's `additional_chat_templates`, in order. A file whose name does not end in
/// `.jinja` is no template.
pub(crate) fn additional(folder: &Path) -> Result<Vec<String>, DataError> {
    let dir = folder.join(TEMPLATE_DIR);
    let error = |source| DataError::Read { path: dir.clone(), source };
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(&dir).map_err(error)? {
        let name = entry.map_err(error)?.file_name();
        if !name.as_encoded_bytes().ends_with(b".jinja") {
            continue;
        }
        let why = match name.to_str() {
            Some(_) if names.len() == MAX_TEMPLATES => format!("it has more than {MAX_TEMPLATES} templates"),
            Some(name) => {
                names.push(format!("{TEMPLATE_DIR}/{name}"));
                continue;
            }
            None => format!("the name of {name:?} is not UTF-8"),
        };
        return Err(DataError::TokenizerMalformed { path: dir, why });
    }
    names.sort_unstable();
    Ok(names)
}
