//! Reads a checkpoint: only files that the manifest lists, and only the parts that are requested.
//!
//! Opening reads the manifest only, so its cost does not depend on how many ranks wrote the checkpoint or read it.
//! The contents of files can be trusted after [`Checkpoint::verify`], or after every rank has called
//! [`Checkpoint::verify_share`].

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use lockstep_core::{Bytes, Step};

use crate::durable::{read_bytes, read_error};
use crate::manifest::{MANIFEST, MANIFEST_CAP, Manifest, Piece, StoredTensor};
use crate::retention::step_of;
use crate::{CkptError, ManifestFault, Meta, SafetensorsFile};

/// The number of files that [`Checkpoint::read_f32`] keeps open. The usual limit of a process is about a thousand.
const MAX_OPEN_FILES: usize = 64;
/// The largest number of values passed on at once.
const PART_ELEMS: usize = 1 << 18;

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    pub(crate) path: PathBuf,
    pub(crate) manifest: Manifest,
    manifest_hash: String,
    open_files: Mutex<BTreeMap<String, Arc<SafetensorsFile>>>,
    bytes_read: AtomicU64,
    pub(crate) bytes_verified: AtomicU64,
}

/// A flat range of a tensor to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPart {
    pub name: String,
    /// The shape of the whole tensor. It is an error if the checkpoint has another one.
    pub shape: Vec<usize>,
    pub elems: Range<usize>,
}

impl Checkpoint {
    /// Opens a checkpoint and validates its manifest. The files are not opened.
    pub fn open(path: &Path) -> Result<Self, CkptError> {
        let (manifest, manifest_hash) = read_manifest(path)?;
        Ok(Checkpoint {
            path: path.into(),
            manifest,
            manifest_hash,
            open_files: Mutex::default(),
            bytes_read: AtomicU64::new(0),
            bytes_verified: AtomicU64::new(0),
        })
    }

    /// Like [`Checkpoint::open`], and then verifies every byte.
    pub fn open_verified(path: &Path) -> Result<Self, CkptError> {
        let checkpoint = Checkpoint::open(path)?;
        checkpoint.verify()?;
        Ok(checkpoint)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn meta(&self) -> &Meta {
        &self.manifest.meta
    }

    pub fn step(&self) -> Step {
        self.manifest.meta.step
    }

    /// The hash of the manifest. The manifest contains the hashes of all files, so ranks with the same hash read the
    /// same checkpoint.
    pub fn manifest_hash(&self) -> &str {
        &self.manifest_hash
    }

    /// Bytes of tensors and headers read so far, not counting verification.
    pub fn bytes_read(&self) -> Bytes {
        let open = self.open_files.lock().unwrap_or_else(|e| e.into_inner());
        let now_open: u64 = open.values().map(|file| file.bytes_read().0).sum();
        Bytes(self.bytes_read.load(Ordering::Relaxed) + now_open)
    }

    /// Bytes hashed so far.
    pub fn bytes_verified(&self) -> Bytes {
        Bytes(self.bytes_verified.load(Ordering::Relaxed))
    }

    /// A counter. It is an error if the checkpoint does not have it.
    pub fn counter(&self, name: &str) -> Result<u64, CkptError> {
        let found = self.manifest.meta.counters.get(name).copied();
        found.ok_or_else(|| CkptError::NoCounter { file: self.manifest_path(), name: name.into() })
    }

    /// The names and shapes of all tensors.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.manifest.tensors.iter().map(|(name, t)| (name.as_str(), t.shape.as_slice()))
    }

    /// The names of the files that do not hold tensors.
    pub fn other_files(&self) -> impl Iterator<Item = &str> {
        self.manifest.files.iter().filter(|entry| !entry.has_tensors()).map(|entry| entry.name.as_str())
    }

    /// Reads and verifies a file, such as one of [`Checkpoint::other_files`]. `None` if there is no such file.
    pub fn read_file(&self, name: &str) -> Result<Option<Vec<u8>>, CkptError> {
        let Some(entry) = self.manifest.files.iter().find(|entry| entry.name == name) else {
            return Ok(None);
        };
        self.verify_file(entry)?;
        read_bytes(&self.path.join(name), Bytes(entry.bytes)).map(Some)
    }

    /// Reads parts of tensors, whichever pieces hold them. `put` receives the index into `parts`, a flat range of
    /// that tensor and its values, a bounded number at a time.
    ///
    /// Reads file by file, in an unspecified order. Every file that holds some of the parts is opened once, and no
    /// other file is opened.
    ///
    /// # Panics
    /// If a range is outside its shape.
    pub fn read_parts<E: From<CkptError>>(
        &self,
        parts: &[TensorPart],
        mut put: impl FnMut(usize, Range<usize>, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut by_file: BTreeMap<&str, Vec<(usize, &Piece)>> = BTreeMap::new();
        for (index, part) in parts.iter().enumerate() {
            let logical = self.require(&part.name, &part.shape)?;
            check_range(part);
            let overlaps = |piece: &&Piece| piece.part.may_overlap(&part.shape, &part.elems);
            for piece in logical.pieces.iter().filter(overlaps).filter(|_| !part.elems.is_empty()) {
                by_file.entry(&piece.file).or_default().push((index, piece));
            }
        }
        let mut values = Vec::new();
        for (name, pieces) in by_file {
            let file = SafetensorsFile::open(&self.path.join(name))?;
            for (index, piece) in pieces {
                let part = &parts[index];
                self.check_piece(&part.name, piece, &file)?;
                for copy in piece.part.copy_ranges(&part.shape, &part.elems) {
                    let mut from = copy.piece;
                    for start in copy.tensor.clone().step_by(PART_ELEMS) {
                        let end = (start + PART_ELEMS).min(copy.tensor.end);
                        values.resize(end - start, 0.0);
                        file.read_numbers(&piece.tensor, from..from + values.len(), &mut values)?;
                        put(index, start..end, &values)?;
                        from += values.len();
                    }
                }
            }
            self.bytes_read.fetch_add(file.bytes_read().0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Reads a flat range of a whole tensor, whichever pieces hold it.
    ///
    /// # Panics
    /// If the range is outside `expected_shape`, or `out` does not have its length.
    pub fn read_f32(
        &self,
        name: &str,
        expected_shape: &[usize],
        elems: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CkptError> {
        let logical = self.require(name, expected_shape)?;
        let part = TensorPart { name: name.into(), shape: expected_shape.into(), elems: elems.clone() };
        check_range(&part);
        assert_eq!(elems.len(), out.len(), "{} elements of `{name}` into {}", elems.len(), out.len());
        let overlaps = |piece: &&Piece| piece.part.may_overlap(expected_shape, &elems);
        for piece in logical.pieces.iter().filter(overlaps).filter(|_| !elems.is_empty()) {
            let file = self.open_file(&piece.file)?;
            self.check_piece(name, piece, &file)?;
            for copy in piece.part.copy_ranges(&logical.shape, &elems) {
                let into = copy.tensor.start - elems.start..copy.tensor.end - elems.start;
                file.read_numbers(&piece.tensor, copy.piece..copy.piece + into.len(), &mut out[into])?;
            }
        }
        Ok(())
    }

    /// Opens a file of tensors, or returns it if it is already open.
    fn open_file(&self, name: &str) -> Result<Arc<SafetensorsFile>, CkptError> {
        let mut open = self.open_files.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(file) = open.get(name) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(SafetensorsFile::open(&self.path.join(name))?);
        if open.len() == MAX_OPEN_FILES {
            let closed = open.pop_first();
            self.bytes_read.fetch_add(closed.map_or(0, |(_, file)| file.bytes_read().0), Ordering::Relaxed);
        }
        open.insert(name.into(), Arc::clone(&file));
        Ok(file)
    }

    fn require(&self, name: &str, expected_shape: &[usize]) -> Result<&StoredTensor, CkptError> {
        let Some(logical) = self.manifest.tensors.get(name) else {
            let names = self.manifest.tensors.keys().map(String::as_str);
            return Err(CkptError::no_tensor(self.manifest_path(), name, names));
        };
        if logical.shape != expected_shape {
            return Err(CkptError::Shape {
                file: self.manifest_path(),
                tensor: name.into(),
                expected: expected_shape.into(),
                found: logical.shape.clone(),
            });
        }
        Ok(logical)
    }

    /// Checks that a piece is in its file with the shape that the manifest lists.
    pub(crate) fn check_piece(
        &self,
        tensor: &str,
        piece: &Piece,
        file: &SafetensorsFile,
    ) -> Result<(), CkptError> {
        let Some(info) = file.tensor(&piece.tensor) else {
            let names = file.tensors().map(|t| t.name.as_str());
            return Err(CkptError::no_tensor(file.path().into(), &piece.tensor, names));
        };
        if info.shape == piece.part.extent {
            return Ok(());
        }
        let fault = ManifestFault::PieceShape {
            tensor: tensor.into(),
            piece: piece.tensor.clone(),
            file: piece.file.clone(),
            found: piece.part.extent.clone(),
            shape: info.shape.clone(),
        };
        Err(CkptError::Manifest { file: self.manifest_path(), fault: Box::new(fault) })
    }

    fn manifest_path(&self) -> PathBuf {
        self.path.join(MANIFEST)
    }
}

fn check_range(part: &TensorPart) {
    let (elems, name) = (&part.elems, &part.name);
    let total: usize = part.shape.iter().product();
    assert!(
        elems.start <= elems.end && elems.end <= total,
        "elements {elems:?} of `{name}`, which has {total}"
    );
}

/// Reads the manifest and validates it against its own hash and the name of its folder. Also returns the hash of the
/// manifest file.
pub(crate) fn read_manifest(path: &Path) -> Result<(Manifest, String), CkptError> {
    let found = path.metadata().map_err(read_error(path))?;
    if !found.is_dir() {
        return Err(CkptError::WrongKind { path: path.into(), expected: "folder" });
    }
    let file = path.join(MANIFEST);
    let text = read_bytes(&file, MANIFEST_CAP).map_err(|e| match e {
        CkptError::Missing { .. } => CkptError::NoManifest { path: path.into() },
        other => other,
    })?;
    let fail = |fault| CkptError::Manifest { file: file.clone(), fault: Box::new(fault) };
    let manifest = Manifest::from_text(&text).map_err(fail)?;
    let found = manifest.meta.step;
    match step_of(path) {
        Some(expected) if expected != found => {
            Err(fail(ManifestFault::Step { expected: expected.0, found: found.0 }))
        }
        _ => Ok((manifest, blake3::hash(&text).to_hex().to_string())),
    }
}
