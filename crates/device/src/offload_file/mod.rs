//! The file that holds a rank's share of states offloaded to NVMe.
//!
//! Transfers bypass the page cache where the file system allows it; otherwise the offloaded states would occupy memory
//! after all. Where the system has io_uring, many requests are in flight at once.

#[cfg(target_os = "linux")]
mod ring;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use half::{bf16, f16};
use lockstep_core::{Bytes, DType};

use crate::{Real, View};

/// Why an offload file failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadFileError {
    #[error("cannot create an offload file of {bytes} in {}: {cause}", dir.display())]
    Create { dir: PathBuf, bytes: Bytes, cause: io::Error },
    #[error("cannot {verb} {len} bytes of the offload file in {}: {cause}", dir.display())]
    Transfer { dir: PathBuf, verb: &'static str, len: usize, cause: io::Error },
    #[error("the offload file in {} failed earlier and can no longer be used: {cause}", dir.display())]
    FailedEarlier { dir: PathBuf, cause: String },
}

/// An unnamed file: it disappears with its process, however the process ends.
///
/// After a failed transfer the file holds a mix of old and new bytes, so it refuses all further transfers.
#[derive(Debug)]
pub struct OffloadFile {
    file: File,
    /// The same file, opened to bypass the page cache.
    #[cfg(target_os = "linux")]
    direct: Option<File>,
    #[cfg(target_os = "linux")]
    ring: Option<ring::Ring>,
    dir: PathBuf,
    /// The message of the first failure.
    failure: OnceLock<String>,
}

impl OffloadFile {
    /// Creates a file of `bytes` zeros in `dir` and reserves its disk space.
    pub fn create(dir: &Path, bytes: Bytes) -> Result<OffloadFile, OffloadFileError> {
        let fail = |cause| OffloadFileError::Create { dir: dir.to_path_buf(), bytes, cause };
        std::fs::create_dir_all(dir).map_err(fail)?;
        let name = dir.join(format!(".lockstep-offload-{}", std::process::id()));
        let mut nth = 0;
        let (path, file) = loop {
            let path = name.with_extension(nth.to_string());
            match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
                Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => nth += 1,
                Err(cause) => return Err(fail(cause)),
                Ok(file) => break (path, file),
            }
        };
        #[cfg(target_os = "linux")]
        let direct = open_direct(&path);
        std::fs::remove_file(&path).map_err(fail)?;
        reserve(&file, bytes).map_err(fail)?;
        Ok(OffloadFile {
            file,
            #[cfg(target_os = "linux")]
            direct: direct.filter(|direct| bytes.0 >= 1024 && reads_sectors(direct)),
            #[cfg(target_os = "linux")]
            ring: ring::Ring::open(),
            dir: dir.to_path_buf(),
            failure: OnceLock::new(),
        })
    }

    /// How bytes are transferred, for log messages.
    pub fn described(&self) -> &'static str {
        #[cfg(target_os = "linux")]
        return match (&self.direct, &self.ring) {
            (Some(_), Some(_)) => "direct, io_uring",
            (Some(_), None) => "direct",
            (None, Some(_)) => "through the page cache, io_uring",
            (None, None) => "through the page cache",
        };
        #[cfg(not(target_os = "linux"))]
        "through the page cache"
    }

    /// The file handle to transfer these bytes with: the direct one where offset, length and address are aligned.
    #[cfg(target_os = "linux")]
    fn handle_for(&self, offset: u64, bytes: &[u8]) -> &File {
        let aligned = |n: usize| n.is_multiple_of(SECTOR);
        let fits = aligned(offset as usize) && aligned(bytes.len()) && aligned(bytes.as_ptr() as usize);
        self.direct.as_ref().filter(|_| fits).unwrap_or(&self.file)
    }

    /// Reads into `view` from byte `offset` on. After an error the contents of the view are unspecified.
    pub fn read(&self, offset: u64, view: View<'_>) -> Result<(), OffloadFileError> {
        self.transfer("read", view.bytes(), || {
            // SAFETY: the plan's waits give the caller's lane the view while this runs; every bit pattern is a valid
            // value of every dtype.
            let bytes = unsafe { view.as_bytes_mut() };
            #[cfg(target_os = "linux")]
            return match &self.ring {
                Some(ring) => ring.read(self.handle_for(offset, bytes), offset, bytes),
                None => self.handle_for(offset, bytes).read_exact_at(bytes, offset),
            };
            #[cfg(not(target_os = "linux"))]
            self.file.read_exact_at(bytes, offset)
        })
    }

    /// Writes `view` from byte `offset` on.
    pub fn write(&self, offset: u64, view: View<'_>) -> Result<(), OffloadFileError> {
        self.transfer("write", view.bytes(), || {
            // SAFETY: the plan's waits keep writers off the view while this runs.
            let bytes = unsafe { view.as_bytes() };
            #[cfg(target_os = "linux")]
            return match &self.ring {
                Some(ring) => ring.write(self.handle_for(offset, bytes), offset, bytes),
                None => self.handle_for(offset, bytes).write_all_at(bytes, offset),
            };
            #[cfg(not(target_os = "linux"))]
            self.file.write_all_at(bytes, offset)
        })
    }

    /// Reads elements of `dtype` from byte `offset` on, converted to f32. Allocates, so it is for use between steps.
    pub fn read_f32(&self, offset: u64, dtype: DType, out: &mut [f32]) -> Result<(), OffloadFileError> {
        let mut bytes = vec![0; out.len() * dtype.size()];
        self.transfer("read", bytes.len(), || self.file.read_exact_at(&mut bytes, offset))?;
        for (out, b) in out.iter_mut().zip(bytes.chunks_exact(dtype.size())) {
            *out = match (dtype, b) {
                (DType::F32, [a, b, c, d]) => f32::from_ne_bytes([*a, *b, *c, *d]),
                (DType::BF16, [a, b]) => bf16::from_ne_bytes([*a, *b]).to_f32(),
                (DType::F16, [a, b]) => f16::from_ne_bytes([*a, *b]).to_f32(),
                (DType::U8, [code]) => f32::from(*code),
                _ => panic!("{dtype} is not a float storage type"),
            };
        }
        Ok(())
    }

    /// Reads numbers of a two-byte type as they are. Allocates, so it is for use between steps.
    pub fn read_halves(&self, offset: u64, out: &mut [u16]) -> Result<(), OffloadFileError> {
        let mut bytes = vec![0; size_of_val(out)];
        self.transfer("read", bytes.len(), || self.file.read_exact_at(&mut bytes, offset))?;
        for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            *out = u16::from_ne_bytes(*bytes);
        }
        Ok(())
    }

    /// Writes numbers of a two-byte type as they are.
    pub fn write_halves(&self, offset: u64, values: &[u16]) -> Result<(), OffloadFileError> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        self.transfer("write", bytes.len(), || self.file.write_all_at(&bytes, offset))
    }

    /// Writes f32 values as elements of `dtype` from byte `offset` on, rounded with ties to even. Allocates, so it is for
    /// use between steps.
    pub fn write_f32(&self, offset: u64, dtype: DType, values: &[f32]) -> Result<(), OffloadFileError> {
        self.write_rounded(offset, dtype, values, <bf16 as Real>::from_f32)
    }

    /// As [`OffloadFile::write_f32`], with master parameters rounded to weights ([`Real::weight_from_f32`]).
    pub fn write_weights(&self, offset: u64, dtype: DType, masters: &[f32]) -> Result<(), OffloadFileError> {
        self.write_rounded(offset, dtype, masters, bf16::weight_from_f32)
    }

    fn write_rounded(
        &self,
        offset: u64,
        dtype: DType,
        values: &[f32],
        to_bf16: impl Fn(f32) -> bf16,
    ) -> Result<(), OffloadFileError> {
        let mut bytes = Vec::with_capacity(values.len() * dtype.size());
        for value in values {
            match dtype {
                DType::F32 => bytes.extend(value.to_ne_bytes()),
                DType::BF16 => bytes.extend(to_bf16(*value).to_ne_bytes()),
                DType::F16 => bytes.extend(f16::from_f32(*value).to_ne_bytes()),
                DType::U8 => bytes.push(*value as u8),
                _ => panic!("{dtype} is not a float storage type"),
            }
        }
        self.transfer("write", bytes.len(), || self.file.write_all_at(&bytes, offset))
    }

    /// Runs a transfer, unless an earlier one failed.
    fn transfer(
        &self,
        verb: &'static str,
        len: usize,
        work: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), OffloadFileError> {
        if let Some(cause) = self.failure.get() {
            return Err(OffloadFileError::FailedEarlier { dir: self.dir.clone(), cause: cause.clone() });
        }
        work().map_err(|cause| {
            let _ = self.failure.set(cause.to_string());
            OffloadFileError::Transfer { dir: self.dir.clone(), verb, len, cause }
        })
    }
}

/// Direct transfers must be multiples of this, on most disks. Shards are multiples of 256 elements.
#[cfg(target_os = "linux")]
const SECTOR: usize = 512;

#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> Option<File> {
    use rustix::fs::{Mode, OFlags, open};
    open(path, OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()).ok().map(File::from)
}

/// Whether a direct read of one sector works. Some file systems refuse direct transfers only at the first read, and
/// some disks have larger sectors.
#[cfg(target_os = "linux")]
fn reads_sectors(file: &File) -> bool {
    #[repr(align(512))]
    struct Sector([u8; SECTOR]);
    let mut sector = Sector([0; SECTOR]);
    file.read_exact_at(&mut sector.0, SECTOR as u64).is_ok()
}

/// Reserves disk space, so that a full disk fails here and not in the middle of a step.
fn reserve(file: &File, bytes: Bytes) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    if bytes.0 > 0 {
        use rustix::fs::{FallocateFlags, fallocate};
        match fallocate(file, FallocateFlags::empty(), 0, bytes.0) {
            Ok(()) => return Ok(()),
            // Not every file system supports this; a sparse file works too.
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
    fn written_bytes_are_read_back_and_no_file_remains() {
        let dir = tempfile::tempdir().unwrap();
        let file = OffloadFile::create(dir.path(), Bytes(1 << 16)).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let memory = Memory::allocate(Bytes(1 << 16), &Pool::new(1)).unwrap();
        let (a, b) = (memory.view(0, 100, DType::F32), memory.view(4096, 100, DType::F32));
        a.write_host(&[1.5f32; 100]);
        file.write(8192, a).unwrap();
        file.read(8192, b).unwrap();
        let mut out = [0f32; 100];
        b.read_host(&mut out);
        assert_eq!(out, [1.5; 100]);
        file.read(0, b).unwrap();
        b.read_host(&mut out);
        assert_eq!(out, [0.0; 100]);
    }

    /// Large and small, aligned and unaligned transfers, through the direct and the cached handle.
    #[test]
    fn every_length_and_offset_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = 6 << 20;
        let file = OffloadFile::create(dir.path(), Bytes(bytes)).unwrap();
        println!("{}", file.described());
        let memory = Memory::allocate(Bytes(2 * bytes), &Pool::new(1)).unwrap();
        let elems = bytes as usize / 4;
        let (from, to) = (memory.view(0, elems, DType::F32), memory.view(bytes as usize, elems, DType::F32));
        let values: Vec<f32> = (0..elems).map(|i| i as f32).collect();
        for (start, len) in [(0, elems), (256, 256), (1024, elems - 2048), (3, 1000), (128, 129), (0, 0)] {
            from.write_host(&values);
            to.zero_host();
            file.write(4 * start as u64, from.slice(start, len)).unwrap();
            file.read(4 * start as u64, to.slice(start, len)).unwrap();
            let mut out = vec![0f32; len];
            to.slice(start, len).read_host(&mut out);
            assert!(out == values[start..start + len], "[{start}, +{len}]");
            file.read_f32(4 * start as u64, DType::F32, &mut out).unwrap();
            assert!(out == values[start..start + len], "[{start}, +{len}] through the cache");
        }
        file.write_f32(4096, DType::F32, &[7.0; 300]).unwrap();
        file.read(4096, to.first(256)).unwrap();
        let mut out = [0f32; 256];
        to.first(256).read_host(&mut out);
        assert_eq!(out, [7.0; 256]);
    }

    /// Calls `f` with an offload file for each transfer method of this machine, and a view to transfer.
    fn for_each_method(bytes: u64, mut f: impl FnMut(OffloadFile, View<'_>)) {
        let dir = tempfile::tempdir().unwrap();
        let memory = Memory::allocate(Bytes(bytes), &Pool::new(1)).unwrap();
        let view = memory.view(0, bytes as usize / 4, DType::F32);
        f(OffloadFile::create(dir.path(), Bytes(bytes)).unwrap(), view);
        #[cfg(target_os = "linux")]
        for ring in [ring::Ring::open(), None] {
            let file = OffloadFile::create(dir.path(), Bytes(bytes)).unwrap();
            f(OffloadFile { direct: None, ring, ..file }, view);
        }
    }

    #[test]
    fn a_truncated_file_refuses_all_further_transfers() {
        let bytes = 3 << 20;
        for_each_method(bytes, |file, view| {
            view.write_host(&vec![1.5f32; view.len()]);
            file.write(0, view).unwrap();
            file.file.set_len(bytes / 2).unwrap();
            let failed = file.read(0, view).unwrap_err();
            assert!(matches!(failed, OffloadFileError::Transfer { verb: "read", .. }), "{failed}");
            // The file has its length again, but not its contents.
            file.file.set_len(bytes).unwrap();
            let stopped = |outcome| {
                assert!(matches!(outcome, Err(OffloadFileError::FailedEarlier { .. })), "{outcome:?}")
            };
            stopped(file.read(0, view));
            stopped(file.write(0, view));
            stopped(file.read_f32(0, DType::F32, &mut [0.0]));
            stopped(file.write_f32(0, DType::F32, &[0.0]));
        });
    }

    #[test]
    fn a_failed_write_is_reported_and_the_file_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("read-only");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        for_each_method(1 << 20, |offload, view| {
            let file = OffloadFile {
                file: File::open(&path).unwrap(),
                #[cfg(target_os = "linux")]
                direct: None,
                ..offload
            };
            let failed = file.write(0, view).unwrap_err();
            assert!(matches!(failed, OffloadFileError::Transfer { verb: "write", .. }), "{failed}");
            assert!(matches!(file.read(0, view), Err(OffloadFileError::FailedEarlier { .. })));
        });
    }
}
