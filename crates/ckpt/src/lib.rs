//! State on disk: Hugging Face model folders and checkpoints. A checkpoint is either complete and checksummed, or not
//! visible at all.
//!
//! [`SafetensorsFile`] reads tensors without trusting the file, [`ModelFolder`] finds them across shards, and
//! [`export_folder`] writes a model folder in bounded memory. [`CheckpointWriter`] and [`Checkpoint`] store a run's
//! whole state by logical tensor, so that a checkpoint can be loaded with any sharding. Ranks write one checkpoint
//! together: each writes the pieces it holds, reads the ranges it needs, and verifies its share of the files.
//! [`latest`] and [`retain`] manage the folder that contains the checkpoints.
//!
//! Not implemented: pickled weights (`.bin`, `.pt`), and checking for free disk space before a save.

#![forbid(unsafe_code)]

mod adapter_folder;
mod bitsandbytes;
mod checkpoint;
mod checkpoint_write;
mod convert;
mod durable;
mod error;
mod export;
mod format;
mod geometry;
mod manifest;
mod model_folder;
mod retention;
mod safetensors_file;
mod safetensors_write;
mod verify;

pub use adapter_folder::{AdapterConfig, AdapterFolder, adapter_tensor_name, model_tensor_name};
pub use bitsandbytes::StoredNf4;
pub use checkpoint::{Checkpoint, TensorPart};
pub use checkpoint_write::{CheckpointWriter, PieceSpec, TensorSpec};
pub use error::{CkptError, IndexFault, ManifestFault, SafetensorsFault};
pub use export::{
    DEFAULT_SHARD_BYTES, Export, FolderKind, check_model_files, check_replaceable, export_folder,
};
pub use geometry::TensorBox;
pub use manifest::{DataCursor, Meta, NumbersRecord};
pub use model_folder::ModelFolder;
pub use retention::{LatestCheckpoint, SkippedCheckpoint, latest, open_latest, retain};
pub use safetensors_file::{SafetensorsFile, TensorInfo};
pub use safetensors_write::{SafetensorsWriter, WrittenFile};
pub use verify::Damage;

/// Fills the slice with the elements of the named tensor in the flat range. Tensors are requested one after the
/// other, with ascending ranges, so an implementation can stream.
pub type Source<'a> = dyn FnMut(&str, std::ops::Range<usize>, &mut [f32]) -> Result<(), CkptError> + 'a;

/// Like [`Source`], for pieces: takes the index into the list of pieces, and a flat range within the piece.
pub type PieceSource<'a> = dyn FnMut(usize, std::ops::Range<usize>, &mut [f32]) -> Result<(), CkptError> + 'a;
