//! Writes a checkpoint that is either complete or not visible.
//!
//! All files are written to `step-N.partial/` and synced, the manifest last. Then the folder is renamed to `step-N`
//! and its parent is synced. A crash at any point leaves earlier checkpoints intact and at most a `.partial` folder,
//! which is never read. Several ranks write one checkpoint together: one calls [`CheckpointWriter::begin`], the
//! others [`CheckpointWriter::join`], and it adds their shares before it finishes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lockstep_core::{Bytes, DType, Step};

use crate::durable::{
    exchange, fresh_dir, is_model_file_name, is_plain_name, parent, remove_dir, rename, sync_dir,
    with_suffix, write_model_file, write_synced,
};
use crate::format::v1;
use crate::manifest::{FileEntry, MANIFEST, MANIFEST_CAP, Manifest, Piece, StoredTensor};
use crate::safetensors_write::write_file;
use crate::{CkptError, Meta, PieceSource, Source, TensorBox};

/// A tensor to write as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    pub shape: Vec<usize>,
}

impl TensorSpec {
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        TensorSpec { name: name.into(), shape: shape.into() }
    }

    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A part of a tensor to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceSpec {
    /// The state (`model/`, `exp_avg/` or `exp_avg_sq/`) followed by the tensor's name in the model.
    pub name: String,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    pub part: TensorBox,
}

/// A checkpoint that is being written. If it is dropped before [`CheckpointWriter::finish`], nothing remains.
#[derive(Debug)]
pub struct CheckpointWriter {
    step: Step,
    target: PathBuf,
    partial: PathBuf,
    files: Vec<FileEntry>,
    tensors: BTreeMap<String, StoredTensor>,
    /// The rank that began the checkpoint cleans up after a failure; ranks that joined do not.
    began: bool,
    finished: bool,
}

/// What one rank has written of a checkpoint. It is sent to the rank that finishes the checkpoint.
#[derive(serde::Serialize, serde::Deserialize)]
struct RankShare {
    files: Vec<v1::File>,
    tensors: BTreeMap<String, v1::Tensor>,
}

impl CheckpointWriter {
    /// Starts `step-N` in `root`, which is created if needed. Removes what a crash may have left of it.
    pub fn begin(root: &Path, step: Step) -> Result<Self, CkptError> {
        let target = root.join(format!("step-{step}"));
        let partial = with_suffix(&target, ".partial");
        fresh_dir(&partial)?;
        let (files, tensors) = (Vec::new(), BTreeMap::new());
        Ok(CheckpointWriter { step, target, partial, files, tensors, began: true, finished: false })
    }

    /// Joins a checkpoint that another rank has begun.
    pub fn join(root: &Path, step: Step) -> Self {
        let target = root.join(format!("step-{step}"));
        let partial = with_suffix(&target, ".partial");
        let (files, tensors) = (Vec::new(), BTreeMap::new());
        CheckpointWriter { step, target, partial, files, tensors, began: false, finished: false }
    }

    /// Completes this rank's share. Returns a text for [`CheckpointWriter::add_share`] of the rank that began.
    pub fn share(mut self) -> Result<String, CkptError> {
        sync_dir(&self.partial)?;
        let (files, tensors) = (std::mem::take(&mut self.files), std::mem::take(&mut self.tensors));
        let share = RankShare {
            files: files.iter().map(FileEntry::to_disk).collect(),
            tensors: tensors.iter().map(|(name, t)| (name.clone(), t.to_disk())).collect(),
        };
        self.finished = true;
        Ok(serde_json::to_string(&share).expect("a share can be serialized"))
    }

    /// Adds what another rank has written.
    pub fn add_share(&mut self, share: &str) -> Result<(), CkptError> {
        let bad = |why: String| CkptError::Share { step: self.step, why };
        let share: RankShare = serde_json::from_str(share).map_err(|e| bad(e.to_string()))?;
        for (name, tensor) in share.tensors {
            let tensor = StoredTensor::from_disk(tensor);
            let whole = self
                .tensors
                .entry(name.clone())
                .or_insert_with(|| StoredTensor { shape: tensor.shape.clone(), pieces: Vec::new() });
            if whole.shape != tensor.shape {
                return Err(bad(format!(
                    "`{name}` has shape {:?}, but on another rank {:?}",
                    tensor.shape, whole.shape
                )));
            }
            whole.pieces.extend(tensor.pieces);
        }
        self.files.extend(share.files.into_iter().map(FileEntry::from_disk));
        Ok(())
    }

    /// Writes whole tensors into one file of the checkpoint, in `dtype`.
    pub fn write_shard(
        &mut self,
        file_name: &str,
        tensors: &[TensorSpec],
        dtype: DType,
        source: &mut Source<'_>,
    ) -> Result<(), CkptError> {
        let whole = |t: &TensorSpec| PieceSpec {
            name: t.name.clone(),
            shape: t.shape.clone(),
            part: TensorBox::whole(&t.shape),
        };
        let pieces: Vec<PieceSpec> = tensors.iter().map(whole).collect();
        self.write_pieces(file_name, &pieces, dtype, &mut |idx, range, out| {
            source(&tensors[idx].name, range, out)
        })
    }

    /// Adds a file that does not hold tensors, such as the model's `config.json`.
    /// [`check_model_files`](crate::check_model_files) says which names are allowed.
    pub fn write_file(&mut self, name: &str, content: &[u8]) -> Result<(), CkptError> {
        let taken = name == MANIFEST || self.files.iter().any(|file| file.name == name);
        if taken || !is_model_file_name(name) || name.ends_with(".safetensors") {
            return Err(CkptError::FileName { name: name.into() });
        }
        write_model_file(&self.partial, name, content)?;
        let (bytes, blake3) = (content.len() as u64, blake3::hash(content).to_hex().to_string());
        self.files.push(FileEntry { name: name.into(), bytes, blake3 });
        Ok(())
    }

    /// Writes parts of tensors into one file. `source` takes the index into `pieces`, and a flat range within the
    /// piece.
    pub fn write_pieces(
        &mut self,
        file_name: &str,
        pieces: &[PieceSpec],
        dtype: DType,
        source: &mut PieceSource<'_>,
    ) -> Result<(), CkptError> {
        let taken = self.files.iter().any(|file| file.name == file_name);
        if taken || !is_plain_name(file_name) || !file_name.ends_with(".safetensors") {
            return Err(CkptError::FileName { name: file_name.into() });
        }
        let specs: Vec<TensorSpec> = pieces.iter().map(stored_as).collect();
        let by_name: BTreeMap<&str, usize> =
            specs.iter().enumerate().map(|(idx, spec)| (spec.name.as_str(), idx)).collect();
        let path = self.partial.join(file_name);
        let written =
            write_file(&path, &specs, dtype, &mut |name, range, out| source(by_name[name], range, out))?;
        self.files.push(FileEntry { name: file_name.into(), bytes: written.bytes.0, blake3: written.blake3 });
        for (piece, spec) in pieces.iter().zip(specs) {
            assert!(piece.part.fits(&piece.shape), "a piece of `{}` is out of bounds", piece.name);
            let logical = self
                .tensors
                .entry(piece.name.clone())
                .or_insert_with(|| StoredTensor { shape: piece.shape.clone(), pieces: Vec::new() });
            assert_eq!(logical.shape, piece.shape, "two shapes for `{}`", piece.name);
            let (file, tensor, part) = (file_name.into(), spec.name, piece.part.clone());
            logical.pieces.push(Piece { file, tensor, part });
        }
        Ok(())
    }

    /// Writes the manifest and makes the checkpoint visible. It is complete and synced when this returns.
    ///
    /// Replaces an existing checkpoint of the same step, atomically if the file system supports it.
    ///
    /// # Panics
    /// If `meta` is for another step, or if the pieces do not cover their tensors.
    pub fn finish(mut self, meta: Meta) -> Result<PathBuf, CkptError> {
        assert_eq!(meta.step, self.step, "the checkpoint was begun for another step");
        let files = std::mem::take(&mut self.files);
        let tensors = std::mem::take(&mut self.tensors);
        let text = Manifest { meta, files, tensors }.to_text();
        let size = Bytes(text.len() as u64);
        if size > MANIFEST_CAP {
            return Err(CkptError::TooLarge { path: self.target.join(MANIFEST), size, cap: MANIFEST_CAP });
        }
        if let Err(fault) = Manifest::from_text(text.as_bytes()) {
            panic!("the manifest is not valid: {fault}");
        }
        write_synced(&self.partial.join(MANIFEST), text.as_bytes())?;
        sync_dir(&self.partial)?;
        let root = parent(&self.target);
        if !self.target.exists() {
            rename(&self.partial, &self.target)?;
        } else if !exchange(&self.partial, &self.target)? {
            let trash = with_suffix(&self.target, ".trash");
            remove_dir(&trash)?;
            rename(&self.target, &trash)?;
            rename(&self.partial, &self.target)?;
            sync_dir(root)?;
            remove_dir(&trash)?;
        }
        self.finished = true;
        sync_dir(root)?;
        // After an exchange this is the old checkpoint.
        remove_dir(&self.partial)?;
        Ok(self.target.clone())
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        if self.began && !self.finished {
            // If it cannot be removed, it does no harm: a partial checkpoint is never read.
            let _ = remove_dir(&self.partial);
        }
    }
}

/// The name of a piece in its file: the tensor's name, followed by the start of the piece if it is not the whole
/// tensor.
fn stored_as(piece: &PieceSpec) -> TensorSpec {
    let whole = piece.part == TensorBox::whole(&piece.shape);
    let at: Vec<String> = piece.part.start.iter().map(usize::to_string).collect();
    let name = if whole { piece.name.clone() } else { format!("{}@{}", piece.name, at.join(",")) };
    TensorSpec { name, shape: piece.part.extent.clone() }
}
