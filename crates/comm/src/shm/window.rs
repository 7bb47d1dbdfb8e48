//! A moving window onto a peer's memory.
//!
//! Reading through a mapping is about twice as fast as asking the system to copy, but pages that were read stay
//! charged to the reader. So a rank maps a little of the peer's memory at a time and lets it go: what it holds
//! of others is bounded, and its peak is its own.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

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
        let copy = if into.len() >= PAST_THE_CACHES { copy_past_caches } else { copy };
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
                copy(mapped.base.as_ptr().add(at as usize), into.as_mut_ptr(), now);
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

/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// As [`copy`], with stores that bypass the caches where the machine has them.
///
/// # Safety
/// As [`copy`].
unsafe fn copy_past_caches(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise; the feature was just found.
        return unsafe { stream_avx(from, to, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { copy(from, to, len) }
}

/// # Safety
/// As [`copy`], on a machine with AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream_avx(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    const LINE: usize = 64;
    let head = to.align_offset(LINE).min(len);
    let lines = (len - head) / LINE;
    // SAFETY: head, lines and tail make up `len` bytes on both sides; `to + head` is aligned to a line.
    unsafe {
        copy(from, to, head);
        for i in 0..lines {
            let (from, to) = (from.add(head + i * LINE), to.add(head + i * LINE));
            let (low, high) = (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast()));
            _mm256_stream_si256(to.cast(), low);
            _mm256_stream_si256(to.add(32).cast(), high);
        }
        // Streamed stores are not ordered with others; whoever is told next must see them.
        _mm_sfence();
        let done = head + lines * LINE;
        copy(from.add(done), to.add(done), len - done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streamed_bytes_arrive() {
        let from: Vec<u8> = (0..10_000u32).map(|i| (i * 7) as u8).collect();
        for (start, len) in [(0, 10_000), (1, 9_999), (3, 64), (5, 63), (7, 0), (9, 200)] {
            let mut to = vec![0u8; 10_100];
            // SAFETY: both slices are long enough, and apart.
            unsafe { copy_past_caches(from[start..].as_ptr(), to[start + 11..].as_mut_ptr(), len) };
            assert_eq!(&to[start + 11..][..len], &from[start..][..len]);
            assert!(to[..start + 11].iter().chain(&to[start + 11 + len..]).all(|b| *b == 0));
        }
    }
}
