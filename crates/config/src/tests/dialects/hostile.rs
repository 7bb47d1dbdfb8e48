//! No file and no command line causes a panic, in any dialect, and the limits hold.

use proptest::prelude::*;

use super::{load_with, words};
use crate::{
    Inputs, Purpose, Source, convert, load_inputs, recognize, referenced_files, translate_launch_line,
};

/// Files of every dialect start with keys that decide the dialect.
const STARTS: [&str; 4] = ["", "steps_per_print: 1\n", "machine_rank: 0\n", "model: tiny\n"];

pub(super) fn check(files: &[(&str, &str)], line: &str) {
    if let Err(errors) = load_with(files, line, &["model=tiny"]) {
        let text = errors.to_string();
        assert!(!errors.0.is_empty() && text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    }
    let files: Vec<Source<'_>> = files.iter().map(|(name, text)| Source { name, text }).collect();
    let overrides = ["model=tiny".to_owned()];
    let inputs = Inputs { files: &files, overrides: &overrides, ..Inputs::default() };
    referenced_files(&inputs);
    // A configuration that loads also converts, to the same run.
    if let Ok(loaded) = load_inputs(Purpose::Plan, &inputs) {
        let text = convert(&inputs).unwrap();
        let second =
            load_with(&[("out.yaml", &text)], "", &[]).unwrap_or_else(|errors| panic!("{text}\n{errors}"));
        assert!(second.config.is_same_run(&loaded.config), "{text}");
    }
    for file in files {
        recognize(file.text);
    }
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(vec![
            "zero_optimization",
            "zero_optimization.stage",
            "optimizer",
            "scheduler",
            "fp16",
            "bf16",
            "deepspeed",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "fsdp",
            "fsdp_config",
            "deepspeed_config",
            "distributed_type",
            "num_processes",
            "num_machines",
            "machine_rank",
            "gpu_ids",
            "main_process_port",
            "activation_checkpointing",
            "tensorboard",
            "autotuning",
            "tensor_parallel",
            "offload_optimizer",
            "dynamo_config",
            "config_file",
            "distributed_strategy",
            "world_size",
        ])
        .prop_map(str::to_owned),
        "[a-z_.]{1,10}",
    ]
}

fn value() -> impl Strategy<Value = String> {
    prop::sample::select(vec![
        "true",
        "auto",
        "null",
        "0",
        "-1",
        "2e8",
        "1e999",
        "99999999999999999999",
        "x",
        "[]",
        "[1, auto]",
        "{}",
        "{stage: 3}",
        "{type: AdamW, params: {lr: 1e-4, betas: [auto, x]}}",
        "{enabled: true, loss_scale: -1}",
        "{type: WarmupLR, params: {warmup_max_lr: x, warmup_num_steps: auto}}",
        "{device: nvme}",
        "full_shard offload",
        "{config_path: ds.json}",
        "{zero_stage: 2}",
        "{fsdp_sharding_strategy: 9}",
        "{a: {b: {c: d}}}",
        "ds.json",
    ])
    .prop_map(str::to_owned)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn on_likely_files(
        start in prop::sample::select(STARTS.to_vec()),
        entries in prop::collection::vec((key(), value()), 0..6),
        other in prop::collection::vec((key(), value()), 0..4),
    ) {
        let text = |entries: &[(String, String)]| -> String {
            entries.iter().map(|(key, value)| format!("{key}: {value}\n")).collect()
        };
        check(&[("run.yaml", &format!("{start}{}", text(&entries))), ("ds.json", &text(&other))], "");
    }

    #[test]
    fn on_any_text_in_two_files(a in "\\PC{0,60}", b in "[\\[\\]{}:,&*'\"\\- \nab0.]{0,60}") {
        check(&[("a.yaml", &a), ("b.json", &b)], "");
    }

    #[test]
    fn on_any_command_line(
        program in prop::sample::select(vec!["torchrun", "deepspeed", "accelerate launch", "trl sft", "python", "x", ""]),
        rest in prop::collection::vec(
            prop_oneof![
                prop::sample::select(vec![
                    "--nproc_per_node=4", "--nnodes", "1:2", "-m", "--module", "train.py", "--config", "run.yaml",
                    "--deepspeed", "--bf16", "--learning_rate", "1e-4", "--fsdp", "full_shard", "--report_to", "=",
                    "--", "-", "--=", "--no_", "--no_bf16", "-1", "--rdzv_endpoint", ":", "--model.a", "A=b", "\\",
                ]).prop_map(str::to_owned),
                "\\PC{0,12}",
            ],
            0..8,
        ),
    ) {
        let line: Vec<String> = program.split(' ').map(str::to_owned).chain(rest).collect();
        if let Ok(line) = translate_launch_line(&line) {
            let inputs = Inputs { launch_line: Some(&line), ..Inputs::default() };
            drop(convert(&inputs));
            referenced_files(&inputs);
        }
    }
}

#[test]
fn limits_hold_in_every_dialect() {
    for start in STARTS {
        let deep = format!("{start}deepspeed: {}1{}", "{a: ".repeat(40), "}".repeat(40));
        let text = load_with(&[("a.yaml", &deep)], "", &[]).unwrap_err().to_string();
        assert!(text.contains("nested") || text.contains("recursion limit"), "{text}");
        let large = format!("{start}x: {}", "y".repeat(crate::MAX_TEXT_BYTES));
        let text = load_with(&[("a.yaml", &large)], "", &[]).unwrap_err().to_string();
        assert!(text.contains("larger than 1 MiB"), "{text}");
        let many = format!("{start}x: [{}]", "1, ".repeat(20_000));
        let text = load_with(&[("a.yaml", &many)], "", &[]).unwrap_err().to_string();
        assert!(text.contains("more than 10000 values"), "{text}");
        let mut aliases = format!("{start}a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for idx in 1..9 {
            let before = format!("*a{}, ", idx - 1).repeat(10);
            aliases.push_str(&format!("a{idx}: &a{idx} [{before}]\n"));
        }
        let text = load_with(&[("a.yaml", &aliases)], "", &[]).unwrap_err().to_string();
        assert!(text.contains("aliases make the text too large"), "{text}");
    }
    let long = "--bf16 ".repeat(3_000);
    let error = translate_launch_line(&words(&format!("torchrun train.py {long}"))).unwrap_err();
    assert!(error.to_string().contains("too long"), "{error}");
}

#[test]
fn many_errors_take_little_time() {
    let unknown: String = (0..3_000).map(|i| format!("unknown_key_number_{i}: 1\n")).collect();
    for start in STARTS {
        let errors = load_with(&[("a.yaml", &format!("{start}{unknown}"))], "", &[]).unwrap_err();
        assert!(errors.0.len() >= 3_000);
    }
}
