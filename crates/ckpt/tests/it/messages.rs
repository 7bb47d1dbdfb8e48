//! The messages and hints of all errors.

use std::fs;
use std::io;
use std::path::Path;

use insta::assert_snapshot;
use lockstep_ckpt::{Checkpoint, CkptError, ModelFolder, SafetensorsFile};
use lockstep_core::{Bytes, DType};

use crate::model_folders::export;
use crate::{save, show};

const INDEX: &str = "model.safetensors.index.json";

#[test]
fn about_model_folders() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path();
    let open = |path: &Path| show(dir, &ModelFolder::open(path).unwrap_err());
    assert_snapshot!(open(&dir.join("modle")), @"[66] modle does not exist");
    assert_snapshot!(open(dir), @r"
    [66] DIR has no config.json
    hint: a model folder contains config.json and model.safetensors, or shards with model.safetensors.index.json.
    ");
    fs::write(dir.join("config.json"), "{}").unwrap();
    assert_snapshot!(open(&dir.join("config.json")), @"[65] config.json is not a folder");
    assert_snapshot!(open(dir), @r"
    [66] DIR has no safetensors weights
    hint: a model folder contains config.json and model.safetensors, or shards with model.safetensors.index.json.
    ");
    fs::write(dir.join("pytorch_model.bin"), "").unwrap();
    assert_snapshot!(open(dir), @r"
    [66] DIR has no safetensors weights; pytorch_model.bin is not safetensors
    hint: pickled weights can run code when they are loaded, so they are not supported: load the folder in transformers and save it with save_pretrained(folder, safe_serialization=True).
    ");
    let model = dir.join("model");
    export(&model, DType::F32, Bytes(u64::MAX)).unwrap();
    let folder = ModelFolder::open(&model).unwrap();
    let read =
        |name: &str, shape: &[usize]| show(dir, &folder.read_f32(name, shape, 0..0, &mut []).unwrap_err());
    assert_snapshot!(read("embed.weight", &[8, 5]), @r"
    [65] `embed.weight` in model/model.safetensors has shape [8, 4], expected [8, 5]
    hint: the model configuration does not match these weights.
    ");
    assert_snapshot!(read("embed.wieght", &[8, 4]), @r"
    [65] model has no tensor `embed.wieght`
    hint: the most similar name is `embed.weight`.
    ");
    fs::write(model.join("config.json"), vec![b' '; 17 << 20]).unwrap();
    assert_snapshot!(open(&model), @"[65] model/config.json is 17.0 MiB, which exceeds the limit of 16.0 MiB for such a file");
    fs::remove_file(model.join("config.json")).unwrap();
    let refused = export(&model, DType::F32, Bytes(1)).unwrap_err();
    assert_snapshot!(show(dir, &refused), @r"
    [73] model exists and is not a model folder
    hint: choose another folder, or remove this one if it is not needed.
    ");
}

#[test]
fn about_indexes() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    export(&dir, DType::F32, Bytes(140)).unwrap();
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let good = fs::read_to_string(dir.join(INDEX)).unwrap();
    let with = |text: &str| {
        fs::write(dir.join(INDEX), text).unwrap();
        show(&dir, &ModelFolder::open(&dir).unwrap_err())
    };
    let entry = |shard: &str| format!(r#"{{"weight_map": {{"embed.weight": "{shard}"}}}}"#);
    assert_snapshot!(with("{"), @"[65] model.safetensors.index.json is not a valid index: EOF while parsing an object at line 1 column 1");
    assert_snapshot!(with("{}"), @"[65] model.safetensors.index.json is not a valid index: missing field `weight_map` at line 1 column 2");
    assert_snapshot!(with(r#"{"weight_map": {}}"#), @"[65] model.safetensors.index.json is not a valid index: it lists no tensors");
    for shard in ["../x.safetensors", "/etc/passwd", "a/b", "..", "a\\\\b"] {
        assert!(with(&entry(shard)).contains("is not a plain file name in the same folder"), "{shard}");
    }
    assert_snapshot!(with(&entry("absent.safetensors")), @"[66] absent.safetensors does not exist");
    assert_snapshot!(with(r#"{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}"#), @"[65] model.safetensors.index.json is not a valid index: tensor `a` is listed twice");
    assert_snapshot!(with(&good.replace("\"norm.weight\"", "\"norm.bias\"")), @"[65] model.safetensors.index.json is not a valid index: model-00002-of-00002.safetensors contains `norm.weight`, which the index does not list");
    assert_snapshot!(with(&good.replace("{\n    \"embed", "{\n    \"x.weight\": \"model-00001-of-00002.safetensors\",\n    \"embed")), @"[65] model.safetensors.index.json is not a valid index: it lists `x.weight` in model-00001-of-00002.safetensors, which does not contain it");
    fs::copy(dir.join(first), dir.join(second)).unwrap();
    assert_snapshot!(with(&good), @"[65] model.safetensors.index.json is not a valid index: tensor `embed.weight` is in both model-00001-of-00002.safetensors and model-00002-of-00002.safetensors");
}

#[test]
fn about_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path();
    let path = save(dir, 4);
    let open = |path: &Path| show(dir, &Checkpoint::open_verified(path).unwrap_err());
    let checkpoint = Checkpoint::open(&path).unwrap();
    let read = |name: &str, shape: &[usize]| {
        show(dir, &checkpoint.read_f32(name, shape, 0..0, &mut []).unwrap_err())
    };
    assert_snapshot!(read("exp_avg/norm.weight", &[4]), @r"
    [65] `exp_avg/norm.weight` in step-4/manifest.json has shape [3], expected [4]
    hint: the model configuration does not match these weights.
    ");
    assert_snapshot!(read("exp_avg/norm.wight", &[4]), @r"
    [65] step-4/manifest.json has no tensor `exp_avg/norm.wight`
    hint: the most similar name is `exp_avg/norm.weight`.
    ");
    assert_snapshot!(show(dir, &checkpoint.counter("epoch").unwrap_err()), @"[65] step-4/manifest.json has no counter `epoch`");
    assert_snapshot!(open(&dir.join("step-5")), @"[66] step-5 does not exist");
    fs::create_dir(dir.join("step-5")).unwrap();
    assert_snapshot!(open(&dir.join("step-5")), @r"
    [65] step-5 is not a complete checkpoint: it has no manifest.json
    hint: the save did not finish: use an earlier checkpoint.
    ");
    let manifest = fs::read_to_string(path.join("manifest.json")).unwrap();
    let with = |text: &str| {
        fs::write(path.join("manifest.json"), text).unwrap();
        open(&path)
    };
    assert_snapshot!(with("{}"), @"[65] step-4/manifest.json is not a valid manifest: it is damaged or truncated");
    let changed = with(&manifest.replace("\"adam_t\": 4", "\"adam_t\": 5"));
    assert!(changed.contains("is not a valid manifest: its BLAKE3 hash is"), "{changed}");
    let body = manifest.split_once("\"manifest\": ").unwrap().1.strip_suffix("\n}\n").unwrap();
    let framed = |body: &str| {
        let hash = blake3::hash(body.as_bytes()).to_hex();
        with(&format!("{{\n\"blake3\": \"{hash}\",\n\"manifest\": {body}\n}}\n"))
    };
    assert_snapshot!(framed(&body.replace("\"format\": 2", "\"format\": 3")), @r"
    [65] step-4/manifest.json is not a valid manifest: it has format version 3, but this version of lockstep supports up to 2
    hint: use the version of lockstep that wrote it, or a newer one.
    ");
    assert_snapshot!(framed(&body.replace("\"step\": 4", "\"step\": 9")), @"[65] step-4/manifest.json is not a valid manifest: it is for step 9, but its folder is named for step 4");
    assert_snapshot!(framed(&body.replace("\"name\": \"model.safetensors\"", "\"name\": \"../model.safetensors\"")), @"[65] step-4/manifest.json is not a valid manifest: file `../model.safetensors` is listed twice or is not a plain file name");
    assert_snapshot!(framed(&body.replace("\"file\": \"model.safetensors\"", "\"file\": \"other.safetensors\"")), @"[65] step-4/manifest.json is not a valid manifest: `model/embed.weight` refers to `other.safetensors`, which is not listed");
    assert_snapshot!(framed(&body.replacen("5,\n", "6,\n", 1)), @"[65] step-4/manifest.json is not a valid manifest: the pieces of `exp_avg/embed.weight` do not cover its shape [6, 3] exactly once");
    assert_snapshot!(framed(&body.replace("5,\n", "6,\n")), @"[65] step-4/manifest.json is not a valid manifest: it lists a piece of `model/embed.weight` with shape [6, 3], but `model/embed.weight` in model.safetensors has shape [5, 3]");
    assert_snapshot!(framed(&body.replace("\"world\": 1,", "")), @"[65] step-4/manifest.json is not a valid manifest: missing field `world` at line 170 column 1");
    fs::write(path.join("manifest.json"), manifest).unwrap();
    fs::copy(path.join("model.safetensors"), path.join("x.safetensors")).unwrap();
    assert_snapshot!(open(&path), @r"
    [65] step-4/x.safetensors is not in the manifest
    hint: the checkpoint was changed after it was written: use an earlier one.
    ");
    fs::remove_file(path.join("x.safetensors")).unwrap();
    let model = path.join("model.safetensors");
    let mut bytes = fs::read(&model).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&model, &bytes).unwrap();
    assert_snapshot!(open(&path), @r"
    [65] step-4/model.safetensors is corrupt: its BLAKE3 hash is HASH, expected HASH
    hint: the checkpoint was changed after it was written: use an earlier one.
    ");
    bytes.pop();
    fs::write(&model, &bytes).unwrap();
    assert_snapshot!(open(&path), @r"
    [65] step-4/model.safetensors has 255 bytes, expected 256
    hint: the checkpoint was changed after it was written: use an earlier one.
    ");
    assert_snapshot!(show(dir, &SafetensorsFile::open(&model).unwrap_err()), @r"
    [65] step-4/model.safetensors is not a valid safetensors file: truncated: expected 256 bytes, found 255
    hint: the download or copy is incomplete: fetch the file again.
    ");
}

#[test]
fn about_writing() {
    let write = |code: i32| {
        let source = io::Error::from_raw_os_error(code);
        show(
            Path::new("/nowhere"),
            &CkptError::Write { path: "runs/step-4.partial/model.safetensors".into(), source },
        )
    };
    assert_snapshot!(write(28), @r"
    [73] cannot write runs/step-4.partial/model.safetensors: No space left on device (os error 28)
    hint: the disk or quota is full: free space, keep fewer checkpoints, or choose another folder.
    ");
    assert_snapshot!(write(13), @r"
    [73] cannot write runs/step-4.partial/model.safetensors: Permission denied (os error 13)
    hint: choose a folder that this user may write to.
    ");
    assert_snapshot!(write(5), @"[73] cannot write runs/step-4.partial/model.safetensors: Input/output error (os error 5)");
}

/// `/dev/full` behaves like a full disk.
#[test]
fn about_a_full_disk() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        println!("skipped: there is no /dev/full here");
        return;
    }
    let specs = [lockstep_ckpt::TensorSpec::new("w", [1 << 20])];
    let mut writer = lockstep_ckpt::SafetensorsWriter::create(full, &specs, DType::F32).unwrap();
    let error = writer.append(&vec![0.0; 1 << 20]).unwrap_err();
    assert_snapshot!(show(Path::new("/nowhere"), &error), @r"
    [73] cannot write /dev/full: No space left on device (os error 28)
    hint: the disk or quota is full: free space, keep fewer checkpoints, or choose another folder.
    ");
}
