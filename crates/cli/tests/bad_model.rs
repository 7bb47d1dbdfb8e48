//! Invalid model folders: errors name the file, the tensor and what was expected.

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
    assert_snapshot!(Folder::new(TUNE).train_refused(&[], 66), @r"
    error: model folder model does not exist
    hint: give a folder with a model, or the name of a model on the Hugging Face Hub, such as org/name.
    ");
}

#[test]
fn no_config() {
    let remove = |folder: &Folder| fs::remove_file(folder.path("model/config.json")).unwrap();
    assert_snapshot!(refused(66, remove), @r"
    error: model has no config.json
    hint: a model folder contains config.json and model.safetensors, or shards with model.safetensors.index.json.
    ");
}

#[test]
fn no_weights() {
    let remove = |folder: &Folder| fs::remove_file(folder.path(WEIGHTS)).unwrap();
    assert_snapshot!(refused(66, remove), @r"
    error: model has no safetensors weights
    hint: a model folder contains config.json and model.safetensors, or shards with model.safetensors.index.json.
    ");
}

#[test]
fn pickled_weights() {
    let pickle = |f: &Folder| fs::rename(f.path(WEIGHTS), f.path("model/pytorch_model.bin")).unwrap();
    assert_snapshot!(refused(66, pickle), @r"
    error: model has no safetensors weights; pytorch_model.bin is not safetensors
    hint: pickled weights can run code when they are loaded, so they are not supported: load the folder in transformers and save it with save_pretrained(folder, safe_serialization=True).
    ");
}

#[test]
fn no_tokenizer() {
    let remove = |folder: &Folder| fs::remove_file(folder.path("model/tokenizer.json")).unwrap();
    assert_snapshot!(refused(66, remove), @r"
    error: model has no tokenizer.json
    hint: copy the tokenizer.json that the model was trained with into the folder, or load the tokenizer with AutoTokenizer.from_pretrained in transformers and write it there with save_pretrained.
    ");
}

#[test]
fn truncated() {
    let cut = |folder: &Folder| {
        let bytes = fs::read(folder.path(WEIGHTS)).unwrap();
        folder.write(WEIGHTS, &bytes[..bytes.len() - 100]);
    };
    assert_snapshot!(refused(65, cut), @r"
    error: model/model.safetensors is not a valid safetensors file: truncated: expected 150464 bytes, found 150364
    hint: the download or copy is incomplete: fetch the file again.
    ");
}

#[test]
fn malformed_header() {
    let spoil = |folder: &Folder| {
        let mut bytes = fs::read(folder.path(WEIGHTS)).unwrap();
        bytes[9] = b'?';
        folder.write(WEIGHTS, bytes);
    };
    assert_snapshot!(refused(65, spoil), @r"
    error: model/model.safetensors is not a valid safetensors file: its header is invalid: key must be a string at line 1 column 2
    hint: the file is damaged: fetch or write it again.
    ");
}

#[test]
fn not_fetched() {
    let pointer = |folder: &Folder| {
        folder.write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n");
    };
    assert_snapshot!(refused(65, pointer), @r"
    error: model/model.safetensors is not a valid safetensors file: it is a Git LFS pointer, not the file itself
    hint: fetch the file itself with `git lfs pull`, or convert it with safetensors' converter.
    ");
}

#[test]
fn wrong_shape() {
    let change = |tensors: &mut Vec<tensors::Tensor>| {
        let up = tensors.iter_mut().find(|t| t.name.ends_with("layers.1.mlp.up_proj.weight")).unwrap();
        up.shape.swap(0, 1);
    };
    assert_snapshot!(with_tensors(65, change), @r"
    error: `model.layers.1.mlp.up_proj.weight` in model/model.safetensors has shape [32, 64], expected [64, 32]
    hint: the model configuration does not match these weights.
    ");
}

#[test]
fn wrong_dtype() {
    let change = |tensors: &mut Vec<tensors::Tensor>| tensors[0].dtype = "I32".into();
    assert_snapshot!(with_tensors(65, change), @r"
    error: `lm_head.weight` in model/model.safetensors has dtype I32, but only F32, F16 and BF16 are supported
    hint: convert the weights to one of these dtypes.
    ");
}

#[test]
fn missing_tensor() {
    let change = |tensors: &mut Vec<tensors::Tensor>| tensors.retain(|t| t.name != "model.norm.weight");
    assert_snapshot!(with_tensors(65, change), @r"
    error: model has no tensor `model.norm.weight`
    hint: the model configuration does not match these weights.
    ");
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
    assert_snapshot!(with_tensors(65, change), @r"
    error: model: the model has no tensors of these names: model.layers.2.self_attn.q_proj.bias, model.layers.3.self_attn.q_proj.bias, model.layers.4.self_attn.q_proj.bias, model.layers.5.self_attn.q_proj.bias, model.layers.6.self_attn.q_proj.bias, model.layers.7.self_attn.q_proj.bias and 2 more
    hint: these weights belong to a different model than the one in the configuration.
    ");
}

#[test]
fn config_that_is_not_json() {
    assert_snapshot!(with_config(64, "{", "{{"), @r"
    error: model/config.json: not valid JSON: key must be a string at line 1 column 2
    ");
}

#[test]
fn unimplemented_architecture() {
    assert_snapshot!(with_config(64, "LlamaForCausalLM", "MixtralForCausalLM"), @r"
    error: model/config.json: architecture MixtralForCausalLM is not supported
    hint: supported architectures: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, and ForSequenceClassification of the same families.
    ");
}

#[test]
fn rope_scaling() {
    let scaling = "\"rope_scaling\": {\"rope_type\": \"dynamic\", \"factor\": 4.0}, \"hidden_size\"";
    assert_snapshot!(with_config(64, "\"hidden_size\"", scaling), @r#"
    error: model/config.json: `rope_scaling.rope_type` = "dynamic" is not supported
    hint: ignoring it would give wrong results, so the model is rejected.
    "#);
}

#[test]
fn window_of_another_family() {
    let window = "\"sliding_window\": 4096, \"hidden_size\"";
    assert_snapshot!(with_config(64, "\"hidden_size\"", window), @r"
    error: model/config.json: `sliding_window` = 4096 is not an option of LlamaForCausalLM
    hint: remove `sliding_window` if the model was trained without it, or set the architecture that has it.
    ");
}

#[test]
fn heads_that_do_not_fit() {
    let text = RUN.replace("num_attention_heads: 2", "num_attention_heads: 2, num_key_value_heads: 3");
    assert_snapshot!(Folder::new(&text).train_refused(&[], 64), @r"
    error: model: `num_attention_heads` 2 is not a multiple of `num_key_value_heads` 3
    ");
    let text = RUN.replace("hidden_size: 32, ", "");
    assert_snapshot!(Folder::new(&text).train_refused(&[], 64), @r"
    error: model: `hidden_size` is missing
    ");
}

#[test]
fn vocabulary_smaller_than_the_tokenizer() {
    let folder = Folder::new(TUNE);
    golden("qwen3-tied", &folder.path("model"));
    assert_snapshot!(folder.train_refused(&["tokenizer=byte"], 64), @r"
    error: the tokenizer has 257 tokens, but the model's vocab_size is 101: ids from 101 on have no embedding
    hint: use the model's own tokenizer, or a model with a vocab_size of at least 257.
    ");
}

/// A NaN weight is found at the first step. No step is applied, and nothing is saved.
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
        assert!(ran.stderr.starts_with(&format!("error: step 2: loss is {shown}, ")), "{}", ran.stderr);
        folder.assert_no_partial();
        assert!(!folder.path("out/model").exists() && !folder.path("out/checkpoints").exists());
        assert!(folder.read("out/logs/training.log").contains("step 1 was skipped: objective "));
        if bad.is_nan() {
            assert_snapshot!(ran.stderr, @r"
    error: step 2: loss is NaN, gradient norm is NaN; 2 steps in a row were not finite; the first non-finite gradient is that of model.norm.weight (dataset rows [1, 6])
    hint: no step was applied. If the first steps fail, check the model's weights for NaN and infinity.
    ");
        }
    }
}
