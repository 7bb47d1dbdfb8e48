//! Model folders that cannot be used: the file, the tensor and what was expected are named.

use std::fs;

use insta::assert_snapshot;

use crate::export::golden;
use crate::support::{Folder, RUN, TUNE};
use crate::tensors;

const WEIGHTS: &str = "model/model.safetensors";

/// Damages the folder's weights and trains from it.
fn refused(code: i32, damage: impl FnOnce(&Folder)) -> String {
    let folder = Folder::with_model();
    damage(&folder);
    folder.train_refused(&[], code)
}

fn with_tensors(code: i32, change: impl FnOnce(&mut Vec<tensors::Tensor>)) -> String {
    refused(code, |folder| tensors::edit(&folder.path(WEIGHTS), change))
}

fn with_config(code: i32, from: &str, to: &str) -> String {
    refused(code, |folder| {
        let config = folder.read("model/config.json");
        assert!(config.contains(from), "{config}");
        folder.write("model/config.json", config.replace(from, to));
    })
}

#[test]
fn no_folder() {
    assert_snapshot!(Folder::new(TUNE).train_refused(&[], 66), @"FILL");
}

#[test]
fn no_config() {
    let remove = |folder: &Folder| fs::remove_file(folder.path("model/config.json")).unwrap();
    assert_snapshot!(refused(66, remove), @"FILL");
}

#[test]
fn no_weights() {
    let remove = |folder: &Folder| fs::remove_file(folder.path(WEIGHTS)).unwrap();
    assert_snapshot!(refused(66, remove), @"FILL");
}

#[test]
fn pickled_weights() {
    let pickle = |f: &Folder| fs::rename(f.path(WEIGHTS), f.path("model/pytorch_model.bin")).unwrap();
    assert_snapshot!(refused(66, pickle), @"FILL");
}

#[test]
fn no_tokenizer() {
    let remove = |folder: &Folder| fs::remove_file(folder.path("model/tokenizer.json")).unwrap();
    assert_snapshot!(refused(66, remove), @"FILL");
}

#[test]
fn truncated() {
    let cut = |folder: &Folder| {
        let bytes = fs::read(folder.path(WEIGHTS)).unwrap();
        folder.write(WEIGHTS, &bytes[..bytes.len() - 100]);
    };
    assert_snapshot!(refused(65, cut), @"FILL");
}

#[test]
fn malformed_header() {
    let spoil = |folder: &Folder| {
        let mut bytes = fs::read(folder.path(WEIGHTS)).unwrap();
        bytes[9] = b'?';
        folder.write(WEIGHTS, bytes);
    };
    assert_snapshot!(refused(65, spoil), @"FILL");
}

#[test]
fn not_fetched() {
    let pointer = |folder: &Folder| {
        folder.write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n");
    };
    assert_snapshot!(refused(65, pointer), @"FILL");
}

#[test]
fn wrong_shape() {
    let change = |tensors: &mut Vec<tensors::Tensor>| {
        let up = tensors.iter_mut().find(|t| t.name.ends_with("layers.1.mlp.up_proj.weight")).unwrap();
        up.shape.swap(0, 1);
    };
    assert_snapshot!(with_tensors(65, change), @"FILL");
}

#[test]
fn wrong_dtype() {
    let change = |tensors: &mut Vec<tensors::Tensor>| tensors[0].dtype = "I32".into();
    assert_snapshot!(with_tensors(65, change), @"FILL");
}

#[test]
fn missing_tensor() {
    let change = |tensors: &mut Vec<tensors::Tensor>| tensors.retain(|t| t.name != "model.norm.weight");
    assert_snapshot!(with_tensors(65, change), @"FILL");
}

#[test]
fn extra_tensors() {
    let change = |tensors: &mut Vec<tensors::Tensor>| {
        for layer in 2..10 {
            let mut extra = tensors[0].clone();
            extra.name = format!("model.layers.{layer}.self_attn.q_proj.bias");
            tensors.push(extra);
        }
    };
    assert_snapshot!(with_tensors(65, change), @"FILL");
}

#[test]
fn config_that_is_not_json() {
    assert_snapshot!(with_config(64, "{", "{{"), @"FILL");
}

#[test]
fn unimplemented_architecture() {
    assert_snapshot!(with_config(64, "LlamaForCausalLM", "MistralForCausalLM"), @"FILL");
}

#[test]
fn rope_scaling() {
    let scaling = "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0}, \"hidden_size\"";
    assert_snapshot!(with_config(64, "\"hidden_size\"", scaling), @"FILL");
}

#[test]
fn heads_that_do_not_fit() {
    let text = RUN.replace("num_attention_heads: 2", "num_attention_heads: 2, num_key_value_heads: 3");
    assert_snapshot!(Folder::new(&text).train_refused(&[], 64), @"FILL");
    let text = RUN.replace("hidden_size: 32, ", "");
    assert_snapshot!(Folder::new(&text).train_refused(&[], 64), @"FILL");
}

#[test]
fn vocabulary_smaller_than_the_tokenizer() {
    let folder = Folder::new(TUNE);
    golden("qwen3-tied", &folder.path("model"));
    assert_snapshot!(folder.train_refused(&["tokenizer=byte"], 64), @"FILL");
}

/// A weight that is not a number shows at the first step, which is not applied.
#[test]
fn weights_that_are_not_numbers() {
    for (bad, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "NaN")] {
        let folder = Folder::with_model();
        tensors::edit(&folder.path(WEIGHTS), |tensors| {
            let norm = tensors.iter_mut().find(|t| t.name == "model.norm.weight").unwrap();
            norm.bytes[..4].copy_from_slice(&bad.to_le_bytes());
        });
        let ran = folder.run(&["train", "run.yaml", "save_steps=1"]);
        assert_eq!(ran.code, Some(76), "{ran:#?}");
        assert!(ran.stderr.starts_with(&format!("error: step 1: the loss is {shown}, ")), "{}", ran.stderr);
        folder.assert_no_partial();
        assert!(!folder.path("out/model").exists() && !folder.path("out/checkpoints").exists());
        assert!(folder.read("out/logs/training.log").contains("stopped: step 1: the objective is "));
        if bad.is_nan() {
            assert_snapshot!(ran.stderr, @"FILL");
        }
    }
}
