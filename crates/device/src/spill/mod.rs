//! A file that holds what memory does not: a rank's share of states on a disk.
//!
//! Bytes go past the page cache where the file system can, or what was spilled would be in memory all the
//! same; and many requests are under way at once where the system has io_uring.

#[cfg(target_os = "linux")]
mod ring;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

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
    #[error("the spill file in {} failed before and is not used any more: {cause}", dir.display())]
    Stopped { dir: PathBuf, cause: String },
}

/// An unnamed file: it is gone when its process is, however that ends.
///
/// After a failed transfer the file holds some old and some new bytes, so it is not read or written any more.
#[derive(Debug)]
pub struct Spill {
    file: File,
    /// The same file, opened to bypass the page cache.
    #[cfg(target_os = "linux")]
    direct: Option<File>,
    #[cfg(target_os = "linux")]
    ring: Option<ring::Ring>,
    dir: PathBuf,
    /// The first failure, in words.
    failure: OnceLock<String>,
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
        #[cfg(target_os = "linux")]
        let direct = open_direct(&path);
        std::fs::remove_file(&path).map_err(fail)?;
        reserve(&file, bytes).map_err(fail)?;
        Ok(Spill {
            file,
            #[cfg(target_os = "linux")]
            direct: direct.filter(|direct| bytes.0 >= 1024 && reads_sectors(direct)),
            #[cfg(target_os = "linux")]
            ring: ring::Ring::open(),
            dir: dir.to_path_buf(),
            failure: OnceLock::new(),
        })
    }

    /// How bytes move, in words.
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

    /// The file to move these bytes with: direct where address and place allow it.
    #[cfg(target_os = "linux")]
    fn fitting(&self, offset: u64, bytes: &[u8]) -> &File {
        let aligned = |n: usize| n.is_multiple_of(SECTOR);
        let fits = aligned(offset as usize) && aligned(bytes.len()) && aligned(bytes.as_ptr() as usize);
        self.direct.as_ref().filter(|_| fits).unwrap_or(&self.file)
    }

    /// Fills `view` from byte `offset` on. After an error the view holds anything.
    pub fn read(&self, offset: u64, view: View<'_>) -> Result<(), SpillError> {
        self.transfer("read", view.bytes(), || {
            // SAFETY: the caller's lane owns the view while this runs, by the plan's waits; any bytes are a
            // valid value of every dtype.
            let bytes = unsafe { view.as_bytes_mut() };
            #[cfg(target_os = "linux")]
            return match &self.ring {
                Some(ring) => ring.read(self.fitting(offset, bytes), offset, bytes),
                None => self.fitting(offset, bytes).read_exact_at(bytes, offset),
            };
            #[cfg(not(target_os = "linux"))]
            self.file.read_exact_at(bytes, offset)
        })
    }

    /// Writes `view` from byte `offset` on.
    pub fn write(&self, offset: u64, view: View<'_>) -> Result<(), SpillError> {
        self.transfer("write", view.bytes(), || {
            // SAFETY: nobody writes the view while this runs, by the plan's waits.
            let bytes = unsafe { view.as_bytes() };
            #[cfg(target_os = "linux")]
            return match &self.ring {
                Some(ring) => ring.write(self.fitting(offset, bytes), offset, bytes),
                None => self.fitting(offset, bytes).write_all_at(bytes, offset),
            };
            #[cfg(not(target_os = "linux"))]
            self.file.write_all_at(bytes, offset)
        })
    }

    /// Reads elements of `dtype` from byte `offset` on, as f32. Between steps: it allocates.
    pub fn read_f32(&self, offset: u64, dtype: DType, out: &mut [f32]) -> Result<(), SpillError> {
        let mut bytes = vec![0; out.len() * dtype.size()];
        self.transfer("read", bytes.len(), || self.file.read_exact_at(&mut bytes, offset))?;
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
        self.transfer("write", bytes.len(), || self.file.write_all_at(&bytes, offset))
    }

    /// Moves bytes, unless that failed before.
    fn transfer(
        &self,
        verb: &'static str,
        len: usize,
        work: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), SpillError> {
        if let Some(cause) = self.failure.get() {
            return Err(SpillError::Stopped { dir: self.dir.clone(), cause: cause.clone() });
        }
        work().map_err(|cause| {
            let _ = self.failure.set(cause.to_string());
            SpillError::Move { dir: self.dir.clone(), verb, len, cause }
        })
    }
}

/// What direct transfers must be a multiple of, on most disks. Shards are multiples of 256 elements.
#[cfg(target_os = "linux")]
const SECTOR: usize = 512;

#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> Option<File> {
    use rustix::fs::{Mode, OFlags, open};
    open(path, OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()).ok().map(File::from)
}

/// Whether a direct read of one sector works: some file systems refuse direct transfers only then, and some
/// disks have larger sectors.
#[cfg(target_os = "linux")]
fn reads_sectors(file: &File) -> bool {
    #[repr(align(512))]
    struct Sector([u8; SECTOR]);
    let mut room = Sector([0; SECTOR]);
    file.read_exact_at(&mut room.0, SECTOR as u64).is_ok()
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
        a.write_host(&[1.5f32; 100]);
        spill.write(8192, a).unwrap();
        spill.read(8192, b).unwrap();
        let mut out = [0f32; 100];
        b.read_host(&mut out);
        assert_eq!(out, [1.5; 100]);
        spill.read(0, b).unwrap();
        b.read_host(&mut out);
        assert_eq!(out, [0.0; 100]);
    }

    /// Large and small, aligned and not, seen alike by both ways to the file.
    #[test]
    fn every_length_and_place_arrives() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = 6 << 20;
        let spill = Spill::make(dir.path(), Bytes(bytes)).unwrap();
        println!("{}", spill.described());
        let memory = Memory::take(Bytes(2 * bytes), &Pool::new(1)).unwrap();
        let elems = bytes as usize / 4;
        let (from, to) = (memory.view(0, elems, DType::F32), memory.view(bytes as usize, elems, DType::F32));
        let values: Vec<f32> = (0..elems).map(|i| i as f32).collect();
        for (start, len) in [(0, elems), (256, 256), (1024, elems - 2048), (3, 1000), (128, 129), (0, 0)] {
            from.write_host(&values);
            to.zero_host();
            spill.write(4 * start as u64, from.slice(start, len)).unwrap();
            spill.read(4 * start as u64, to.slice(start, len)).unwrap();
            let mut out = vec![0f32; len];
            to.slice(start, len).read_host(&mut out);
            assert!(out == values[start..start + len], "[{start}, +{len}]");
            spill.read_f32(4 * start as u64, DType::F32, &mut out).unwrap();
            assert!(out == values[start..start + len], "[{start}, +{len}] through the cache");
        }
        spill.write_f32(4096, DType::F32, &[7.0; 300]).unwrap();
        spill.read(4096, to.first(256)).unwrap();
        let mut out = [0f32; 256];
        to.first(256).read_host(&mut out);
        assert_eq!(out, [7.0; 256]);
    }

    /// A spill file with each way to move bytes that this machine has, and memory to move them from and to.
    fn each_way(bytes: u64, mut f: impl FnMut(Spill, View<'_>)) {
        let dir = tempfile::tempdir().unwrap();
        let memory = Memory::take(Bytes(bytes), &Pool::new(1)).unwrap();
        let view = memory.view(0, bytes as usize / 4, DType::F32);
        f(Spill::make(dir.path(), Bytes(bytes)).unwrap(), view);
        #[cfg(target_os = "linux")]
        for ring in [ring::Ring::open(), None] {
            let spill = Spill::make(dir.path(), Bytes(bytes)).unwrap();
            f(Spill { direct: None, ring, ..spill }, view);
        }
    }

    #[test]
    fn a_file_that_was_cut_gives_nothing_any_more() {
        let bytes = 3 << 20;
        each_way(bytes, |spill, view| {
            view.write_host(&vec![1.5f32; view.len()]);
            spill.write(0, view).unwrap();
            spill.file.set_len(bytes / 2).unwrap();
            let failed = spill.read(0, view).unwrap_err();
            assert!(matches!(failed, SpillError::Move { verb: "read", .. }), "{failed}");
            // What is there again is not what was written.
            spill.file.set_len(bytes).unwrap();
            let stopped =
                |outcome| assert!(matches!(outcome, Err(SpillError::Stopped { .. })), "{outcome:?}");
            stopped(spill.read(0, view));
            stopped(spill.write(0, view));
            stopped(spill.read_f32(0, DType::F32, &mut [0.0]));
            stopped(spill.write_f32(0, DType::F32, &[0.0]));
        });
    }

    #[test]
    fn a_file_that_cannot_be_written_says_so_and_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("read-only");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        each_way(1 << 20, |spill, view| {
            let file = File::open(&path).unwrap();
            let spill = Spill {
                file,
                #[cfg(target_os = "linux")]
                direct: None,
                ..spill
            };
            let failed = spill.write(0, view).unwrap_err();
            assert!(matches!(failed, SpillError::Move { verb: "write", .. }), "{failed}");
            assert!(matches!(spill.read(0, view), Err(SpillError::Stopped { .. })));
        });
    }
}
