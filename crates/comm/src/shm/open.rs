//! How ranks of one host find each other's memory: through `/proc/<pid>/fd`, checked by inode.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use lockstep_core::Bytes;
use lockstep_device::{Memory, Pool};
use rustix::fs::{Mode, OFlags, SealFlags, fcntl_get_seals, fstat, open};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

use crate::carrier::BOUNCE_BYTES;
use crate::error::CommError;
use crate::shm::block::Block;

/// Regions of one rank, its bounce memory included.
const MAX_REGIONS: usize = 255;

/// A file of a process, as others find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileAddress {
    pub(crate) fd: u32,
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) len: u64,
}

/// What a rank tells others of its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShmAddress {
    pub(crate) pid: u32,
    pub(crate) block: FileAddress,
    pub(crate) regions: Vec<FileAddress>,
}

/// A rank's own part, before it knows the others.
pub(crate) struct Prepared {
    pub(crate) block: Block,
    /// The caller's, then the bounce memory.
    pub(crate) regions: Vec<Arc<Memory>>,
}

/// A peer's part as this rank sees it.
pub(crate) struct Peer {
    pub(crate) block: Block,
    pub(crate) regions: Vec<(OwnedFd, u64)>,
    /// Readable when the process has ended.
    pub(crate) process: OwnedFd,
}

impl Prepared {
    pub(crate) fn new(rank: u32, world: u32, regions: &[Arc<Memory>]) -> Result<Prepared, CommError> {
        let setup = |why: String| CommError::Setup { what: "shared memory", why };
        let mut regions: Vec<_> = regions.iter().filter(|m| m.bytes() != Bytes::ZERO).cloned().collect();
        if let Some(memory) = regions.iter().find(|m| m.shared_fd().is_none()) {
            return Err(setup(format!("{} of memory were not taken as shared", memory.bytes())));
        }
        if regions.len() >= MAX_REGIONS {
            return Err(setup(format!("{} regions, of which {MAX_REGIONS} can be shared", regions.len())));
        }
        let bounce = Memory::allocate_shared(Bytes(BOUNCE_BYTES as u64), &Pool::new(1));
        regions.push(Arc::new(bounce.map_err(|e| setup(e.to_string()))?));
        let block = Block::create(rank, world).map_err(|e| setup(e.to_string()))?;
        Ok(Prepared { block, regions })
    }

    pub(crate) fn address(&self) -> Result<ShmAddress, CommError> {
        let setup = |e: rustix::io::Errno| CommError::Setup { what: "shared memory", why: e.to_string() };
        let regions = self.regions.iter().filter_map(|memory| memory.shared_fd());
        Ok(ShmAddress {
            pid: getpid().as_raw_nonzero().get() as u32,
            block: address(self.block.file()).map_err(setup)?,
            regions: regions.map(address).collect::<Result<_, _>>().map_err(setup)?,
        })
    }
}

impl Peer {
    /// Opens what `rank` has told.
    pub(crate) fn open(at: &ShmAddress, rank: u32, world: u32) -> Result<Peer, CommError> {
        let setup = |why: String| CommError::Setup { what: "shared memory", why };
        let of_rank = |e: std::io::Error| setup(format!("of rank {rank} (process {}): {e}", at.pid));
        let pid = i32::try_from(at.pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| setup(format!("of rank {rank}: no process has id {}", at.pid)))?;
        // The process first: that its files are the right ones then shows that it is the right process.
        let process = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| of_rank(e.into()))?;
        let block = open_file(at.pid, &at.block).map_err(of_rank)?;
        let block = Block::open(block, rank, world).map_err(of_rank)?;
        let regions = at.regions.iter().map(|file| Ok((open_file(at.pid, file)?, file.len)));
        let regions = regions.collect::<std::io::Result<Vec<_>>>().map_err(of_rank)?;
        Ok(Peer { block, regions, process })
    }
}

fn address(file: BorrowedFd<'_>) -> rustix::io::Result<FileAddress> {
    let stat = fstat(file)?;
    Ok(FileAddress {
        fd: file.as_raw_fd() as u32,
        device: stat.st_dev,
        inode: stat.st_ino,
        len: stat.st_size as u64,
    })
}

fn open_file(pid: u32, at: &FileAddress) -> std::io::Result<OwnedFd> {
    let path = format!("/proc/{pid}/fd/{}", at.fd);
    let file = open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| std::io::Error::other(format!("{path}: {}", std::io::Error::from(e))))?;
    let found = address(file.as_fd())?;
    let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    if (found.device, found.inode, found.len) != (at.device, at.inode, at.len) || !sealed {
        return Err(std::io::Error::other(format!("{path} is not the file that was announced")));
    }
    Ok(file)
}
