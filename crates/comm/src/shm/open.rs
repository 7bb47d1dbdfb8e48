//! Opens the memory of other ranks on the same host through `/proc/<pid>/fd`, and verifies it by inode.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use lockstep_core::Bytes;
use lockstep_device::{Memory, Pool};
use rustix::fs::{Mode, OFlags, SealFlags, fcntl_get_seals, fstat, open};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

use crate::carrier::BOUNCE_BYTES;
use crate::error::CommError;
use crate::shm::block::Block;

/// The largest number of regions of one rank, including its bounce buffer.
const MAX_REGIONS: usize = 255;

/// A file descriptor of a process, with what identifies the file behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileAddress {
    pub(crate) fd: u32,
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) len: u64,
}

/// How other ranks on the host find a rank's control block and regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShmAddress {
    pub(crate) pid: u32,
    pub(crate) block: FileAddress,
    pub(crate) regions: Vec<FileAddress>,
}

/// The memory that a rank exports to its peers.
pub(crate) struct ShmExport {
    pub(crate) block: Block,
    /// The caller's regions, then the bounce buffer.
    pub(crate) regions: Vec<Arc<Memory>>,
}

/// A peer's exported memory, opened by this rank.
pub(crate) struct PeerMemory {
    pub(crate) block: Block,
    pub(crate) regions: Vec<(OwnedFd, u64)>,
    /// A pidfd: it becomes readable when the process ends.
    pub(crate) process: OwnedFd,
}

impl ShmExport {
    pub(crate) fn new(rank: u32, world: u32, regions: &[Arc<Memory>]) -> Result<ShmExport, CommError> {
        let setup = |why: String| CommError::Setup { what: "shared memory", why };
        let mut regions: Vec<_> = regions.iter().filter(|m| m.bytes() != Bytes::ZERO).cloned().collect();
        if let Some(memory) = regions.iter().find(|m| m.shared_fd().is_none()) {
            return Err(setup(format!("{} of memory were not allocated as shared", memory.bytes())));
        }
        if regions.len() >= MAX_REGIONS {
            return Err(setup(format!(
                "{} regions are more than the {} that can be shared",
                regions.len(),
                MAX_REGIONS - 1
            )));
        }
        let bounce = Memory::allocate_shared(Bytes(BOUNCE_BYTES as u64), &Pool::new(1));
        regions.push(Arc::new(bounce.map_err(|e| setup(e.to_string()))?));
        let block = Block::create(rank, world).map_err(|e| setup(e.to_string()))?;
        Ok(ShmExport { block, regions })
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

impl PeerMemory {
    /// Opens the memory that `rank` has announced.
    pub(crate) fn open(at: &ShmAddress, rank: u32, world: u32) -> Result<PeerMemory, CommError> {
        let setup = |why: String| CommError::Setup { what: "shared memory", why };
        let of_rank = |e: std::io::Error| setup(format!("memory of rank {rank} (process {}): {e}", at.pid));
        let pid = i32::try_from(at.pid).ok().and_then(Pid::from_raw);
        let pid =
            pid.ok_or_else(|| setup(format!("memory of rank {rank}: {} is not a process id", at.pid)))?;
        // Open the process first. If its files then turn out to be the announced ones, the PID was not reused.
        let process = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| of_rank(e.into()))?;
        let block = open_file(at.pid, &at.block).map_err(of_rank)?;
        let block = Block::open(block, rank, world).map_err(of_rank)?;
        let regions = at.regions.iter().map(|file| Ok((open_file(at.pid, file)?, file.len)));
        let regions = regions.collect::<std::io::Result<Vec<_>>>().map_err(of_rank)?;
        Ok(PeerMemory { block, regions, process })
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
        return Err(std::io::Error::other(format!("{path} is not the file that the rank announced")));
    }
    Ok(file)
}
