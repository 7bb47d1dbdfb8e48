//! Verifies that a checkpoint is intact: the length and hash of every file, and that it holds the pieces that the
//! manifest lists.
//!
//! Ranks divide the files among themselves, so that each file is read once, whatever the world size.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashSet};
use std::io::Read;
use std::num::NonZero;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use lockstep_core::Step;

use crate::checkpoint::{Checkpoint, read_manifest};
use crate::durable::{open_file, read_error};
use crate::manifest::{FileEntry, Manifest, Piece};
use crate::{CkptError, SafetensorsFile};

/// The buffer of each hashing thread, negligible compared to the memory in a rank's plan.
const BUFFER_BYTES: usize = 1 << 17;

/// What is wrong with a checkpoint.
#[derive(Debug)]
pub struct Damage {
    /// Orders the findings of several ranks, so that all of them report the first.
    pub order: usize,
    pub error: CkptError,
}

impl Checkpoint {
    /// Verifies every file, on all cores.
    pub fn verify(&self) -> Result<(), CkptError> {
        self.verify_share(0, 1).map_err(|damage| damage.error)
    }

    /// Verifies the share of files of `member`, of `members` that each call this. If none finds damage, every byte of
    /// the checkpoint is intact. Shares have about the same size; a file is never split.
    pub fn verify_share(&self, member: usize, members: usize) -> Result<(), Damage> {
        assert!(member < members, "member {member} of {members}");
        if member == 0 {
            refuse_extra_files(&self.path, &self.manifest).map_err(|error| Damage { order: 0, error })?;
        }
        let files = &self.manifest.files;
        let owners = owners(files, members);
        let mine: Vec<usize> = (0..files.len()).filter(|idx| owners[*idx] == member).collect();
        let pieces = self.pieces_of(&mine);
        let next = AtomicUsize::new(0);
        let found: Mutex<Vec<Damage>> = Mutex::new(Vec::new());
        let threads = thread::available_parallelism().map_or(1, NonZero::get).min(mine.len());
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some(&idx) = mine.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let entry = &files[idx];
                        // Check the hash first, so that a damaged file is reported as such and not by its symptoms.
                        let outcome =
                            self.verify_file(entry).and_then(|()| self.verify_pieces(entry, &pieces));
                        if let Err(error) = outcome {
                            let damage = Damage { order: 1 + idx, error };
                            found.lock().expect("no thread panics while it holds the lock").push(damage);
                        }
                    }
                });
            }
        });
        let found = found.into_inner().expect("no thread panics while it holds the lock");
        found.into_iter().min_by_key(|damage| damage.order).map_or(Ok(()), Err)
    }

    /// The pieces that the manifest lists for these files, by file, each with the name of its tensor.
    fn pieces_of(&self, files: &[usize]) -> BTreeMap<&str, Vec<(&str, &Piece)>> {
        let mut by_file: BTreeMap<&str, Vec<(&str, &Piece)>> =
            files.iter().map(|idx| (self.manifest.files[*idx].name.as_str(), Vec::new())).collect();
        for (tensor, logical) in &self.manifest.tensors {
            for piece in &logical.pieces {
                if let Some(pieces) = by_file.get_mut(piece.file.as_str()) {
                    pieces.push((tensor, piece));
                }
            }
        }
        by_file
    }

    fn verify_pieces(
        &self,
        entry: &FileEntry,
        pieces: &BTreeMap<&str, Vec<(&str, &Piece)>>,
    ) -> Result<(), CkptError> {
        if !entry.has_tensors() {
            return Ok(());
        }
        let file = SafetensorsFile::open(&self.path.join(&entry.name))?;
        pieces[entry.name.as_str()]
            .iter()
            .try_for_each(|(tensor, piece)| self.check_piece(tensor, piece, &file))
    }

    pub(crate) fn verify_file(&self, entry: &FileEntry) -> Result<(), CkptError> {
        check_length(&self.path, entry)?;
        let file = self.path.join(&entry.name);
        let (mut reader, _) = open_file(&file)?;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    hasher.update(&buffer[..n]);
                    self.bytes_verified.fetch_add(n as u64, Ordering::Relaxed);
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(read_error(&file)(e)),
            }
        }
        let found = hasher.finalize().to_hex().to_string();
        if found == entry.blake3 {
            Ok(())
        } else {
            Err(CkptError::Hash { file, expected: entry.blake3.clone(), found })
        }
    }
}

/// Which member verifies each file: files are assigned from the largest to the smallest, each to the member with the
/// least so far.
fn owners(files: &[FileEntry], members: usize) -> Vec<usize> {
    let mut largest_first: Vec<usize> = (0..files.len()).collect();
    largest_first.sort_by_key(|idx| Reverse(files[*idx].bytes));
    let mut loads: BinaryHeap<Reverse<(u64, usize)>> =
        (0..members).map(|member| Reverse((0, member))).collect();
    let mut owners = vec![0; files.len()];
    for idx in largest_first {
        let Reverse((load, member)) = loads.pop().expect("there is at least one member");
        owners[idx] = member;
        // Add one byte for opening the file, so that empty files are distributed too.
        loads.push(Reverse((load.saturating_add(files[idx].bytes).saturating_add(1), member)));
    }
    owners
}

/// Checks a checkpoint without reading its files: the manifest must be valid, and the files must have their lengths.
pub(crate) fn check_without_reading(path: &Path) -> Result<Step, CkptError> {
    let (manifest, _) = read_manifest(path)?;
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

/// Refuses safetensors files that the manifest does not list: another program must have added them.
fn refuse_extra_files(path: &Path, manifest: &Manifest) -> Result<(), CkptError> {
    let listed: HashSet<&str> = manifest.files.iter().map(|entry| entry.name.as_str()).collect();
    for entry in path.read_dir().map_err(read_error(path))? {
        let file = entry.map_err(read_error(path))?.path();
        let known = file.file_name().and_then(|name| name.to_str()).is_some_and(|name| listed.contains(name));
        if !known && file.extension().is_some_and(|ext| ext == "safetensors") {
            return Err(CkptError::ExtraFile { file });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verification_is_divided_evenly() {
        let file = |bytes: u64| FileEntry { name: String::new(), bytes, blake3: String::new() };
        let files: Vec<FileEntry> = (0..40).map(|i| file(100 + i % 7)).chain([file(4000), file(0)]).collect();
        for members in [1, 2, 3, 8] {
            let owners = owners(&files, members);
            let load =
                |member| (0..files.len()).filter(|i| owners[*i] == member).map(|i| files[i].bytes).sum();
            let loads: Vec<u64> = (0..members).map(load).collect();
            let fair = 8120 / members as u64;
            assert!(loads.iter().all(|load| *load <= fair.max(4000) + 106), "{loads:?}");
        }
        assert_eq!(owners(&files[..1], 4), [0]);
    }
}
