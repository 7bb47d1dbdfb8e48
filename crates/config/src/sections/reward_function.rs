//! One reward function: the name of a built-in function, or a map such as `{regex: {pattern: '…'}}` with its options.

use crate::reader::{Later, Reader};
use crate::sections::reward_options::Options;
use crate::yaml::{Entry, Node, Value};

/// A reward function, its name in metrics and its weight in the sum of rewards.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardFunctionConfig {
    pub name: String,
    pub kind: RewardFunctionKind,
    pub weight: f64,
}

/// A reward function with its options. `column` is the name of a column of the data.
#[derive(Clone, Debug, PartialEq)]
pub enum RewardFunctionKind {
    /// 1 if the completion, or the part of it that the pattern `extract` captures, equals the row's answer.
    ExactMatch { column: String, extract: Option<String>, ignore_case: bool },
    /// 1 if the number in the completion equals that of the row's answer, up to an absolute tolerance.
    NumericMatch { column: String, tolerance: f64, source: NumberSource },
    /// 1 if the whole completion matches the pattern. `None`: it has the form `<think>…</think>…`.
    Format { pattern: Option<String> },
    /// 1 if the pattern matches somewhere in the completion.
    Regex { pattern: String },
    /// From 0 to -1 over the last `buffer` tokens before `max_length` tokens.
    LengthPenalty { max_length: u32, buffer: u32 },
    /// `max_penalty` times the fraction of repeated n-grams of tokens.
    RepetitionPenalty { ngram_size: u32, max_penalty: f64 },
    /// A program that reads completions and writes rewards as lines of JSON.
    Program(ProgramReward),
    /// An HTTP endpoint.
    Http(HttpReward),
}

/// Which number of a completion counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NumberSource {
    Last,
    /// The number in `\boxed{…}`.
    Boxed,
    /// The number after this marker, such as `####`.
    After(String),
}

#[derive(Clone, Debug, PartialEq)]
pub struct ProgramReward {
    /// The program and its arguments; not empty.
    pub command: Vec<String>,
    /// Seconds for one batch.
    pub timeout_s: f64,
    /// Processes.
    pub workers: u32,
    /// Environment variables: `NAME` to pass one on, or `NAME=value`.
    pub env: Vec<String>,
    /// How many times in a row a worker is started again.
    pub max_restarts: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct HttpReward {
    /// Starts with `http://` or `https://` and has no user name or password.
    pub url: String,
    /// Seconds for one batch.
    pub timeout_s: f64,
    /// The environment variable with the bearer token.
    pub token_env: Option<String>,
}

#[derive(Clone, Copy)]
pub(crate) enum Kind {
    ExactMatch,
    NumericMatch,
    Format,
    Regex,
    LengthPenalty,
    RepetitionPenalty,
    Program,
    Http,
}

pub(crate) const KINDS: [(&str, Kind); 8] = [
    ("exact_match", Kind::ExactMatch),
    ("numeric_match", Kind::NumericMatch),
    ("format", Kind::Format),
    ("regex", Kind::Regex),
    ("length_penalty", Kind::LengthPenalty),
    ("repetition_penalty", Kind::RepetitionPenalty),
    ("program", Kind::Program),
    ("http", Kind::Http),
];

/// TRL's functions.
const OTHERS: Later = Later(
    &[
        "accuracy_reward",
        "reasoning_accuracy_reward",
        "think_format_reward",
        "get_soft_overlong_punishment",
        "get_cosine_scaled_reward",
        "get_repetition_penalty_reward",
    ],
    "use exact_match, numeric_match, format, length_penalty or repetition_penalty.",
);

const EXPECTED: &str = "the name of a built-in function, or a map such as `{program: [python3, reward.py]}`";

pub(crate) fn read(r: &mut Reader<'_>, node: &Node) -> Option<RewardFunctionConfig> {
    match &node.value {
        Value::Scalar { text, .. } if is_python(text) => {
            let hint = "to use Python, write a program: `{program: [python3, reward.py]}`. It reads completions and \
                        writes rewards as lines of JSON.";
            r.out_of_range_with("reward_funcs", EXPECTED, hint, node);
            None
        }
        Value::Scalar { text, .. } if text.contains('/') => {
            r.out_of_range_with("reward_funcs", EXPECTED, "use `reward_model_path` for a model.", node);
            None
        }
        Value::Scalar { .. } => {
            let kind = r.word_of("reward_funcs", &KINDS, OTHERS, node)?;
            Options::new(kind, None).function(r, node)
        }
        Value::Map(entries) => match &entries[..] {
            [Entry { key, key_at, node: options }] => {
                let name = Node { value: Value::Scalar { text: key.clone(), plain: true }, at: *key_at };
                let kind = r.word_of("reward_funcs", &KINDS, OTHERS, &name)?;
                Options::new(kind, Some(options)).function(r, options)
            }
            _ => {
                r.wrong_type(
                    "reward_funcs",
                    "a map with one key, the function, such as `{format: {}}`",
                    node,
                );
                None
            }
        },
        Value::Seq(_) => {
            r.wrong_type("reward_funcs", EXPECTED, node);
            None
        }
    }
}

/// A Python file or a dotted name: TRL's forms.
fn is_python(text: &str) -> bool {
    let dotted = |text: &str| {
        text.contains('.')
            && text
                .split('.')
                .all(|part| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_'))
    };
    text.ends_with(".py") || text.contains(".py:") || dotted(text)
}
