//! A file that holds what memory does not: a rank's share of states on a disk.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use lockstep_core::{Bytes, DType};

use crate::View;

/// Why a spill file failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpillError {
    #[error("cannot make a spill file of {bytes} in {}: {cause}", dir.display())]
    Make { dir: PathBuf, bytes: Bytes, cause: io::Error },
    #[error("cannot {verb} {len} bytes of the spill file in {}: {cause}", dir.display())]
    Move { dir: PathBuf, verb: &'static str, len: usize, cause: io::Error },
}

/// An unnamed file: it is gone when its process is, however that ends.
#[derive(Debug)]
pub struct Spill {
    file: File,
    dir: PathBuf,
}

impl Spill {
    /// Makes a file of `bytes` zeros in `dir`, its room reserved.
    pub fn make(dir: &Path, bytes: Bytes) -> Result<Spill, SpillError> {
        let fail = |cause| SpillError::Make { dir: dir.to_path_buf(), bytes, cause };
        std::fs::create_dir_all(dir).map_err(fail)?;
        let name = dir.join(format!(".lockstep-spill-{}", std::process::id()));
        let mut nth = 0;
        let (path, file) = loop {
            let path = name.with_extension(nth.to_string());
            match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
                Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => nth += 1,
                Err(cause) => return Err(fail(cause)),
                Ok(file) => break (path, file),
            }
        };
        std::fs::remove_file(&path).map_err(fail)?;
        reserve(&file, bytes).map_err(fail)?;
        Ok(Spill { file, dir: dir.to_path_buf() })
    }

    /// Fills `view` from byte `offset` on.
    pub fn read(&self, offset: u64, view: View<'_>) -> Result<(), SpillError> {
        // SAFETY: the caller's lane owns the view while this runs, by the plan's waits; any bytes are a
        // valid value of every dtype.
        let bytes = unsafe { view.as_bytes_mut() };
        self.file.read_exact_at(bytes, offset).map_err(|cause| self.failed("read", view.bytes(), cause))
    }

    /// Writes `view` from byte `offset` on.
    pub fn write(&self, offset: u64, view: View<'_>) -> Result<(), SpillError> {
        // SAFETY: nobody writes the view while this runs, by the plan's waits.
        let bytes = unsafe { view.as_bytes() };
        self.file.write_all_at(bytes, offset).map_err(|cause| self.failed("write", view.bytes(), cause))
    }

    /// Reads elements of `dtype` from byte `offset` on, as f32. Between steps: it allocates.
    pub fn read_f32(&self, offset: u64, dtype: DType, out: &mut [f32]) -> Result<(), SpillError> {
        let mut bytes = vec![0; out.len() * dtype.size()];
        self.file.read_exact_at(&mut bytes, offset).map_err(|e| self.failed("read", bytes.len(), e))?;
        for (out, b) in out.iter_mut().zip(bytes.chunks_exact(dtype.size())) {
            *out = match (dtype, b) {
                (DType::F32, [a, b, c, d]) => f32::from_ne_bytes([*a, *b, *c, *d]),
                (DType::BF16, [a, b]) => half::bf16::from_ne_bytes([*a, *b]).to_f32(),
                (DType::F16, [a, b]) => half::f16::from_ne_bytes([*a, *b]).to_f32(),
                _ => panic!("{dtype} is not a float storage type"),
            };
        }
        Ok(())
    }

    /// Writes f32 values as elements of `dtype` from byte `offset` on. Between steps: it allocates.
    pub fn write_f32(&self, offset: u64, dtype: DType, values: &[f32]) -> Result<(), SpillError> {
        let mut bytes = Vec::with_capacity(values.len() * dtype.size());
        for value in values {
            match dtype {
                DType::F32 => bytes.extend(value.to_ne_bytes()),
                DType::BF16 => bytes.extend(half::bf16::from_f32(*value).to_ne_bytes()),
                DType::F16 => bytes.extend(half::f16::from_f32(*value).to_ne_bytes()),
                _ => panic!("{dtype} is not a float storage type"),
            }
        }
        self.file.write_all_at(&bytes, offset).map_err(|e| self.failed("write", bytes.len(), e))
    }

    fn failed(&self, verb: &'static str, len: usize, cause: io::Error) -> SpillError {
        SpillError::Move { dir: self.dir.clone(), verb, len, cause }
    }
}

/// Reserves room, so that a full disk is found here and not in the middle of a step.
fn reserve(file: &File, bytes: Bytes) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    if bytes.0 > 0 {
        use rustix::fs::{FallocateFlags, fallocate};
        match fallocate(file, FallocateFlags::empty(), 0, bytes.0) {
            Ok(()) => return Ok(()),
            // Not every file system can; a sparse file works too.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {}
            Err(cause) => return Err(cause.into()),
        }
    }
    file.set_len(bytes.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Memory, Pool};

    #[test]
    fn what_is_written_is_read_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let spill = Spill::make(dir.path(), Bytes(1 << 16)).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let memory = Memory::take(Bytes(1 << 16), &Pool::new(1)).unwrap();
        let (a, b) = (memory.view(0, 100, DType::F32), memory.view(4096, 100, DType::F32));
        a.write(&[1.5f32; 100]);
        spill.write(8192, a).unwrap();
        spill.read(8192, b).unwrap();
        let mut out = [0f32; 100];
        b.read(&mut out);
        assert_eq!(out, [1.5; 100]);
        spill.read(0, b).unwrap();
        b.read(&mut out);
        assert_eq!(out, [0.0; 100]);
    }
}
