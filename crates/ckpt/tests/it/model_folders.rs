//! Export and import of Hugging Face model folders.

use std::fs;
use std::ops::Range;
use std::path::Path;

use lockstep_ckpt::{CkptError, DEFAULT_SHARD_BYTES, Export, ModelFolder, TensorSpec, export_folder};
use lockstep_core::{Bytes, DType};

use crate::{source, value};

pub(crate) fn tensors() -> Vec<TensorSpec> {
    vec![
        TensorSpec::new("embed.weight", [8, 4]),
        TensorSpec::new("layer.weight", [4, 4]),
        TensorSpec::new("norm.weight", [4]),
    ]
}

pub(crate) fn export(dir: &Path, dtype: DType, shard_limit: Bytes) -> Result<(), CkptError> {
    let export = Export {
        kind: lockstep_ckpt::FolderKind::Model,
        files: &[
            ("config.json".to_string(), b"{\"model_type\": \"llama\"}\n".to_vec()),
            ("generation_config.json".to_string(), b"{}\n".to_vec()),
            ("tokenizer.json".to_string(), b"{}".to_vec()),
        ],
        tensors: &tensors(),
        dtype,
        shard_limit,
    };
    export_folder(dir, &export, &mut source)
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        dir.read_dir().unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn an_exported_folder_reads_back() {
    let root = tempfile::tempdir().unwrap();
    for (dtype, limit) in [
        (DType::F32, DEFAULT_SHARD_BYTES),
        (DType::F32, Bytes(140)),
        (DType::F32, Bytes(1)),
        (DType::BF16, Bytes(90)),
    ] {
        let dir = root.path().join(format!("{dtype}-{}", limit.0));
        export(&dir, dtype, limit).unwrap();
        let folder = ModelFolder::open(&dir).unwrap();
        assert_eq!(folder.config_json(), "{\"model_type\": \"llama\"}\n");
        for spec in tensors() {
            let range = 1..spec.elems();
            let mut out = vec![0.0; range.len()];
            folder.read_f32(&spec.name, &spec.shape, range.clone(), &mut out).unwrap();
            let expected: Vec<f32> = range
                .map(|e| value(&spec.name, e))
                .map(|v| if dtype == DType::BF16 { half::bf16::from_f32(v).to_f32() } else { v })
                .collect();
            assert_eq!(out, expected);
        }
        assert_eq!(folder.unused(["embed.weight", "not there"]), ["layer.weight", "norm.weight"]);
    }
    let listed = names(&root.path().join("f32-140"));
    assert_eq!(
        listed,
        [
            "config.json",
            "generation_config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json"
        ]
    );
    let index = fs::read_to_string(root.path().join("f32-140/model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], 52 * 4);
    assert_eq!(index["weight_map"]["norm.weight"], "model-00002-of-00002.safetensors");
    assert_eq!(names(root.path()).len(), 4);
}

#[test]
fn only_a_model_folder_is_replaced() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    export(&dir, DType::F32, Bytes(1)).unwrap();
    export(&dir, DType::F16, DEFAULT_SHARD_BYTES).unwrap();
    assert_eq!(names(&dir), ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(names(root.path()), ["model"]);

    let home = root.path().join("home");
    fs::create_dir(&home).unwrap();
    export(&home, DType::F32, DEFAULT_SHARD_BYTES).unwrap();
    fs::remove_file(home.join("config.json")).unwrap();
    fs::write(home.join("thesis.txt"), "x").unwrap();
    assert!(matches!(export(&home, DType::F32, DEFAULT_SHARD_BYTES), Err(CkptError::WouldReplace { .. })));
    assert!(home.join("thesis.txt").exists());
}

#[test]
fn a_failed_export_leaves_the_old_folder() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    export(&dir, DType::F32, DEFAULT_SHARD_BYTES).unwrap();
    let tensors = tensors();
    let spec = Export {
        kind: lockstep_ckpt::FolderKind::Model,
        files: &[("config.json".to_string(), b"{}".to_vec())],
        tensors: &tensors,
        dtype: DType::F32,
        shard_limit: DEFAULT_SHARD_BYTES,
    };
    let mut fails = |tensor: &str, _: Range<usize>, _: &mut [f32]| {
        Err(CkptError::Source { tensor: tensor.into(), source: "device lost".into() })
    };
    assert!(export_folder(&dir, &spec, &mut fails).is_err());
    assert_eq!(names(root.path()), ["model"]);
    assert_eq!(ModelFolder::open(&dir).unwrap().config_json(), "{\"model_type\": \"llama\"}\n");
}

#[test]
fn links_are_followed_only_within_the_cache() {
    let root = tempfile::tempdir().unwrap();
    let snapshot = root.path().join("hub/models--x/snapshots/abc");
    export(&snapshot, DType::F32, DEFAULT_SHARD_BYTES).unwrap();
    let weights = snapshot.join("model.safetensors");
    let blob = root.path().join("hub/models--x/blobs/0123");
    fs::create_dir(blob.parent().unwrap()).unwrap();
    fs::rename(&weights, &blob).unwrap();
    std::os::unix::fs::symlink("../../blobs/0123", &weights).unwrap();
    ModelFolder::open(&snapshot).unwrap();

    let outside = root.path().join("secret");
    fs::copy(&blob, &outside).unwrap();
    fs::remove_file(&weights).unwrap();
    std::os::unix::fs::symlink(&outside, &weights).unwrap();
    assert!(matches!(ModelFolder::open(&snapshot), Err(CkptError::LinkOutside { .. })));
}
