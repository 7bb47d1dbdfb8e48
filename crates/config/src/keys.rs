//! The keys: one table that drives reading, suggestions and the reference page.
//!
//! Names are Hugging Face's and TRL's where they have one. Defaults are text and are read by the same
//! code as the user's text, so that the table cannot drift from the behaviour. Keys that other trainers
//! have and this one does not are in [`crate::foreign`].

use crate::sections::AlgorithmName;

/// A part of the reference page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Section {
    Model,
    Algorithm,
    Preference,
    Reference,
    Generation,
    Rewards,
    Groups,
    Ppo,
    Data,
    Batch,
    Optim,
    Precision,
    Device,
    Eval,
    Plan,
    Output,
}

/// How two spellings of one key are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Numbers by value, everything else as written.
    Exact,
    /// One of a few words: case, dashes and underscores do not matter.
    Word,
    /// A map, whose parts may also be given as `key.part`.
    Map,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) aliases: &'static [&'static str],
    pub(crate) section: Section,
    pub(crate) kind: Kind,
    /// The algorithms that use the key; empty if all do.
    algorithms: &'static [AlgorithmName],
    /// YAML text; `null` where there is no value unless one is given.
    default: &'static str,
    /// The defaults of algorithms that differ from `default`.
    other_defaults: &'static [(&'static [AlgorithmName], &'static str)],
    pub(crate) doc: &'static str,
}

impl Key {
    /// The algorithms that use the key.
    pub(crate) fn algorithms(&self) -> &'static [AlgorithmName] {
        if self.algorithms.is_empty() { &AlgorithmName::ALL } else { self.algorithms }
    }

    pub(crate) fn is_for(&self, algorithm: AlgorithmName) -> bool {
        self.algorithms().contains(&algorithm)
    }

    /// The default with this algorithm, as YAML text.
    pub(crate) fn default_for(&self, algorithm: AlgorithmName) -> &'static str {
        let other = self.other_defaults.iter().find(|(algorithms, _)| algorithms.contains(&algorithm));
        other.map_or(self.default, |(_, text)| text)
    }
}

use Kind::{Exact, Map, Word};
use Section::{
    Algorithm, Batch, Data, Device, Eval, Generation, Groups, Model, Optim, Output, Plan, Ppo, Precision,
    Preference, Reference, Rewards,
};

/// Key by name. Only for names written in this crate.
pub(crate) fn key(name: &str) -> &'static Key {
    KEYS.iter().find(|k| k.name == name).expect("a key of the table")
}

/// The key that is spelled `name`, in its own spelling or another.
pub(crate) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|k| k.name == name || k.aliases.contains(&name))
}

/// `Section Kind "name" ["alias"] for Algorithm Algorithm = "default" {Algorithm: "other default"}, "doc";`
macro_rules! keys {
    ($(
        $section:ident $kind:ident $name:literal $([$($alias:literal),*])? $(for $($algorithm:ident)+)?
        = $default:literal $({$($($other:ident)+: $text:literal),+})?, $doc:literal;
    )*) => {
        pub(crate) const KEYS: &[Key] = &[$(Key {
            name: $name,
            aliases: &[$($($alias),*)?],
            section: $section,
            kind: $kind,
            algorithms: &[$($(AlgorithmName::$algorithm),+)?],
            default: $default,
            other_defaults: &[$($((&[$(AlgorithmName::$other),+], $text)),+)?],
            doc: $doc,
        }),*];
    };
}

keys! {
    Model Exact "model_name_or_path" = "null", "The model to train: the name of a model on the Hugging Face Hub (`org/name`), which is downloaded, or a model folder on this machine. Set either this or `model`.";
    Model Exact "model_revision" = "null", "Branch, tag or commit of a model from the Hub. Defaults to `main`.";
    Model Map "model" = "null", "The model to train from scratch: a named size (`tiny`, `15m`, `90m`, `300m`, `1b`, `7b`), or a map with the keys of `config.json`.";
    Model Exact "vocab_size" = "null", "Vocabulary size of a model given by its size. Defaults to the size of the tokenizer.";
    Model Word "init" = "null", "Initial weights: `pretrained` loads those of `model_name_or_path` (the default with a folder), `random` initializes new ones.";
    Model Exact "attention_dropout" = "null", "Dropout probability of the attention weights. Defaults to the value in the model's `config.json`.";
    Model Exact "disable_dropout" = "false" {Reward Dpo Ppo: "true"}, "Train without dropout, whatever the model's `config.json` sets.";
    Model Exact "resid_dropout" ["dropout", "resid_pdrop", "hidden_dropout"] = "null", "Dropout probability of the attention and MLP outputs, before they are added to the residual stream. Defaults to the value in the model's `config.json`.";
    Model Exact "use_peft" = "false", "Train low-rank adapters (LoRA) and freeze the weights. The run saves an adapter that PEFT can load.";
    Model Exact "lora_r" = "16", "Rank of the adapters.";
    Model Exact "lora_alpha" = "32", "Adapters are scaled by `lora_alpha` divided by `lora_r`.";
    Model Exact "lora_dropout" = "0.05", "Dropout at the input of adapters.";
    Model Exact "lora_target_modules" = "null", "Modules that get an adapter: names such as `q_proj`, patterns with `*`, or `all-linear` for all projections of all blocks. Defaults to `[q_proj, v_proj]`, as in PEFT.";
    Model Exact "lora_modules_to_save" = "null", "Modules to train as a whole and to save with the adapters, such as `lm_head`.";
    Model Exact "use_rslora" = "false", "Scale adapters by `lora_alpha` divided by the square root of `lora_r`.";
    Model Map "peft_config" ["lora"] = "null", "The adapters in PEFT's form, with its defaults: `{r: 16, lora_alpha: 32, target_modules: all-linear}`.";
    Model Exact "adapter_name_or_path" ["adapter"] = "null", "Folder of an adapter to continue training. It defines rank, targets and scale.";

    Model Exact "load_in_4bit" = "false", "Keep the frozen projections of all blocks in 4 bits (QLoRA): NF4 with double quantisation, as in bitsandbytes. Requires `use_peft: true`.";
    Model Word "bnb_4bit_quant_type" = "nf4", "Format of `load_in_4bit`: `nf4`.";
    Model Exact "bnb_4bit_use_double_quant" ["use_bnb_nested_quant"] = "true", "Quantize the scales of `load_in_4bit`, too. Must be true.";
    Model Word "bnb_4bit_compute_dtype" = "null", "Type that 4-bit weights are dequantized to: `bfloat16`, `float16` or `float32`. Must be that of `mixed_precision`, which is the default.";

    Algorithm Word "algorithm" = "sft", "Training algorithm: `sft` or `clm` (predict the next token), `reward` (reward model), `dpo`, `ppo`, `grpo` or `rloo`. `lockstep dpo` is the same as `lockstep train algorithm=dpo`.";

    Preference Exact "center_rewards_coefficient" for Reward = "null", "Weight of a term that keeps the mean reward of a pair near zero. 0.01 is a good value. Defaults to no such term.";
    Preference Word "loss_type" for Dpo Grpo = "sigmoid" {Grpo: "dapo"}, "Loss of dpo: `sigmoid`, `cdpo` (sigmoid with label smoothing), `hinge`, `ipo`, `exo_pair`, `nca_pair`, `robust`, `bco_pair`, `sppo_hard`, `aot`, `aot_unpaired`, `apo_zero`, `apo_down`, `discopop`, `sft` or `sigmoid_norm`, or a list of these. Loss of grpo: `grpo`, `bnpo`, `dr_grpo`, `dapo`, `cispo`, `sapo`, `luspo` or `vespo`.";
    Preference Exact "loss_weights" for Dpo = "null", "Weights of the losses in `loss_type`, as a list. Defaults to 1 for each.";
    Preference Exact "beta" for Dpo Grpo Rloo = "0.1" {Grpo: "0.0", Rloo: "0.05"}, "Weight of the divergence from the reference model. With 0, grpo and rloo load no reference model.";
    Preference Exact "label_smoothing" for Dpo = "0.0", "Assumed fraction of mislabelled pairs. Only the losses `cdpo`, `robust` (below 0.5), `exo_pair` (above 0), `aot` and `aot_unpaired` use it.";
    Preference Word "f_divergence_type" for Dpo = "reverse_kl", "Divergence from the reference model: `reverse_kl`, `forward_kl`, `js_divergence` or `alpha_divergence`.";
    Preference Exact "f_alpha_divergence_coef" for Dpo = "0.5", "Coefficient of `f_divergence_type: alpha_divergence`.";
    Preference Exact "ld_alpha" for Dpo = "null", "Weight of the tokens of the longer completion beyond the length of the shorter one (LD-DPO), from 0 to 1. Defaults to 1.";
    Preference Exact "discopop_tau" for Dpo = "0.05", "Temperature of `loss_type: discopop`.";
    Preference Exact "use_weighting" for Dpo = "false", "Must be false: weighting pairs by the policy's probabilities (WPO) is not implemented yet.";
    Preference Exact "precompute_ref_log_probs" for Dpo = "false", "Compute the reference model's log-probabilities once before training, so that the model takes no memory during training.";

    Reference Exact "ref_model_name_or_path" ["ref_model", "ref_model_path"] for Dpo Ppo Grpo Rloo = "null", "Reference model: a model folder or the name of a model on the Hub. Defaults to the model before training.";
    Reference Exact "sync_ref_model" for Dpo Grpo Rloo = "false", "Move the reference model towards the policy every `ref_model_sync_steps` steps.";
    Reference Exact "ref_model_mixup_alpha" for Dpo Grpo Rloo = "0.6", "Fraction of the policy in the new reference model with `sync_ref_model`; the rest is the old one.";
    Reference Exact "ref_model_sync_steps" for Dpo Grpo Rloo = "512", "Steps between updates of the reference model with `sync_ref_model`.";

    Generation Exact "max_prompt_length" for Ppo Grpo Rloo = "null", "Maximum number of tokens of a prompt. Longer prompts are not used; see `on_long_row`. Defaults to 512, or to `max_length` less `max_completion_length` if `max_length` is set.";
    Generation Exact "max_completion_length" ["response_length", "max_new_tokens"] for Ppo Grpo Rloo = "512" {Ppo: "53"}, "Maximum number of tokens of a completion.";
    Generation Exact "temperature" for Ppo Grpo Rloo = "1.0" {Ppo: "0.7"}, "Sampling temperature. The loss uses log-probabilities at this temperature.";
    Generation Exact "top_p" for Ppo Grpo Rloo = "1.0", "Sample from the most likely tokens with this total probability. 1 uses all tokens.";
    Generation Exact "top_k" for Ppo Grpo Rloo = "0", "Sample from this many of the most likely tokens. 0 uses all tokens.";
    Generation Exact "min_p" for Ppo Grpo Rloo = "null", "Sample only tokens with at least this fraction of the most likely token's probability. Defaults to 0.";
    Generation Exact "repetition_penalty" for Ppo Grpo Rloo = "1.0", "Penalty for tokens that already occur in the prompt or the completion. 1 is no penalty.";
    Generation Exact "log_completions" for Ppo Grpo Rloo = "false", "Print completions with their rewards every `logging_steps` steps.";
    Generation Exact "num_completions_to_print" for Ppo Grpo Rloo = "null", "Number of completions to print with `log_completions`. Defaults to all.";

    Rewards Exact "reward_funcs" for Grpo Rloo = "[]", "Reward functions, as a list. Built-in functions: `exact_match`, `numeric_match`, `format`, `regex`, `length_penalty` and `repetition_penalty`. With options: `{regex: {pattern: '^[0-9]+$'}}`. Options: `column`, `extract` and `ignore_case` of exact_match; `column`, `tolerance`, `source` (`last` or `boxed`) and `marker` of numeric_match; `pattern` of format and regex; `max_length` and `buffer` of length_penalty; `ngram_size` and `max_penalty` of repetition_penalty. An external program: `{program: {command: [python3, reward.py], timeout: 10, workers: 2}}`. An HTTP endpoint: `{http: {url: 'http://127.0.0.1:8000/reward', token_env: REWARD_TOKEN}}`. A `name` in the options names the metric.";
    Rewards Exact "reward_weights" for Grpo Rloo = "null", "Weights of the reward functions, as a list; the last one is that of `reward_model_path`, if it is set. Defaults to 1 for each.";
    Rewards Exact "reward_model_path" ["reward_model", "reward_model_name_or_path"] for Ppo Grpo Rloo = "null", "Reward model: a folder of `lockstep reward` or any other `…ForSequenceClassification` model with one label, or its name on the Hub. ppo requires it.";
    Rewards Word "reward_on_error" for Grpo Rloo = "stop", "What to do if a reward function fails: `stop` with an error, use the reward `zero`, or `skip` the function for these completions.";

    Groups Exact "num_generations" for Grpo Rloo = "8" {Rloo: "2"}, "Completions per prompt, at least 2. The generation batch must be divisible by it.";
    Groups Exact "num_generations_eval" for Grpo Rloo = "null", "Completions per prompt in evaluation. Defaults to `num_generations`.";
    Groups Exact "steps_per_generation" for Grpo Rloo = "null", "Micro-batches per generation batch, which has `per_device_train_batch_size` times this many completions per rank. Defaults to `gradient_accumulation_steps`.";
    Groups Exact "generation_batch_size" for Grpo Rloo = "null", "Completions in a generation batch, over all ranks. Another way to set `steps_per_generation`.";
    Groups Exact "num_iterations" for Grpo Rloo = "1", "Training passes over each generation batch.";
    Groups Exact "epsilon" for Grpo Rloo = "0.2", "Clip range of the probability ratio: from 1 - `epsilon` to 1 + `epsilon_high`.";
    Groups Exact "epsilon_high" for Grpo Rloo = "null", "Upper clip range of the probability ratio. Defaults to `epsilon`. With `loss_type: cispo`, the maximum ratio itself, for example 5.";
    Groups Exact "delta" for Grpo = "null", "Upper bound of the probability ratio for negative advantages (two-sided clipping). Should be above 1 + `epsilon`.";
    Groups Word "importance_sampling_level" for Grpo = "token", "Probability ratios per `token`, or one per `sequence` (GSPO).";
    Groups Word "scale_rewards" for Grpo = "group", "Divide advantages by the standard deviation of the rewards of the `group`, of the `batch`, or by nothing (`none`).";
    Groups Exact "mask_truncated_completions" for Grpo Rloo = "false", "Leave completions without an end-of-sequence token out of the loss.";
    Groups Exact "top_entropy_quantile" for Grpo = "1.0", "Fraction of the tokens to train on: those with the highest entropy.";
    Groups Exact "entropy_coef" for Grpo = "0.0", "Weight of an entropy bonus in the loss.";
    Groups Exact "use_bias_correction_kl" for Grpo = "true", "Multiply the divergence from the reference model by the probability ratio, which makes its gradient unbiased.";
    Groups Exact "sapo_temperature_pos" for Grpo = "1.0", "Temperature of `loss_type: sapo` for positive advantages.";
    Groups Exact "sapo_temperature_neg" for Grpo = "1.05", "Temperature of `loss_type: sapo` for other advantages.";
    Groups Exact "vespo_k_pos" for Grpo = "2.0", "Exponent of `loss_type: vespo` for positive advantages.";
    Groups Exact "vespo_lambda_pos" for Grpo = "3.0", "Decay of `loss_type: vespo` for positive advantages.";
    Groups Exact "vespo_k_neg" for Grpo = "3.0", "Exponent of `loss_type: vespo` for negative advantages.";
    Groups Exact "vespo_lambda_neg" for Grpo = "2.0", "Decay of `loss_type: vespo` for negative advantages.";
    Groups Exact "normalize_advantages" for Rloo = "false", "Shift and scale the advantages of a generation batch to mean 0 and standard deviation 1.";
    Groups Exact "reward_clip_range" for Rloo = "null", "Clip rewards to this range, as a list: `[-1, 1]`. Defaults to no clipping.";

    Ppo Exact "value_model_path" ["value_model", "critic_model_path"] for Ppo = "null", "Initial value model, in the same form as `reward_model_path`. Defaults to the reward model.";
    Ppo Exact "value_learning_rate" ["critic_learning_rate"] for Ppo = "null", "Peak learning rate of the value model. Defaults to `learning_rate`.";
    Ppo Exact "num_ppo_epochs" ["ppo_epochs"] for Ppo = "4", "Training passes over each batch of completions.";
    Ppo Exact "num_mini_batches" for Ppo = "1", "Optimizer steps per pass: each uses its share of the batch, which must be divisible by this number.";
    Ppo Exact "kl_coef" ["init_kl_coef"] for Ppo = "0.05", "Weight of the divergence from the reference model in the reward; the initial weight with `adaptive_kl`.";
    Ppo Word "kl_estimator" for Ppo = "k1", "Estimator of the divergence: `k1` (unbiased) or `k3` (unbiased, lower variance).";
    Ppo Exact "adaptive_kl" ["adap_kl_ctrl"] for Ppo = "false", "Adapt `kl_coef` during training, so that the divergence approaches `kl_target`.";
    Ppo Exact "kl_target" for Ppo = "6.0", "Divergence that `adaptive_kl` approaches: nats per completion.";
    Ppo Exact "kl_horizon" for Ppo = "10000", "Completions over which `adaptive_kl` corrects the coefficient.";
    Ppo Exact "cliprange" ["clip_range"] for Ppo = "0.2", "Clip range of the probability ratio: from 1 - `cliprange` to 1 + `cliprange`.";
    Ppo Exact "cliprange_value" ["clip_range_value"] for Ppo = "0.2", "Maximum change of a value prediction in a batch, for clipping.";
    Ppo Exact "vf_coef" for Ppo = "0.1", "Weight of the value loss.";
    Ppo Exact "gamma" for Ppo = "1.0", "Discount factor of rewards.";
    Ppo Exact "lam" ["gae_lambda"] for Ppo = "0.95", "Lambda of generalized advantage estimation (GAE).";
    Ppo Exact "whiten_rewards" for Ppo = "false", "Scale the rewards of a batch to standard deviation 1.";
    Ppo Exact "missing_eos_penalty" for Ppo = "null", "Subtract this number from the reward of a completion without an end-of-sequence token. Defaults to no penalty.";

    Data Exact "train_files" ["train_file", "dataset_path"] = "[]", "Training data: a file, a folder, a glob pattern such as `data/*.jsonl`, or a list of these. Supports jsonl, json, txt, csv and tsv (also compressed as .gz or .zst), parquet and arrow.";
    Data Exact "eval_files" ["eval_file", "validation_file", "validation_files", "test_file", "test_files"] = "[]", "Evaluation data, in the same form as `train_files`.";
    Data Exact "eval_fraction" ["eval_split_ratio", "val_size", "test_size"] = "null", "Fraction of the training rows to hold out for evaluation, chosen at random with `data_seed`.";
    Data Exact "dataset_name" = "null", "Training dataset, instead of `train_files`: the name of a dataset on the Hugging Face Hub (`org/name`), which is downloaded, or the path of a dataset folder.";
    Data Exact "dataset_config" ["dataset_config_name"] = "null", "Configuration (subset) of the dataset, if it has several.";
    Data Exact "dataset_revision" = "null", "Branch, tag or commit of a dataset from the Hub. Defaults to `main`.";
    Data Exact "dataset_train_split" = "train", "Split to train on.";
    Data Exact "dataset_test_split" = "test", "Split to evaluate on.";
    Data Exact "text_column" ["dataset_text_field"] = "null", "Name of the column that contains the text, if it is not `text`.";
    Data Map "columns" = "null", "Names of other columns in the files, as a map from the standard name: `{prompt: question, completion: answer}`.";
    Data Exact "tokenizer" ["tokenizer_name_or_path", "tokenizer_name"] = "null", "A tokenizer file or folder, `byte` for the built-in byte tokenizer, or `none` if all rows are `input_ids`. Defaults to the tokenizer of the model folder, or `byte` without a folder.";
    Data Exact "chat_template" = "null", "Chat template for conversations: `builtin`, or the text of a Jinja template. Defaults to the tokenizer's template.";
    Data Exact "chat_template_path" = "null", "Path of a Jinja chat template, or of a tokenizer folder that contains one.";
    Data Exact "assistant_only_loss" for Sft Clm = "false", "In conversations, compute the loss only on the assistant's tokens.";
    Data Exact "max_length" ["max_seq_length", "block_size"] = "1024" {Ppo Grpo Rloo: "null"}, "Maximum number of tokens per row; of each completion of a pair, with its prompt. For longer rows see `on_long_row`. With ppo, grpo and rloo, the default is the sum of `max_prompt_length` and `max_completion_length`.";
    Data Word "packing" = "none", "How to pack several documents into one row: `none`, `bfd` (best-fit decreasing), `bfd_split` (bfd after splitting long documents) or `wrapped` (concatenate all documents and cut them into full rows). `true` means `bfd`. reward and dpo allow `none` and `bfd`, which keeps pairs whole; ppo, grpo and rloo allow `none`.";
    Data Word "packing_strategy" = "null", "Strategy of `packing: true`: `bfd`, `bfd_split` or `wrapped`.";
    Data Exact "completion_only_loss" for Sft Clm = "null", "Compute the loss only on completions. Defaults to true for rows with a prompt and a completion.";
    Data Word "truncation" ["truncation_mode"] for Sft Clm Dpo = "keep_start", "Which end of a row longer than `max_length` to keep: `keep_start` or `keep_end`.";
    Data Word "on_long_row" = "truncate" {Reward Ppo Grpo Rloo: "drop"}, "What to do with a row longer than `max_length`, or a prompt longer than `max_prompt_length`: `truncate` it (sft, clm and dpo), `drop` it, or `stop` with an error. `packing: bfd_split` and `wrapped` keep all tokens.";
    Data Word "on_bad_row" = "stop", "What to do with a row that cannot be used: `stop` with an error, or `skip` it.";
    Data Exact "data_cache_dir" = "null", "Folder for prepared data. Runs find data there by its content. Defaults to `lockstep/data` in the user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`), which all runs share.";
    Data Exact "dataloader_num_workers" ["dataloader.num_workers"] = "1", "Number of threads that prepare batches ahead of the step. 0 prepares them in the training loop. The batches do not depend on it.";
    Data Exact "dataloader_prefetch_factor" ["dataloader.prefetch_factor"] = "1", "Number of steps that each worker prepares ahead.";
    Data Exact "shuffle" ["shuffle_dataset"] = "true", "Shuffle the rows in every epoch.";

    Batch Exact "per_device_train_batch_size" ["dataloader.batch_size"] = "8", "Rows per rank in one micro-batch. `auto` divides `train_batch_size` so that the predicted step is shortest.";
    Batch Exact "gradient_accumulation_steps" = "1", "Micro-batches per optimizer step.";
    Batch Exact "train_batch_size" ["train_batch"] = "null", "Rows of one optimizer step over all ranks: `per_device_train_batch_size` times `gradient_accumulation_steps` times the number of ranks. Determines the one of the two that is not set; with neither, `gradient_accumulation_steps` is 1.";
    Batch Exact "max_steps" = "-1", "Number of optimizer steps. -1 uses `num_train_epochs`; 0 only writes the model folder.";
    Batch Exact "num_train_epochs" = "3.0", "Number of epochs, if `max_steps` is -1. May be a fraction.";
    Batch Exact "dataloader_drop_last" ["dataloader.drop_last"] = "false", "Drop the last, incomplete batch of an epoch.";
    Batch Exact "seed" = "42", "Random seed for initial weights, dropout and the data order.";
    Batch Exact "data_seed" = "null", "Random seed for the data order. Defaults to `seed`.";

    Optim Word "optim" = "adamw", "Optimizer: `adamw` (or any full-precision name of it, such as `adamw_torch_fused`), `sgd` or `lion`; `adamw_8bit` and `lion_8bit` are the same with `optimizer_state_dtype: int8`.";
    Optim Word "optimizer_state_dtype" = "null", "Type of optimizer states: `fp32`, `bf16` (stochastic rounding) or `int8` (codes with a scale per 256 elements). Defaults to `fp32`.";
    Optim Exact "learning_rate" = "5e-5" {Reward: "1e-4", Dpo Grpo Rloo: "1e-6", Ppo: "3e-6"}, "Peak learning rate of the schedule.";
    Optim Word "lr_scaling" = "none", "Scale the learning rate with the number of ranks: `none`, `linear` (multiply by the number of ranks) or `sqrt` (multiply by its square root).";
    Optim Exact "adam_beta1" = "0.9", "First beta of AdamW or Lion.";
    Optim Exact "adam_beta2" = "0.999", "Second beta of AdamW or Lion.";
    Optim Exact "adam_epsilon" = "1e-8", "Epsilon of AdamW, added to the denominator for numerical stability.";
    Optim Exact "momentum" = "0.0", "Momentum of SGD, as in PyTorch. With 0, no momentum buffer is allocated.";
    Optim Exact "nesterov" = "false", "Use Nesterov momentum with SGD.";
    Optim Exact "weight_decay" = "0.0", "Weight decay: decoupled for AdamW and Lion, added to the gradient for SGD, as in PyTorch.";
    Optim Exact "freeze" = "null", "Names of tensors or modules not to train, as a list. `*` matches any text: `[model.embed_tokens, 'model.layers.*.mlp']`.";
    Optim Exact "decay_norms_and_biases" = "false", "Apply weight decay to norm weights and biases as well.";
    Optim Exact "max_grad_norm" ["gradient_clipping"] = "1.0", "Maximum gradient norm for clipping. 0 disables clipping.";
    Optim Word "lr_scheduler_type" = "linear", "Learning-rate scheduler: Hugging Face's `linear`, `cosine`, `constant`, `constant_with_warmup` or `cosine_with_min_lr`, or DeepSpeed's `WarmupLR`, `WarmupDecayLR` or `WarmupCosineLR`.";
    Optim Map "lr_scheduler_kwargs" = "null", "Arguments of the scheduler: `num_cycles`, `min_lr` or `min_lr_rate`, or the parameters of DeepSpeed's schedulers.";
    Optim Map "scheduler" = "null", "Learning-rate scheduler in DeepSpeed's form: `{type: WarmupLR, params: {warmup_num_steps: 500}}`. `total_num_steps` and `warmup_max_lr` default to the run's values.";
    Optim Exact "warmup_steps" = "0", "Number of warmup steps. A value below 1 is a fraction of all steps.";
    Optim Exact "warmup_ratio" = "null", "Warmup as a fraction of all steps, below 1.";

    Precision Word "mixed_precision" = "null", "Compute precision: `fp32` (or `no`), `bf16`, `fp16`, or `auto` (bf16 on a GPU, fp32 on the CPU). Defaults to `fp32`.";
    Precision Map "bf16" = "null", "`true` is the same as `mixed_precision: bf16`. DeepSpeed's `{enabled: true}` works too.";
    Precision Map "fp16" = "null", "`true` is the same as `mixed_precision: fp16`. Also DeepSpeed's map: `enabled`, `loss_scale` (0 means dynamic), `initial_scale_power` (16), `loss_scale_window` (1000), `hysteresis` (2) and `min_loss_scale` (1).";

    Precision Word "master_weights" = "fp32", "Master weights of bf16 training: `fp32`, or `none` to update the bf16 weights with stochastic rounding.";
    Precision Word "gradient_dtype" = "fp32", "Type that gradients are kept in until the update: `fp32` or `bf16`. They are computed and summed over ranks in fp32; `bf16` needs one micro-batch per step.";

    Device Word "device" = "auto", "Device to train on: `cpu`, `cuda` or `auto`, which uses a GPU if one works. Rank n of a host uses the n-th GPU of CUDA_VISIBLE_DEVICES.";
    Device Exact "share_gpus" = "false", "Allow more ranks than GPUs on a host. The ranks share the GPUs, which is slow and meant for testing.";
    Device Exact "tf32" = "false", "Use TF32 for fp32 matrix multiplications on a GPU: several times faster, less accurate.";
    Device Exact "use_cpu" ["no_cuda"] = "null", "`true` is the same as `device: cpu`.";

    Eval Word "eval_strategy" ["evaluation_strategy"] = "null", "When to evaluate: `no`, `steps` or `epoch`. Defaults to `steps` if `eval_steps` is set, otherwise `no`.";
    Eval Exact "eval_steps" = "null", "Evaluate every N steps. Defaults to `logging_steps` if that is set, otherwise 500.";
    Eval Exact "eval_on_start" = "false", "Evaluate before the first step as well.";
    Eval Exact "per_device_eval_batch_size" = "null", "Rows per rank in one evaluation batch. Values above `per_device_train_batch_size` are reduced to it; the results are the same.";
    Eval Word "metric_for_best_model" = "eval_loss" {Ppo Grpo Rloo: "eval_reward"}, "Metric that determines the best checkpoint: `eval_loss`, `eval_perplexity` (sft, clm), `eval_accuracy` (reward), `eval_rewards/accuracies` (dpo) or `eval_reward` (ppo, grpo, rloo).";
    Eval Exact "greater_is_better" = "null", "Whether a greater value of `metric_for_best_model` is better. Defaults to true for accuracies and rewards, and to false for losses and perplexity.";
    Eval Exact "load_best_model_at_end" = "false", "Keep the best checkpoint regardless of `save_total_limit`, and export the model folder from it.";
    Eval Exact "bf16_full_eval" = "false", "Evaluate in bf16. Requires `mixed_precision: bf16`, which does so already.";
    Eval Exact "fp16_full_eval" = "false", "Evaluate in fp16. Requires `mixed_precision: fp16`, which does so already.";

    Plan Word "strategy" ["sharding_strategy", "fsdp_sharding_strategy", "distributed_strategy"] = "null", "Parallelism strategy: `ddp`, `zero1`, `zero2`, `zero3`, `shard_grad_op`, `full_shard`, `hybrid_shard`, `no_shard` or `auto`. Defaults to `ddp`.";
    Plan Exact "fsdp" ["use_fsdp"] = "null", "`true` selects a sharded strategy: `full_shard` unless `strategy` sets another one.";
    Plan Word "recompute" = "null", "Activations to recompute in backward instead of storing them: `none`, `selective` (norms and SwiGLU; the default), `full`, or `auto`, which recomputes as little as `memory_budget_gib`, or else the memory of the GPU or host, allows. The results are bit-identical.";
    Plan Exact "gradient_checkpointing" = "null", "`true` is the same as `recompute: full`, `false` the same as `recompute: none`.";
    Plan Word "accumulation_order" = "auto", "Order in which gradients are summed: `local` (over micro-batches, then over ranks), `reduced` (over ranks, then over micro-batches) or `auto` (the default of the strategy).";
    Plan Exact "prefetch" = "1", "Number of units (transformer blocks) whose weights are gathered ahead.";
    Plan Exact "ddp_bucket_cap_mb" = "25", "Size of a gradient bucket in MiB, as in PyTorch DDP.";
    Plan Exact "reduce_bucket_size" = "0", "Minimum number of elements of sharded gradients to reduce together. 0 reduces each unit separately; `auto` is the square of the model's hidden size, as in transformers.";
    Plan Exact "allgather_bucket_size" = "0", "Minimum number of elements of updated weights to all-gather together (zero1, zero2). 0 gathers each unit separately.";
    Plan Map "offload_optimizer" = "none", "Where to store the optimizer state: `none` (on the device), `cpu` or `nvme`. `{device: cpu, ratio: 0.7}` offloads at least this fraction; without `ratio`, as little as `memory_budget_gib` allows, or everything without a budget.";
    Plan Map "offload_param" = "none", "Where to store the weights: `none` (on the device), `cpu` or `nvme`. `{device: cpu}` works too.";
    Plan Exact "nvme_path" = "null", "Folder on a local disk for NVMe offload. Defaults to `output_dir`.";
    Plan Word "carrier" = "auto", "How ranks communicate on the CPU: `shm` (shared memory, on one host), `tcp`, `mpi` or `auto`, which takes MPI if mpiexec or srun started the ranks and all have its library. GPUs use NCCL.";
    Plan Exact "collective_timeout" ["ddp_timeout"] = "1800", "Timeout of a collective in seconds.";
    Plan Exact "nodes" ["nnodes", "num_nodes"] = "1", "Number of hosts.";
    Plan Exact "nproc_per_node" ["nproc", "num_gpus"] = "1", "Ranks per host.";
    Plan Exact "world_size" ["num_processes"] = "null", "Checked against `nodes` times `nproc_per_node`, which decide.";
    Plan Exact "memory_budget_gib" = "null", "Maximum memory per rank in GiB.";
    Plan Exact "threads" = "null", "CPU threads per rank.";
    Plan Exact "head_chunk_tokens" = "null", "Tokens per chunk of the LM head.";

    Output Exact "output_dir" = "null", "Folder of the run. Training requires it or `experiment_name`.";
    Output Exact "experiment_name" = "null", "Name of the run. Without `output_dir`, the output folder is `outputs/NAME`.";
    Output Exact "overwrite_output_dir" = "false", "Allow an output folder with checkpoints of another run, and delete them.";
    Output Exact "logging_steps" = "1", "Log every N steps. (The default is 1, unlike 500 in Hugging Face and 10 in TRL.)";
    Output Word "save_strategy" = "steps", "When to save checkpoints: `steps`, `epoch`, `best` (after the best evaluation so far) or `no`.";
    Output Exact "save_steps" = "500", "Save a checkpoint every N steps.";
    Output Exact "save_total_limit" = "null", "Maximum number of checkpoints to keep. Defaults to all.";
    Output Word "report_to" = "none", "Trackers to report to: `tensorboard` (or `all`), `csv`, `wandb` (files for `wandb sync`), `mlflow`, `trackio` or `none`. May be a list.";
    Output Exact "project" = "null", "Project of the run in wandb and Trackio, and its experiment in MLflow. Defaults to `WANDB_PROJECT`, `MLFLOW_EXPERIMENT_NAME` or `TRACKIO_PROJECT`, or else to `lockstep`.";
    Output Exact "logging_dir" = "null", "Folder of TensorBoard's event files. Defaults to `runs` in `output_dir`.";
    Output Exact "wall_clock_breakdown" = "false", "Print where the time of each logged step goes. On a GPU, all operations are measured then, which ends every step with a wait for the GPU.";
    Output Exact "profile_steps" = "null", "Record when each operation of these steps runs on every rank: a step, or a range such as `10:12`. The file, in `profile` in `output_dir`, opens in Perfetto and in Chrome.";
    Output Exact "dashboard" = "false", "Serve a web page of the run while it trains: `true` (port 8420 of this machine), a port, or an address and a port, such as `0.0.0.0:8420`. Other machines need a token (docs/dashboard.md).";
    Output Exact "resume_from_checkpoint" ["resume_from"] = "false", "Checkpoint to resume from: `true` or `latest` for the newest complete one, `auto` for the newest one if there is any, or a path.";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign;

    #[test]
    fn no_name_means_two_things() {
        let mut names: Vec<&str> =
            KEYS.iter().flat_map(|k| k.aliases.iter().copied().chain([k.name])).collect();
        names.extend(foreign::INERT.iter().flat_map(|i| i.names.iter().copied()));
        names.extend(foreign::REFUSED.iter().map(|(name, _)| *name));
        names.sort_unstable();
        let twice: Vec<_> = names.windows(2).filter(|w| w[0] == w[1]).collect();
        assert!(twice.is_empty(), "{twice:?}");
        assert!(names.iter().all(|n| !n.contains('-')));
    }
}
