//! What can be wrong with weight files, model folders and checkpoints.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

use lockstep_core::{Bytes, DType, Fault, FaultClass, closest};

/// Why state could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CkptError {
    #[error("{} does not exist", path.display())]
    Missing { path: PathBuf },
    #[error("{} is not a {expected}", path.display())]
    WrongKind {
        path: PathBuf,
        /// `regular file` or `folder`.
        expected: &'static str,
    },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("a rank's share of the checkpoint of step {step} does not fit: {why}")]
    Share { step: lockstep_core::Step, why: String },
    #[error("{} is {size}, more than the {cap} such a file may have", path.display())]
    TooLarge { path: PathBuf, size: Bytes, cap: Bytes },
    #[error("{} is not a usable safetensors file: {fault}", file.display())]
    Safetensors { file: PathBuf, fault: Box<SafetensorsFault> },
    #[error("{} has no tensor `{tensor}`", path.display())]
    NoTensor {
        path: PathBuf,
        tensor: String,
        /// A tensor of nearly that name.
        similar: Option<String>,
    },
    #[error("`{tensor}` in {} has shape {found:?}, expected {expected:?}", file.display())]
    Shape { file: PathBuf, tensor: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("`{tensor}` in {} has dtype {dtype}; F32, F16 and BF16 can be read", file.display())]
    DtypeUnreadable { file: PathBuf, tensor: String, dtype: String },
    #[error("tensors cannot be written as {dtype}")]
    DtypeUnwritable { dtype: DType },
    #[error("{} has no config.json", folder.display())]
    NoConfig { folder: PathBuf },
    #[error("{} has no safetensors weights{}", folder.display(), Beside(pickled))]
    NoWeights {
        folder: PathBuf,
        /// Weight files of the pickled kind, which are not read.
        pickled: Vec<String>,
    },
    #[error("{} is not a usable index: {fault}", file.display())]
    Index { file: PathBuf, fault: Box<IndexFault> },
    /// A link out of the folder, other than into the cache it belongs to.
    #[error("{} is a link that leaves its folder, to {}", file.display(), target.display())]
    LinkLeaves { file: PathBuf, target: PathBuf },
    #[error("{} exists and is not a model folder", folder.display())]
    WouldReplace { folder: PathBuf },
    #[error("`{}` cannot be the name of a file in a model folder", name.escape_debug())]
    FileName { name: String },
    #[error("{} is not a complete checkpoint: it has no manifest.json", path.display())]
    NoManifest { path: PathBuf },
    #[error("{} is not a usable manifest: {fault}", file.display())]
    Manifest { file: PathBuf, fault: Box<ManifestFault> },
    #[error("{} has {found} bytes, expected {expected}", file.display())]
    Length { file: PathBuf, expected: u64, found: u64 },
    #[error("{} is corrupt: its BLAKE3 hash is {found}, expected {expected}", file.display())]
    Hash { file: PathBuf, expected: String, found: String },
    #[error("{} is not in the manifest", file.display())]
    ExtraFile { file: PathBuf },
    #[error("{} does not say `{name}`", file.display())]
    NoCounter { file: PathBuf, name: String },
    /// Whoever had to give a tensor's values could not.
    #[error("no values for `{tensor}`: {source}")]
    Source { tensor: String, source: Box<dyn Error + Send + Sync> },
}

/// What is wrong with a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsFault {
    #[error("truncated: expected {expected} bytes, found {found}")]
    Truncated { expected: u64, found: u64 },
    #[error("{extra} bytes after the last tensor; expected {expected} bytes, found {found}")]
    Trailing { expected: u64, found: u64, extra: u64 },
    #[error("it is {what}")]
    OtherKind { what: &'static str },
    #[error("its header claims {size} bytes, more than the {cap} allowed")]
    HeaderTooLarge { size: u64, cap: u64 },
    #[error("its header is not valid: {why}")]
    Header { why: String },
    #[error("tensor `{tensor}` is there twice")]
    Duplicate { tensor: String },
    #[error("tensor `{tensor}` has unknown dtype `{dtype}`")]
    UnknownDtype { tensor: String, dtype: String },
    #[error("tensor `{tensor}` of shape {shape:?} is larger than can be addressed")]
    Overflow { tensor: String, shape: Vec<u64> },
    #[error(
        "tensor `{tensor}` of shape {shape:?} and dtype {dtype} needs {needed} bytes, its offsets give {given}"
    )]
    Size { tensor: String, shape: Vec<u64>, dtype: String, needed: u64, given: u64 },
    #[error("tensor `{tensor}` of shape {shape:?} and dtype {dtype} does not fill whole bytes")]
    PartByte { tensor: String, shape: Vec<u64>, dtype: String },
    #[error("tensor `{tensor}` ends at {end} before it starts at {start}")]
    Backwards { tensor: String, start: u64, end: u64 },
    #[error("tensor `{tensor}` starts at {start}, inside `{other}`, which ends at {end}")]
    Overlap { tensor: String, start: u64, other: String, end: u64 },
    #[error("nothing is at {from}..{to}, before tensor `{tensor}`")]
    Gap { tensor: String, from: u64, to: u64 },
}

/// What is wrong with `model.safetensors.index.json`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexFault {
    #[error("{why}")]
    Json { why: String },
    #[error("tensor `{tensor}` is listed twice")]
    Duplicate { tensor: String },
    #[error("shard `{shard}` is not a plain file name in the same folder")]
    ShardPath { shard: String },
    #[error("it puts `{tensor}` into {shard}, which does not have it")]
    NotInShard { tensor: String, shard: String },
    #[error("tensor `{tensor}` is in both {first} and {second}")]
    TwoShards { tensor: String, first: String, second: String },
    #[error("{shard} has `{tensor}`, which it does not list")]
    Unlisted { tensor: String, shard: String },
    #[error("it lists no tensors")]
    Empty,
}

/// What is wrong with `manifest.json`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestFault {
    #[error("its frame is damaged or cut short")]
    Frame,
    #[error("its BLAKE3 hash is {found}, expected {expected}")]
    Hash { expected: String, found: String },
    #[error("{why}")]
    Json { why: String },
    #[error("it has format version {found}; this program knows {known}")]
    Version { found: u64, known: u64 },
    #[error("it is of step {found}, but its folder is named for step {expected}")]
    Step { expected: u64, found: u64 },
    #[error("file `{name}` is listed twice or is no plain file name")]
    File { name: String },
    #[error("`{tensor}` refers to `{file}`, which is not listed")]
    UnlistedFile { tensor: String, file: String },
    #[error("`{tensor}` has a piece of {found:?}, but `{piece}` in {file} has shape {shape:?}")]
    PieceShape { tensor: String, piece: String, file: String, found: Vec<usize>, shape: Vec<usize> },
    #[error("the pieces of `{tensor}` do not make up its shape {shape:?}")]
    Pieces { tensor: String, shape: Vec<usize> },
}

impl CkptError {
    /// The error for a tensor that is not among `names`.
    pub(crate) fn no_tensor<'a>(
        path: PathBuf,
        tensor: &str,
        names: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        // The search is quadratic in the name's length; a hostile header must not make it slow.
        let near = names.into_iter().filter(|name| name.len() <= 256).take(10_000);
        let similar = if tensor.len() <= 256 { closest(tensor, near).map(str::to_string) } else { None };
        CkptError::NoTensor { path, tensor: tensor.into(), similar }
    }
}

impl Fault for CkptError {
    fn class(&self) -> FaultClass {
        match self {
            CkptError::Missing { .. } | CkptError::NoConfig { .. } | CkptError::NoWeights { .. } => {
                FaultClass::InputMissing
            }
            CkptError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                FaultClass::InputMissing
            }
            CkptError::Write { .. } | CkptError::WouldReplace { .. } => FaultClass::CannotWrite,
            CkptError::DtypeUnwritable { .. } => FaultClass::BadConfig,
            CkptError::Source { .. } | CkptError::Share { .. } => FaultClass::Internal,
            _ => FaultClass::BadData,
        }
    }

    fn hint(&self) -> Option<String> {
        let text = match self {
            CkptError::Write { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    "the disk or quota is full: free space, keep fewer checkpoints, or choose another folder."
                }
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    "choose a folder that this user may write to."
                }
                _ => return None,
            },
            CkptError::NoWeights { pickled, .. } if !pickled.is_empty() => {
                "pickled weights can run code when read, so they are not; load the folder in transformers \
                 and save it with save_pretrained(folder, safe_serialization=True)."
            }
            CkptError::NoWeights { .. } | CkptError::NoConfig { .. } => {
                "a model folder has config.json and model.safetensors, or shards with \
                 model.safetensors.index.json."
            }
            CkptError::NoTensor { similar: Some(similar), .. } => {
                return Some(format!("there is a tensor `{similar}`."));
            }
            CkptError::NoTensor { .. } | CkptError::Shape { .. } => {
                "the config does not describe these weights."
            }
            CkptError::Safetensors { fault, .. } if matches!(**fault, SafetensorsFault::Truncated { .. }) => {
                "the download or copy was cut short; fetch the file again."
            }
            CkptError::Safetensors { fault, .. } if matches!(**fault, SafetensorsFault::OtherKind { .. }) => {
                "fetch the file itself with `git lfs pull`, or convert it with safetensors' converter."
            }
            CkptError::Safetensors { .. } => "the file is damaged; fetch or write it again.",
            CkptError::DtypeUnreadable { .. } => "convert the weights to one of these.",
            CkptError::WouldReplace { .. } => {
                "choose another folder, or remove this one if it is not needed."
            }
            CkptError::NoManifest { .. } => "the save was cut short; use an earlier checkpoint.",
            CkptError::Hash { .. } | CkptError::Length { .. } | CkptError::ExtraFile { .. } => {
                "the checkpoint was changed after it was written; use an earlier one."
            }
            CkptError::Manifest { fault, .. } if matches!(**fault, ManifestFault::Version { .. }) => {
                "use the version of this program that wrote it, or a newer one."
            }
            CkptError::FileName { .. } => {
                "rename the file; a name has no separators, colons or control characters, and is not one that \
                 weights or manifests have."
            }
            CkptError::LinkLeaves { .. } => "replace the link by the file.",
            _ => return None,
        };
        Some(text.into())
    }
}

struct Beside<'a>(&'a [String]);

impl fmt::Display for Beside<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => Ok(()),
            [one] => write!(f, "; {one} is not safetensors"),
            [first, rest @ ..] => write!(f, "; {first} and {} more are not safetensors", rest.len()),
        }
    }
}
