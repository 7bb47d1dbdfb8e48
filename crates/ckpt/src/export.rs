//! Writes a Hugging Face model folder as a stream: only one chunk of one tensor is in memory at a time.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use lockstep_core::{Bytes, DType};
use serde_json::{Map, Value, json};

use crate::adapter_folder::ADAPTER_CONFIG;
use crate::durable::{
    exchange, fresh_dir, is_model_file_name, parent, remove_dir, rename, sync_dir, with_suffix, write_error,
    write_model_file, write_synced,
};
use crate::manifest::MANIFEST;
use crate::safetensors_write::write_file;
use crate::{CkptError, Source, TensorSpec};

/// The default limit for a shard, the same as in transformers.
pub const DEFAULT_SHARD_BYTES: Bytes = Bytes(5_000_000_000);

const INDEX: &str = "model.safetensors.index.json";

/// Which kind of folder is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolderKind {
    /// A whole model.
    Model,
    /// A LoRA adapter, as PEFT writes it.
    Adapter,
}

impl FolderKind {
    /// The file that a folder of this kind always has.
    const fn config(self) -> &'static str {
        match self {
            FolderKind::Model => "config.json",
            FolderKind::Adapter => ADAPTER_CONFIG,
        }
    }

    /// The name of the weights without its ending.
    const fn stem(self) -> &'static str {
        match self {
            FolderKind::Model => "model",
            FolderKind::Adapter => "adapter_model",
        }
    }
}

/// The contents of a model folder.
#[derive(Clone, Copy, Debug)]
pub struct Export<'a> {
    pub kind: FolderKind,
    /// Names and contents of the files next to the weights: `config.json`, `generation_config.json` and the tokenizer
    /// files.
    pub files: &'a [(String, Vec<u8>)],
    /// The tensors, in the order in which they are written.
    pub tensors: &'a [TensorSpec],
    /// F32, BF16 or F16. Narrowing rounds to nearest, bf16 with ties away from zero.
    pub dtype: DType,
    /// The size limit of a shard. Only a single tensor that is larger exceeds it.
    pub shard_limit: Bytes,
}

/// Writes a model folder to `dir`, either completely or not at all. Replaces an existing folder only if it is a model
/// or adapter folder, that is, if it contains `config.json` or `adapter_config.json`, or if it is empty.
pub fn export_folder(dir: &Path, export: &Export<'_>, source: &mut Source<'_>) -> Result<(), CkptError> {
    let replaces = check_replaceable(dir)?;
    let partial = with_suffix(dir, ".partial");
    fresh_dir(&partial)?;
    let result = write_folder(&partial, export, source).and_then(|()| publish(&partial, dir, replaces));
    if result.is_err() {
        // Report the first error, not one of the cleanup.
        let _ = remove_dir(&partial);
    }
    result
}

/// Checks that a folder does not exist, or may be replaced by a model or an adapter: if it is one, or empty. Returns
/// whether it exists.
pub fn check_replaceable(dir: &Path) -> Result<bool, CkptError> {
    let exists = dir.symlink_metadata().is_ok();
    let is_ours = |kind: FolderKind| dir.join(kind.config()).is_file();
    if exists && !is_ours(FolderKind::Model) && !is_ours(FolderKind::Adapter) && !is_empty_dir(dir) {
        return Err(CkptError::WouldReplace { folder: dir.into() });
    }
    Ok(exists)
}

/// Checks that these names are allowed for files next to the weights, in a model folder and in a checkpoint. Each
/// must be a plain name, or one in `additional_chat_templates`, must occur once, and must not be reserved for
/// weights, index or manifest.
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
    let shards = split_into_shards(export.tensors, export.dtype, export.shard_limit);
    let mut weight_map = Map::new();
    for (idx, tensors) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => format!("{}.safetensors", export.kind.stem()),
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

/// Moves a complete folder to its final name: atomically if the file system can swap names, otherwise after moving
/// the old folder away. The old folder is removed last.
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

/// Splits the tensors into consecutive shards within the limit; at least one shard.
fn split_into_shards(tensors: &[TensorSpec], dtype: DType, limit: Bytes) -> Vec<&[TensorSpec]> {
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

/// Removes a folder, or a symbolic link to one.
fn remove_any(path: &Path) -> Result<(), CkptError> {
    if path.is_symlink() { fs::remove_file(path).map_err(write_error(path)) } else { remove_dir(path) }
}
