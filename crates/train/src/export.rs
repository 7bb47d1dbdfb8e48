//! A model folder from a checkpoint, without training: tensors go from file to file, a part at a time.

use std::path::{Path, PathBuf};

use lockstep_ckpt::{Checkpoint, CkptError, DEFAULT_SHARD_BYTES, Export, TensorSpec, export_folder};
use lockstep_core::DType;
use serde_json::{Map, Value};

use crate::error::TrainError;

/// What was exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    pub checkpoint: PathBuf,
    pub dtype: DType,
    /// Worth telling: checkpoints that were passed over.
    pub notes: Vec<String>,
}

/// Writes the model of a checkpoint to `out`, as a Hugging Face folder. `from` is a checkpoint, a folder of
/// them, or the output folder of a run, whose newest complete one is taken. Without `dtype`, weights have the
/// type that the run kept them in.
pub fn export_checkpoint(from: &Path, out: &Path, dtype: Option<DType>) -> Result<Exported, TrainError> {
    let (checkpoint, notes) = find(from)?;
    let mut files = Vec::new();
    for name in checkpoint.other_files() {
        let content = checkpoint.read_file(name)?.expect("the checkpoint lists it");
        files.push((name.to_string(), content));
    }
    let Some((_, config)) = files.iter_mut().find(|(name, _)| name == "config.json") else {
        return Err(CkptError::NoConfig { folder: checkpoint.path().into() }.into());
    };
    let dtype = settle_dtype(config, dtype);
    const MODEL: &str = "model/";
    let tensors: Vec<TensorSpec> = checkpoint
        .tensors()
        .filter_map(|(name, shape)| Some(TensorSpec::new(name.strip_prefix(MODEL)?, shape)))
        .collect();
    let shapes: std::collections::BTreeMap<&str, &[usize]> =
        tensors.iter().map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
    let export = Export { files: &files, tensors: &tensors, dtype, shard_limit: DEFAULT_SHARD_BYTES };
    export_folder(out, &export, &mut |name, part, values| {
        checkpoint.read_f32(&format!("{MODEL}{name}"), shapes[name], part, values)
    })?;
    Ok(Exported { checkpoint: checkpoint.path().into(), dtype, notes })
}

fn find(from: &Path) -> Result<(Checkpoint, Vec<String>), TrainError> {
    if !from.exists() {
        return Err(TrainError::NothingToExport { path: from.into() });
    }
    let inside = from.join("checkpoints");
    let root = if inside.is_dir() { inside } else { from.to_path_buf() };
    let (found, skipped) = lockstep_ckpt::open_latest(&root)?;
    let notes: Vec<String> =
        skipped.iter().map(|damaged| format!("checkpoint passed over: {}", damaged.why)).collect();
    match (found, skipped.into_iter().next()) {
        (Some(checkpoint), _) => Ok((checkpoint, notes)),
        (None, Some(damaged)) => Err(damaged.why.into()),
        (None, None) if from.join("manifest.json").exists() => Ok((Checkpoint::open_verified(from)?, notes)),
        (None, None) => Err(TrainError::NothingToExport { path: from.into() }),
    }
}

/// The type asked for, which goes into `config.json`, or the one it names.
fn settle_dtype(config: &mut Vec<u8>, asked: Option<DType>) -> DType {
    let known = [DType::F32, DType::BF16, DType::F16];
    let Ok(mut map) = serde_json::from_slice::<Map<String, Value>>(config) else {
        return asked.unwrap_or(DType::F32);
    };
    let keys = ["dtype", "torch_dtype"];
    let named = keys.iter().find_map(|key| map.get(*key)?.as_str());
    let named = known.into_iter().find(|dtype| named == Some(dtype.hf_name()));
    let dtype = asked.or(named).unwrap_or(DType::F32);
    if named != Some(dtype) {
        let mut there: Vec<&str> = keys.into_iter().filter(|key| map.contains_key(*key)).collect();
        if there.is_empty() {
            there.push("dtype");
        }
        for key in there {
            map.insert(key.to_string(), dtype.hf_name().into());
        }
        *config = format!("{:#}\n", Value::Object(map)).into_bytes();
    }
    dtype
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_config_says_the_type_of_the_weights() {
        let settled = |text: &str, asked| {
            let mut config = text.as_bytes().to_vec();
            let dtype = settle_dtype(&mut config, asked);
            (dtype, String::from_utf8(config).unwrap())
        };
        let text = "{\"torch_dtype\": \"bfloat16\", \"a\": 1}";
        assert_eq!(settled(text, None), (DType::BF16, text.into()));
        let (dtype, changed) = settled(text, Some(DType::F16));
        assert_eq!(dtype, DType::F16);
        assert!(
            changed.contains("\"torch_dtype\": \"float16\"") && changed.contains("\"a\": 1"),
            "{changed}"
        );
        let (dtype, changed) = settled("{}", Some(DType::F32));
        assert!(dtype == DType::F32 && changed.contains("\"dtype\": \"float32\""), "{changed}");
    }
}
