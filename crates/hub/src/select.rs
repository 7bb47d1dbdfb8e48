//! Which files of a model repository training needs.

use crate::error::HubError;
use crate::repo::Repo;

/// How much of a model is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFiles {
    /// Configuration, tokenizer and weights.
    All,
    /// Everything but the weights: enough to plan, and to train from random weights.
    WithoutWeights,
    /// The tokenizer and its chat template.
    Tokenizer,
}

const CONFIG: [&str; 2] = ["config.json", "generation_config.json"];
const TOKENIZER: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
];
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const PICKLED: [&str; 5] = [".bin", ".pt", ".pth", ".ckpt", ".pkl"];

/// The files of `names` that are needed. Files in folders are left out: they are copies in other formats, such as
/// `onnx/` and `original/`.
pub fn model_files(repo: &Repo, names: &[&str], wanted: ModelFiles) -> Result<Vec<String>, HubError> {
    let is_tokenizer = |name: &&str| {
        TOKENIZER.contains(name)
            || (name.starts_with("chat_template") && !name.contains('/'))
            || (name.starts_with("additional_chat_templates/") && name.ends_with(".jinja"))
    };
    let mut chosen: Vec<&str> = names.iter().copied().filter(|name| is_tokenizer(name)).collect();
    if wanted != ModelFiles::Tokenizer {
        if !names.contains(&"config.json") {
            return Err(HubError::NoConfig { repo: repo.clone() });
        }
        chosen.extend(CONFIG.into_iter().filter(|name| names.contains(name)));
    }
    if wanted == ModelFiles::All {
        chosen.extend(weights(repo, names)?);
    }
    chosen.sort_unstable();
    chosen.dedup();
    Ok(chosen.into_iter().map(String::from).collect())
}

fn weights<'a>(repo: &Repo, names: &[&'a str]) -> Result<Vec<&'a str>, HubError> {
    let at_root = |name: &&&str| !name.contains('/');
    let safetensors: Vec<&str> =
        names.iter().filter(at_root).copied().filter(|name| name.ends_with(".safetensors")).collect();
    if let Some(index) = names.iter().find(|name| **name == INDEX) {
        let shards = safetensors.iter().copied().filter(|name| is_shard(name));
        return Ok(shards.chain([*index]).collect());
    }
    if let Some(single) = safetensors.iter().find(|name| **name == "model.safetensors") {
        return Ok(vec![single]);
    }
    let others: Vec<&str> =
        safetensors.into_iter().filter(|name| !name.starts_with("consolidated")).collect();
    if !others.is_empty() {
        return Ok(others);
    }
    let is_pickled =
        |name: &&str| PICKLED.iter().any(|end| name.ends_with(end)) && *name != "training_args.bin";
    let pickled: Vec<String> = names.iter().copied().filter(is_pickled).take(3).map(String::from).collect();
    match pickled.is_empty() {
        true => Err(HubError::NoWeights { repo: repo.clone() }),
        false => Err(HubError::PickledWeights { repo: repo.clone(), files: pickled }),
    }
}

/// Whether a name is `model-00001-of-00002.safetensors`.
fn is_shard(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let middle = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    middle.and_then(|rest| rest.split_once("-of-")).is_some_and(|(at, of)| number(at) && number(of))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repo::RepoKind;

    fn chosen(names: &[&str], wanted: ModelFiles) -> Result<Vec<String>, String> {
        let repo = Repo::new(RepoKind::Model, "org/name").unwrap();
        model_files(&repo, names, wanted).map_err(|e| e.to_string())
    }

    #[test]
    fn only_what_training_needs() {
        let names = [
            ".gitattributes",
            "README.md",
            "config.json",
            "chat_template.jinja",
            "consolidated.safetensors",
            "generation_config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "onnx/model.onnx",
            "original/consolidated.00.pth",
            "original/tokenizer.model",
            "pytorch_model.bin",
            "tokenizer.json",
            "tokenizer_config.json",
        ];
        let plan = ["chat_template.jinja", "config.json", "generation_config.json"];
        let tokenizer = ["tokenizer.json", "tokenizer_config.json"];
        let weights = names[6..9].to_vec();
        assert_eq!(chosen(&names, ModelFiles::WithoutWeights).unwrap(), [&plan[..], &tokenizer].concat());
        assert_eq!(chosen(&names, ModelFiles::All).unwrap(), [&plan[..], &weights, &tokenizer].concat());
        assert_eq!(chosen(&names, ModelFiles::Tokenizer).unwrap(), [&plan[..1], &tokenizer].concat());
    }

    #[test]
    fn one_file_of_weights() {
        let all = |names: &[&str]| chosen(names, ModelFiles::All).unwrap();
        assert_eq!(
            all(&["config.json", "model.safetensors", "model.fp16.safetensors", "x/model.safetensors"]),
            ["config.json", "model.safetensors"]
        );
        assert_eq!(all(&["config.json", "weights.safetensors"]), ["config.json", "weights.safetensors"]);
    }

    #[test]
    fn repositories_that_cannot_be_trained() {
        let fails = |names: &[&str]| chosen(names, ModelFiles::All).unwrap_err();
        insta::assert_snapshot!(fails(&["config.json", "pytorch_model-00001-of-00002.bin", "training_args.bin"]), @"model org/name has pickled weights only: pytorch_model-00001-of-00002.bin");
        insta::assert_snapshot!(fails(&["config.json", "model.gguf"]), @"model org/name has no safetensors weights");
        insta::assert_snapshot!(fails(&["model.safetensors"]), @"model org/name has no config.json, so it is not a Transformers model");
    }
}
