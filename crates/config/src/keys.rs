//! The keys: one table that drives reading, suggestions and the reference page.
//!
//! Names are Hugging Face's and TRL's where they have one. Defaults are text and are read by the same
//! code as the user's text, so that the table cannot drift from the behaviour. Keys that other trainers
//! have and this one does not are in [`crate::foreign`].

/// A part of the reference page; also the sections of a `RunConfig`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Section {
    Model,
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
    /// YAML text; `null` where there is no value unless one is given.
    pub(crate) default: &'static str,
    pub(crate) doc: &'static str,
}

use Kind::{Exact, Map, Word};
use Section::{Batch, Data, Device, Eval, Model, Optim, Output, Plan, Precision};

/// Key by name. Only for names written in this crate.
pub(crate) fn key(name: &str) -> &'static Key {
    KEYS.iter().find(|k| k.name == name).expect("a key of the table")
}

/// The key that is spelled `name`, in its own spelling or another.
pub(crate) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|k| k.name == name || k.aliases.contains(&name))
}

macro_rules! keys {
    ($($section:ident $kind:ident $name:literal $([$($alias:literal),*])? = $default:literal, $doc:literal;)*) => {
        pub(crate) const KEYS: &[Key] = &[$(Key {
            name: $name,
            aliases: &[$($($alias),*)?],
            section: $section,
            kind: $kind,
            default: $default,
            doc: $doc,
        }),*];
    };
}

keys! {
    Model Exact "model_name_or_path" = "null", "A Hugging Face model folder on this machine. Either this or `model` is required.";
    Model Map "model" = "null", "A named size (15m, 90m, 300m, 1b, 7b, tiny), or a map with the names of `config.json`.";
    Model Exact "vocab_size" = "null", "How many tokens a model knows that is given by its size. By default as many as the tokenizer has.";
    Model Word "init" = "null", "`pretrained` or `random`: start from the folder's weights (the default with a folder) or from its `config.json` alone.";
    Model Exact "attention_dropout" = "null", "The share of attention's probabilities that training sets to zero. By default what the model's `config.json` says.";
    Model Exact "resid_dropout" ["dropout", "resid_pdrop", "hidden_dropout"] = "null", "The same for what attention and the feed-forward layer add to the residual stream.";

    Data Exact "train_files" ["train_file", "dataset_path"] = "[]", "What to train on: a file, a folder, a pattern such as `data/*.jsonl`, or a list of them. jsonl, json, txt, csv, tsv (these also as .gz and .zst), parquet and arrow files are read.";
    Data Exact "eval_files" ["eval_file", "validation_file", "validation_files", "test_file", "test_files"] = "[]", "What to evaluate on, written in the same way.";
    Data Exact "eval_fraction" ["eval_split_ratio", "val_size", "test_size"] = "null", "Hold back this share of the training rows for evaluation, drawn by `data_seed`.";
    Data Exact "dataset_name" = "null", "Instead of `train_files`: a data set that Hugging Face libraries have downloaded to this machine, or the path of a folder with one.";
    Data Exact "dataset_config" ["dataset_config_name"] = "null", "Which configuration of the data set, where it has several.";
    Data Exact "dataset_train_split" = "train", "The split to train on.";
    Data Exact "dataset_test_split" = "test", "The split to evaluate on.";
    Data Exact "text_column" ["dataset_text_field"] = "null", "What the files call the column `text`.";
    Data Map "columns" = "null", "What the files call other columns: `{prompt: question, completion: answer}`.";
    Data Exact "tokenizer" ["tokenizer_name_or_path", "tokenizer_name"] = "null", "`byte`, `none`, or a tokenizer file or folder. By default the model folder's own, and `byte` without a folder; rows of `input_ids` need none.";
    Data Exact "chat_template" = "null", "How conversations are written: `builtin`, or a Jinja template itself. By default the tokenizer's own.";
    Data Exact "chat_template_path" = "null", "A file with a Jinja template for conversations, or a folder with a tokenizer that has one.";
    Data Exact "assistant_only_loss" = "false", "Of conversations, train only on what the assistant says.";
    Data Exact "max_length" ["max_seq_length", "block_size"] = "1024", "Tokens per row at most.";
    Data Word "packing" = "none", "`none`; `bfd` (best-fit decreasing) puts several rows into one; `bfd_split` does so with the pieces of rows that are too long; `wrapped` cuts all rows, end to end, into full ones. `true` means bfd.";
    Data Word "packing_strategy" = "null", "How `packing: true` packs: `bfd`, `bfd_split` or `wrapped`.";
    Data Exact "completion_only_loss" = "null", "Train on completions only. By default yes for rows with a prompt and a completion.";
    Data Word "truncation" ["truncation_mode"] = "keep_start", "Which end of a row longer than `max_length` stays: `keep_start` or `keep_end`.";
    Data Word "on_long_row" = "truncate", "What becomes of a row longer than `max_length`: `truncate`, `drop` or `stop`. bfd_split and wrapped keep all of it.";
    Data Word "on_bad_row" = "stop", "`stop` at a row that cannot be used, or `skip` it.";
    Data Exact "data_cache_dir" = "null", "Folder for prepared data, which later runs find; `cache` in the output folder by default.";
    Data Exact "dataloader_num_workers" ["dataloader.num_workers"] = "1", "Threads that fill batches ahead of the step, with the same rows for any number; with 0 the step waits for them.";
    Data Exact "dataloader_prefetch_factor" ["dataloader.prefetch_factor"] = "1", "Steps that each of these threads is ahead.";
    Data Exact "shuffle" ["shuffle_dataset"] = "true", "Draw the rows in a new order every epoch.";

    Batch Exact "per_device_train_batch_size" ["dataloader.batch_size"] = "8", "Rows per rank and micro-batch.";
    Batch Exact "gradient_accumulation_steps" = "1", "Micro-batches per optimizer step.";
    Batch Exact "max_steps" = "-1", "Optimizer steps; 0 only writes the model folder, -1 lets `num_train_epochs` decide.";
    Batch Exact "num_train_epochs" = "3.0", "Passes over the data, if `max_steps` is -1; may be a fraction.";
    Batch Exact "dataloader_drop_last" ["dataloader.drop_last"] = "false", "Drop the last, incomplete batch of an epoch.";
    Batch Exact "seed" = "42", "Seed of everything random.";
    Batch Exact "data_seed" = "null", "Seed of the data order; `seed` by default.";

    Optim Word "optim" = "adamw", "The optimizer: `adamw` (any full-precision spelling of it, such as adamw_torch_fused), `sgd` or `lion`.";
    Optim Exact "learning_rate" = "5e-5", "The highest learning rate of the schedule.";
    Optim Word "lr_scaling" = "none", "What the number of ranks does to the learning rate: `none`, `linear` (times the ranks) or `sqrt` (times their root).";
    Optim Exact "adam_beta1" = "0.9", "Decay of the first moment; Lion's first beta.";
    Optim Exact "adam_beta2" = "0.999", "Decay of the second moment; Lion's second beta.";
    Optim Exact "adam_epsilon" = "1e-8", "Added to the root of the second moment.";
    Optim Exact "momentum" = "0.0", "SGD's momentum, as PyTorch's; 0 keeps no buffer.";
    Optim Exact "nesterov" = "false", "Nesterov's form of SGD's momentum.";
    Optim Exact "weight_decay" = "0.0", "Weight decay: decoupled for AdamW and Lion, part of the gradient for SGD, as in PyTorch.";
    Optim Exact "freeze" = "null", "Tensors that are not trained, by name: `*` stands for any text, a module's name for all in it (`[model.embed_tokens, 'model.layers.*.mlp']`).";
    Optim Exact "decay_norms_and_biases" = "false", "Decay norm weights and biases too.";
    Optim Exact "max_grad_norm" ["gradient_clipping"] = "1.0", "Clip gradients to this global norm; 0 turns clipping off.";
    Optim Word "lr_scheduler_type" = "linear", "Hugging Face's `linear`, `cosine`, `constant`, `constant_with_warmup`, `cosine_with_min_lr`, or DeepSpeed's `WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`.";
    Optim Map "lr_scheduler_kwargs" = "null", "The schedule's own numbers: `num_cycles`, `min_lr` or `min_lr_rate`, and those of DeepSpeed's schedules.";
    Optim Map "scheduler" = "null", "DeepSpeed's form of both: `{type: WarmupLR, params: {warmup_num_steps: 500}}`. `total_num_steps` and `warmup_max_lr` are filled in.";
    Optim Exact "warmup_steps" = "0", "Steps of warm-up; a number below 1 is a share of all steps.";
    Optim Exact "warmup_ratio" = "null", "Share of all steps to warm up, below 1.";

    Precision Word "mixed_precision" = "null", "`fp32` (or `no`), `bf16`, `fp16`, or `auto`: bf16 on a GPU, fp32 on the CPU. fp32 by default.";
    Precision Map "bf16" = "null", "`true` is `mixed_precision: bf16`; also `{enabled: true}`.";
    Precision Map "fp16" = "null", "`true` is `mixed_precision: fp16`; also DeepSpeed's map with `enabled`, `loss_scale` (0 finds it), `initial_scale_power` (16), `loss_scale_window` (1000), `hysteresis` (2) and `min_loss_scale` (1).";

    Device Word "device" = "auto", "What computes: `cpu`, `cuda` (an NVIDIA GPU; rank n of a host takes the nth that CUDA_VISIBLE_DEVICES shows) or `auto`, which is a GPU where one works.";
    Device Exact "share_gpus" = "false", "Let more ranks than GPUs on a host share them, which is otherwise refused. For trying things out: it is not fast.";
    Device Exact "tf32" = "false", "On a GPU, round the operands of fp32 products to tf32, which is several times faster and less exact.";
    Device Exact "use_cpu" ["no_cuda"] = "null", "`true` is `device: cpu`.";

    Eval Word "eval_strategy" ["evaluation_strategy"] = "null", "When to evaluate: `no`, `steps` or `epoch`. `no` by default, `steps` where `eval_steps` is given.";
    Eval Exact "eval_steps" = "null", "Evaluate every this many steps; by default as often as `logging_steps`, if that is given, or every 500.";
    Eval Exact "eval_on_start" = "false", "Evaluate before the first step too.";
    Eval Exact "per_device_eval_batch_size" = "null", "Rows per rank at once in evaluation; more than are trained on at once are taken in several parts, with the same results.";
    Eval Word "metric_for_best_model" = "eval_loss", "`eval_loss` or `eval_perplexity`.";
    Eval Exact "greater_is_better" = "false", "Whether a greater metric is better.";
    Eval Exact "load_best_model_at_end" = "false", "Keep the best checkpoint whatever `save_total_limit` says, and make the model folder from it.";
    Eval Exact "bf16_full_eval" = "false", "Evaluate in bf16, which `mixed_precision: bf16` does anyway.";
    Eval Exact "fp16_full_eval" = "false", "Evaluate in fp16, which `mixed_precision: fp16` does anyway.";

    Plan Word "strategy" ["sharding_strategy", "fsdp_sharding_strategy", "distributed_strategy"] = "null", "ddp, zero1, zero2, zero3, shard_grad_op, full_shard, hybrid_shard, no_shard or auto. ddp by default.";
    Plan Exact "fsdp" ["use_fsdp"] = "null", "`true` asks for a sharded strategy: `full_shard` unless `strategy` says another.";
    Plan Word "recompute" = "null", "What backward computes again instead of keeping: `none`, `selective` (norms and the gated unit; the default), `full`, or `auto`: as little as `memory_budget_gib` allows, or without it the GPU's memory, block by block. The results are the same bits.";
    Plan Exact "gradient_checkpointing" = "null", "`true` is `recompute: full`, `false` is `recompute: none`.";
    Plan Word "accumulation_order" = "auto", "`local`, `reduced` or `auto`: whether gradients are summed over micro-batches or over ranks first.";
    Plan Exact "prefetch" = "1", "How many units ahead weights are gathered.";
    Plan Exact "ddp_bucket_cap_mb" = "25", "Size of a gradient bucket in MiB.";
    Plan Exact "reduce_bucket_size" = "0", "Elements of sharded gradients that are reduced together at least; 0 reduces each unit by itself.";
    Plan Exact "allgather_bucket_size" = "0", "Elements of updated weights that ranks give each other together at least (zero1, zero2); 0: each unit by itself.";
    Plan Map "offload_optimizer" = "none", "Where optimizer state lies: `none` (the device), `cpu` or `nvme`; also `{device: cpu, ratio: 0.7}`, of which share of the parameters at least. Without `ratio`, as few as `memory_budget_gib` allows, or all.";
    Plan Map "offload_param" = "none", "Where weights lie: `none` (the device), `cpu` or `nvme`; also `{device: cpu}`.";
    Plan Exact "nvme_path" = "null", "Folder on a local disk for what `nvme` offload spills; `output_dir` by default.";
    Plan Word "carrier" = "auto", "What moves bytes between ranks: `auto`, `shm` (shared memory, on one host) or `tcp`.";
    Plan Exact "collective_timeout" ["ddp_timeout"] = "1800", "Seconds that a rank waits for another in one collective.";
    Plan Exact "nodes" ["nnodes", "num_nodes"] = "1", "Machines.";
    Plan Exact "nproc_per_node" ["nproc", "num_gpus"] = "1", "Ranks per machine.";
    Plan Exact "world_size" ["num_processes"] = "null", "Checked against `nodes` times `nproc_per_node`, which decide.";
    Plan Exact "memory_budget_gib" = "null", "GiB of memory a rank may use.";
    Plan Exact "threads" = "null", "CPU threads per rank.";
    Plan Exact "head_chunk_tokens" = "null", "Tokens per chunk of the LM head.";
    Plan Word "algorithm" = "sft", "sft or clm; reward, dpo, ppo and grpo are known and cannot be trained yet.";
    Plan Map "adapter" = "null", "A low-rank adapter, which cannot be trained yet: `{r: 8, target_modules: [q_proj, v_proj]}`.";

    Output Exact "output_dir" = "null", "Folder of the run. Required, unless `experiment_name` is given.";
    Output Exact "experiment_name" = "null", "Names the run; without `output_dir` its folder is `outputs/NAME`.";
    Output Exact "overwrite_output_dir" = "false", "Allow an output folder that has a run in it.";
    Output Exact "logging_steps" = "1", "Log every this many steps (1, where Hugging Face has 500 and TRL 10).";
    Output Word "save_strategy" = "steps", "When to make checkpoints: `steps`, `epoch`, `best` (after an evaluation better than all before) or `no`.";
    Output Exact "save_steps" = "500", "Checkpoint every this many steps.";
    Output Exact "save_total_limit" = "null", "Keep this many checkpoints; all by default.";
    Output Word "report_to" = "none", "`tensorboard` (or `all`) to write its event files, or `none`; also a list.";
    Output Exact "logging_dir" = "null", "Folder of TensorBoard's event files; `runs` in `output_dir` by default.";
    Output Exact "resume_from_checkpoint" ["resume_from"] = "false", "`true` or `latest` for the newest complete checkpoint, `auto` for that or, where there is none, the beginning, or the path of one.";
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
