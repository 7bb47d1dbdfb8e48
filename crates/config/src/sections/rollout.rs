//! How completions are generated: their lengths, and how tokens are sampled.

use crate::reader::Reader;

/// How completions are generated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingConfig {
    /// Tokens.
    pub max_completion_length: u32,
    /// Tokens.
    pub max_prompt_length: u32,
    pub temperature: f64,
    pub top_p: f64,
    /// 0: all tokens.
    pub top_k: u32,
    /// 0: all tokens.
    pub min_p: f64,
    /// 1: no penalty.
    pub repetition_penalty: f64,
    /// Print completions every `logging_steps` steps.
    pub log_completions: bool,
    /// `None`: all.
    pub num_completions_to_print: Option<u32>,
}

/// Bounds in tokens.
#[derive(Clone, Copy)]
pub(crate) struct Lengths {
    pub(crate) prompt: u32,
    pub(crate) completion: u32,
    /// At least the sum of both.
    pub(crate) total: u32,
}

/// The default of `max_prompt_length`, if `max_length` is not set.
const MAX_PROMPT_LENGTH: u32 = 512;

impl SamplingConfig {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        let lengths = Lengths::read(r);
        let log_completions = r.bool("log_completions").unwrap_or(false);
        let num_completions_to_print = r.count("num_completions_to_print", 1);
        if !log_completions {
            r.note_no_effect("num_completions_to_print", "`log_completions` is off");
        }
        SamplingConfig {
            max_completion_length: lengths.completion,
            max_prompt_length: lengths.prompt,
            temperature: r.float("temperature", "above 0", |x| x > 0.0).unwrap_or(1.0),
            top_p: r.float("top_p", "above 0 and at most 1", |x| x > 0.0 && x <= 1.0).unwrap_or(1.0),
            top_k: r.count("top_k", 0).unwrap_or(0),
            min_p: r.float("min_p", "at least 0 and at most 1", |x| (0.0..=1.0).contains(&x)).unwrap_or(0.0),
            repetition_penalty: r.float("repetition_penalty", "above 0", |x| x > 0.0).unwrap_or(1.0),
            log_completions,
            num_completions_to_print,
        }
    }
}

impl Lengths {
    /// Reads the lengths of prompts and completions. `max_length` bounds their sum: if only it is set, the prompt gets
    /// what the completion leaves.
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        let completion: u32 = r.count("max_completion_length", 1).unwrap_or(1);
        let prompt_given = r.given("max_prompt_length");
        let prompt: Option<u32> = r.count("max_prompt_length", 1);
        let total_given = r.given("max_length");
        let total: Option<u32> = r.count("max_length", 2);
        let (Some(total), Some(given)) = (total, total_given) else {
            let prompt = prompt.unwrap_or(MAX_PROMPT_LENGTH);
            r.derived("max_length", "max_prompt_length and max_completion_length");
            return Lengths { prompt, completion, total: prompt.saturating_add(completion) };
        };
        if prompt_given.is_some() {
            let prompt = prompt.unwrap_or(1);
            let sum = prompt.saturating_add(completion);
            if total < sum {
                let rule = format!(
                    "at least {sum}, the sum of `max_prompt_length` ({prompt}) and `max_completion_length` ({completion})"
                );
                r.out_of_range_with("max_length", rule, "remove it to use the sum.", &given.node);
            }
            return Lengths { prompt, completion, total };
        }
        r.derived("max_prompt_length", "max_length");
        if total <= completion {
            let rule =
                format!("above `max_completion_length` ({completion}), to leave tokens for the prompt");
            r.out_of_range("max_length", rule, &given.node);
        }
        Lengths { prompt: total.saturating_sub(completion).max(1), completion, total }
    }
}
