//! A moving window into a peer's memory.
//!
//! Reading through a mapping is about twice as fast as `pread`, but the pages that were read stay charged to the
//! reader. So a rank maps a small part of the peer's memory at a time and unmaps it again: the memory it holds of its
//! peers is bounded.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use lockstep_device::copy_nontemporal;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes of a peer's memory that are mapped at a time.
pub const SHM_WINDOW_BYTES: u64 = 2 << 20;

/// Parts shorter than this are copied with `pread`, because moving the window would cost more.
pub(super) const MIN_WINDOW_READ_BYTES: u64 = 256 << 10;

/// Reads of at least this many bytes use non-temporal stores: the data would not stay in the caches anyway, and a
/// cache line that is overwritten completely need not be fetched first.
const NONTEMPORAL_READ_BYTES: usize = 16 << 20;

/// A mapped part of one region of a peer, or nothing.
pub(super) struct MappedWindow(Option<Mapping>);

struct Mapping {
    base: NonNull<u8>,
    len: u64,
    region: u8,
    start: u64,
}

// SAFETY: the window is the only owner of the mapping; moving it to another thread moves that ownership.
unsafe impl Send for MappedWindow {}
// SAFETY: `&MappedWindow` gives access to nothing.
unsafe impl Sync for MappedWindow {}

impl MappedWindow {
    pub(super) fn closed() -> MappedWindow {
        MappedWindow(None)
    }

    pub(super) fn close(&mut self) {
        if let Some(mapped) = self.0.take() {
            // SAFETY: the range was mapped by `open`, and nothing refers to it, because `read` keeps no pointer.
            // Unmapping a mapped range cannot fail.
            let _ = unsafe { munmap(mapped.base.as_ptr().cast(), mapped.len as usize) };
        }
    }

    /// Copies bytes from `offset` of a region of `size` bytes. The range must lie inside the region.
    pub(super) fn read(
        &mut self,
        file: &OwnedFd,
        (region, size): (u8, u64),
        mut offset: u64,
        mut into: &mut [u8],
    ) -> std::io::Result<()> {
        assert!(
            offset.checked_add(into.len() as u64).is_some_and(|end| end <= size),
            "a read must lie inside its region"
        );
        let nontemporal = into.len() >= NONTEMPORAL_READ_BYTES;
        while !into.is_empty() {
            let inside = |m: &Mapping| m.region == region && m.start <= offset && offset < m.start + m.len;
            if !self.0.as_ref().is_some_and(inside) {
                self.open(file, (region, size), offset)?;
            }
            let mapped = self.0.as_ref().expect("just opened");
            let at = offset - mapped.start;
            let len = into.len().min((mapped.len - at) as usize);
            // SAFETY: `at + len` is inside the mapping. The file is sealed against shrinking, so its pages exist. The
            // peer does not change them until this rank is done with the call. Only this rank accesses `into`.
            unsafe {
                let from = mapped.base.as_ptr().add(at as usize);
                if nontemporal {
                    copy_nontemporal(from, into.as_mut_ptr(), len);
                } else {
                    std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), len);
                }
            }
            (into, offset) = (&mut into[len..], offset + len as u64);
        }
        Ok(())
    }

    fn open(&mut self, file: &OwnedFd, (region, size): (u8, u64), offset: u64) -> std::io::Result<()> {
        self.close();
        // A multiple of the page size of every supported system.
        const LARGEST_PAGE: u64 = 64 << 10;
        let start = offset / LARGEST_PAGE * LARGEST_PAGE;
        let len = SHM_WINDOW_BYTES.min(size - start);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len as usize, ProtFlags::READ, MapFlags::SHARED, file, start)?
        };
        let base = NonNull::new(base.cast()).expect("a mapping is never at address zero");
        self.0 = Some(Mapping { base, len, region, start });
        Ok(())
    }
}

impl Drop for MappedWindow {
    fn drop(&mut self) {
        self.close();
    }
}
