//! A run that is killed and resumed ends bit for bit like one that never stopped.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::support::{Folder, rows};

/// Twenty steps over rows that make seven steps an epoch; a step takes some ten milliseconds.
const RUN: &str = "\
model: {architectures: [Qwen3ForCausalLM], hidden_size: 64, num_hidden_layers: 3, num_attention_heads: 4, \
num_key_value_heads: 2, head_dim: 16, intermediate_size: 160, max_position_embeddings: 128, \
tie_word_embeddings: true}
train_files: data.jsonl
max_length: 128
packing: bfd
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 20
save_steps: 10
learning_rate: 3e-3
warmup_steps: 3
weight_decay: 0.1
lr_scheduler_type: cosine
threads: 2
";

/// When a run is killed.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// As soon as this path exists; a `.partial` means in the middle of a save.
    At(&'static str),
    /// This long after the path exists.
    After(&'static str, u64),
}

fn same_as_never_stopped(settings: &[&str], seed: u64) {
    let folder = Folder::new(RUN);
    folder.write("data.jsonl", rows(90));
    let args = |output: &'static str| [&["train", "run.yaml", output][..], settings].concat();
    folder.succeeds(&args("output_dir=straight"));

    let mut random = seed;
    let mut draw = |below: u64| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) % below
    };
    let moments = [
        Moment::After("out/metrics.jsonl", draw(60)),
        Moment::At("out/checkpoints/step-10.partial"),
        Moment::At("out/checkpoints/step-10"),
        Moment::After("out/checkpoints/step-10", draw(80)),
        Moment::At("out/checkpoints/step-20.partial"),
        Moment::At("out/model.partial"),
    ];
    let mut killed = 0;
    for moment in moments {
        killed += u32::from(killed_at(&folder, &args("output_dir=out"), moment));
    }
    assert!(killed >= 3, "seed {seed}: only {killed} of the runs were killed before their end");
    folder.succeeds(&with_resume(&folder, &args("output_dir=out")));

    let equal = |name: &str| {
        let [straight, out] =
            ["straight", "out"].map(|o| fs::read(folder.path(&format!("{o}/{name}"))).unwrap());
        assert!(straight == out, "seed {seed}, {settings:?}: {name} differs");
    };
    equal("model/model.safetensors");
    for state in ["model", "exp_avg", "exp_avg_sq"] {
        equal(&format!("checkpoints/step-20/{state}-rank-0.safetensors"));
    }
    let [straight, out] = ["straight", "out"].map(|o| losses(&folder.read(&format!("{o}/metrics.jsonl"))));
    assert_eq!(straight.len(), 20);
    let epoch = straight[19].split_once("\"epoch\":").and_then(|(_, rest)| rest.split(',').next());
    assert!(epoch.unwrap().parse::<f64>().unwrap() > 2.0, "the run crosses epochs");
    assert_eq!(straight, out, "seed {seed}, {settings:?}");
}

/// Starts or resumes a run, and kills it. False if it ended before.
fn killed_at(folder: &Folder, args: &[&str], moment: Moment) -> bool {
    let (path, delay) = match moment {
        Moment::At(path) => (path, 0),
        Moment::After(path, delay) => (path, delay),
    };
    // Files of an earlier run must not count as files of this one.
    let _ = fs::remove_dir_all(folder.path("out/checkpoints/step-10.partial"));
    let mut child = folder.start(&with_resume(folder, args));
    let deadline = Instant::now() + Duration::from_secs(60);
    while !folder.path(path).exists() {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        assert!(Instant::now() < deadline, "{path} never came");
        sleep(Duration::from_micros(200));
    }
    sleep(Duration::from_millis(delay));
    child.kill().unwrap();
    !child.wait().unwrap().success()
}

fn with_resume<'a>(folder: &Folder, args: &[&'a str]) -> Vec<&'a str> {
    let started =
        ["step-10", "step-20"].iter().any(|s| folder.path(&format!("out/checkpoints/{s}")).exists());
    let mut args = args.to_vec();
    if started {
        args.push("resume_from_checkpoint=latest");
    }
    args
}

/// Step, epoch, loss, gradient norm and rate of each line, as text: without speeds and times.
fn losses(metrics: &str) -> Vec<String> {
    metrics.lines().map(|line| line.split(",\"tokens_per_second\"").next().unwrap().to_string()).collect()
}

#[test]
fn f32_keeping_everything() {
    same_as_never_stopped(&["mixed_precision=no", "recompute=none"], 1);
}

#[test]
fn f32_recomputing() {
    same_as_never_stopped(&["mixed_precision=no", "recompute=full"], 2);
}

#[test]
fn bf16_keeping_everything() {
    same_as_never_stopped(&["mixed_precision=bf16", "recompute=none"], 3);
}

#[test]
fn bf16_recomputing() {
    same_as_never_stopped(&["mixed_precision=bf16", "recompute=full"], 4);
}
