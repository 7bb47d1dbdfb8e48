//! Tests of the public interface: round trips, damage, hostile files, and every message.

mod checkpoints;
mod damage;
mod hostile;
mod messages;
mod model_folders;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use lockstep_ckpt::{CheckpointWriter, CkptError, DataCursor, Meta, NumbersRecord, TensorSpec};
use lockstep_core::{DType, Fault, Step};

/// A value that identifies the tensor and the element, exact in f32.
fn value(name: &str, elem: usize) -> f32 {
    let salt: usize = name.bytes().map(usize::from).sum();
    (salt * 1000 + elem) as f32
}

fn source(name: &str, range: Range<usize>, out: &mut [f32]) -> Result<(), CkptError> {
    for (slot, elem) in out.iter_mut().zip(range) {
        *slot = value(name, elem);
    }
    Ok(())
}

fn meta(step: u64) -> Meta {
    Meta {
        step: Step(step),
        world: 1,
        counters: BTreeMap::from([("tokens_seen".into(), u64::MAX), ("adam_t".into(), step)]),
        reals: BTreeMap::from([("best_loss".into(), 0.1 + 0.2), ("scale".into(), f64::INFINITY)]),
        data: DataCursor {
            seed: 42,
            next_step: step,
            rows_per_step: 8,
            num_rows: 100,
            fingerprint: "f".into(),
        },
        config_hash: "c".into(),
        tokenizer_hash: "t".into(),
        run_config: "model: \"tiny\"\n# ünï\n".into(),
        numbers: NumbersRecord {
            fingerprint: "0123456789ab".into(),
            fields: vec![("storage".into(), "f32".into()), ("device".into(), "CPU".into())],
        },
        settings: BTreeMap::from([("max_steps".into(), "4".into())]),
    }
}

fn states() -> [Vec<TensorSpec>; 2] {
    let spec = |state: &str| {
        vec![
            TensorSpec::new(format!("{state}/embed.weight"), [5, 3]),
            TensorSpec::new(format!("{state}/norm.weight"), [3]),
        ]
    };
    [spec("model"), [spec("exp_avg"), spec("exp_avg_sq")].concat()]
}

/// A small complete checkpoint of two files.
fn save(root: &Path, step: u64) -> PathBuf {
    let mut writer = CheckpointWriter::begin(root, Step(step)).unwrap();
    let [model, optimizer] = states();
    writer.write_shard("model.safetensors", &model, DType::F32, &mut source).unwrap();
    writer.write_shard("optimizer.safetensors", &optimizer, DType::F32, &mut source).unwrap();
    writer.finish(meta(step)).unwrap()
}

/// Exit code, message and hint, with `dir` removed from paths and hashes replaced.
fn show(dir: &Path, error: &CkptError) -> String {
    let hint = error.hint().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
    let text = format!("[{}] {error}{hint}", error.class().exit_code());
    let dir = dir.display().to_string();
    let text = text.replace(&format!("{dir}/"), "").replace(&dir, "DIR");
    let is_hash = |word: &str| word.len() == 64 && word.bytes().all(|b| b.is_ascii_hexdigit());
    let words = text.split_inclusive(|c: char| !c.is_ascii_alphanumeric()).map(|word| {
        let bare = word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        if is_hash(bare) { word.replace(bare, "HASH") } else { word.to_string() }
    });
    words.collect()
}
