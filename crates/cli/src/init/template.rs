//! Turns answers into a commented configuration: the recipe of the algorithm, with the lines replaced that answers decide.

use lockstep_config::AlgorithmName;
use serde_json::Value;

use super::Found;
use super::answers::{Answers, is_files, is_functions, is_size};
use crate::recipe;
use crate::report::Failure;

/// The column of comments.
const COMMENTS: usize = 37;

/// The data of an algorithm's recipe.
pub(super) fn default_data(algorithm: AlgorithmName) -> String {
    ["dataset_name", "train_files"].iter().find_map(|key| value(algorithm, key)).unwrap_or_default()
}

/// The reward functions or the reward model of an algorithm's recipe.
pub(super) fn default_reward(algorithm: AlgorithmName) -> String {
    let value = ["reward_funcs", "reward_model_path"].iter().find_map(|key| value(algorithm, key));
    value.unwrap_or_default().trim_matches(['[', ']']).to_owned()
}

/// The value of a key in an algorithm's recipe.
fn value(algorithm: AlgorithmName, wanted: &str) -> Option<String> {
    let text = recipe::find(algorithm.name()).ok()?.text;
    let (_, rest) = text.lines().filter_map(|line| line.split_once(": ")).find(|(key, _)| *key == wanted)?;
    Some(rest.split(" #").next().unwrap_or_default().trim().to_owned())
}

/// The configuration that the answers describe.
pub(super) fn render(answers: &Answers, found: &Found, file: &str) -> Result<String, Failure> {
    let recipe = recipe::find(answers.algorithm.name())?;
    let is_default_data = answers.data == default_data(answers.algorithm);
    let mut lines = vec![
        format!("# {}", recipe.about()),
        "#".into(),
        format!("# Written by `lockstep init` on a machine with {found}."),
        format!(
            "# `lockstep plan {file}` shows its memory and predicted time, `lockstep train {file}` trains."
        ),
        "# `lockstep keys` explains every key.".into(),
    ];
    for line in recipe.text.lines().skip(1) {
        match line.split_once(": ").map_or("", |(key, _)| key) {
            "model_name_or_path" => lines.extend(model(answers)),
            "dataset_name" | "train_files" if !is_default_data => lines.push(data(answers)),
            "dataset_config" | "columns" if !is_default_data => {}
            "reward_funcs" | "reward_model_path" => lines.extend(reward(answers)),
            "mixed_precision" => {
                lines.push(ranks(answers, found));
                lines.push(line.into());
            }
            "output_dir" => {
                lines.push(commented(&key("output_dir", &answers.output_dir), "checkpoints, metrics, model"));
            }
            _ => lines.push(line.into()),
        }
    }
    Ok(lines.iter().map(|line| format!("{line}\n")).collect())
}

fn model(answers: &Answers) -> Vec<String> {
    let name = &answers.model;
    if !is_size(name) {
        let about = match std::path::Path::new(name).exists() {
            true => "a model folder on this machine",
            false => "a model on the Hugging Face Hub, which is downloaded",
        };
        return vec![commented(&key("model_name_or_path", name), about)];
    }
    vec![
        commented(&format!("model: {name}"), "a LLaMA of this size, trained from scratch"),
        commented("tokenizer: byte", "needs no download; or a tokenizer folder, or the name of a Hub model"),
        commented("chat_template: builtin", "for rows that are conversations"),
    ]
}

fn data(answers: &Answers) -> String {
    let key_name = if is_files(&answers.data) { "train_files" } else { "dataset_name" };
    let rows = match answers.algorithm {
        AlgorithmName::Sft => "rows with `messages`, `prompt` and `completion`, or `text`",
        AlgorithmName::Clm => "rows with `text`; a txt file has a document per line",
        AlgorithmName::Reward | AlgorithmName::Dpo => "rows with `prompt`, `chosen` and `rejected`",
        AlgorithmName::Ppo => "rows with `prompt`",
        AlgorithmName::Grpo | AlgorithmName::Rloo => "rows with `prompt`, and columns for the rewards",
    };
    commented(&key(key_name, &answers.data), rows)
}

fn reward(answers: &Answers) -> Option<String> {
    let reward = answers.reward.as_deref()?;
    Some(match is_functions(reward) {
        true => commented(&format!("reward_funcs: [{reward}]"), "`answer` is compared; docs/rewards.md"),
        false => commented(&key("reward_model_path", reward), "has the policy's tokenizer and one output"),
    })
}

fn ranks(answers: &Answers, found: &Found) -> String {
    let about = match found.gpus {
        0 => "processes; no GPU was found, and on the CPU they share its cores".to_owned(),
        gpus if gpus == u32::from(answers.nproc) => "processes: one for each GPU that was found".to_owned(),
        gpus => format!("processes, each with a GPU; {gpus} found on this machine"),
    };
    commented(&format!("nproc_per_node: {}", answers.nproc), &about)
}

/// A setting with a text as its value. A text that YAML could read as something else is quoted.
fn key(name: &str, text: &str) -> String {
    let is_safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-');
    let is_plain = text.contains('/') && text.chars().all(is_safe) && !text.starts_with('-');
    match is_plain {
        true => format!("{name}: {text}"),
        false => format!("{name}: {}", Value::String(text.into())),
    }
}

fn commented(setting: &str, about: &str) -> String {
    format!("{setting:<COMMENTS$} # {about}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_quoted_where_yaml_needs_it() {
        assert_eq!(key("output_dir", "outputs/a-1"), "output_dir: outputs/a-1");
        assert_eq!(key("output_dir", "null"), "output_dir: \"null\"");
        assert_eq!(key("output_dir", "a: b\"#"), "output_dir: \"a: b\\\"#\"");
        assert_eq!(key("train_files", "*.jsonl"), "train_files: \"*.jsonl\"");
    }

    #[test]
    fn every_algorithm_has_a_recipe_with_data() {
        for algorithm in AlgorithmName::ALL {
            assert!(!default_data(algorithm).is_empty(), "{algorithm}");
            assert_eq!(!default_reward(algorithm).is_empty(), algorithm.generates(), "{algorithm}");
        }
        assert_eq!(default_reward(AlgorithmName::Grpo), "numeric_match");
        assert_eq!(default_data(AlgorithmName::Clm), "data/*.txt");
    }
}
