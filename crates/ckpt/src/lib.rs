//! State on disk: Hugging Face model folders in and out, and checkpoints that are complete and
//! checksummed, or invisible.
//!
//! [`SafetensorsFile`] reads tensors without trusting the file, [`ModelFolder`] finds them over shards,
//! [`export_folder`] streams a folder in bounded memory. [`CheckpointWriter`] and [`Checkpoint`] keep a
//! run's whole state by logical tensor, so that any layout loads what any other wrote: a rank reads the ranges it
//! owns, and ranks divide the files to verify between them. [`latest`] and [`retain`] look after the folder that
//! checkpoints lie in.
//!
//! Left out so far: pickled weights (`.bin`, `.pt`), checking that the disk has room before a save.

#![forbid(unsafe_code)]

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

pub use checkpoint::{Checkpoint, TensorPart};
pub use checkpoint_write::{CheckpointWriter, PieceSpec, TensorSpec};
pub use error::{CkptError, IndexFault, ManifestFault, SafetensorsFault};
pub use export::{DEFAULT_SHARD_BYTES, Export, check_model_files, export_folder};
pub use geometry::TensorBox;
pub use manifest::{DataCursor, Meta, NumbersRecord};
pub use model_folder::ModelFolder;
pub use retention::{Latest, SkippedCheckpoint, latest, open_latest, retain};
pub use safetensors_file::{SafetensorsFile, TensorInfo};
pub use safetensors_write::{SafetensorsWriter, WrittenFile};
pub use verify::Damage;

/// Fills the slice with the elements of the named tensor in the flat range. Called with ranges that
/// go up through each tensor in turn, so whoever answers can stream.
pub type Source<'a> = dyn FnMut(&str, std::ops::Range<usize>, &mut [f32]) -> Result<(), CkptError> + 'a;

/// As [`Source`], for pieces: asked by index into the list of pieces, with ranges flat within the piece.
pub type PieceSource<'a> = dyn FnMut(usize, std::ops::Range<usize>, &mut [f32]) -> Result<(), CkptError> + 'a;
