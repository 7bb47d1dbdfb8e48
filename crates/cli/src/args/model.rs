//! Arguments of the commands that use a trained model.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::parsers::{at_least_two, not_negative, probability, slots};

/// The model, and the device to run it on.
#[derive(Debug, Args)]
pub(crate) struct Model {
    /// Use this Hugging Face model folder, or the model in the output folder of a run
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,
    /// Use this LoRA adapter with the model: PEFT's folder, or the output folder of a run
    #[arg(long, value_name = "FOLDER")]
    pub(crate) adapter: Option<PathBuf>,
    /// Store weights and activations in this data type [default: that of the model's weights]
    #[arg(long, value_name = "TYPE", ignore_case = true)]
    pub(crate) dtype: Option<Storage>,
    /// Compute on this device: auto, cpu or cuda [default: a GPU if one works]
    #[arg(long, value_enum, value_name = "DEVICE", default_value_t = DeviceArg::Auto, hide_default_value = true, hide_possible_values = true)]
    pub(crate) device: DeviceArg,
    /// Use this many CPU threads [default: all cores]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Limit a sequence, including its prompt, to this many tokens (and to the model's own limit)
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = at_least_two)]
    pub(crate) context: usize,
}

/// A device to compute on.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum DeviceArg {
    Auto,
    Cpu,
    #[value(alias = "gpu")]
    Cuda,
}

impl From<DeviceArg> for lockstep_config::DeviceKind {
    fn from(device: DeviceArg) -> Self {
        match device {
            DeviceArg::Auto => Self::Auto,
            DeviceArg::Cpu => Self::Cpu,
            DeviceArg::Cuda => Self::Cuda,
        }
    }
}

/// How to sample tokens. The defaults are those of the model's `generation_config.json`, and greedy without that file.
#[derive(Debug, Args)]
pub(crate) struct SamplingFlags {
    /// Generate at most this many tokens
    #[arg(long, value_name = "N", alias = "max_new_tokens", default_value_t = 256)]
    pub(crate) max_new_tokens: usize,
    /// Sample at this temperature; 0 always takes the most likely token
    #[arg(long, value_name = "T", value_parser = not_negative)]
    pub(crate) temperature: Option<f32>,
    /// Sample from the K most likely tokens
    #[arg(long, value_name = "K", alias = "top_k")]
    pub(crate) top_k: Option<usize>,
    /// Sample from the most likely tokens with a total probability of P
    #[arg(long, value_name = "P", alias = "top_p", value_parser = probability)]
    pub(crate) top_p: Option<f32>,
    /// Sample from tokens that are at least P times as likely as the most likely one
    #[arg(long, value_name = "P", alias = "min_p", value_parser = probability)]
    pub(crate) min_p: Option<f32>,
    /// Make tokens that already occurred less likely; 1 turns it off
    #[arg(long, value_name = "X", alias = "repetition_penalty", value_parser = not_negative)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Stop at this text, which is not printed; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Sample with this random seed
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
pub(crate) struct Generate {
    #[command(flatten)]
    pub(crate) model: Model,
    /// Continue this text; may be repeated
    #[arg(long, short, value_name = "TEXT")]
    pub(crate) prompt: Vec<String>,
    /// Read prompts from a jsonl file: one object with `prompt` per line
    #[arg(long, value_name = "FILE")]
    pub(crate) prompts: Option<PathBuf>,
    /// Generate this many completions per prompt
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) samples: usize,
    /// Run this many prompts at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = slots)]
    pub(crate) slots: usize,
    /// Print one JSON object per completion, with its tokens and their log-probabilities
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingFlags,
}

#[derive(Debug, Args)]
pub(crate) struct TemplateFlags {
    /// Use a chat template file, the template of a tokenizer folder, or `builtin` [default: the model's own]
    #[arg(long, value_name = "PATH", alias = "chat_template")]
    pub(crate) chat_template: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Chat {
    #[command(flatten)]
    pub(crate) model: Model,
    #[command(flatten)]
    pub(crate) template: TemplateFlags,
    /// Start with this system message
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    #[command(flatten)]
    pub(crate) sampling: SamplingFlags,
}

#[derive(Debug, Args)]
pub(crate) struct Eval {
    /// Evaluate this Hugging Face model folder, or the model in the output folder of a run
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,
    /// Use this LoRA adapter with the model: PEFT's folder, or the output folder of a run
    #[arg(long, value_name = "FOLDER")]
    pub(crate) adapter: Option<PathBuf>,
    /// Read the configuration of a run, or give settings such as eval_files=test.jsonl max_length=512
    #[arg(value_name = "CONFIG | KEY=VALUE", required = true)]
    pub(crate) settings: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// Convert this checkpoint, or the newest checkpoint in the output folder of a run; with --merge also an adapter
    #[arg(value_name = "CHECKPOINT | RUN_DIR")]
    pub(crate) from: PathBuf,
    /// Write the model to this folder; an existing model folder is replaced
    pub(crate) out: PathBuf,
    /// Merge the run's adapter into its model, and write the whole model
    #[arg(long)]
    pub(crate) merge: bool,
    /// With --merge, use this folder as the model that the adapter belongs to [default: the one that the run used]
    #[arg(long, value_name = "FOLDER", requires = "merge")]
    pub(crate) model: Option<PathBuf>,
    /// Store the weights in this data type [default: the compute type of the run]
    #[arg(long, value_name = "TYPE", ignore_case = true)]
    pub(crate) dtype: Option<Storage>,
}

/// A data type for weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Storage {
    #[value(alias = "fp32", alias = "float32")]
    F32,
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "fp16", alias = "float16")]
    F16,
}

impl From<Storage> for lockstep_core::DType {
    fn from(storage: Storage) -> lockstep_core::DType {
        match storage {
            Storage::F32 => lockstep_core::DType::F32,
            Storage::Bf16 => lockstep_core::DType::BF16,
            Storage::F16 => lockstep_core::DType::F16,
        }
    }
}
