//! What is trained on and how rows become tokens.

use std::path::PathBuf;

use crate::reader::{Later, Reader};
use crate::sections::ModelSource;

#[derive(Clone, Debug, PartialEq)]
pub struct DataConfig {
    /// May be empty: a plan needs no data. `RunConfig::check_trainable` asks for it.
    pub train_files: Vec<PathBuf>,
    /// Evaluated on; may be empty.
    pub eval_files: Vec<PathBuf>,
    pub tokenizer: Tokenizer,
    pub chat_template: ChatTemplate,
    /// Tokens per row at most.
    pub max_length: u32,
    pub packing: Packing,
    /// `None`: yes exactly for rows with a prompt and a completion.
    pub completion_only_loss: Option<bool>,
    pub on_bad_row: OnBadRow,
    pub shuffle: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokenizer {
    /// The model folder's own.
    Auto,
    /// Bytes are tokens.
    Byte,
    /// A tokenizer file, or a folder with one.
    File(PathBuf),
}

/// How conversations become text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatTemplate {
    /// As the tokenizer's files say.
    Auto,
    /// The one that needs no file.
    Builtin,
    /// The template's own text.
    Inline(String),
    /// A file, or a folder with a tokenizer.
    Path(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    None,
    /// Best-fit decreasing.
    Bfd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBadRow {
    Stop,
    Skip,
}

const OTHER_PACKING: Later = Later(&["bfd_split", "wrapped"], "write `packing: bfd` or `packing: none`.");

impl DataConfig {
    pub(crate) fn read(r: &mut Reader<'_>, model: &ModelSource) -> Self {
        DataConfig {
            train_files: r.paths("train_files"),
            eval_files: r.paths("eval_files"),
            tokenizer: read_tokenizer(r, model),
            chat_template: read_chat_template(r),
            max_length: r.count("max_length", 2).unwrap_or(2),
            packing: read_packing(r),
            completion_only_loss: r.bool("completion_only_loss"),
            on_bad_row: r
                .word("on_bad_row", &[("stop", OnBadRow::Stop), ("skip", OnBadRow::Skip)], Later::NONE)
                .unwrap_or(OnBadRow::Stop),
            shuffle: r.bool("shuffle").unwrap_or(true),
        }
    }
}

fn read_tokenizer(r: &mut Reader<'_>, model: &ModelSource) -> Tokenizer {
    match (r.text("tokenizer", "`byte` or a path"), model) {
        (Some(text), _) if text.eq_ignore_ascii_case("byte") => Tokenizer::Byte,
        (Some(path), _) => Tokenizer::File(path.into()),
        (None, ModelSource::Folder(_)) => {
            r.derived("tokenizer", "model_name_or_path");
            Tokenizer::Auto
        }
        (None, _) => Tokenizer::Byte,
    }
}

fn read_chat_template(r: &mut Reader<'_>) -> ChatTemplate {
    let rivals = ["chat_template", "chat_template_path"];
    r.prefer_flags(&rivals);
    if let (Some(text), Some(path)) = (r.given(rivals[0]), r.given(rivals[1])) {
        r.conflict(&text, &path, "both say how conversations are written; keep one.");
    }
    let text = r.text("chat_template", "`builtin` or a template");
    match (text, r.text("chat_template_path", "a path")) {
        (Some(text), _) if text.eq_ignore_ascii_case("builtin") => ChatTemplate::Builtin,
        (Some(text), _) => ChatTemplate::Inline(text),
        (None, Some(path)) => ChatTemplate::Path(path.into()),
        (None, None) => ChatTemplate::Auto,
    }
}

fn read_packing(r: &mut Reader<'_>) -> Packing {
    // TRL's `packing_strategy` has no effect by itself: it says how `packing: true` packs.
    r.word("packing_strategy", &[("bfd", Packing::Bfd)], OTHER_PACKING);
    let choices = [
        ("none", Packing::None),
        ("bfd", Packing::Bfd),
        ("false", Packing::None),
        ("no", Packing::None),
        ("off", Packing::None),
        ("true", Packing::Bfd),
        ("yes", Packing::Bfd),
        ("on", Packing::Bfd),
    ];
    let Some(node) = r.node("packing") else { return Packing::None };
    // Booleans are accepted but not offered.
    let shown = if node.bool().is_some() { &choices[..] } else { &choices[..2] };
    r.word_of("packing", shown, OTHER_PACKING, &node).unwrap_or(Packing::None)
}
