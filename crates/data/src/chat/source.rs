//! Finds chat templates: in the tokenizer's files, where transformers stores them, or where the user points.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::tokenizer::{CONFIG, TEMPLATE, TEMPLATE_DIR, companion_files, read};
use crate::{DataError, Tokenizer};

use super::TemplateFault;

/// Where a chat template comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TemplateSource {
    /// The tokenizer's files.
    #[default]
    Tokenizer,
    /// A template file, or a folder with tokenizer files.
    Path(PathBuf),
    /// The text of the template.
    Inline(String),
    /// The built-in template, for models without one: `role: content` lines.
    Builtin,
}

/// The built-in template: `role: content` lines; the assistant's lines end with the EOS token.
pub(crate) const BUILTIN: &str = include_str!("builtin.jinja");

/// The name of the template that is used unless another one is chosen.
pub(crate) const DEFAULT: &str = "default";

/// A template's name, origin and text.
#[derive(Debug)]
pub(crate) struct NamedTemplate {
    /// `default`, `tool_use`, or any other name that its author chose.
    pub(crate) name: String,
    pub(crate) origin: String,
    pub(crate) text: String,
}

/// The templates of `source`; at least one.
pub(crate) fn find(source: &TemplateSource, tokenizer: &Tokenizer) -> Result<Vec<NamedTemplate>, DataError> {
    let single = |origin: String, text: String| vec![NamedTemplate { name: DEFAULT.into(), origin, text }];
    match source {
        TemplateSource::Builtin => Ok(single("`builtin`".into(), BUILTIN.into())),
        TemplateSource::Inline(text) => Ok(single("`chat_template`".into(), text.clone())),
        TemplateSource::Tokenizer => among(tokenizer.files(), tokenizer.folder()),
        TemplateSource::Path(path) if path.is_dir() => among(&companion_files(path)?, Some(path)),
        TemplateSource::Path(path) => {
            let bytes = read(path)?.ok_or_else(|| DataError::NoChatTemplate { path: Some(path.clone()) })?;
            let origin = path.display().to_string();
            Ok(single(origin.clone(), text(origin, bytes)?))
        }
    }
}

/// The templates among a tokenizer's files. Template files take precedence over `tokenizer_config.json`.
fn among(files: &[(String, Vec<u8>)], folder: Option<&Path>) -> Result<Vec<NamedTemplate>, DataError> {
    let origin = |file: &str| folder.map_or_else(|| file.to_string(), |f| f.join(file).display().to_string());
    let mut found = Vec::new();
    for (file, bytes) in files {
        let name = match file.strip_prefix(TEMPLATE_DIR).and_then(|name| name.strip_prefix('/')) {
            Some(name) => name.strip_suffix(".jinja").unwrap_or(name),
            None if file == TEMPLATE => DEFAULT,
            None => continue,
        };
        let text = text(origin(file), bytes.clone())?;
        found.push(NamedTemplate { name: name.into(), origin: origin(file), text });
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

/// The `chat_template` of a `tokenizer_config.json`: one template, or several with names.
fn in_config(bytes: &[u8], origin: String) -> Result<Vec<NamedTemplate>, DataError> {
    let malformed = |why: String| DataError::TokenizerMalformed { path: origin.clone().into(), why };
    let config: Value = serde_json::from_slice(bytes).map_err(|e| malformed(e.to_string()))?;
    let named = |name: &str, text: &Value| {
        let text = text.as_str().ok_or_else(|| malformed(format!("template `{name}` is not a string")))?;
        Ok(NamedTemplate { name: name.into(), origin: origin.clone(), text: text.into() })
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
        let why = "invalid UTF-8".to_string();
        DataError::ChatTemplate(TemplateFault { origin, line: Some(line), why, raised: false })
    })
}

/// A limit on the number of template files, far above what models have.
const MAX_TEMPLATES: usize = 64;

/// The template files in a folder's `additional_chat_templates`, sorted by name. Only files that end in `.jinja` count.
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
            Some(_) if names.len() == MAX_TEMPLATES => {
                format!("the folder has more than {MAX_TEMPLATES} templates")
            }
            Some(name) => {
                names.push(format!("{TEMPLATE_DIR}/{name}"));
                continue;
            }
            None => format!("the file name {name:?} is not valid UTF-8"),
        };
        return Err(DataError::TokenizerMalformed { path: dir, why });
    }
    names.sort_unstable();
    Ok(names)
}
