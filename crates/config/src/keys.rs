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
use Section::{Batch, Data, Model, Optim, Output, Plan, Precision};

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
    Model Word "init" = "null", "`pretrained` or `random`: start from the folder's weights (the default with a folder) or from its `config.json` alone.";

    Data Exact "train_files" ["train_file", "dataset_path"] = "[]", "What to train on: a file, a folder, a pattern such as `data/*.jsonl`, or a list of them. jsonl, json, txt, csv, tsv (these also as .gz and .zst), parquet and arrow files are read.";
    Data Exact "eval_files" ["eval_file", "validation_file", "validation_files", "test_file", "test_files"] = "[]", "What to evaluate on, written in the same way.";
    Data Exact "eval_fraction" ["eval_split_ratio", "val_size", "test_size"] = "null", "Hold back this share of the training rows for evaluation, drawn by `data_seed`.";
    Data Exact "dataset_name" = "null", "Instead of `train_files`: a data set that Hugging Face libraries have downloaded to this machine, or the path of a folder with one.";
    Data Exact "dataset_config" ["dataset_config_name"] = "null", "Which configuration of the data set, where it has several.";
    Data Exact "dataset_train_split" = "train", "The split to train on.";
    Data Exact "dataset_test_split" = "test", "The split to evaluate on.";
    Data Exact "text_column" ["dataset_text_field"] = "null", "What the files call the column `text`.";
    Data Map "columns" = "null", "What the files call other columns: `{prompt: question, completion: answer}`.";
    Data Exact "tokenizer" ["tokenizer_name_or_path", "tokenizer_name"] = "null", "`byte`, or a tokenizer file or folder. By default the model folder's own, and `byte` without a folder.";
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

    Optim Word "optim" = "adamw", "The optimizer: `adamw` (any full-precision spelling of it, such as adamw_torch_fused).";
    Optim Exact "learning_rate" = "5e-5", "The highest learning rate of the schedule.";
    Optim Exact "adam_beta1" = "0.9", "Decay of the first moment.";
    Optim Exact "adam_beta2" = "0.999", "Decay of the second moment.";
    Optim Exact "adam_epsilon" = "1e-8", "Added to the root of the second moment.";
    Optim Exact "weight_decay" = "0.0", "Decoupled weight decay.";
    Optim Exact "decay_norms_and_biases" = "false", "Decay norm weights and biases too.";
    Optim Exact "max_grad_norm" ["gradient_clipping"] = "1.0", "Clip gradients to this global norm; 0 turns clipping off.";
    Optim Word "lr_scheduler_type" = "linear", "`linear`, `cosine` or `constant`, after the warm-up.";
    Optim Exact "warmup_steps" = "0", "Steps of warm-up; a number below 1 is a share of all steps.";
    Optim Exact "warmup_ratio" = "null", "Share of all steps to warm up, below 1.";

    Precision Word "mixed_precision" = "null", "`fp32` (or `no`) or `bf16`. fp32 by default.";
    Precision Exact "bf16" = "null", "`true` is `mixed_precision: bf16`.";
    Precision Exact "fp16" = "null", "`true` is `mixed_precision: fp16`, which is not implemented yet.";

    Plan Word "strategy" ["sharding_strategy", "fsdp_sharding_strategy", "distributed_strategy"] = "null", "ddp, zero1, zero2, zero3, shard_grad_op, full_shard, hybrid_shard, no_shard or auto. ddp by default.";
    Plan Exact "fsdp" ["use_fsdp"] = "null", "`true` asks for a sharded strategy: `full_shard` unless `strategy` says another.";
    Plan Word "recompute" = "null", "What backward computes again instead of keeping: `none`, `selective` (norms and the gated unit; the default) or `full`. The results are the same bits.";
    Plan Exact "gradient_checkpointing" = "null", "`true` is `recompute: full`, `false` is `recompute: none`.";
    Plan Word "accumulation_order" = "auto", "`local`, `reduced` or `auto`: whether gradients are summed over micro-batches or over ranks first.";
    Plan Exact "prefetch" = "1", "How many units ahead weights are gathered.";
    Plan Exact "ddp_bucket_cap_mb" = "25", "Size of a gradient bucket in MiB.";
    Plan Exact "reduce_bucket_size" = "0", "Elements of sharded gradients that are reduced together at least; 0 reduces each unit by itself.";
    Plan Exact "allgather_bucket_size" = "0", "Elements of updated weights that ranks give each other together at least (zero1, zero2); 0: each unit by itself.";
    Plan Map "offload_optimizer" = "none", "Where optimizer state lies: `none` (the device), `cpu` or `nvme`; also `{device: cpu}`.";
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
    Plan Word "algorithm" = "sft", "sft, clm, reward, dpo, ppo or grpo.";
    Plan Map "adapter" = "null", "A low-rank adapter to plan for: `{r: 8, target_modules: [q_proj, v_proj]}`.";

    Output Exact "output_dir" = "null", "Folder of the run. Required, unless `experiment_name` is given.";
    Output Exact "experiment_name" = "null", "Names the run; without `output_dir` its folder is `outputs/NAME`.";
    Output Exact "overwrite_output_dir" = "false", "Allow an output folder that has a run in it.";
    Output Exact "logging_steps" = "1", "Log every this many steps (1, where Hugging Face has 500 and TRL 10).";
    Output Word "save_strategy" = "steps", "`steps` or `no`.";
    Output Exact "save_steps" = "500", "Checkpoint every this many steps.";
    Output Exact "save_total_limit" = "null", "Keep this many checkpoints; all by default.";
    Output Exact "resume_from_checkpoint" ["resume_from"] = "false", "`true` or `latest` for the newest complete checkpoint, or the path of one.";
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
