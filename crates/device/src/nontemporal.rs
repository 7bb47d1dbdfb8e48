//! Non-temporal copies, for data that is not read again soon. An ordinary store first reads the cache line from memory
//! and then evicts another line that may still be needed; a non-temporal store does neither.

/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// Copies bytes with non-temporal stores where the machine has them.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
pub unsafe fn copy_nontemporal(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: guaranteed by the caller; the feature was just detected.
        return unsafe { stream_avx(from, to, len) };
    }
    // SAFETY: guaranteed by the caller.
    unsafe { copy(from, to, len) }
}

/// # Safety
/// As [`copy_nontemporal`], on a machine with AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream_avx(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    const LINE: usize = 64;
    let head = to.align_offset(LINE).min(len);
    let lines = (len - head) / LINE;
    // SAFETY: head, lines and tail add up to `len` bytes on both sides; `to + head` is aligned to a cache line.
    unsafe {
        copy(from, to, head);
        for i in 0..lines {
            let (from, to) = (from.add(head + i * LINE), to.add(head + i * LINE));
            let (low, high) = (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast()));
            _mm256_stream_si256(to.cast(), low);
            _mm256_stream_si256(to.add(32).cast(), high);
        }
        // Non-temporal stores are weakly ordered: this fence makes them visible before any later store.
        _mm_sfence();
        let done = head + lines * LINE;
        copy(from.add(done), to.add(done), len - done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copied_bytes_arrive_at_every_alignment() {
        let from: Vec<u8> = (0..10_000u32).map(|i| (i * 7) as u8).collect();
        for (start, len) in [(0, 10_000), (1, 9_999), (3, 64), (5, 63), (7, 0), (9, 200)] {
            let mut to = vec![0u8; 10_100];
            // SAFETY: both slices are long enough and do not overlap.
            unsafe { copy_nontemporal(from[start..].as_ptr(), to[start + 11..].as_mut_ptr(), len) };
            assert_eq!(&to[start + 11..][..len], &from[start..][..len]);
            assert!(to[..start + 11].iter().chain(&to[start + 11 + len..]).all(|b| *b == 0));
        }
    }
}
