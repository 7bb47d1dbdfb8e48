//! The questions of `lockstep init`, and what answers mean.

use std::path::Path;

use lockstep_config::{AlgorithmName, NAMED_MODELS};
use lockstep_hub::looks_like_repo;

use super::questions::{Asking, Question};
use super::{Found, InitError, template};
use crate::args::Init;

/// A model to start from.
pub(super) const MODEL: &str = "Qwen/Qwen3-0.6B";

/// Reward functions that need no options.
const REWARDS: [&str; 4] = ["exact_match", "numeric_match", "format", "repetition_penalty"];

const FILE_TYPES: [&str; 9] =
    [".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst"];

/// A run, as the user described it.
#[derive(Clone, Debug)]
pub(super) struct Answers {
    pub(super) algorithm: AlgorithmName,
    pub(super) model: String,
    pub(super) data: String,
    /// Reward functions or a reward model, for algorithms that generate completions.
    pub(super) reward: Option<String>,
    pub(super) nproc: u16,
    pub(super) output_dir: String,
}

impl Answers {
    /// Takes answers from the flags, and asks for the others.
    pub(super) fn collect(args: &Init, found: &Found, asking: &mut Asking<'_>) -> Result<Answers, InitError> {
        if matches!(asking, Asking::FlagsOnly) {
            check_flags(args)?;
        }
        let algorithm = Question {
            flag: "--algorithm",
            text: "Algorithm: sft, clm, reward, dpo, ppo, grpo or rloo",
            default: "sft".into(),
            check: &|answer| find_algorithm(answer).map(|_| ()),
        };
        let algorithm = algorithm.answer(args.algorithm.as_deref(), asking)?;
        let algorithm = find_algorithm(&algorithm).unwrap_or(AlgorithmName::Sft);
        let model = Question {
            flag: "--model",
            text: "Model: a Hub name, a folder, or a size to train from scratch (tiny, 15m, 90m, 300m, 1b, 7b)",
            default: MODEL.into(),
            check: &|answer| match is_size(answer) || is_model(answer) {
                true => Ok(()),
                false => Err(format!(
                    "expected a Hub name such as {MODEL}, a folder that exists, or one of {}",
                    NAMED_MODELS.join(", ")
                )),
            },
        };
        let model = model.answer(args.model.as_deref(), asking)?;
        let data = Question {
            flag: "--data",
            text: "Data: a file, a folder, a pattern such as data/*.jsonl, or a data set on the Hub",
            default: template::default_data(algorithm),
            check: &|answer| match is_files(answer) || looks_like_repo(answer) {
                true => Ok(()),
                false => Err("expected a path, a pattern, or the name of a data set such as org/name".into()),
            },
        };
        let data = data.answer(args.data.as_deref(), asking)?;
        let reward = match algorithm.generates() {
            true => Some(reward_question(algorithm, args, asking)?),
            false => None,
        };
        let nproc = Question {
            flag: "--nproc",
            text: "Ranks on this machine, one per GPU",
            default: found.gpus.clamp(1, u32::from(u16::MAX)).to_string(),
            check: &|answer| match answer.parse::<u16>() {
                Ok(1..) => Ok(()),
                _ => Err("expected a number from 1 to 65535".into()),
            },
        };
        let nproc = nproc.answer(args.nproc.as_deref(), asking)?.parse().unwrap_or(1);
        let output_dir = Question {
            flag: "--output-dir",
            text: "Output folder",
            default: format!("outputs/{algorithm}"),
            check: &|answer| match answer.trim().is_empty() {
                true => Err("expected a folder".into()),
                false => Ok(()),
            },
        };
        let output_dir = output_dir.answer(args.output_dir.as_deref(), asking)?;
        Ok(Answers { algorithm, model, data, reward, nproc, output_dir })
    }
}

/// Reports all flags that are missing at once.
fn check_flags(args: &Init) -> Result<(), InitError> {
    let all = [
        ("--algorithm", &args.algorithm),
        ("--model", &args.model),
        ("--data", &args.data),
        ("--nproc", &args.nproc),
        ("--output-dir", &args.output_dir),
    ];
    let flags: Vec<&str> = all.iter().filter(|(_, value)| value.is_none()).map(|(flag, _)| *flag).collect();
    if flags.is_empty() { Ok(()) } else { Err(InitError::NoTerminal { flags }) }
}

fn reward_question(
    algorithm: AlgorithmName,
    args: &Init,
    asking: &mut Asking<'_>,
) -> Result<String, InitError> {
    let needs_model = algorithm == AlgorithmName::Ppo;
    let question = Question {
        flag: "--reward",
        text: match needs_model {
            true => "Reward model: a Hub name, or a folder that `lockstep reward` has trained",
            false => "Rewards: exact_match, numeric_match, format, repetition_penalty, or a reward model",
        },
        default: template::default_reward(algorithm),
        check: &|answer| match is_model(answer) || (!needs_model && is_functions(answer)) {
            true => Ok(()),
            false if needs_model => Err("expected the folder or the Hub name of a reward model".into()),
            false => Err(format!(
                "expected a reward model, or functions separated by commas: {}",
                REWARDS.join(", ")
            )),
        },
    };
    question.answer(args.reward.as_deref(), asking)
}

fn find_algorithm(word: &str) -> Result<AlgorithmName, String> {
    let names = || AlgorithmName::ALL.iter().map(|algorithm| algorithm.name());
    let word = word.to_ascii_lowercase();
    let found = AlgorithmName::ALL.into_iter().find(|algorithm| algorithm.name() == word);
    found.ok_or_else(|| match lockstep_core::closest(&word, names()) {
        Some(meant) => format!("unknown algorithm; did you mean {meant}?"),
        None => format!("unknown algorithm; expected {}", names().collect::<Vec<_>>().join(", ")),
    })
}

/// Whether an answer names a size to train from scratch.
pub(super) fn is_size(answer: &str) -> bool {
    NAMED_MODELS.contains(&answer) && !Path::new(answer).exists()
}

/// Whether an answer is a model folder, or can be a name on the Hub.
fn is_model(answer: &str) -> bool {
    Path::new(answer).is_dir() || (answer.contains('/') && looks_like_repo(answer))
}

pub(super) fn is_functions(answer: &str) -> bool {
    answer.split(',').all(|name| REWARDS.contains(&name.trim()))
}

/// Whether an answer means files and not a data set of the Hub. They need not exist yet.
pub(super) fn is_files(answer: &str) -> bool {
    Path::new(answer).exists()
        || answer.contains('*')
        || answer.starts_with(['.', '/'])
        || FILE_TYPES.iter().any(|end| answer.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> Init {
        Init {
            file: "run.yaml".into(),
            algorithm: None,
            model: None,
            data: None,
            reward: None,
            nproc: None,
            output_dir: None,
            yes: false,
            force: false,
        }
    }

    const FOUND: Found = Found { cores: 4, memory: None, gpus: 2, gpu_name: None };

    /// The answers to questions on a terminal, and what it shows.
    fn asked(args: &Init, typed: &str) -> (Result<Answers, InitError>, String) {
        let mut input = typed.as_bytes();
        let mut shown = String::new();
        let mut show = |text: &str| shown.push_str(text);
        let mut asking = Asking::Questions { input: &mut input, show: &mut show };
        let answers = Answers::collect(args, &FOUND, &mut asking);
        (answers, shown)
    }

    #[test]
    fn enter_accepts_every_default() {
        let (answers, shown) = asked(&flags(), "\n\n\n\n\n");
        let answers = answers.unwrap();
        assert_eq!((answers.algorithm, answers.nproc), (AlgorithmName::Sft, 2));
        assert_eq!(answers.output_dir, "outputs/sft");
        insta::assert_snapshot!(shown.replace("]: ", "]\n"), @r"
        Algorithm: sft, clm, reward, dpo, ppo, grpo or rloo [sft]
        Model: a Hub name, a folder, or a size to train from scratch (tiny, 15m, 90m, 300m, 1b, 7b) [Qwen/Qwen3-0.6B]
        Data: a file, a folder, a pattern such as data/*.jsonl, or a data set on the Hub [trl-lib/Capybara]
        Ranks on this machine, one per GPU [2]
        Output folder [outputs/sft]
        ");
    }

    #[test]
    fn bad_answers_are_asked_for_once_more() {
        let typed =
            "drpo\ngrpo\nnope\ntiny\nno such data!\nrows.jsonl\nnumber\nnumeric_match\nmany\n3\nout\n";
        let (answers, shown) = asked(&flags(), typed);
        let answers = answers.unwrap();
        assert_eq!((answers.algorithm, answers.model.as_str()), (AlgorithmName::Grpo, "tiny"));
        assert_eq!((answers.nproc, answers.reward.as_deref()), (3, Some("numeric_match")));
        for problem in [
            "unknown algorithm; did you mean dpo?",
            "expected a Hub name such as Qwen/Qwen3-0.6B, a folder that exists, or one of tiny, ",
            "expected a path, a pattern, or the name of a data set such as org/name",
            "expected a reward model, or functions separated by commas",
            "expected a number from 1 to 65535",
        ] {
            assert!(shown.contains(problem), "{problem}: {shown}");
        }
    }

    #[test]
    fn flags_answer_without_a_question() {
        let args = Init { algorithm: Some("dpo".into()), model: Some("15m".into()), ..flags() };
        let (answers, shown) = asked(&args, "pairs.jsonl\n\n\n");
        assert_eq!(answers.unwrap().data, "pairs.jsonl");
        assert!(!shown.contains("Algorithm") && !shown.contains("Model"), "{shown}");
        let (answers, _) = asked(&Init { nproc: Some("0".into()), ..args }, "pairs.jsonl\n");
        assert_eq!(answers.unwrap_err().to_string(), "--nproc 0: expected a number from 1 to 65535");
    }

    #[test]
    fn the_end_of_the_input_cancels() {
        let (answers, _) = asked(&flags(), "sft\n");
        assert!(matches!(answers, Err(InitError::Cancelled)));
        let missing = Answers::collect(&flags(), &FOUND, &mut Asking::FlagsOnly).unwrap_err();
        assert_eq!(
            missing.to_string(),
            "cannot ask for --algorithm, --model, --data, --nproc, --output-dir: standard input is not a terminal"
        );
    }
}
