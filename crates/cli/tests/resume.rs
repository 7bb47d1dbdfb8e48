//! Resuming: damaged checkpoints are skipped or reported, and changes that matter are refused.

use std::fs;

use insta::assert_snapshot;

use crate::support::{Folder, RUN, rows, steady};
use crate::tensors::flip_bit;

const RESUME: &str = "resume_from_checkpoint=true";

/// A folder with a run of four steps and checkpoints at 2 and 4.
fn interrupted() -> Folder {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml", "max_steps=4", "save_steps=2"]);
    folder
}

/// A resume that is refused with a message in which hashes are replaced.
fn refused(change: impl FnOnce(&Folder), settings: &[&str], code: i32) -> String {
    let folder = interrupted();
    change(&folder);
    let settings: Vec<&str> = ["max_steps=6", RESUME].into_iter().chain(settings.iter().copied()).collect();
    without_hashes(&folder.train_refused(&settings, code))
}

fn without_hashes(text: &str) -> String {
    let is_hash = |word: &str| word.len() >= 12 && word.chars().all(|c| c.is_ascii_hexdigit());
    let word = |word: &str| {
        let bare = word.trim_end_matches([',', '\n']);
        if is_hash(bare) { word.replace(bare, "[hash]") } else { word.into() }
    };
    text.split_inclusive([' ', '\n'])
        .map(|w| word(w.trim_end_matches(' ')) + " ")
        .collect::<String>()
        .replace("\n ", "\n")
}

#[test]
fn nothing_there() {
    assert_snapshot!(Folder::new(RUN).train_refused(&[RESUME], 66), @r"
    error: no checkpoint to resume from in out/checkpoints
    hint: remove resume_from_checkpoint to start from the beginning, or set resume_from_checkpoint: auto, which starts from the beginning if there is no checkpoint.
    ");
    assert_snapshot!(Folder::new(RUN).train_refused(&["resume_from_checkpoint=out/checkpoints/step-7"], 66), @r"
    error: no checkpoint to resume from in out/checkpoints/step-7
    hint: remove resume_from_checkpoint to start from the beginning, or set resume_from_checkpoint: auto, which starts from the beginning if there is no checkpoint.
    ");
}

#[test]
fn going_on() {
    let folder = interrupted();
    assert_snapshot!(steady(&folder.succeeds(&["train", "run.yaml", "max_steps=5", RESUME])), @r"
    LlamaForCausalLM, 37.1 k parameters | f32 ddp on 2 threads | memory [size]
    8 documents in 8 rows, 247 tokens
    resumed from out/checkpoints/step-4 at step 4
    setting changed since the checkpoint: max_steps: 4 -> 5
    setting changed since the checkpoint: save_steps: 2 -> 500
    step 5/5 | loss: 5.530260 | grad_norm 1.62 | lr 1.00e-5 | [speed] | [time]
    model in out/model
    checkpoint in out/checkpoints/step-5
    peak memory [size] (planned [size])
    ");
    let second = folder.succeeds(&["train", "run.yaml", "max_steps=5", RESUME]);
    assert!(second.contains("there are no steps left: the run ends at step 5\n"), "{second}");
    folder.succeeds(&["train", "run.yaml", "max_steps=6", "resume_from_checkpoint=out/checkpoints/step-4"]);
    assert_eq!(folder.read("out/metrics.jsonl").lines().count(), 6);
}

#[test]
fn a_flipped_bit_in_the_latest() {
    let folder = interrupted();
    flip_bit(&folder.path("out/checkpoints/step-4/exp_avg-rank-0.safetensors"));
    let ran = folder.run(&["train", "run.yaml", "max_steps=6", RESUME]);
    assert_eq!(ran.code, Some(0), "{ran:#?}");
    let notes: Vec<&str> =
        ran.stdout.lines().filter(|l| l.contains("damaged checkpoint") || l.contains("resumed")).collect();
    assert_snapshot!(without_hashes(&notes.join("\n")), @r"
    skipped a damaged checkpoint: out/checkpoints/step-4/exp_avg-rank-0.safetensors is corrupt: its BLAKE3 hash is [hash], expected [hash]
    resumed from out/checkpoints/step-2 at step 2
    ");
    assert!(folder.read("out/logs/training.log").contains("skipped a damaged checkpoint"));
}

#[test]
fn all_damaged() {
    let damage = |folder: &Folder| {
        for step in ["step-2", "step-4"] {
            flip_bit(&folder.path(&format!("out/checkpoints/{step}/model-rank-0.safetensors")));
        }
    };
    assert_snapshot!(refused(damage, &[], 65), @r"
    error: all checkpoints in out/checkpoints are damaged; the newest one: out/checkpoints/step-4/model-rank-0.safetensors is corrupt: its BLAKE3 hash is [hash], expected [hash]
    hint: remove the damaged folders, or start over with overwrite_output_dir: true.
    ");
    let one = ["resume_from_checkpoint=out/checkpoints/step-4"];
    assert_snapshot!(refused(damage, &one, 65), @r"
    error: out/checkpoints/step-4/model-rank-0.safetensors is corrupt: its BLAKE3 hash is [hash], expected [hash]
    hint: the checkpoint was changed after it was written: use an earlier one.
    ");
}

#[test]
fn cut_short() {
    let cut = |folder: &Folder| {
        fs::remove_dir_all(folder.path("out/checkpoints/step-2")).unwrap();
        folder.write("out/checkpoints/step-4/model-rank-0.safetensors", "");
    };
    assert_snapshot!(refused(cut, &[], 65), @r"
    error: all checkpoints in out/checkpoints are damaged; the newest one: out/checkpoints/step-4/model-rank-0.safetensors has 0 bytes, expected 150592
    hint: remove the damaged folders, or start over with overwrite_output_dir: true.
    ");
}

#[test]
fn changed_data() {
    assert_snapshot!(refused(|f| f.write("data.jsonl", rows(9)), &[], 64), @r"
    error: out/checkpoints/step-4: the checkpoint has dataset rows 8, but this run has 9
    hint: to resume, restore the data files, the tokenizer, max_length and packing. Otherwise start a new run in another output_dir.
    ");
    let other = |f: &Folder| f.write("data.jsonl", rows(8).replace("lockstep", "Lockstep"));
    assert_snapshot!(refused(other, &[], 64), @r"
    error: out/checkpoints/step-4: the checkpoint has dataset hash [hash], but this run has [hash]
    hint: to resume, restore the data files, the tokenizer, max_length and packing. Otherwise start a new run in another output_dir.
    ");
    assert_snapshot!(refused(|_| (), &["max_length=20"], 64), @r"
    error: out/checkpoints/step-4: the checkpoint has dataset hash [hash], but this run has [hash]
    hint: to resume, restore the data files, the tokenizer, max_length and packing. Otherwise start a new run in another output_dir.
    ");
}

#[test]
fn changed_settings() {
    assert_snapshot!(refused(|_| (), &["per_device_train_batch_size=4"], 64), @r"
    error: out/checkpoints/step-4: the checkpoint has rows per step 2, but this run has 4
    hint: to resume, restore per_device_train_batch_size times gradient_accumulation_steps. Otherwise start a new run in another output_dir.
    ");
    assert_snapshot!(refused(|_| (), &["seed=7"], 64), @r"
    error: out/checkpoints/step-4: the checkpoint has data_seed 42, but this run has 7
    hint: to resume, restore data_seed. Otherwise start a new run in another output_dir.
    ");
    assert_snapshot!(refused(|_| (), &["shuffle=false"], 64), @r"
    error: out/checkpoints/step-4: the checkpoint has shuffle true, but this run has false
    hint: to resume, restore shuffle. Otherwise start a new run in another output_dir.
    ");
    // The same rows in other micro-batches are the same run, up to the order of summation.
    let folder = interrupted();
    folder.succeeds(&[
        "train",
        "run.yaml",
        "max_steps=6",
        RESUME,
        "per_device_train_batch_size=1",
        "gradient_accumulation_steps=2",
    ]);
}

/// Allowed changes are reported, in the output and in the log.
#[test]
fn changes_are_reported() {
    let folder = interrupted();
    let args = [
        "train",
        "run.yaml",
        "max_steps=6",
        RESUME,
        "learning_rate=1e-3",
        "per_device_train_batch_size=1",
        "gradient_accumulation_steps=2",
    ];
    let text = folder.succeeds(&args);
    let changes: Vec<&str> = text.lines().filter(|line| line.contains(" changed since ")).collect();
    assert_snapshot!(changes.join("\n"), @r"
    setting changed since the checkpoint: gradient_accumulation_steps: 1 -> 2
    setting changed since the checkpoint: learning_rate: 5e-5 -> 1e-3
    setting changed since the checkpoint: max_steps: 4 -> 6
    setting changed since the checkpoint: per_device_train_batch_size: 2 -> 1
    setting changed since the checkpoint: save_steps: 2 -> 500
    fingerprint changed since the checkpoint: micro-batches: 1 -> 2
    fingerprint changed since the checkpoint: accumulation order: none -> local
    ");
    let log = folder.read("out/logs/training.log");
    assert!(changes.iter().all(|change| log.contains(&format!(" {change}\n"))), "{log}");
    // A resumed run that is the same has nothing to report.
    let same = folder.succeeds(&args);
    assert!(!same.contains("changed since"), "{same}");
}

/// The manifest of a checkpoint, with `change` made to it.
fn rewrite_manifest(folder: &Folder, checkpoint: &str, change: impl FnOnce(&mut serde_json::Value)) {
    let path = format!("out/checkpoints/{checkpoint}/manifest.json");
    let mut whole: serde_json::Value = serde_json::from_str(&folder.read(&path)).unwrap();
    change(&mut whole["manifest"]);
    let body = serde_json::to_string_pretty(&whole["manifest"]).unwrap();
    let hash = blake3::hash(body.as_bytes()).to_hex();
    folder.write(&path, format!("{{\n\"blake3\": \"{hash}\",\n\"manifest\": {body}\n}}\n"));
}

/// The run's fingerprint is the same in the plan, the metrics, the log and the checkpoint.
#[test]
fn the_fingerprint_is_kept() {
    let folder = interrupted();
    let plan = folder.succeeds(&["plan", "run.yaml"]);
    let hash = plan.split_once("\nfingerprint ").unwrap().1[..12].to_string();
    let metrics = folder.read("out/metrics.jsonl");
    let lines: Vec<serde_json::Value> = metrics.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!((lines.len(), &lines[0]["step"]), (4, &1.into()));
    assert_eq!(lines[0]["fingerprint"], hash.as_str());
    assert_eq!(lines[0]["numbers"]["sum over ranks"], "one rank");
    assert!(lines[1..].iter().all(|line| line.get("fingerprint").is_none()));
    assert!(folder.read("out/logs/training.log").contains(&format!(" fingerprint {hash} | lockstep: ")));
    rewrite_manifest(&folder, "step-4", |manifest| {
        assert_eq!(manifest["numbers"]["fingerprint"], hash.as_str());
        assert_eq!(manifest["settings"]["max_steps"], "4");
    });
}

/// Checkpoints of the version before the fingerprint load, with nothing to compare.
#[test]
fn a_checkpoint_without_a_fingerprint() {
    let folder = interrupted();
    rewrite_manifest(&folder, "step-4", |manifest| {
        let manifest = manifest.as_object_mut().unwrap();
        manifest.remove("numbers").unwrap();
        manifest.remove("settings").unwrap();
        manifest["format"] = 1.into();
    });
    let text = folder.succeeds(&["train", "run.yaml", "max_steps=6", RESUME]);
    assert!(text.contains("resumed from out/checkpoints/step-4 at step 4\n"), "{text}");
    assert!(!text.contains("changed since"), "{text}");
}

#[test]
fn changed_model() {
    let other =
        |f: &Folder| f.write("run.yaml", RUN.replace("intermediate_size: 64", "intermediate_size: 96"));
    assert_snapshot!(refused(other, &[], 65), @r"
    error: `model/model.layers.0.mlp.gate_proj.weight` in out/checkpoints/step-4/manifest.json has shape [64, 32], expected [96, 32]
    hint: the model configuration does not match these weights.
    ");
    let more = |f: &Folder| f.write("run.yaml", RUN.replace("num_hidden_layers: 2", "num_hidden_layers: 3"));
    assert_snapshot!(refused(more, &[], 65), @r"
    error: out/checkpoints/step-4/manifest.json has no tensor `model/model.layers.2.self_attn.q_proj.weight`
    hint: the most similar name is `model/model.layers.0.self_attn.q_proj.weight`.
    ");
    let fewer = |f: &Folder| f.write("run.yaml", RUN.replace("num_hidden_layers: 2", "num_hidden_layers: 1"));
    assert_snapshot!(refused(fewer, &[], 65), @r"
    error: out/checkpoints/step-4: the model has no tensors of these names: exp_avg/model.layers.1.input_layernorm.weight, exp_avg/model.layers.1.mlp.down_proj.weight, exp_avg/model.layers.1.mlp.gate_proj.weight, exp_avg/model.layers.1.mlp.up_proj.weight, exp_avg/model.layers.1.post_attention_layernorm.weight, exp_avg/model.layers.1.self_attn.k_proj.weight and 21 more
    hint: these weights belong to a different model than the one in the configuration.
    ");
}

/// Bytes that all ranks read and verified before the last start, as the log has them.
fn loaded(folder: &Folder) -> (u64, u64) {
    let log = folder.read("out/logs/training.log");
    let line =
        log.lines().rfind(|line| line.contains("loading: all ranks read ")).expect("a line on loading");
    let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
    (numbers[numbers.len() - 2], numbers[numbers.len() - 1])
}

/// Bytes of a folder's files: of tensors, and of all that a manifest lists.
fn sizes(folder: &Folder, path: &str) -> (u64, u64) {
    let files = fs::read_dir(folder.path(path)).unwrap().map(|entry| entry.unwrap());
    let listed = files.filter(|entry| entry.file_name() != "manifest.json");
    let size = |(tensors, all): (u64, u64), entry: fs::DirEntry| {
        let bytes = entry.metadata().unwrap().len();
        let of_tensors = entry.path().extension().is_some_and(|e| e == "safetensors");
        (if of_tensors { tensors + bytes } else { tensors }, all + bytes)
    };
    listed.fold((0, 0), size)
}

/// Four ranks resume from a checkpoint of two: each reads its own part, and each file is verified by one of them.
#[test]
fn a_rank_reads_what_it_holds_and_each_file_is_verified_once() {
    let folder = Folder::new(RUN);
    let train = |settings: &[&str]| {
        folder.succeeds(
            &[&["train", "run.yaml", "threads=1", "per_device_train_batch_size=1"], settings].concat(),
        );
    };
    train(&["--nproc", "2", "strategy=zero3", "max_steps=2", "gradient_accumulation_steps=2"]);
    let (tensors, listed) = sizes(&folder, "out/checkpoints/step-2");
    train(&["--nproc", "4", "strategy=zero3", "max_steps=3", RESUME]);
    let (read, verified) = loaded(&folder);
    assert_eq!(verified, listed);
    // Headers are read by every rank that needs the file, and this model is hardly larger than its headers.
    assert!((tensors * 9 / 10..tensors * 3 / 2).contains(&read), "{read} bytes read of {tensors}");
    // If every rank holds everything, every rank reads it, and one verifies it.
    let (tensors, listed) = sizes(&folder, "out/checkpoints/step-3");
    train(&["--nproc", "2", "strategy=ddp", "max_steps=4", "gradient_accumulation_steps=2", RESUME]);
    let (read, verified) = loaded(&folder);
    assert_eq!(verified, listed);
    assert!((2 * tensors * 9 / 10..2 * tensors * 11 / 10).contains(&read), "{read} bytes read of {tensors}");
}

#[test]
fn a_rank_reads_what_it_holds_of_a_model_folder() {
    let folder = Folder::with_model();
    let (tensors, _) = sizes(&folder, "model");
    folder.succeeds(&["train", "run.yaml", "threads=1", "--nproc", "2", "strategy=zero3"]);
    let (read, verified) = loaded(&folder);
    assert_eq!(verified, 0);
    assert!((tensors * 9 / 10..tensors * 11 / 10).contains(&read), "{read} bytes read of {tensors}");
}

/// Whichever rank finds the damage, all of them skip the checkpoint or end with the same error.
#[test]
fn ranks_agree_on_what_is_damaged() {
    let folder = Folder::new(RUN);
    let ranks = ["train", "run.yaml", "threads=1", "--nproc", "2", "strategy=zero3"];
    folder.succeeds(&[&ranks[..], &["max_steps=4", "save_steps=2"]].concat());
    let files = ["model-rank-0", "model-rank-1", "exp_avg-rank-0", "exp_avg_sq-rank-1"];
    for file in files {
        let path = folder.path(&format!("out/checkpoints/step-4/{file}.safetensors"));
        flip_bit(&path);
        let expected = format!(
            "out/checkpoints/step-4/{file}.safetensors is corrupt: its BLAKE3 hash is [hash], expected [hash]"
        );
        let ran = folder.run(&[&ranks[..], &["resume_from_checkpoint=out/checkpoints/step-4"]].concat());
        assert_eq!(ran.code, Some(65), "{ran:#?}");
        assert!(without_hashes(&ran.stderr).contains(&expected), "{ran:#?}");
        flip_bit(&path);
    }
    let path = folder.path("out/checkpoints/step-4/exp_avg-rank-1.safetensors");
    flip_bit(&path);
    let ran = folder.run(&[&ranks[..], &["max_steps=6", RESUME]].concat());
    assert_eq!(ran.code, Some(0), "{ran:#?}");
    let notes: Vec<&str> =
        ran.stdout.lines().filter(|l| l.contains("damaged checkpoint") || l.contains("resumed")).collect();
    assert_snapshot!(without_hashes(&notes.join("\n")), @r"
    skipped a damaged checkpoint: out/checkpoints/step-4/exp_avg-rank-1.safetensors is corrupt: its BLAKE3 hash is [hash], expected [hash]
    resumed from out/checkpoints/step-2 at step 2
    ");
}

/// A step that diverges is reported and not applied. Checkpoints before it are kept and load.
#[test]
fn divergence_leaves_earlier_checkpoints_intact() {
    let folder = Folder::new(RUN);
    let wild = [
        "train",
        "run.yaml",
        "max_steps=4",
        "save_steps=1",
        "learning_rate=1e30",
        "lr_scheduler_type=constant",
    ];
    let ran = folder.run(&wild);
    assert_eq!(ran.code, Some(76), "{ran:#?}");
    assert_snapshot!(ran.stderr, @r"
    error: step 4: loss is NaN, gradient norm is NaN; 3 steps in a row were not finite; the first non-finite gradient is that of model.norm.weight (dataset rows [7, 2])
    hint: none of these steps was applied. Lower learning_rate, use a longer warmup, or set max_grad_norm: 1.0. Checkpoint out/checkpoints/step-1 is intact.
    ");
    folder.assert_no_partial();
    let kept = folder.path("out/checkpoints/step-1");
    assert!(kept.exists() && !folder.path("out/checkpoints/step-2").exists());
    let before = folder.tree();
    let second = folder.run(&[&wild[..], &[RESUME]].concat());
    assert_eq!((second.code, &second.stderr), (Some(76), &ran.stderr), "it loads, and diverges alike");
    let after = folder.tree();
    for (path, content) in before.iter().filter(|(path, _)| path.starts_with("out/checkpoints")) {
        assert_eq!(after.get(path), Some(content), "{}", path.display());
    }
}

/// `auto` resumes from a checkpoint, or starts from the beginning without one, and prints which.
#[test]
fn auto() {
    const AUTO: &str = "resume_from_checkpoint=auto";
    let folder = Folder::new(RUN);
    let resume_lines =
        |text: &str| text.lines().filter(|l| l.contains("resume")).collect::<Vec<_>>().join("\n");
    let first = folder.succeeds(&["train", "run.yaml", "max_steps=4", "save_strategy=no", AUTO]);
    assert_snapshot!(resume_lines(&first), @"resume_from_checkpoint: auto: no checkpoint in out/checkpoints; starting from the beginning");
    // Files of a run without checkpoints do not matter.
    fs::create_dir_all(folder.path("out/checkpoints/step-3.partial")).unwrap();
    let second = folder.succeeds(&["train", "run.yaml", "max_steps=4", "save_steps=2", AUTO]);
    assert_snapshot!(resume_lines(&second), @"resume_from_checkpoint: auto: no checkpoint in out/checkpoints; starting from the beginning");
    let third = folder.succeeds(&["train", "run.yaml", "max_steps=5", AUTO]);
    assert_snapshot!(resume_lines(&third), @"resumed from out/checkpoints/step-4 at step 4");
    // `overwrite_output_dir` does not delete a checkpoint that `auto` can resume from.
    let fourth = folder.succeeds(&["train", "run.yaml", "max_steps=6", AUTO, "overwrite_output_dir=true"]);
    assert_snapshot!(resume_lines(&fourth), @"resumed from out/checkpoints/step-5 at step 5");
    for step in [2, 4, 5, 6] {
        flip_bit(&folder.path(&format!("out/checkpoints/step-{step}/model-rank-0.safetensors")));
    }
    let refused = folder.train_refused(&["max_steps=7", AUTO], 65);
    assert!(
        refused.starts_with("error: all checkpoints in out/checkpoints are damaged; the newest one: "),
        "{refused}"
    );
}

/// Settings of `optim` and `freeze` for runs that are interrupted and resumed.
const TRAINED: [&[&str]; 7] = [
    &["optim=sgd", "momentum=0.9", "nesterov=true"],
    &["optim=sgd"],
    &["optim=lion", "weight_decay=0.1"],
    &["freeze=[model.layers.0, '*k_proj', lm_head]"],
    // Masters are remainders beside their weights, and whole in another memory.
    &["bf16=true"],
    &["bf16=true", "optim=adamw_8bit"],
    &["bf16=true", "master_weights=none", "optimizer_state_dtype=bf16"],
];

/// A run that is resumed on other ranks, with another strategy and other offload, is bit-identical to one without an
/// interruption.
#[test]
fn other_optimizers_formats_and_frozen_tensors_reshard() {
    for trained in TRAINED {
        // The learning rate does not depend on the number of steps.
        let common =
            ["train", "run.yaml", "threads=1", "accumulation_order=reduced", "lr_scheduler_type=constant"];
        let train =
            |folder: &Folder, settings: &[&str]| folder.succeeds(&[&common[..], trained, settings].concat());
        let split =
            ["--nproc", "2", "strategy=zero3", "offload_optimizer=cpu", "max_steps=2", "save_steps=2"];
        let joined = ["strategy=ddp", "gradient_accumulation_steps=2", "max_steps=4"];
        let [whole, parts] = [0, 1].map(|_| Folder::new(RUN));
        // The same rows in every step: two ranks of one micro-batch, one rank of two.
        train(&whole, &[&joined[..2], &["max_steps=2", "save_steps=2"]].concat());
        train(&whole, &[&joined[..], &[RESUME]].concat());
        train(&parts, &split);
        train(&parts, &[&joined[..], &[RESUME]].concat());
        let losses = |folder: &Folder| -> Vec<f64> {
            let metrics = folder.read("out/metrics.jsonl");
            let lines = metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
            lines.map(|line| line["loss"].as_f64().unwrap()).collect()
        };
        let (one, other) = (losses(&whole), losses(&parts));
        assert_eq!(one.len(), 4, "{trained:?}");
        // Sums over ranks and over micro-batches are grouped differently, and bf16 weights amplify that.
        let tolerance = if trained.contains(&"bf16=true") { 2e-3 } else { 2e-6 };
        let close = one.iter().zip(&other).all(|(a, b)| (a - b).abs() <= tolerance * a.abs());
        assert!(close, "{trained:?}: {one:?} and {other:?}");
        // From the same checkpoint on, everything is bit-identical.
        let second = Folder::new(RUN);
        train(&second, &split);
        train(&second, &["--nproc", "2", "strategy=zero1", "offload_optimizer=nvme", "max_steps=4", RESUME]);
        let straight = Folder::new(RUN);
        train(&straight, &["--nproc", "2", "strategy=zero2", "max_steps=4", "save_steps=4"]);
        let model = "out/model/model.safetensors";
        let [second, straight] = [&second, &straight].map(|f| std::fs::read(f.path(model)).unwrap());
        assert!(second == straight, "{trained:?}: a run that was resumed ends with other weights");
    }
}

#[test]
fn another_optimizer() {
    assert_snapshot!(refused(|_| {}, &["optim=lion"], 64), @r"
    error: out/checkpoints/step-4: the checkpoint's optimizer state is exp_avg and exp_avg_sq, but lion needs exp_avg
    hint: resume with the optimizer, momentum and `optimizer_state_dtype` of the original run, or start a new run from its model folder.
    ");
    assert_snapshot!(refused(|_| {}, &["optim=adamw_8bit"], 64), @r"
    error: out/checkpoints/step-4: the checkpoint's optimizer state is exp_avg and exp_avg_sq, but adamw needs exp_avg_codes and exp_avg_scales and exp_avg_sq_codes and exp_avg_sq_scales
    hint: resume with the optimizer, momentum and `optimizer_state_dtype` of the original run, or start a new run from its model folder.
    ");
    assert_snapshot!(refused(|_| {}, &["optim=sgd"], 64), @r"
    error: out/checkpoints/step-4: the checkpoint's optimizer state is exp_avg and exp_avg_sq, but sgd needs none
    hint: resume with the optimizer, momentum and `optimizer_state_dtype` of the original run, or start a new run from its model folder.
    ");
}
