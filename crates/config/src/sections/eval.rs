//! Evaluation during training, and how the best checkpoint is chosen.

use crate::error::Problem;
use crate::reader::{Later, Reader};
use crate::sections::{AlgorithmName, Precision};

/// Evaluation during training, and how the best checkpoint is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalConfig {
    pub when: EvalStrategy,
    /// Also evaluate before the first step.
    pub on_start: bool,
    /// Rows per rank; `None`: the training batch size.
    pub per_device_batch_size: Option<u32>,
    pub metric: EvalMetric,
    pub greater_is_better: bool,
    /// Keep the best checkpoint and export the model folder from it.
    pub load_best_model_at_end: bool,
}

/// When to evaluate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvalStrategy {
    No,
    /// Every this many steps.
    Steps(u64),
    /// At the end of every epoch.
    Epoch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvalMetric {
    Loss,
    /// Of sft and clm.
    Perplexity,
    /// The fraction of pairs in which the chosen completion has the greater reward. Of reward and dpo.
    Accuracy,
    /// The mean reward of completions. Of ppo, grpo and rloo.
    Reward,
}

/// Steps between evaluations if neither `eval_steps` nor `logging_steps` is set: Hugging Face's default of
/// `logging_steps`.
const DEFAULT_STEPS: u64 = 500;

impl EvalConfig {
    pub(crate) fn read(r: &mut Reader<'_>, precision: &Precision) -> Self {
        let when = read_when(r);
        check_precision(r, precision);
        let metric = read_metric(r);
        let greater = r.bool("greater_is_better");
        let config = EvalConfig {
            when,
            on_start: r.bool("eval_on_start").unwrap_or(false),
            per_device_batch_size: r.count("per_device_eval_batch_size", 1),
            metric,
            greater_is_better: greater.unwrap_or_else(|| {
                r.derived("greater_is_better", "metric_for_best_model");
                matches!(metric, EvalMetric::Accuracy | EvalMetric::Reward)
            }),
            load_best_model_at_end: r.bool("load_best_model_at_end").unwrap_or(false),
        };
        if let (EvalStrategy::No, true, Some(given)) =
            (when, config.load_best_model_at_end, r.given("load_best_model_at_end"))
        {
            r.out_of_range(
                "load_best_model_at_end",
                "false unless evaluation is enabled (`eval_strategy: steps` or `epoch`)",
                &given.node,
            );
        }
        config
    }

    /// Whether the run evaluates at all, so that the plan must include it.
    pub fn evaluates(&self) -> bool {
        self.when != EvalStrategy::No || self.on_start
    }
}

/// Reads the metric; every algorithm has its own, with and without `eval_`.
fn read_metric(r: &mut Reader<'_>) -> EvalMetric {
    let losses = [("eval_loss", EvalMetric::Loss), ("loss", EvalMetric::Loss)];
    let own = match r.algorithm() {
        AlgorithmName::Sft | AlgorithmName::Clm => {
            [("eval_perplexity", EvalMetric::Perplexity), ("perplexity", EvalMetric::Perplexity)]
        }
        AlgorithmName::Reward => {
            [("eval_accuracy", EvalMetric::Accuracy), ("accuracy", EvalMetric::Accuracy)]
        }
        AlgorithmName::Dpo => {
            [("eval_rewards/accuracies", EvalMetric::Accuracy), ("rewards/accuracies", EvalMetric::Accuracy)]
        }
        AlgorithmName::Ppo | AlgorithmName::Grpo | AlgorithmName::Rloo => {
            [("eval_reward", EvalMetric::Reward), ("reward", EvalMetric::Reward)]
        }
    };
    let metrics: Vec<_> = losses.into_iter().chain(own).collect();
    r.word("metric_for_best_model", &metrics, Later::NONE).unwrap_or(EvalMetric::Loss)
}

fn read_when(r: &mut Reader<'_>) -> EvalStrategy {
    #[derive(Clone, Copy)]
    enum Word {
        No,
        Steps,
        Epoch,
    }
    let words = [("no", Word::No), ("steps", Word::Steps), ("epoch", Word::Epoch)];
    let given = r.given("eval_strategy");
    let steps_given = r.given("eval_steps");
    let steps: Option<u64> = r.count("eval_steps", 1);
    let word = match given {
        // `none` and `false` occur in the files of other trainers.
        Some(given) if given.node.bool() == Some(false) => Word::No,
        Some(_) => r.word("eval_strategy", &words, Later::NONE).unwrap_or(Word::No),
        None if steps_given.is_some() => {
            r.derived("eval_strategy", "eval_steps");
            Word::Steps
        }
        None => Word::No,
    };
    match word {
        Word::No => EvalStrategy::No,
        Word::Epoch => EvalStrategy::Epoch,
        Word::Steps => EvalStrategy::Steps(steps.unwrap_or_else(|| {
            let logging = r.given("logging_steps").is_some();
            r.count("logging_steps", 1).filter(|_| logging).unwrap_or(DEFAULT_STEPS)
        })),
    }
}

/// Evaluation uses the weights as they are stored; another data type would need a second copy of them.
fn check_precision(r: &mut Reader<'_>, precision: &Precision) {
    for (key, stored) in [
        ("bf16_full_eval", *precision == Precision::Bf16),
        ("fp16_full_eval", matches!(precision, Precision::F16(_))),
    ] {
        let given = r.given(key);
        let (Some(given), Some(true)) = (given, r.bool(key)) else { continue };
        if stored {
            r.note(format!("`{key}` has no effect: evaluation already uses the precision of training"));
        } else {
            let word = &key[..4];
            let instead = if word == "bf16" {
                "evaluation uses the precision of training; set `mixed_precision: bf16` to use bf16 for both."
            } else {
                "evaluation uses the precision of training; set `mixed_precision: fp16` to use fp16 for both."
            };
            let value = "true".to_owned();
            r.fail(Problem::ValueNotImplemented { key, value, instead }, given.node.at);
        }
    }
}
