//! Accepted configurations and the values that they result in.

use std::path::PathBuf;

use super::{accepted, run};
use crate::keys::KEYS;
use crate::*;

fn default_optim() -> OptimConfig {
    OptimConfig {
        optimizer: OptimizerName::AdamW,
        state_dtype: StateDtype::F32,
        master_weights: true,
        gradient_dtype: lockstep_core::DType::F32,
        momentum: 0.0,
        nesterov: false,
        freeze: vec![],
        learning_rate: 5e-5,
        lr_scaling: LrScaling::None,
        adam_beta1: 0.9,
        adam_beta2: 0.999,
        adam_epsilon: 1e-8,
        weight_decay: 0.0,
        decay_norms_and_biases: false,
        max_grad_norm: Some(1.0),
        lr_scheduler_type: LrSchedulerType::Linear,
        warmup: Warmup::Steps(0),
    }
}

#[test]
fn defaults_are_those_of_the_reference_page() {
    let config = run("model: 15m\noutput_dir: out\n", &[]).unwrap();
    assert_eq!(
        config.model,
        ModelConfig {
            source: ModelSource::Named("15m".into()),
            revision: None,
            vocab_size: None,
            init: InitialWeights::Random,
            attention_dropout: None,
            resid_dropout: None,
            lora: None,
            load_in_4bit: false,
        }
    );
    assert_eq!(
        config.data,
        DataConfig {
            train_files: vec![],
            eval_files: vec![],
            dataset: None,
            eval_fraction: None,
            columns: vec![],
            tokenizer: TokenizerChoice::Auto,
            max_length: 1024,
            packing: Packing::None,
            chat_template: ChatTemplateChoice::Auto,
            assistant_only_loss: false,
            completion_only_loss: None,
            truncation: Truncation::KeepStart,
            on_long_row: OnLongRow::Truncate,
            on_bad_row: OnBadRow::Stop,
            data_cache_dir: None,
            shuffle: true,
            dataloader_num_workers: 1,
            dataloader_prefetch_factor: 1,
            hub: HubFolders::default(),
        }
    );
    assert_eq!(
        config.batch,
        BatchConfig {
            per_device_train_batch_size: 8,
            chooses_rows: false,
            gradient_accumulation_steps: 1,
            max_steps: None,
            num_train_epochs: 3.0,
            dataloader_drop_last: false,
            seed: 42,
            data_seed: 42,
        }
    );
    assert_eq!(config.optim, default_optim());
    assert_eq!(config.precision, Precision::F32);
    assert_eq!(config.plan.strategy, StrategyName::Ddp);
    assert_eq!(config.plan.recompute, Recompute::Selective);
    assert_eq!((config.plan.prefetch, config.plan.ddp_bucket_cap_mb), (1, 25));
    assert_eq!(config.plan.world_size(), 1);
    assert_eq!((config.output.logging_steps, config.output.save), (1, SaveStrategy::Steps(500)));
    assert_eq!(config.output.resume_from_checkpoint, Resume::No);
    assert!(config.check_trainable().is_err());
}

#[test]
fn datasets_columns_and_packing() {
    let text = "dataset_name: HuggingFaceH4/ultrachat_200k\ndataset_train_split: train_sft\n\
                dataset_text_field: body\ncolumns: {prompt: question}\npacking: true\n\
                packing_strategy: wrapped\ntruncation_mode: keep_end\nval_size: 0.1\n\
                dataloader: {num_workers: 4, prefetch_factor: 2}\nvalidation_file: v.csv\n";
    let data = accepted(text, &["columns.completion=answer"]).data;
    let named = data.dataset.unwrap();
    assert_eq!((named.name.as_str(), named.config), ("HuggingFaceH4/ultrachat_200k", None));
    assert_eq!((named.train_split.as_str(), named.test_split.as_str()), ("train_sft", "test"));
    assert!(!named.evaluates_test_split);
    let columns = [("text", "body"), ("prompt", "question"), ("completion", "answer")];
    assert_eq!(data.columns, columns.map(|(a, b)| (a.to_string(), b.to_string())));
    assert_eq!((data.packing, data.truncation), (Packing::Wrapped, Truncation::KeepEnd));
    assert_eq!((data.eval_fraction, data.eval_files), (Some(0.1), vec![PathBuf::from("v.csv")]));
    assert_eq!((data.dataloader_num_workers, data.dataloader_prefetch_factor), (4, 2));
    let data = accepted("packing: bfd_split\ntext_column: text\n", &[]).data;
    assert_eq!((data.packing, data.columns), (Packing::BfdSplit, vec![]));
}

#[test]
fn every_key_of_the_table_is_read() {
    for algorithm in AlgorithmName::ALL {
        let config =
            run(&format!("model: 15m\noutput_dir: out\n{}", super::minimal(algorithm)), &[]).unwrap();
        let keys: Vec<_> = KEYS.iter().filter(|key| key.is_for(algorithm)).collect();
        for key in &keys {
            assert!(config.origins.contains_key(key.name), "{algorithm}: {} is never read", key.name);
            assert!(
                config.settings.contains_key(key.name)
                    || key.name.ends_with("dir")
                    || crate::settings::PER_START.contains(&key.name),
                "{}",
                key.name
            );
        }
        assert_eq!(config.origins.len(), keys.len());
    }
}

#[test]
fn every_value_has_an_origin() {
    let config = accepted("  \n\nlearning_rate: 1e-4\n", &["seed=7"]);
    assert_eq!(config.origin("learning_rate").to_string(), "run.yaml:5:1");
    assert_eq!(config.origin("seed").to_string(), "argument seed=7");
    assert_eq!(config.origin("data_seed").to_string(), "derived from seed");
    assert_eq!(config.origin("weight_decay").to_string(), "default");
    assert_eq!(config.batch.data_seed, 7);
}

#[test]
fn json_yaml_nested_and_dotted_keys_are_equivalent() {
    let texts = [
        "{\"model\": \"15m\", \"output_dir\": \"o\", \"dataloader\": {\"batch_size\": 2}, \"seed\": 1}",
        "training:\n  model: 15m\n  output-dir: o\n  dataloader:\n    batch_size: 2\n  seed: 1\n",
        "model: 15m\ntraining.output_dir: o\ndataloader.batch_size: 2\nseed: 1.0\n",
        "model: 15m\noutput_dir: o\nper-device-train-batch-size: 2\nseed: 1\n",
    ];
    for text in texts {
        let config = run(text, &[]).unwrap();
        assert_eq!(config.output.output_dir, PathBuf::from("o"), "{text}");
        assert_eq!((config.batch.per_device_train_batch_size, config.batch.seed), (2, 1), "{text}");
    }
}

#[test]
fn overrides_work_without_a_file() {
    let flags = ["model=tiny", "output_dir=o", "train_files=[a.jsonl, b.jsonl]"].map(String::from);
    let config = load(None, &flags).unwrap();
    assert_eq!(config.data.train_files, ["a.jsonl", "b.jsonl"].map(PathBuf::from));
    assert!(config.check_trainable().is_ok());
}

#[test]
fn overrides_replace_values_of_the_file() {
    let config =
        accepted("seed: 1\nbf16: true\nwarmup_ratio: 0.1\n", &["seed=2", "seed=3", "warmup-steps=10"]);
    assert_eq!(config.batch.seed, 3);
    assert_eq!(config.optim.warmup, Warmup::Steps(10));
    assert_eq!(accepted("bf16: true\n", &["mixed_precision=no"]).precision, Precision::F32);
    let folder = accepted("", &["model_name_or_path=/models/m"]);
    assert_eq!(folder.model.source, ModelSource::Folder("/models/m".into()));
    assert_eq!(
        (folder.model.init, folder.data.tokenizer),
        (InitialWeights::Pretrained, TokenizerChoice::Auto)
    );
}

#[test]
fn models_may_be_maps_and_overrides_may_set_parts() {
    let text = "model:\n  architecture: LlamaForCausalLM\n  hidden_size: 64\n  rope_theta: 1e4\n\
                output_dir: o\nmodel.num_hidden_layers: 2\n";
    let config = run(text, &["model.hidden_size=128", "model.rope_scaling.factor=2"]).unwrap();
    let expected = serde_json::json!({
        "architecture": "LlamaForCausalLM",
        "hidden_size": 128,
        "rope_theta": 1e4,
        "num_hidden_layers": 2,
        "rope_scaling": {"factor": 2},
    });
    assert_eq!(config.model.source, ModelSource::Explicit(expected));
    assert_eq!(run(text, &["model=1B"]).unwrap().model.source, ModelSource::Named("1b".into()));
}

#[test]
fn spellings_of_the_device() {
    let device = |text: &str, flags: &[&str]| accepted(text, flags).device;
    assert_eq!(device("", &[]), DeviceConfig { kind: DeviceKind::Auto, share_gpus: false, tf32: false });
    for text in ["device: cpu", "use_cpu: true", "no_cuda: true\ndevice: auto", "device: CPU\nuse_cpu: false"]
    {
        assert_eq!(device(text, &[]).kind, DeviceKind::Cpu, "{text}");
    }
    assert_eq!(device("device: cuda\nuse_cpu: false", &["tf32=true"]).kind, DeviceKind::Cuda);
    assert_eq!(device("use_cpu: true", &["device=gpu"]).kind, DeviceKind::Cuda);
    assert!(device("tf32: true\nshare_gpus: true", &[]).share_gpus);
    assert_eq!(accepted("use_cpu: true", &[]).origin("device").to_string(), "derived from use_cpu");
    assert!(run("model: tiny\noutput_dir: o\ndevice: cuda\nuse_cpu: true\n", &[]).is_err());
}

#[test]
fn spellings_of_precision() {
    for text in ["mixed_precision: bf16", "bf16: True", "mixed_precision: BF16\nbf16: yes\nfp16: false"] {
        assert_eq!(accepted(text, &[]).precision, Precision::Bf16, "{text}");
    }
    for text in ["mixed_precision: no", "mixed_precision: fp32", "bf16: off\nfp16: false", "fp16: null"] {
        assert_eq!(accepted(text, &[]).precision, Precision::F32, "{text}");
    }
    assert_eq!(accepted("bf16: true", &[]).origin("mixed_precision").to_string(), "derived from bf16");
    let dynamic = LossScaling::default();
    for text in [
        "fp16: true",
        "mixed_precision: fp16",
        "fp16: {enabled: true}\nbf16: {enabled: false}",
        "mixed_precision: fp16\nfp16: {enabled: auto, loss_scale: 0, hysteresis: 2, auto_cast: false}",
    ] {
        assert_eq!(accepted(text, &[]).precision, Precision::F16(dynamic), "{text}");
    }
    let text = "fp16:\n  enabled: true\n  initial_scale_power: 8\n  loss_scale_window: 20\n";
    let config = accepted(text, &["fp16.hysteresis=1", "fp16.min_loss_scale=0.5"]);
    let other = LossScaling {
        initial_scale_power: 8,
        loss_scale_window: 20,
        hysteresis: 1,
        min_loss_scale: 0.5,
        loss_scale: None,
    };
    assert_eq!(config.precision, Precision::F16(other));
    let fixed = LossScaling { loss_scale: Some(128.0), ..dynamic };
    let config = accepted("fp16: {enabled: true, loss_scale: 128}", &[]);
    assert_eq!(config.precision, Precision::F16(fixed));
}

#[test]
fn evaluation_during_training() {
    let config = accepted("eval_strategy: no\n", &[]);
    assert!(!config.eval.evaluates());
    let config = accepted("eval_steps: 20\nmetric_for_best_model: perplexity\n", &[]);
    assert_eq!((config.eval.when, config.eval.metric), (EvalStrategy::Steps(20), EvalMetric::Perplexity));
    let config = accepted("eval_strategy: steps\nlogging_steps: 7\n", &[]);
    assert_eq!(config.eval.when, EvalStrategy::Steps(7));
    assert_eq!(accepted("eval_strategy: steps\n", &[]).eval.when, EvalStrategy::Steps(500));
    let text = "evaluation_strategy: epoch\nsave_strategy: best\nload_best_model_at_end: true\nbf16: true\n\
                bf16_full_eval: true\n";
    let config = accepted(text, &[]);
    assert_eq!((config.eval.when, config.output.save), (EvalStrategy::Epoch, SaveStrategy::Best));
    assert!(config.eval.load_best_model_at_end && config.notes.len() == 1);
}

#[test]
fn report_to_names_several_trackers() {
    use crate::Tracker::*;
    let output = accepted("report_to: [wandb, tensorboard, csv, wandb]\nproject: mine\n", &[]).output;
    assert!(output.tensorboard.is_some() && output.trackers == [Wandb, Csv]);
    assert_eq!(output.project.as_deref(), Some("mine"));
    assert_eq!(accepted("report_to: mlflow\n", &["report_to=[trackio]"]).output.trackers, [Trackio]);
}

#[test]
fn the_dashboard_has_an_address() {
    let address = |text: &str| {
        let dashboard = accepted(&format!("dashboard: {text}\n"), &[]).output.dashboard;
        dashboard.map(|address| format!("{} {:?}", address.ip, address.port))
    };
    assert_eq!((address("false"), accepted("", &[]).output.dashboard), (None, None));
    for (text, expected) in [
        ("true", "127.0.0.1 None"),
        ("0", "127.0.0.1 Some(0)"),
        ("8421", "127.0.0.1 Some(8421)"),
        ("localhost:80", "127.0.0.1 Some(80)"),
        ("0.0.0.0:8420", "0.0.0.0 Some(8420)"),
        ("10.0.0.1", "10.0.0.1 None"),
        ("'[::1]:80'", "::1 Some(80)"),
        ("'::1'", "::1 None"),
    ] {
        assert_eq!(address(text).as_deref(), Some(expected), "{text}");
    }
}

#[test]
fn profile_steps_are_one_or_a_range() {
    let steps = |text: &str| accepted(text, &[]).output.profile_steps;
    assert_eq!(steps("profile_steps: 10:12\n"), Some((10, 12)));
    assert_eq!(steps("profile_steps: 3\n"), Some((3, 3)));
    assert_eq!(steps(""), None);
    assert_eq!(accepted("", &["profile_steps=2:2"]).output.profile_steps, Some((2, 2)));
}

#[test]
fn report_to_enables_tensorboard() {
    let dir = |text: &str| accepted(text, &[]).output.tensorboard;
    for text in ["report_to: none\n", "report_to: []\n", "report_to: no\n", ""] {
        assert_eq!(dir(text), None, "{text}");
    }
    for text in ["report_to: tensorboard\n", "report_to: [tensorboard]\n", "report_to: all\n"] {
        assert!(dir(text).unwrap().ends_with("runs"), "{text}");
    }
    assert_eq!(dir("report_to: tensorboard\nlogging_dir: tb\n"), Some("tb".into()));
    assert_eq!(accepted("logging_dir: tb\n", &[]).notes.len(), 1);
}

#[test]
fn spellings_of_strategies() {
    let named = |text: &str| accepted(text, &[]).plan.strategy;
    assert_eq!(named("strategy: ZeRO-3"), StrategyName::Zero3);
    assert_eq!(named("fsdp: True\nsharding_strategy: SHARD_GRAD_OP"), StrategyName::ShardGradOp);
    assert_eq!(
        named("training:\n  use_fsdp: true\n  fsdp_sharding_strategy: \"FULL_SHARD\""),
        StrategyName::FullShard
    );
    assert_eq!(named("use_fsdp: true"), StrategyName::FullShard);
    assert_eq!(named("distributed_strategy: auto"), StrategyName::Ddp);
    assert_eq!(named("strategy: auto\nnproc_per_node: 2\nworld_size: 2"), StrategyName::Auto);
}

#[test]
fn aliases_with_equal_values_are_accepted() {
    let config =
        accepted("max_grad_norm: 0.5\ngradient_clipping: 5e-1\nblock_size: 64\nmax-seq-length: 64.0", &[]);
    assert_eq!(config.optim.max_grad_norm, Some(0.5));
    assert_eq!(config.data.max_length, 64);
    assert_eq!(
        accepted("gradient_checkpointing: true\nrecompute: full", &[]).plan.recompute,
        Recompute::Full
    );
}

#[test]
fn other_settings() {
    let config = accepted(
        "train_file: a.jsonl\ntokenizer: tok/tokenizer.json\npacking: true\npacking_strategy: bfd\n\
         completion_only_loss: false\non_bad_row: skip\nshuffle: no\nmax_steps: 1e3\nmax_grad_norm: 0\n\
         lr_scheduler_type: cosine\nwarmup_steps: 0.05\noptim: adamw_torch_fused\n\
         gradient_checkpointing: on\naccumulation_order: reduced\noffload_optimizer: {device: cpu, pin_memory: true}\n\
         offload_param.device: nvme\nnodes: 2\nnproc: 4\nmemory_budget_gib: 40\nthreads: 2\n\
         head_chunk_tokens: 256\nalgorithm: clm\npeft_config: {r: 8, target_modules: [q_proj, v_proj]}\n\
         save_strategy: no\nsave_total_limit: 3\nresume_from_checkpoint: latest\n",
        &[],
    );
    assert_eq!(config.data.tokenizer, TokenizerChoice::File("tok/tokenizer.json".into()));
    assert_eq!((config.data.packing, config.data.on_bad_row), (Packing::Bfd, OnBadRow::Skip));
    assert_eq!((config.data.completion_only_loss, config.data.shuffle), (Some(false), false));
    assert_eq!((config.batch.max_steps, config.optim.max_grad_norm), (Some(1000), None));
    assert_eq!(
        (config.optim.lr_scheduler_type, config.optim.warmup),
        (LrSchedulerType::Cosine { cycles: 0.5 }, Warmup::Ratio(0.05))
    );
    let plan = &config.plan;
    assert_eq!((plan.recompute, plan.accumulation_order), (Recompute::Full, AccumulationOrder::Reduced));
    assert_eq!((plan.offload_optimizer, plan.offload_param), (Offload::Cpu, Offload::Nvme));
    assert_eq!((plan.world_size(), config.global_batch_rows()), (8, 64));
    assert_eq!((plan.memory_budget_gib, plan.threads, config.algorithm.name()), (Some(40.0), Some(2), "clm"));
    let lora = config.model.lora.as_ref().unwrap();
    assert_eq!((lora.r, lora.alpha, lora.dropout, lora.target_modules.len()), (8, 8.0, 0.0, 2));
    assert_eq!((config.output.save, config.output.save_total_limit), (SaveStrategy::No, Some(3)));
    assert_eq!(config.output.resume_from_checkpoint, Resume::Latest);
    assert_eq!(config.notes.len(), 1, "{:?}", config.notes);
}

#[test]
fn recompute_auto_with_a_memory_budget() {
    let config = accepted("recompute: auto\ngradient_checkpointing: true\nmemory_budget_gib: 40\n", &[]);
    assert_eq!(config.plan.recompute, Recompute::Auto);
}

/// DeepSpeed's map: a fraction of the optimizer states, and settings without effect.
#[test]
fn partial_offload() {
    let config = accepted(
        "offload_optimizer: {device: nvme, ratio: 0.3, buffer_count: 4, pipeline_read: true}\n",
        &[],
    );
    assert_eq!((config.plan.offload_optimizer, config.plan.offload_ratio), (Offload::Nvme, Some(0.3)));
    assert_eq!(config.notes.len(), 2, "{:?}", config.notes);
    let config = accepted("offload_optimizer: cpu\n", &["offload_optimizer={device: cpu, ratio: 1}"]);
    assert_eq!((config.plan.offload_optimizer, config.plan.offload_ratio), (Offload::Cpu, Some(1.0)));
    assert_eq!(accepted("offload_optimizer: cpu\n", &[]).plan.offload_ratio, None);
}

#[test]
fn schedulers_of_hugging_face_and_deepspeed() {
    let config = accepted("lr_scheduler_type: WarmupDecayLR\nwarmup_steps: 7\n", &[]);
    let params = |warmup_type, total_num_steps| WarmupLrParams {
        warmup_min_lr: 0.0,
        warmup_max_lr: None,
        warmup_type,
        total_num_steps,
    };
    assert_eq!(config.optim.lr_scheduler_type, LrSchedulerType::WarmupDecayLr(params(WarmupType::Log, None)));
    assert_eq!(config.optim.warmup, Warmup::Steps(7));

    let config = accepted(
        "scheduler:\n  type: WarmupLR\n  params: {warmup_num_steps: 5, warmup_type: linear, warmup_max_lr: auto}\n",
        &["scheduler.params.total_num_steps=50"],
    );
    assert_eq!(
        config.optim.lr_scheduler_type,
        LrSchedulerType::WarmupLr(params(WarmupType::Linear, Some(50)))
    );
    assert_eq!(config.optim.warmup, Warmup::Steps(5));
    assert_eq!(config.origin("lr_scheduler_type").to_string(), "derived from scheduler");

    let config = accepted("scheduler: {type: WarmupLR}\n", &[]);
    assert_eq!(config.optim.warmup, Warmup::Steps(1000));

    let config =
        accepted("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-6}\n", &[]);
    let min = MinLr::Lr(1e-6);
    assert_eq!(config.optim.lr_scheduler_type, LrSchedulerType::CosineWithMinLr { cycles: 0.5, min });
}

#[test]
fn lr_scaling_multiplies_the_learning_rate() {
    let text = "learning_rate: 1e-4\nlr_scaling: sqrt\nnproc: 4\n";
    let config = accepted(text, &[]);
    assert_eq!(config.peak_learning_rate(), 2e-4);
    assert_eq!(config.notes, ["`lr_scaling: sqrt` multiplies the learning rate 1e-4 by 2 for 4 ranks: 2e-4"]);
    assert_eq!(accepted(text, &["lr_scaling=linear"]).peak_learning_rate(), 4e-4);
    assert_eq!(accepted(text, &["lr_scaling=none"]).peak_learning_rate(), 1e-4);
    assert_eq!(accepted(text, &["lr_scaling=off"]).notes.len(), 0);
}

#[test]
fn constant_ignores_the_warmup_with_a_note() {
    let config = accepted("lr_scheduler_type: constant\nwarmup_steps: 10\n", &[]);
    assert_eq!(
        config.notes,
        ["`warmup_steps` has no effect: `constant` has no warmup; use `constant_with_warmup`"]
    );
}

#[test]
fn only_training_needs_data_and_an_output_folder() {
    let load = |purpose, text: &str| {
        crate::load_for(purpose, Some(Source { name: "run.yaml", text }), &[]).map_err(|e| e.to_string())
    };
    let planned = load(Purpose::Plan, "model: tiny\n").unwrap();
    assert_eq!(planned.check_trainable().unwrap_err().0.len(), 2);
    assert!(load(Purpose::Prepare, "model: tiny\ntrain_files: a\n").is_ok());
    assert!(load(Purpose::Train, "model: tiny\ndataset_name: a\nexperiment_name: b\n").is_ok());
    insta::assert_snapshot!(load(Purpose::Train, "model: tiny\nsed: 1\n").unwrap_err(), @r"
    run.yaml:2:1: unknown key `sed`
      |
    2 | sed: 1
      | ^^^
      hint: did you mean `seed`?

    error: `train_files` is missing: set `train_files` to a file, a folder or a list of them, or set `dataset_name`

    error: `output_dir` is missing: set `output_dir: outputs/first-run`, or set `experiment_name`

    error: the configuration has 3 errors
    ");
}

/// A suggestion must be a key, and the name must not be one.
#[test]
fn common_names_lead_to_keys() {
    for (names, key) in crate::foreign::COMMON_NAMES {
        assert!(crate::keys::find(key).is_some_and(|found| found.name == *key), "{key}");
        for name in *names {
            assert!(!crate::is_known_key(name), "`{name}` is a key itself");
            assert_eq!(crate::suggested_key(name), Some(*key));
        }
    }
}

#[test]
fn the_experiment_name_sets_the_output_folder() {
    let config = run("model: tiny\nexperiment_name: first\n", &[]).unwrap();
    assert_eq!(config.output.output_dir, PathBuf::from("outputs/first"));
    assert_eq!(config.origin("output_dir").to_string(), "derived from experiment_name");
}

#[test]
fn keys_without_effect_are_noted() {
    let config = accepted("dataloader:\n  pin_memory: true\ncompile: False\n", &[]);
    assert_eq!(
        config.notes,
        [
            "`dataloader.pin_memory` (run.yaml:4:3) has no effect here: \
             batches are not copied through pinned memory",
            "`compile` (run.yaml:5:1) has no effect here: models are not compiled",
        ]
    );
}

#[test]
fn errors_have_the_exit_code_of_bad_configurations() {
    use lockstep_core::{Fault, FaultClass};
    let errors = run("sed: 1\n", &[]).unwrap_err();
    assert_eq!(errors.class(), FaultClass::BadConfig);
    assert_eq!(errors.class().exit_code(), 64);
}

#[test]
fn chat_templates_may_be_builtin_inline_or_a_path() {
    let template = |line: &str| accepted(line, &[]).data.chat_template;
    assert_eq!(template("chat_template: builtin"), ChatTemplateChoice::Builtin);
    assert_eq!(
        template("chat_template: \"{{ messages }}\""),
        ChatTemplateChoice::Inline("{{ messages }}".into())
    );
    assert_eq!(template("chat_template_path: chat.jinja"), ChatTemplateChoice::Path("chat.jinja".into()));
    assert_eq!(template("chat_template_path: null"), ChatTemplateChoice::Auto);
}

#[test]
fn revisions_of_models_and_datasets() {
    let flags = [
        "model_name_or_path=org/name",
        "model_revision=v1",
        "dataset_name=org/data",
        "dataset_revision=refs/pr/1",
    ];
    let config = accepted("", &flags);
    assert_eq!(config.model.revision.as_deref(), Some("v1"));
    assert_eq!(config.data.dataset.unwrap().revision.as_deref(), Some("refs/pr/1"));
}
