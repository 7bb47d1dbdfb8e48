//! A moving window onto a peer's memory.
//!
//! Reading through a mapping is about twice as fast as asking the system to copy, but pages that were read stay
//! charged to the reader. So a rank maps a little of the peer's memory at a time and lets it go: what it holds
//! of others is bounded, and its peak is its own.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use lockstep_device::copy_nontemporal;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes of a peer that are mapped at a time.
pub const WINDOW: u64 = 2 << 20;

/// Parts shorter than this are copied by the system: moving a window costs more.
pub(super) const WORTH_A_WINDOW: u64 = 256 << 10;

/// Reads of this many bytes are written past the caches: they would not stay there, and a line that is written
/// whole need not be fetched first.
const PAST_THE_CACHES: usize = 16 << 20;

/// Part of one region of a peer, or nothing.
pub(super) struct Window(Option<Mapped>);

struct Mapped {
    base: NonNull<u8>,
    len: u64,
    region: u8,
    start: u64,
}

// SAFETY: the mapping is owned by the window alone; moving it to another thread moves that ownership.
unsafe impl Send for Window {}
// SAFETY: nothing can be done through `&Window`.
unsafe impl Sync for Window {}

impl Window {
    pub(super) fn closed() -> Window {
        Window(None)
    }

    pub(super) fn close(&mut self) {
        if let Some(mapped) = self.0.take() {
            // SAFETY: the range was mapped by `open` and nothing refers to it: `read` keeps no pointer.
            // It cannot fail on a range that is mapped.
            let _ = unsafe { munmap(mapped.base.as_ptr().cast(), mapped.len as usize) };
        }
    }

    /// Copies bytes from `offset` of a region of `size` bytes, which contains them.
    pub(super) fn read(
        &mut self,
        file: &OwnedFd,
        (region, size): (u8, u64),
        mut offset: u64,
        mut into: &mut [u8],
    ) -> std::io::Result<()> {
        assert!(
            offset.checked_add(into.len() as u64).is_some_and(|end| end <= size),
            "a read outside a region"
        );
        let past_caches = into.len() >= PAST_THE_CACHES;
        while !into.is_empty() {
            let inside = |m: &Mapped| m.region == region && m.start <= offset && offset < m.start + m.len;
            if !self.0.as_ref().is_some_and(inside) {
                self.open(file, (region, size), offset)?;
            }
            let mapped = self.0.as_ref().expect("just opened");
            let at = offset - mapped.start;
            let now = into.len().min((mapped.len - at) as usize);
            // SAFETY: `at + now` is inside the mapping; the file is sealed against shrinking, so its pages are
            // there; the peer leaves them as they are until this rank is done with the call. `into` is ours.
            unsafe {
                let from = mapped.base.as_ptr().add(at as usize);
                if past_caches {
                    copy_nontemporal(from, into.as_mut_ptr(), now);
                } else {
                    std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), now);
                }
            }
            (into, offset) = (&mut into[now..], offset + now as u64);
        }
        Ok(())
    }

    fn open(&mut self, file: &OwnedFd, (region, size): (u8, u64), offset: u64) -> std::io::Result<()> {
        self.close();
        // A multiple of every system's pages.
        const LARGEST_PAGE: u64 = 64 << 10;
        let start = offset / LARGEST_PAGE * LARGEST_PAGE;
        let len = WINDOW.min(size - start);
        // SAFETY: a new mapping at a place of the system's choice.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len as usize, ProtFlags::READ, MapFlags::SHARED, file, start)?
        };
        let base = NonNull::new(base.cast()).expect("a mapping is never at address zero");
        self.0 = Some(Mapped { base, len, region, start });
        Ok(())
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.close();
    }
}
