//! Writing a Hugging Face model folder, streamed: one chunk of one tensor is in memory at a time.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use lockstep_core::{Bytes, DType};
use serde_json::{Map, Value, json};

use crate::durable::{
    exchange, fresh_dir, is_model_file_name, parent, remove_dir, rename, sync_dir, with_suffix, write_error,
    write_model_file, write_synced,
};
use crate::manifest::MANIFEST;
use crate::safetensors_write::write_file;
use crate::{CkptError, Source, TensorSpec};

/// Where the peers cut shards.
pub const DEFAULT_SHARD_BYTES: Bytes = Bytes(5_000_000_000);

const INDEX: &str = "model.safetensors.index.json";

/// What a model folder is made of.
#[derive(Clone, Copy, Debug)]
pub struct Export<'a> {
    /// Name and content of the files beside the weights: `config.json`, `generation_config.json`, the
    /// tokenizer's.
    pub files: &'a [(String, Vec<u8>)],
    /// Written in this order.
    pub tensors: &'a [TensorSpec],
    /// F32, BF16 or F16; narrowing rounds to nearest even.
    pub dtype: DType,
    /// A file's tensors take no more than this, unless one alone does.
    pub shard_limit: Bytes,
}

/// Writes a model folder to `dir`, complete or not at all. A folder that is there is replaced if it is
/// a model folder (it has a `config.json`), and refused otherwise.
pub fn export_folder(dir: &Path, export: &Export<'_>, source: &mut Source<'_>) -> Result<(), CkptError> {
    let replaces = dir.symlink_metadata().is_ok();
    if replaces && !dir.join("config.json").is_file() && !is_empty_dir(dir) {
        return Err(CkptError::WouldReplace { folder: dir.into() });
    }
    let partial = with_suffix(dir, ".partial");
    fresh_dir(&partial)?;
    let result = write_folder(&partial, export, source).and_then(|()| publish(&partial, dir, replaces));
    if result.is_err() {
        // The first error is the one worth telling.
        let _ = remove_dir(&partial);
    }
    result
}

/// Checks that files of these names can stand beside the weights, in a model folder and in a checkpoint: each is a
/// plain name, or one in `additional_chat_templates`, comes once, and is not what the weights or the manifest need.
pub fn check_model_files<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<(), CkptError> {
    let mut known = BTreeSet::new();
    for name in names {
        let reserved = [MANIFEST, INDEX].contains(&name) || name.ends_with(".safetensors");
        if reserved || !is_model_file_name(name) || !known.insert(name) {
            return Err(CkptError::FileName { name: name.into() });
        }
    }
    Ok(())
}

fn write_folder(dir: &Path, export: &Export<'_>, source: &mut Source<'_>) -> Result<(), CkptError> {
    check_model_files(export.files.iter().map(|(name, _)| name.as_str()))?;
    for (name, content) in export.files {
        write_model_file(dir, name, content)?;
    }
    let shards = cut(export.tensors, export.dtype, export.shard_limit);
    let mut weight_map = Map::new();
    for (idx, tensors) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_string(),
            num_shards => format!("model-{:05}-of-{num_shards:05}.safetensors", idx + 1),
        };
        write_file(&dir.join(&name), tensors, export.dtype, source)?;
        weight_map.extend(tensors.iter().map(|t| (t.name.clone(), Value::from(name.as_str()))));
    }
    if shards.len() > 1 {
        let total_size: u64 = export.tensors.iter().map(|t| bytes(t, export.dtype)).sum();
        let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
        write_synced(&dir.join(INDEX), format!("{index:#}\n").as_bytes())?;
    }
    sync_dir(dir)
}

/// Gives a complete folder its name: in one step where the file system can swap names, otherwise the
/// old one is moved away first. It is removed last.
fn publish(partial: &Path, dir: &Path, replaces: bool) -> Result<(), CkptError> {
    let old = with_suffix(dir, ".old");
    if replaces && exchange(partial, dir)? {
        sync_dir(parent(dir))?;
        return remove_any(partial);
    }
    if replaces {
        remove_dir(&old)?;
        rename(dir, &old)?;
    }
    if let Err(e) = rename(partial, dir) {
        if replaces {
            let _ = fs::rename(&old, dir);
        }
        return Err(e);
    }
    sync_dir(parent(dir))?;
    if replaces { remove_any(&old) } else { Ok(()) }
}

/// Runs of tensors that stay within the limit, in order; at least one run.
fn cut(tensors: &[TensorSpec], dtype: DType, limit: Bytes) -> Vec<&[TensorSpec]> {
    let mut shards = Vec::new();
    let (mut first, mut size) = (0, 0);
    for (idx, tensor) in tensors.iter().enumerate() {
        let bytes = bytes(tensor, dtype);
        if idx > first && size + bytes > limit.0 {
            shards.push(&tensors[first..idx]);
            (first, size) = (idx, 0);
        }
        size += bytes;
    }
    shards.push(&tensors[first..]);
    shards
}

fn bytes(tensor: &TensorSpec, dtype: DType) -> u64 {
    (tensor.elems() * dtype.size()) as u64
}

fn is_empty_dir(dir: &Path) -> bool {
    dir.read_dir().is_ok_and(|mut entries| entries.next().is_none())
}

/// Removes a folder, or the link that stood for one.
fn remove_any(path: &Path) -> Result<(), CkptError> {
    if path.is_symlink() { fs::remove_file(path).map_err(write_error(path)) } else { remove_dir(path) }
}
