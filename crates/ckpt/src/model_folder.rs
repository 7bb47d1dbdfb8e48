//! Reads a Hugging Face model folder: the text of its config, and its weights in one file or in shards.
//!
//! No code is ever loaded: pickled weights are refused, with a hint on how to convert them. The index is checked
//! against the shards in both directions. No file outside the folder is opened, except through the links of the
//! Hugging Face cache that the folder belongs to.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use lockstep_core::Bytes;
use serde::Deserialize;
use serde::de::{self, MapAccess, Visitor};

use crate::durable::{is_plain_name, parent, read_bytes, read_error};
use crate::{CkptError, IndexFault, SafetensorsFile, TensorInfo};

const CONFIG_CAP: Bytes = Bytes(16 << 20);
const INDEX_CAP: Bytes = Bytes(100 << 20);
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// An open model folder.
#[derive(Debug)]
pub struct ModelFolder {
    path: PathBuf,
    config_json: String,
    files: Vec<SafetensorsFile>,
    /// Maps each tensor to the index of its file.
    file_of: HashMap<String, usize>,
}

impl ModelFolder {
    /// Opens a folder and validates the headers of its files. Does not read weights.
    pub fn open(path: &Path) -> Result<Self, CkptError> {
        let config_json = Self::read_config(path)?;
        // Like transformers, prefer a single file over an index.
        let (files, file_of) = if path.join(SINGLE).exists() {
            let file = open_inside(path, SINGLE)?;
            let file_of = file.tensors().map(|t| (t.name.clone(), 0)).collect();
            (vec![file], file_of)
        } else if path.join(INDEX).exists() {
            open_shards(path)?
        } else {
            return Err(CkptError::NoWeights { folder: path.into(), pickled: pickled(path)? });
        };
        Ok(ModelFolder { path: path.into(), config_json, files, file_of })
    }

    /// The text of a folder's `config.json`. Works without weights, for a model that is initialized from its config.
    pub fn read_config(path: &Path) -> Result<String, CkptError> {
        let found = path.metadata().map_err(read_error(path))?;
        if !found.is_dir() {
            return Err(CkptError::WrongKind { path: path.into(), expected: "folder" });
        }
        let config = path.join("config.json");
        read_text(&config, CONFIG_CAP).map_err(|e| match e {
            CkptError::Missing { .. } => CkptError::NoConfig { folder: path.into() },
            other => other,
        })
    }

    /// The text of a folder's `generation_config.json`, if it has one.
    pub fn read_generation_config(path: &Path) -> Result<Option<String>, CkptError> {
        match read_text(&path.join("generation_config.json"), CONFIG_CAP) {
            Ok(text) => Ok(Some(text)),
            Err(CkptError::Missing { .. }) => Ok(None),
            Err(other) => Err(other),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The text of `config.json`.
    pub fn config_json(&self) -> &str {
        &self.config_json
    }

    /// Bytes of weights and headers read so far.
    pub fn bytes_read(&self) -> Bytes {
        Bytes(self.files.iter().map(|file| file.bytes_read().0).sum())
    }

    /// The files of the weights.
    pub fn weight_files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(SafetensorsFile::path)
    }

    /// A tensor and the file it is in.
    pub fn tensor(&self, name: &str) -> Option<(&SafetensorsFile, &TensorInfo)> {
        let file = &self.files[*self.file_of.get(name)?];
        Some((file, file.tensor(name)?))
    }

    /// All tensors, file by file.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.files.iter().flat_map(SafetensorsFile::tensors)
    }

    /// Reads a flat range of a tensor, widened to f32. The tensor must have `expected_shape`.
    ///
    /// # Panics
    /// If the range is outside the tensor, or `out` does not have its length.
    pub fn read_f32(
        &self,
        name: &str,
        expected_shape: &[usize],
        elems: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CkptError> {
        let Some((file, info)) = self.tensor(name) else {
            let names = self.tensors().map(|t| t.name.as_str());
            return Err(CkptError::no_tensor(self.path.clone(), name, names));
        };
        if info.shape != expected_shape {
            return Err(CkptError::Shape {
                file: file.path().into(),
                tensor: name.into(),
                expected: expected_shape.into(),
                found: info.shape.clone(),
            });
        }
        file.read_f32(name, elems, out)
    }

    /// The tensors of the folder that are not in `used`, sorted.
    pub fn unused<'a>(&self, used: impl IntoIterator<Item = &'a str>) -> Vec<String> {
        let used: HashSet<&str> = used.into_iter().collect();
        let mut unused: Vec<String> =
            self.tensors().filter(|t| !used.contains(t.name.as_str())).map(|t| t.name.clone()).collect();
        unused.sort_unstable();
        unused
    }
}

type Shards = (Vec<SafetensorsFile>, HashMap<String, usize>);

/// Opens every shard that the index lists, and checks that index and shards agree.
fn open_shards(path: &Path) -> Result<Shards, CkptError> {
    let index = path.join(INDEX);
    let fail = |fault| CkptError::Index { file: index.clone(), fault: Box::new(fault) };
    let text = read_text(&index, INDEX_CAP)?;
    let entries: Index =
        serde_json::from_str(&text).map_err(|e| fail(IndexFault::Json { why: e.to_string() }))?;
    let mut listed: BTreeMap<&str, &str> = BTreeMap::new();
    for (tensor, shard) in &entries.weight_map.0 {
        if !is_plain_name(shard) {
            return Err(fail(IndexFault::ShardPath { shard: shard.clone() }));
        }
        if listed.insert(tensor, shard).is_some() {
            return Err(fail(IndexFault::Duplicate { tensor: tensor.clone() }));
        }
    }
    let names: BTreeSet<&str> = listed.values().copied().collect();
    let mut files = Vec::new();
    let mut file_of: HashMap<String, usize> = HashMap::new();
    for shard in &names {
        let file = open_inside(path, shard)?;
        for tensor in file.tensors() {
            let name = tensor.name.clone();
            if let Some(first) = file_of.insert(name.clone(), files.len()) {
                let first = names.iter().nth(first).copied().unwrap_or_default();
                let (first, second) = (first.to_string(), shard.to_string());
                return Err(fail(IndexFault::TwoShards { tensor: name, first, second }));
            }
            if !listed.contains_key(name.as_str()) {
                return Err(fail(IndexFault::Unlisted { tensor: name, shard: shard.to_string() }));
            }
        }
        files.push(file);
    }
    for (tensor, shard) in &listed {
        let listed_in = names.iter().position(|name| name == shard);
        if file_of.get(*tensor).copied() != listed_in {
            let (tensor, shard) = (tensor.to_string(), shard.to_string());
            return Err(fail(IndexFault::NotInShard { tensor, shard }));
        }
    }
    if files.is_empty() { Err(fail(IndexFault::Empty)) } else { Ok((files, file_of)) }
}

/// Opens a file of the folder, and refuses links to targets outside it. In the Hugging Face cache a snapshot is a
/// folder of links into `blobs`, two levels up; these are followed.
pub(crate) fn open_inside(folder: &Path, name: &str) -> Result<SafetensorsFile, CkptError> {
    let file = folder.join(name);
    let target = file.canonicalize().map_err(read_error(&file))?;
    let folder = folder.canonicalize().map_err(read_error(folder))?;
    let snapshots = parent(&folder);
    let cache = snapshots.file_name().is_some_and(|name| name == "snapshots");
    let in_cache = cache && target.starts_with(parent(snapshots).join("blobs"));
    if !target.starts_with(&folder) && !in_cache {
        return Err(CkptError::LinkOutside { file, target });
    }
    SafetensorsFile::open(&file)
}

fn read_text(path: &Path, cap: Bytes) -> Result<String, CkptError> {
    let bytes = read_bytes(path, cap)?;
    String::from_utf8(bytes).map_err(|e| {
        let source = std::io::Error::new(std::io::ErrorKind::InvalidData, e.utf8_error());
        CkptError::Read { path: path.into(), source }
    })
}

/// Pickled weight files, which could run code when they are loaded.
fn pickled(path: &Path) -> Result<Vec<String>, CkptError> {
    let mut names = Vec::new();
    for entry in path.read_dir().map_err(read_error(path))? {
        let name = entry.map_err(read_error(path))?.file_name().to_string_lossy().into_owned();
        if [".bin", ".pt", ".pth"].iter().any(|ext| name.ends_with(ext)) {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

#[derive(Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// The entries of the index in order, including duplicates.
struct WeightMap(Vec<(String, String)>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensor names and file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(WeightMap(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
