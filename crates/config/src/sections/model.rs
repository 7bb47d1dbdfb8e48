//! The model, and its initial weights.

use std::path::PathBuf;

use crate::reader::{Later, Reader};
use crate::sections::LoraConfig;
use crate::sections::quantisation::read_load_in_4bit;
use crate::yaml::Value;

/// The model sizes that have a name.
pub const NAMED_MODELS: &[&str] = &["tiny", "15m", "90m", "300m", "1b", "7b"];

/// The model, and its initial weights.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub source: ModelSource,
    /// The branch, tag or commit of a model from the Hub.
    pub revision: Option<String>,
    /// The vocabulary size, if `source` does not define it.
    pub vocab_size: Option<u32>,
    pub init: InitialWeights,
    /// Dropout probabilities that override those of `config.json`.
    pub attention_dropout: Option<f64>,
    pub resid_dropout: Option<f64>,
    /// `Some` if adapters are trained instead of the weights.
    pub lora: Option<LoraConfig>,
    /// Whether frozen projections are kept in 4 bits.
    pub load_in_4bit: bool,
}

/// Where the model's architecture and size come from.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSource {
    /// A Hugging Face folder on this machine, or the name of a model on the Hub, which the program replaces by the
    /// folder of its download.
    Folder(PathBuf),
    /// One of [`NAMED_MODELS`].
    Named(String),
    /// A map with the keys of `config.json`.
    Explicit(serde_json::Value),
}

/// The weights that training starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitialWeights {
    Pretrained,
    Random,
}

impl ModelConfig {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        r.prefer_flags(&["model_name_or_path", "model"]);
        let folder = r.given("model_name_or_path");
        let model = r.given("model");
        let source = match (folder, model) {
            (Some(folder), Some(model)) => {
                r.conflict(&folder, &model, "both set the model; keep one.");
                None
            }
            (Some(folder), None) => r
                .text_of(
                    &folder.spelled,
                    "the path of a model folder or the name of a model on the Hub",
                    &folder.node,
                )
                .map(|path| ModelSource::Folder(path.into())),
            (None, Some(model)) => named_or_explicit(r, &model.node),
            (None, None) => {
                r.missing(
                    "model",
                    "set `model: 15m` (or another size), or set `model_name_or_path` to a model on the Hub or a folder",
                );
                None
            }
        };
        let source = source.unwrap_or(ModelSource::Named(String::new()));
        let revision = read_revision(r, &source);
        let vocab_size = read_vocab_size(r, &source);
        let init = read_init(r, &source);
        let off = read_disable_dropout(r);
        let mut probability = |key| r.float(key, "at least 0 and below 1", |x| (0.0..1.0).contains(&x));
        let [attention_dropout, resid_dropout] =
            ["attention_dropout", "resid_dropout"].map(|key| probability(key).or(off.then_some(0.0)));
        let lora = LoraConfig::read(r);
        let load_in_4bit = read_load_in_4bit(r);
        ModelConfig {
            source,
            revision,
            vocab_size,
            init,
            attention_dropout,
            resid_dropout,
            lora,
            load_in_4bit,
        }
    }
}

/// Whether dropout that is not set is 0. By default, and unlike `disable_dropout: true`, this does not contradict
/// dropout that is set.
fn read_disable_dropout(r: &mut Reader<'_>) -> bool {
    let off = r.bool("disable_dropout").unwrap_or(false);
    if let Some(given) = r.given("disable_dropout").filter(|_| off) {
        for key in ["attention_dropout", "resid_dropout"] {
            if let Some(dropout) = r.given(key).filter(|dropout| dropout.node.float() != Some(0.0)) {
                r.conflict(&given, &dropout, "keep one of the two.");
            }
        }
    }
    off
}

fn named_or_explicit(r: &mut Reader<'_>, node: &crate::yaml::Node) -> Option<ModelSource> {
    match &node.value {
        Value::Map(entries) if !entries.is_empty() => Some(ModelSource::Explicit(node.json())),
        Value::Scalar { text, .. } if text.contains(['/', '\\']) || text.starts_with('.') => {
            r.out_of_range("model", "the name of a size (use `model_name_or_path` for a folder)", node);
            None
        }
        Value::Scalar { .. } => {
            let choices: Vec<_> = NAMED_MODELS.iter().map(|name| (*name, *name)).collect();
            let name = r.word_of("model", &choices, Later::NONE, node)?;
            Some(ModelSource::Named(name.to_owned()))
        }
        _ => {
            r.wrong_type("model", "a size such as `15m`, or a map", node);
            None
        }
    }
}

fn read_revision(r: &mut Reader<'_>, source: &ModelSource) -> Option<String> {
    let given = r.given("model_revision");
    let revision = r.text("model_revision", "a branch, a tag or a commit");
    if let (Some(given), ModelSource::Named(_) | ModelSource::Explicit(_)) = (given, source) {
        r.out_of_range("model_revision", "left out without `model_name_or_path`", &given.node);
    }
    revision
}

fn read_vocab_size(r: &mut Reader<'_>, source: &ModelSource) -> Option<u32> {
    let given = r.given("vocab_size")?;
    let elsewhere = match source {
        ModelSource::Folder(_) => true,
        ModelSource::Explicit(keys) => keys.get("vocab_size").is_some(),
        ModelSource::Named(_) => false,
    };
    if elsewhere {
        r.out_of_range("vocab_size", "left out: the model defines it", &given.node);
    }
    r.count_of(&given.spelled, 1, &given.node)
}

fn read_init(r: &mut Reader<'_>, source: &ModelSource) -> InitialWeights {
    let given = r.given("init");
    let choices = [("pretrained", InitialWeights::Pretrained), ("random", InitialWeights::Random)];
    let init = r.word("init", &choices, Later::NONE);
    let is_folder = matches!(source, ModelSource::Folder(_));
    match (init, given) {
        (Some(InitialWeights::Pretrained), Some(given)) if !is_folder => {
            r.out_of_range(
                "init",
                "`random` without `model_name_or_path`: there are no weights to load",
                &given.node,
            );
            InitialWeights::Random
        }
        (Some(init), _) => init,
        (None, _) if is_folder => InitialWeights::Pretrained,
        (None, _) => {
            r.derived("init", "model");
            InitialWeights::Random
        }
    }
}
