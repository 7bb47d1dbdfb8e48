//! Model folders survive a round trip: nothing is lost, rounded or renamed.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use crate::support::{Folder, RUN, TUNE};
use crate::tensors;

/// Copies one of the repository's goldens, a model folder without a tokenizer, to `to`.
pub(crate) fn golden(case: &str, to: &Path) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens").join(case);
    fs::create_dir(to).unwrap();
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

/// Words as tokens, few enough for the goldens' vocabularies.
const WORDS: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
"normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
"model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "one": 1, "step": 2, "the": 3, "other": 4}}}"#;

fn json(folder: &Folder, name: &str) -> Map<String, Value> {
    serde_json::from_str(&folder.read(name)).unwrap()
}

#[test]
fn goldens_come_out_as_they_went_in() {
    let cases = [
        ("llama-untied", "mixed_precision=no"),
        ("llama-tied", "mixed_precision=no"),
        ("qwen3", "mixed_precision=no"),
        ("qwen3-tied", "mixed_precision=no"),
        ("qwen3-tied-bf16", "mixed_precision=bf16"),
    ];
    for (case, precision) in cases {
        let folder = Folder::new(TUNE);
        golden(case, &folder.path("model"));
        folder.write("model/tokenizer.json", WORDS);
        let args = ["train", "run.yaml", "init=pretrained", precision];
        folder.succeeds(&[&args[..], &["max_steps=0", "output_dir=exported"]].concat());
        folder.succeeds(&[&args[..], &["learning_rate=0", "output_dir=still", "save_steps=1"]].concat());
        let given = tensors::read(&folder.path("model/model.safetensors"));
        for out in ["exported", "still"] {
            let found = tensors::read(&folder.path(&format!("{out}/model/model.safetensors")));
            assert!(found == given, "{case}: the tensors in {out} differ");
            let (given, found) =
                (json(&folder, "model/config.json"), json(&folder, &format!("{out}/model/config.json")));
            assert_eq!(found, given, "{case}");
            let name = "model/generation_config.json";
            assert_eq!(folder.read(&format!("{out}/{name}")), folder.read(name));
            assert_eq!(folder.read(&format!("{out}/model/tokenizer.json")), WORDS);
        }
    }
}

#[test]
fn a_trained_model_is_fine_tuned() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml", "save_strategy=no", "output_dir=first"]);
    let tune = TUNE.replace("model_name_or_path: model", "model_name_or_path: first/model");
    folder.write("run.yaml", tune);
    folder.succeeds(&["train", "run.yaml", "max_steps=0", "output_dir=same"]);
    for name in [
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        let (first, same) = (
            fs::read(folder.path(&format!("first/model/{name}"))),
            fs::read(folder.path(&format!("same/model/{name}"))),
        );
        assert_eq!(first.unwrap(), same.unwrap(), "{name}");
    }
    folder.succeeds(&["train", "run.yaml", "save_strategy=no", "output_dir=tuned"]);
    let (first, tuned) = (
        tensors::read(&folder.path("first/model/model.safetensors")),
        tensors::read(&folder.path("tuned/model/model.safetensors")),
    );
    assert!(first.iter().zip(&tuned).all(|(a, b)| a.name == b.name && a.shape == b.shape));
    assert_ne!(first, tuned, "training changes weights");
    let config = json(&folder, "tuned/model/config.json");
    assert_eq!(config["architectures"], serde_json::json!(["LlamaForCausalLM"]));
    assert_eq!(config["vocab_size"], 257);
}

/// bf16 weights are the rounded master weights, and their type says so.
#[test]
fn bf16_is_written_as_bf16() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml", "mixed_precision=bf16"]);
    let tensors = tensors::read(&folder.path("out/model/model.safetensors"));
    assert!(tensors.iter().all(|t| t.dtype == "BF16"));
    let config = json(&folder, "out/model/config.json");
    assert!(config.values().any(|v| v == "bfloat16"), "{config:?}");
    // The checkpoint has the fp32 states of the optimizer.
    let kept = tensors::read(&folder.path("out/checkpoints/step-2/model-rank-0.safetensors"));
    assert!(kept.iter().all(|t| t.dtype == "F32"));
}

/// A checkpoint exports to the same folder as the run's own, in any data type, without the run's data or model.
#[test]
fn a_checkpoint_is_exported() {
    let folder = Folder::with_model();
    folder.write("model/generation_config.json", "{\"max_new_tokens\": 7}\n");
    folder.succeeds(&["train", "run.yaml", "save_steps=1", "bf16=true"]);
    for gone in ["data.jsonl", "run.yaml", "model/config.json"] {
        std::fs::remove_file(folder.path(gone)).unwrap();
    }
    let printed = folder.succeeds(&["export", "out", "exported"]);
    assert_eq!(printed, "exported out/checkpoints/step-2 as bf16\nmodel in exported\n");
    let names = |dir: &str| {
        let entries = folder.path(dir).read_dir().unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names("exported"), names("out/model"));
    for name in names("exported") {
        let read = |dir: &str| std::fs::read(folder.path(dir).join(&name)).unwrap();
        if name != "model.safetensors" {
            assert!(read("exported") == read("out/model"), "{name}");
        }
    }
    let tensors = |dir: &str| tensors::read(&folder.path(dir).join("model.safetensors"));
    assert!(tensors("exported") == tensors("out/model"));
    folder.succeeds(&["export", "out/checkpoints/step-1", "wide", "--dtype", "f32"]);
    assert!(folder.read("wide/config.json").contains("\"dtype\": \"float32\""));
    assert!(tensors("wide").iter().all(|t| t.dtype == "F32"));
    assert!(tensors("wide") != tensors("exported"));
}

#[test]
fn what_cannot_be_exported() {
    let folder = Folder::new(RUN);
    insta::assert_snapshot!(folder.refused(&["export", "nowhere", "exported"], 66), @r"
    error: no complete checkpoint in nowhere
    hint: give a checkpoint (a `step-N` folder), or the output folder of a run that has saved one.
    ");
    folder.succeeds(&["train", "run.yaml", "save_steps=1"]);
    insta::assert_snapshot!(folder.refused(&["export", "out/model", "exported"], 66), @r"
    error: no complete checkpoint in out/model
    hint: give a checkpoint (a `step-N` folder), or the output folder of a run that has saved one.
    ");
    folder.write("taken", "");
    insta::assert_snapshot!(folder.refused(&["export", "out", "taken"], 73), @r"
    error: taken exists and is not a model folder
    hint: choose another folder, or remove this one if it is not needed.
    ");
    tensors::flip_bit(&folder.path("out/checkpoints/step-2/model-rank-0.safetensors"));
    let ran = folder.run(&["export", "out/checkpoints/step-2", "exported"]);
    assert_eq!(ran.code, Some(65), "{ran:#?}");
    let printed = folder.succeeds(&["export", "out", "exported"]);
    assert!(
        printed.contains("skipped a damaged checkpoint") && printed.contains("step-1 as f32"),
        "{printed}"
    );
}
