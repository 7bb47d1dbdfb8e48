//! Reading a checkpoint: only what the manifest names, and nothing that is not as it was written.

use std::collections::BTreeMap;
use std::io::Read;
use std::num::NonZero;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use lockstep_core::{Bytes, Step};

use crate::durable::{open_file, read_bytes, read_error};
use crate::manifest::{FileEntry, Logical, MANIFEST, MANIFEST_CAP, Manifest};
use crate::retention::step_of;
use crate::{CkptError, ManifestFault, Meta, SafetensorsFile};

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: BTreeMap<String, SafetensorsFile>,
}

impl Checkpoint {
    /// Opens a checkpoint and checks all but the hashes: the manifest, each file's presence, length and
    /// header, and that there are no other shards.
    pub fn open(path: &Path) -> Result<Self, CkptError> {
        let manifest = read_manifest(path)?;
        refuse_extra_files(path, &manifest)?;
        let mut files = BTreeMap::new();
        for entry in &manifest.files {
            check_length(path, entry)?;
            if entry.name.ends_with(".safetensors") {
                files.insert(entry.name.clone(), SafetensorsFile::open(&path.join(&entry.name))?);
            }
        }
        let checkpoint = Checkpoint { path: path.into(), manifest, files };
        checkpoint.check_pieces()?;
        Ok(checkpoint)
    }

    /// Opens a checkpoint to resume from: as [`Checkpoint::open`], then hashes every byte.
    pub fn open_verified(path: &Path) -> Result<Self, CkptError> {
        // Hashes come first, so that a damaged file is told as such and not by its symptoms.
        let manifest = read_manifest(path)?;
        refuse_extra_files(path, &manifest)?;
        verify_files(path, &manifest.files)?;
        Checkpoint::open(path)
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

    /// A counter that must be there.
    pub fn counter(&self, name: &str) -> Result<u64, CkptError> {
        let found = self.manifest.meta.counters.get(name).copied();
        found.ok_or_else(|| CkptError::NoCounter { file: self.manifest_path(), name: name.into() })
    }

    /// The names of all tensors, and their shapes.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.manifest.tensors.iter().map(|(name, t)| (name.as_str(), t.shape.as_slice()))
    }

    /// The names of files that are no tensors.
    pub fn other_files(&self) -> impl Iterator<Item = &str> {
        let names = self.manifest.files.iter().map(|entry| entry.name.as_str());
        names.filter(|name| !self.files.contains_key(*name))
    }

    /// Such a file's content, if it is as it was written. `None`: there is no such file.
    pub fn read_file(&self, name: &str) -> Result<Option<Vec<u8>>, CkptError> {
        let Some(entry) = self.manifest.files.iter().find(|entry| entry.name == name) else {
            return Ok(None);
        };
        verify_file(&self.path, entry)?;
        read_bytes(&self.path.join(name), Bytes(entry.bytes)).map(Some)
    }

    /// Hashes every file, several at a time.
    pub fn verify(&self) -> Result<(), CkptError> {
        verify_files(&self.path, &self.manifest.files)
    }

    /// Reads a flat range of a whole tensor, whatever pieces it lies in.
    ///
    /// # Panics
    /// If the range is outside `expected_shape` or `out` is not of its size.
    pub fn read_f32(
        &self,
        name: &str,
        expected_shape: &[usize],
        elems: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CkptError> {
        let logical = self.require(name)?;
        if logical.shape != expected_shape {
            return Err(CkptError::Shape {
                file: self.manifest_path(),
                tensor: name.into(),
                expected: expected_shape.into(),
                found: logical.shape.clone(),
            });
        }
        let total: usize = expected_shape.iter().product();
        assert!(
            elems.start <= elems.end && elems.end <= total,
            "elements {elems:?} of `{name}`, which has {total}"
        );
        assert_eq!(elems.len(), out.len(), "{} elements of `{name}` into {}", elems.len(), out.len());
        for piece in &logical.pieces {
            let file = &self.files[&piece.file];
            for run in piece.part.runs(&logical.shape, &elems) {
                let into = run.tensor.start - elems.start..run.tensor.end - elems.start;
                file.read_f32(&piece.tensor, run.piece..run.piece + into.len(), &mut out[into])?;
            }
        }
        Ok(())
    }

    fn require(&self, name: &str) -> Result<&Logical, CkptError> {
        let names = || self.manifest.tensors.keys().map(String::as_str);
        self.manifest
            .tensors
            .get(name)
            .ok_or_else(|| CkptError::no_tensor(self.manifest_path(), name, names()))
    }

    /// Every piece the manifest names is in its file with its shape.
    fn check_pieces(&self) -> Result<(), CkptError> {
        for (tensor, logical) in &self.manifest.tensors {
            for piece in &logical.pieces {
                let Some(file) = self.files.get(&piece.file) else {
                    let fault =
                        ManifestFault::UnlistedFile { tensor: tensor.clone(), file: piece.file.clone() };
                    return Err(CkptError::Manifest { file: self.manifest_path(), fault: Box::new(fault) });
                };
                let Some(info) = file.tensor(&piece.tensor) else {
                    let names = file.tensors().map(|t| t.name.as_str());
                    return Err(CkptError::no_tensor(file.path().into(), &piece.tensor, names));
                };
                if info.shape != piece.part.extent {
                    let fault = ManifestFault::PieceShape {
                        tensor: tensor.clone(),
                        piece: piece.tensor.clone(),
                        file: piece.file.clone(),
                        found: piece.part.extent.clone(),
                        shape: info.shape.clone(),
                    };
                    return Err(CkptError::Manifest { file: self.manifest_path(), fault: Box::new(fault) });
                }
            }
        }
        Ok(())
    }

    fn manifest_path(&self) -> PathBuf {
        self.path.join(MANIFEST)
    }
}

/// Reads the manifest and checks it against its own hash and its folder's name.
fn read_manifest(path: &Path) -> Result<Manifest, CkptError> {
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
        _ => Ok(manifest),
    }
}

/// The check that finds a checkpoint usable without reading it: manifest, files, lengths.
pub(crate) fn check_cheaply(path: &Path) -> Result<Step, CkptError> {
    let manifest = read_manifest(path)?;
    for entry in &manifest.files {
        check_length(path, entry)?;
    }
    Ok(manifest.meta.step)
}

fn check_length(path: &Path, entry: &FileEntry) -> Result<(), CkptError> {
    let file = path.join(&entry.name);
    let (_, found) = open_file(&file)?;
    if found == entry.bytes { Ok(()) } else { Err(CkptError::Length { file, expected: entry.bytes, found }) }
}

/// A shard that the manifest does not know was put there by someone else.
fn refuse_extra_files(path: &Path, manifest: &Manifest) -> Result<(), CkptError> {
    for entry in path.read_dir().map_err(read_error(path))? {
        let file = entry.map_err(read_error(path))?.path();
        let listed = manifest.files.iter().any(|known| file.file_name() == Some(known.name.as_ref()));
        if !listed && file.extension().is_some_and(|ext| ext == "safetensors") {
            return Err(CkptError::ExtraFile { file });
        }
    }
    Ok(())
}

/// Hashes files on all cores; of several that are damaged the first listed is reported.
fn verify_files(path: &Path, files: &[FileEntry]) -> Result<(), CkptError> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(files.len());
    let next = AtomicUsize::new(0);
    let failures: Mutex<Vec<(usize, CkptError)>> = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((idx, entry)) = {
                    let idx = next.fetch_add(1, Ordering::Relaxed);
                    files.get(idx).map(|entry| (idx, entry))
                } {
                    if let Err(e) = verify_file(path, entry) {
                        failures.lock().expect("no thread panics with the lock").push((idx, e));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no thread panics with the lock");
    match failures.into_iter().min_by_key(|(idx, _)| *idx) {
        Some((_, failure)) => Err(failure),
        None => Ok(()),
    }
}

fn verify_file(path: &Path, entry: &FileEntry) -> Result<(), CkptError> {
    check_length(path, entry)?;
    let file = path.join(&entry.name);
    let (mut reader, _) = open_file(&file)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => hasher.update(&buffer[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(read_error(&file)(e)),
        };
    }
    let found = hasher.finalize().to_hex().to_string();
    if found == entry.blake3 {
        Ok(())
    } else {
        Err(CkptError::Hash { file, expected: entry.blake3.clone(), found })
    }
}
