//! Exports a model folder from a checkpoint without an engine: tensors are copied from file to file in chunks.

use std::path::{Path, PathBuf};

use lockstep_ckpt::{
    AdapterConfig, AdapterFolder, Checkpoint, CkptError, DEFAULT_SHARD_BYTES, Export, FolderKind, TensorSpec,
    adapter_tensor_name, export_folder, model_tensor_name,
};
use lockstep_core::DType;
use serde_json::{Map, Value};

use crate::adapter;
use crate::error::TrainError;
use crate::merge::{self, LoadedAdapter};
use crate::resume::skipped_note;

/// What was exported, and from where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportSummary {
    pub checkpoint: PathBuf,
    pub dtype: DType,
    /// Notes for the user: damaged checkpoints that were skipped.
    pub notes: Vec<String>,
}

/// Writes the model of a checkpoint to `out` as a Hugging Face model folder. `from` is a checkpoint, or a folder of
/// checkpoints or the output folder of a run, of which the newest complete checkpoint is used. Without `dtype`, the
/// weights keep the data type of the run.
///
/// If the run trained an adapter, the folder is an adapter's, as PEFT writes it. With `merge`, it is the whole model with
/// the adapter merged into it; `from` may then be an adapter's folder as well.
pub fn export_checkpoint(
    from: &Path,
    out: &Path,
    dtype: Option<DType>,
    merge: Option<Merge<'_>>,
) -> Result<ExportSummary, TrainError> {
    if let (Some(Merge { base }), true) = (merge, AdapterFolder::is_one(from)) {
        let dtype = merge::merge(&LoadedAdapter::of_folder(from)?, base, out, dtype)?;
        return Ok(ExportSummary { checkpoint: from.into(), dtype, notes: vec![] });
    }
    let (checkpoint, notes) = find(from)?;
    if let Some(config) = checkpoint.read_file(ADAPTER_CONFIG)? {
        let path = checkpoint.path().join(ADAPTER_CONFIG);
        let config = AdapterConfig::parse(&path, &config)?;
        let dtype = match merge {
            Some(Merge { base }) => {
                merge::merge(&LoadedAdapter::of_checkpoint(&checkpoint, config)?, base, out, dtype)?
            }
            None => export_adapter(&checkpoint, out, dtype)?,
        };
        return Ok(ExportSummary { checkpoint: checkpoint.path().into(), dtype, notes });
    }
    if merge.is_some() {
        return Err(TrainError::NothingToMerge { path: checkpoint.path().into() });
    }
    let mut files = Vec::new();
    for name in checkpoint.other_files() {
        let content = checkpoint.read_file(name)?.expect("the checkpoint lists this file");
        files.push((name.to_string(), content));
    }
    let Some((_, config)) = files.iter_mut().find(|(name, _)| name == "config.json") else {
        return Err(CkptError::NoConfig { folder: checkpoint.path().into() }.into());
    };
    let dtype = resolve_dtype(config, dtype);
    const MODEL: &str = "model/";
    let tensors: Vec<TensorSpec> = checkpoint
        .tensors()
        .filter_map(|(name, shape)| Some(TensorSpec::new(name.strip_prefix(MODEL)?, shape)))
        .collect();
    let shapes: std::collections::BTreeMap<&str, &[usize]> =
        tensors.iter().map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
    let kind = FolderKind::Model;
    let export = Export { kind, files: &files, tensors: &tensors, dtype, shard_limit: DEFAULT_SHARD_BYTES };
    export_folder(out, &export, &mut |name, part, values| {
        checkpoint.read_f32(&format!("{MODEL}{name}"), shapes[name], part, values)
    })?;
    Ok(ExportSummary { checkpoint: checkpoint.path().into(), dtype, notes })
}

/// Merge an adapter into its model.
#[derive(Clone, Copy, Debug)]
pub struct Merge<'a> {
    /// The folder of the model; `None`: the one that the adapter names.
    pub base: Option<&'a Path>,
}

const ADAPTER_CONFIG: &str = "adapter_config.json";

/// Writes the adapter of a checkpoint as PEFT's folder.
fn export_adapter(checkpoint: &Checkpoint, out: &Path, dtype: Option<DType>) -> Result<DType, TrainError> {
    let mut files = Vec::new();
    for name in checkpoint.other_files() {
        files.push((name.to_string(), checkpoint.read_file(name)?.expect("the checkpoint lists this file")));
    }
    let model =
        |(name, shape): (&str, &[usize])| Some((name.strip_prefix("model/")?.to_owned(), shape.to_vec()));
    let trained: Vec<(String, Vec<usize>)> = checkpoint.tensors().filter_map(model).collect();
    let spec =
        |(name, shape): &(String, Vec<usize>)| TensorSpec::new(adapter_tensor_name(name), shape.clone());
    let tensors: Vec<TensorSpec> = trained.iter().map(spec).collect();
    let shapes: std::collections::BTreeMap<&str, &[usize]> =
        trained.iter().map(|(name, shape)| (name.as_str(), &shape[..])).collect();
    let dtype = dtype.unwrap_or(DType::F32);
    let export = adapter::export(&files, &tensors, dtype);
    export_folder(out, &export, &mut |name, part, values| {
        let name = model_tensor_name(name);
        checkpoint.read_f32(&format!("model/{name}"), shapes[name], part, values)
    })?;
    Ok(dtype)
}

fn find(from: &Path) -> Result<(Checkpoint, Vec<String>), TrainError> {
    if !from.exists() {
        return Err(TrainError::NothingToExport { path: from.into() });
    }
    let inside = from.join("checkpoints");
    let root = if inside.is_dir() { inside } else { from.to_path_buf() };
    let (found, skipped) = lockstep_ckpt::open_latest(&root)?;
    let notes: Vec<String> = skipped.iter().map(|damaged| skipped_note(&damaged.why)).collect();
    match (found, skipped.into_iter().next()) {
        (Some(checkpoint), _) => Ok((checkpoint, notes)),
        (None, Some(damaged)) => Err(damaged.why.into()),
        (None, None) if from.join("manifest.json").exists() => Ok((Checkpoint::open_verified(from)?, notes)),
        (None, None) => Err(TrainError::NothingToExport { path: from.into() }),
    }
}

/// The requested data type, which is written into `config.json`, or the one that `config.json` names.
fn resolve_dtype(config: &mut Vec<u8>, requested: Option<DType>) -> DType {
    let known = [DType::F32, DType::BF16, DType::F16];
    let Ok(mut map) = serde_json::from_slice::<Map<String, Value>>(config) else {
        return requested.unwrap_or(DType::F32);
    };
    let keys = ["dtype", "torch_dtype"];
    let named = keys.iter().find_map(|key| map.get(*key)?.as_str());
    let named = known.into_iter().find(|dtype| named == Some(dtype.hf_name()));
    let dtype = requested.or(named).unwrap_or(DType::F32);
    if named != Some(dtype) {
        let mut present: Vec<&str> = keys.into_iter().filter(|key| map.contains_key(*key)).collect();
        if present.is_empty() {
            present.push("dtype");
        }
        for key in present {
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
    fn config_json_has_the_dtype_of_the_weights() {
        let resolved = |text: &str, requested| {
            let mut config = text.as_bytes().to_vec();
            let dtype = resolve_dtype(&mut config, requested);
            (dtype, String::from_utf8(config).unwrap())
        };
        let text = "{\"torch_dtype\": \"bfloat16\", \"a\": 1}";
        assert_eq!(resolved(text, None), (DType::BF16, text.into()));
        let (dtype, changed) = resolved(text, Some(DType::F16));
        assert_eq!(dtype, DType::F16);
        assert!(
            changed.contains("\"torch_dtype\": \"float16\"") && changed.contains("\"a\": 1"),
            "{changed}"
        );
        let (dtype, changed) = resolved("{}", Some(DType::F32));
        assert!(dtype == DType::F32 && changed.contains("\"dtype\": \"float32\""), "{changed}");
    }
}
