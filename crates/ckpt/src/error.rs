//! Errors of weight files, model folders and checkpoints.

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
    #[error("a rank reported an invalid share of the checkpoint of step {step}: {why}")]
    Share { step: lockstep_core::Step, why: String },
    #[error("{} is {size}, which exceeds the limit of {cap} for such a file", path.display())]
    TooLarge { path: PathBuf, size: Bytes, cap: Bytes },
    #[error("{} is not a valid safetensors file: {fault}", file.display())]
    Safetensors { file: PathBuf, fault: Box<SafetensorsFault> },
    #[error("{} has no tensor `{tensor}`", path.display())]
    NoTensor {
        path: PathBuf,
        tensor: String,
        /// A tensor with a similar name.
        similar: Option<String>,
    },
    #[error("`{tensor}` in {} has shape {found:?}, expected {expected:?}", file.display())]
    Shape { file: PathBuf, tensor: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("`{tensor}` in {} has dtype {dtype}, but only F32, F16 and BF16 are supported", file.display())]
    DtypeUnreadable { file: PathBuf, tensor: String, dtype: String },
    #[error("{}: cannot read the 4-bit weight `{tensor}`: {why}", file.display())]
    Quantised { file: PathBuf, tensor: String, why: String },
    #[error("tensors cannot be written as {dtype}")]
    DtypeUnwritable { dtype: DType },
    #[error("{} has no config.json", folder.display())]
    NoConfig { folder: PathBuf },
    #[error("{} is not an adapter's folder: it has no adapter_config.json", folder.display())]
    NoAdapter { folder: PathBuf },
    #[error("{} does not describe an adapter that can be loaded: {why}", file.display())]
    AdapterConfig { file: PathBuf, why: String },
    #[error("{} has no safetensors weights{}", folder.display(), OtherWeights(pickled))]
    NoWeights {
        folder: PathBuf,
        /// Pickled weight files, which are not read.
        pickled: Vec<String>,
    },
    #[error("{} is not a valid index: {fault}", file.display())]
    Index { file: PathBuf, fault: Box<IndexFault> },
    /// A symbolic link out of the folder, other than into the Hugging Face cache that the folder belongs to.
    #[error("{} is a symbolic link to {}, outside its folder", file.display(), target.display())]
    LinkOutside { file: PathBuf, target: PathBuf },
    #[error("{} exists and is not a model folder", folder.display())]
    WouldReplace { folder: PathBuf },
    #[error("`{}` is not allowed as a file name in a model folder", name.escape_debug())]
    FileName { name: String },
    #[error("{} is not a complete checkpoint: it has no manifest.json", path.display())]
    NoManifest { path: PathBuf },
    #[error("{} is not a valid manifest: {fault}", file.display())]
    Manifest { file: PathBuf, fault: Box<ManifestFault> },
    #[error("{} has {found} bytes, expected {expected}", file.display())]
    Length { file: PathBuf, expected: u64, found: u64 },
    #[error("{} is corrupt: its BLAKE3 hash is {found}, expected {expected}", file.display())]
    Hash { file: PathBuf, expected: String, found: String },
    #[error("{} is not in the manifest", file.display())]
    ExtraFile { file: PathBuf },
    #[error("{} has no counter `{name}`", file.display())]
    NoCounter { file: PathBuf, name: String },
    /// The caller's [`Source`](crate::Source) failed.
    #[error("cannot get the values of `{tensor}`: {source}")]
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
    #[error("its header is invalid: {why}")]
    Header { why: String },
    #[error("tensor `{tensor}` is listed twice")]
    Duplicate { tensor: String },
    #[error("tensor `{tensor}` has unknown dtype `{dtype}`")]
    UnknownDtype { tensor: String, dtype: String },
    #[error("tensor `{tensor}` of shape {shape:?} is too large to address")]
    Overflow { tensor: String, shape: Vec<u64> },
    #[error(
        "tensor `{tensor}` of shape {shape:?} and dtype {dtype} needs {needed} bytes, but its offsets span {given}"
    )]
    Size { tensor: String, shape: Vec<u64>, dtype: String, needed: u64, given: u64 },
    #[error("tensor `{tensor}` of shape {shape:?} and dtype {dtype} is not a whole number of bytes")]
    PartByte { tensor: String, shape: Vec<u64>, dtype: String },
    #[error("tensor `{tensor}` ends at {end}, before its start at {start}")]
    Backwards { tensor: String, start: u64, end: u64 },
    #[error("tensor `{tensor}` starts at {start}, inside `{other}`, which ends at {end}")]
    Overlap { tensor: String, start: u64, other: String, end: u64 },
    #[error("bytes {from}..{to}, before tensor `{tensor}`, belong to no tensor")]
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
    #[error("it lists `{tensor}` in {shard}, which does not contain it")]
    NotInShard { tensor: String, shard: String },
    #[error("tensor `{tensor}` is in both {first} and {second}")]
    TwoShards { tensor: String, first: String, second: String },
    #[error("{shard} contains `{tensor}`, which the index does not list")]
    Unlisted { tensor: String, shard: String },
    #[error("it lists no tensors")]
    Empty,
}

/// What is wrong with `manifest.json`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestFault {
    #[error("it is damaged or truncated")]
    Frame,
    #[error("its BLAKE3 hash is {found}, expected {expected}")]
    Hash { expected: String, found: String },
    #[error("{why}")]
    Json { why: String },
    #[error("it has format version {found}, but this version of lockstep supports up to {known}")]
    Version { found: u64, known: u64 },
    #[error("it is for step {found}, but its folder is named for step {expected}")]
    Step { expected: u64, found: u64 },
    #[error("file `{name}` is listed twice or is not a plain file name")]
    File { name: String },
    #[error("`{tensor}` refers to `{file}`, which is not listed")]
    UnlistedFile { tensor: String, file: String },
    #[error(
        "it lists a piece of `{tensor}` with shape {found:?}, but `{piece}` in {file} has shape {shape:?}"
    )]
    PieceShape { tensor: String, piece: String, file: String, found: Vec<usize>, shape: Vec<usize> },
    #[error("the pieces of `{tensor}` do not cover its shape {shape:?} exactly once")]
    Pieces { tensor: String, shape: Vec<usize> },
}

impl CkptError {
    /// The error for a tensor that is not among `names`.
    pub(crate) fn no_tensor<'a>(
        path: PathBuf,
        tensor: &str,
        names: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        // The search is quadratic in the length of a name. Limit it, so that a hostile header cannot make it slow.
        let near = names.into_iter().filter(|name| name.len() <= 256).take(10_000);
        let similar = if tensor.len() <= 256 { closest(tensor, near).map(str::to_string) } else { None };
        CkptError::NoTensor { path, tensor: tensor.into(), similar }
    }
}

impl Fault for CkptError {
    fn class(&self) -> FaultClass {
        match self {
            CkptError::Missing { .. }
            | CkptError::NoAdapter { .. }
            | CkptError::NoConfig { .. }
            | CkptError::NoWeights { .. } => FaultClass::InputMissing,
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
                "pickled weights can run code when they are loaded, so they are not supported: load the folder in \
                 transformers and save it with save_pretrained(folder, safe_serialization=True)."
            }
            CkptError::NoWeights { .. } | CkptError::NoConfig { .. } => {
                "a model folder contains config.json and model.safetensors, or shards with \
                 model.safetensors.index.json."
            }
            CkptError::NoAdapter { .. } => {
                "an adapter's folder contains adapter_config.json and adapter_model.safetensors, as PEFT writes them."
            }
            CkptError::AdapterConfig { .. } => {
                "merge the adapter into its model with PEFT's merge_and_unload, and use that model."
            }
            CkptError::NoTensor { similar: Some(similar), .. } => {
                return Some(format!("the most similar name is `{similar}`."));
            }
            CkptError::NoTensor { .. } | CkptError::Shape { .. } => {
                "the model configuration does not match these weights."
            }
            CkptError::Safetensors { fault, .. } if matches!(**fault, SafetensorsFault::Truncated { .. }) => {
                "the download or copy is incomplete: fetch the file again."
            }
            CkptError::Safetensors { fault, .. } if matches!(**fault, SafetensorsFault::OtherKind { .. }) => {
                "fetch the file itself with `git lfs pull`, or convert it with safetensors' converter."
            }
            CkptError::Safetensors { .. } => "the file is damaged: fetch or write it again.",
            CkptError::Quantised { .. } => {
                "only NF4 with double quantisation is read; load the model in transformers, and save it without quantization \
                 or with `bnb_4bit_quant_type=\"nf4\", bnb_4bit_use_double_quant=True`."
            }
            CkptError::DtypeUnreadable { .. } => "convert the weights to one of these dtypes.",
            CkptError::WouldReplace { .. } => {
                "choose another folder, or remove this one if it is not needed."
            }
            CkptError::NoManifest { .. } => "the save did not finish: use an earlier checkpoint.",
            CkptError::Hash { .. } | CkptError::Length { .. } | CkptError::ExtraFile { .. } => {
                "the checkpoint was changed after it was written: use an earlier one."
            }
            CkptError::Manifest { fault, .. } if matches!(**fault, ManifestFault::Version { .. }) => {
                "use the version of lockstep that wrote it, or a newer one."
            }
            CkptError::FileName { .. } => {
                "rename the file: a name must not contain separators, colons or control characters, and must not \
                 be that of a weights file, an index or a manifest."
            }
            CkptError::LinkOutside { .. } => "replace the link with the file.",
            _ => return None,
        };
        Some(text.into())
    }
}

/// Lists the weight files of a folder that are not safetensors.
struct OtherWeights<'a>(&'a [String]);

impl fmt::Display for OtherWeights<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => Ok(()),
            [one] => write!(f, "; {one} is not safetensors"),
            [first, rest @ ..] => write!(f, "; {first} and {} more are not safetensors", rest.len()),
        }
    }
}
