//! fp16: the loss scale is found, saved in checkpoints and reported, and overflows are reported.

use serde_json::Value;

use crate::support::{Folder, RUN};

fn metrics(folder: &Folder, out: &str) -> Vec<Value> {
    let text = folder.read(&format!("{out}/metrics.jsonl"));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn weights(folder: &Folder, out: &str) -> Vec<u8> {
    std::fs::read(folder.path(&format!("{out}/model/model.safetensors"))).unwrap()
}

#[test]
fn a_run_in_fp16_learns_as_one_in_fp32_does() {
    // With warmup: the first steps of Adam depend on the signs of the smallest gradients.
    let rate = "learning_rate: 5e-3\nlr_scheduler_type: constant_with_warmup\nwarmup_steps: 5\n";
    let folder = Folder::new(&format!("{RUN}{rate}"));
    let last = |out: &str, more: &[&str]| {
        let out_dir = format!("output_dir={out}");
        folder.succeeds(&[&["train", "run.yaml", "max_steps=20", &out_dir], more].concat());
        metrics(&folder, out).last().unwrap()["loss"].as_f64().unwrap()
    };
    let (full, half) = (last("full", &[]), last("half", &["fp16={enabled: true, initial_scale_power: 10}"]));
    assert!(full < 4.5 && (full - half).abs() < 0.02 * full, "{full} and {half}");
    let reported = metrics(&folder, "half");
    assert!(reported.iter().all(|line| line["loss_scale"].as_f64().is_some()));
    assert!(metrics(&folder, "full").iter().all(|line| line.get("loss_scale").is_none()));
    assert!(folder.read("half/model/config.json").contains("\"dtype\": \"float16\""));
}

/// The scale starts far too high: hysteresis tolerates the first overflow, and each further one halves the scale.
#[test]
fn overflows_are_skipped_and_reported() {
    let config = format!("{RUN}fp16: {{enabled: true, initial_scale_power: 40}}\nreport_to: tensorboard\n");
    let folder = Folder::new(&config);
    let printed = folder.succeeds(&["train", "run.yaml", "max_steps=40"]);
    let reported = metrics(&folder, "out");
    let skipped = reported.iter().filter(|line| line["skipped"] == true).count();
    assert!((5..35).contains(&skipped), "{skipped} steps were skipped");
    assert_eq!(reported[0]["loss_scale"], reported[1]["loss_scale"]);
    assert_eq!(
        reported[1]["loss_scale"].as_f64().unwrap(),
        2.0 * reported[2]["loss_scale"].as_f64().unwrap()
    );
    // Every step has its rows, applied or not.
    assert_eq!(reported.len(), 40);
    let warnings: Vec<&str> = printed.lines().filter(|line| line.contains("was skipped")).collect();
    assert_eq!(warnings.len(), skipped);
    assert!(
        warnings[1].starts_with(
            "step 2 was skipped: fp16 overflow at scale 1099511627776; the first non-finite gradient is that of "
        ),
        "{}",
        warnings[1]
    );
    assert!(
        warnings[1].contains("; the scale is now 549755813888 (mixed_precision: bf16"),
        "{}",
        warnings[1]
    );
    // The schedule counts applied steps.
    let rates: Vec<f64> = reported.iter().map(|line| line["learning_rate"].as_f64().unwrap()).collect();
    assert_eq!(rates[0], rates[skipped - 1]);
    assert!(folder.path("out/runs").read_dir().unwrap().count() == 1);
}

#[test]
fn at_the_lowest_scale_the_run_ends() {
    let scale = "{enabled: true, initial_scale_power: 40, min_loss_scale: 549755813888, hysteresis: 1}";
    let folder = Folder::new(&format!("{RUN}fp16: {scale}\n"));
    let ran = folder.run(&["train", "run.yaml", "max_steps=9"]);
    assert_eq!(ran.code, Some(76), "{ran:#?}");
    let expected = "error: step 2: fp16 gradients overflow even at the minimum loss scale 549755813888; the first non-finite gradient is that of ";
    assert!(ran.stderr.starts_with(expected), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("hint: use mixed_precision: bf16, which needs no loss scaling."),
        "{}",
        ran.stderr
    );
    folder.assert_no_partial();
}

/// The state of loss scaling is part of the checkpoint: a resumed run is bit-identical.
#[test]
fn a_resumed_run_has_the_same_scales() {
    let scale = "{enabled: true, initial_scale_power: 25, loss_scale_window: 4}";
    let folder = Folder::new(&format!("{RUN}fp16: {scale}\nsave_steps: 7\nlr_scheduler_type: constant\n"));
    folder.succeeds(&["train", "run.yaml", "max_steps=30"]);
    let scales = |out: &str| -> Vec<(Value, Value, Value)> {
        let of = |line: &Value| (line["loss_scale"].clone(), line["skipped"].clone(), line["loss"].clone());
        metrics(&folder, out).iter().map(of).collect()
    };
    let whole = scales("out");
    assert!(whole.iter().filter(|(_, skipped, _)| *skipped == Value::Bool(true)).count() > 5);
    folder.succeeds(&["train", "run.yaml", "max_steps=14", "output_dir=two"]);
    folder.succeeds(&["train", "run.yaml", "max_steps=30", "output_dir=two", "resume_from_checkpoint=true"]);
    assert_eq!(scales("two"), whole);
    assert_eq!(weights(&folder, "two"), weights(&folder, "out"));
    // A checkpoint without a scale cannot be resumed in fp16.
    folder.succeeds(&["train", "run.yaml", "max_steps=7", "fp16=false", "output_dir=plain"]);
    let ran = folder.run(&["train", "run.yaml", "output_dir=plain", "resume_from_checkpoint=true"]);
    assert_eq!(ran.code, Some(64), "{ran:#?}");
    let message = "the checkpoint has mixed_precision without a loss scale, but this run has fp16";
    assert!(ran.stderr.contains(message), "{ran:#?}");
}
