//! Model folders in 4 bits as transformers and bitsandbytes write them.

use std::path::{Path, PathBuf};

use lockstep_core::DType;
use lockstep_core::Fault;
use lockstep_device::Machine;
use lockstep_train::generate::{Generator, GeneratorSpec};
use serde_json::Value;

const SPEC: GeneratorSpec =
    GeneratorSpec { storage: None, machine: Machine::cpu(2), slots: 1, capacity: 64, score_tokens: 64 };

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/bitsandbytes")
}

/// A copy of the golden's folder with a tokenizer. `change` gets its configuration and its weights.
fn folder(change: impl Fn(&mut Value, &mut Vec<u8>)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (config, weights) = ("config.json", "model.safetensors");
    let mut keys: Value =
        serde_json::from_str(&std::fs::read_to_string(golden().join(config)).unwrap()).unwrap();
    let mut bytes = std::fs::read(golden().join(weights)).unwrap();
    change(&mut keys, &mut bytes);
    std::fs::write(dir.path().join(config), keys.to_string()).unwrap();
    std::fs::write(dir.path().join(weights), bytes).unwrap();
    let tokenizer = r#"{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0,"b":1},"unk_token":"b"}}"#;
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
    dir
}

/// Tokens, and the log-probabilities of all but the first.
fn expected() -> (Vec<u32>, Vec<f64>) {
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string(golden().join("golden.json")).unwrap()).unwrap();
    let list = |key: &str| golden[key].as_array().unwrap().clone();
    let tokens = list("tokens").iter().map(|id| id.as_u64().unwrap() as u32).collect();
    (tokens, list("logp").iter().map(|x| x.as_f64().unwrap()).collect())
}

fn score(dir: &Path, storage: Option<DType>) -> Vec<f32> {
    let mut generator = Generator::open(dir, None, &GeneratorSpec { storage, ..SPEC }).unwrap();
    generator.score(&expected().0).unwrap()
}

/// The codes of a folder are used as they are: log-probabilities are those of transformers with the same weights.
#[test]
fn log_probs_match_transformers() {
    let (_, want) = expected();
    let dir = folder(|_, _| {});
    // The folder's own type is f32.
    for (storage, tolerance) in [(None, 2e-5), (Some(DType::F32), 2e-5), (Some(DType::BF16), 0.05)] {
        let got = score(dir.path(), storage);
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            assert!((f64::from(*got) - want).abs() < tolerance, "{got}, expected {want} in {storage:?}");
        }
    }
}

/// Without its `quantization_config` the same folder is dequantised while it is loaded: the same bits.
#[test]
fn a_folder_is_dequantised_for_a_model_in_the_storage_type() {
    let plain = folder(|config, _| {
        config.as_object_mut().unwrap().remove("quantization_config").unwrap();
    });
    let quantised = folder(|_, _| {});
    assert_eq!(score(plain.path(), None), score(quantised.path(), None));
    let size = |dir: &Path| Generator::open(dir, None, &SPEC).unwrap().memory();
    assert!(size(plain.path()) > size(quantised.path()));
}

/// What cannot be read is named.
#[test]
fn other_variants_are_refused() {
    let refused = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let dir = folder(|_, weights| {
            let found = weights.windows(from.len()).position(|window| window == from.as_bytes());
            let at = found.unwrap_or_else(|| panic!("{from} is not in the file"));
            weights[at..at + to.len()].copy_from_slice(to.as_bytes());
        });
        let error = Generator::open(dir.path(), None, &SPEC).err().unwrap();
        assert!(error.hint().is_some(), "{error}");
        error.to_string()
    };
    for (from, to, expected) in [
        ("__nf4\"", "__fp4\"", "it is fp4, not nf4"),
        ("\"nf4\"", "\"fp4\"", "it is fp4 in blocks of 64"),
        ("\"blocksize\": 64", "\"blocksize\": 32", "nf4 in blocks of 32"),
        ("\"nested_blocksize\": 256", "\"nested_blocksize\": 128", "groups of 256"),
        ("\"nested_offset\"", "\"nestedXoffset\"", "double quantisation"),
        ("\"dtype\": \"float32\"", "\"dtype\": \"float64\"", "its type is float64"),
        ("\"quant_type\": \"nf4\"", "\"quant_type\": \"nf4,", "its state is not valid"),
        ("\"shape\": [60, 60]", "\"shape\": [60, 61]", "shape"),
        ("q_proj.weight.absmax\"", "q_proj.weight.absmix\"", "absm"),
    ] {
        let error = refused(from, to);
        assert!(error.contains(expected), "{from} -> {to}: {error}");
    }
    // 1.0, the last value of the codes, in the first map of the file.
    let dir = folder(|_, weights| {
        let at = weights.windows(8).position(|w| w == [1.0f32, 1.0].map(f32::to_le_bytes).concat());
        let ones: Vec<usize> =
            (0..weights.len() - 4).filter(|i| weights[*i..i + 4] == 1.0f32.to_le_bytes()).collect();
        assert!(at.is_none() && ones.len() >= 14, "one for each map");
        ones.iter().for_each(|i| weights[*i..i + 4].copy_from_slice(&0.99f32.to_le_bytes()));
    });
    let error = Generator::open(dir.path(), None, &SPEC).err().unwrap().to_string();
    assert!(error.contains("other values than those of bitsandbytes"), "{error}");
}
