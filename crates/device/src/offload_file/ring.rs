//! Transfers with many requests in flight, through io_uring.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use io_uring::{IoUring, opcode, squeue, types};

/// Requests in flight at once, and the bytes of each.
const DEPTH: usize = 16;
const REQUEST: usize = 256 << 10;

/// Each offload file has a ring of its own. Lanes share it under a lock.
pub(super) struct Ring(Mutex<IoUring>);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ring")
    }
}

impl Ring {
    /// `None` where the system lacks io_uring or forbids it, as in many containers.
    pub(super) fn open() -> Option<Ring> {
        IoUring::new(DEPTH as u32).ok().map(|ring| Ring(Mutex::new(ring)))
    }

    pub(super) fn read(&self, file: &File, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let (base, fd) = (into.as_mut_ptr(), types::Fd(file.as_raw_fd()));
        let entry = |start: usize, len: usize| {
            opcode::Read::new(fd, base.wrapping_add(start), len as u32).offset(offset + start as u64).build()
        };
        // Complete short reads with plain calls, which also report the error.
        self.transfer(into.len(), &entry, &mut |start, end| {
            // SAFETY: inside `into`, which no request touches any more.
            let rest = unsafe { std::slice::from_raw_parts_mut(base.add(start), end - start) };
            file.read_exact_at(rest, offset + start as u64)
        })
    }

    pub(super) fn write(&self, file: &File, offset: u64, from: &[u8]) -> io::Result<()> {
        let (base, fd) = (from.as_ptr(), types::Fd(file.as_raw_fd()));
        let entry = |start: usize, len: usize| {
            opcode::Write::new(fd, base.wrapping_add(start), len as u32).offset(offset + start as u64).build()
        };
        self.transfer(from.len(), &entry, &mut |start, end| {
            file.write_all_at(&from[start..end], offset + start as u64)
        })
    }

    /// Submits requests that together cover `[0, len)` and calls `rest` for what they leave incomplete.
    fn transfer(
        &self,
        len: usize,
        entry: &dyn Fn(usize, usize) -> squeue::Entry,
        rest: &mut dyn FnMut(usize, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        // After a panic requests may still be in flight, and the next transfer would mistake their completions for its
        // own.
        let broken = |_| io::Error::other("io_uring stopped working after a panic");
        let mut ring = self.0.lock().map_err(broken)?;
        for first in (0..len).step_by(DEPTH * REQUEST) {
            let requests = (len - first).div_ceil(REQUEST).min(DEPTH);
            let bounds = |i: usize| (first + i * REQUEST, (first + (i + 1) * REQUEST).min(len));
            for i in 0..requests {
                let (start, end) = bounds(i);
                // SAFETY: the entry's bytes belong to the caller until `finish` has seen every request complete; the
                // file outlives the call.
                unsafe { ring.submission().push(&entry(start, end - start).user_data(i as u64)) }
                    .expect("the ring holds a whole batch");
            }
            let results = finish(&mut ring, requests);
            for (i, result) in results.iter().enumerate().take(requests) {
                let (start, end) = bounds(i);
                let moved = match *result {
                    moved @ 0.. => moved as usize,
                    // Interrupted or temporarily unavailable: completed below.
                    code if matches!(-code, EINTR | EAGAIN) => 0,
                    code => return Err(io::Error::from_raw_os_error(-code)),
                };
                if start + moved < end {
                    rest(start + moved, end)?;
                }
            }
        }
        Ok(())
    }
}

const EINTR: i32 = 4;
const EAGAIN: i32 = 11;

/// Submits the queued requests and waits until all have completed: until then the kernel owns their bytes.
fn finish(ring: &mut IoUring, requests: usize) -> [i32; DEPTH] {
    let mut results = [0; DEPTH];
    let mut ended = 0;
    while ended < requests {
        match ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(cause) if matches!(cause.raw_os_error(), Some(EINTR | EAGAIN)) => {}
            // Returning would release memory that the kernel may still write to.
            Err(cause) => panic!("io_uring stopped working: {cause}"),
        }
        for done in ring.completion() {
            results[done.user_data() as usize] = done.result();
            ended += 1;
        }
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_not_reused_after_a_panic() {
        let Some(ring) = Ring::open() else { return };
        let (file, mut bytes) = (tempfile::tempfile().unwrap(), [1u8; 64]);
        let (at, fd) = (bytes.as_mut_ptr(), types::Fd(file.as_raw_fd()));
        let entry =
            |start: usize, len: usize| opcode::Read::new(fd, at.wrapping_add(start), len as u32).build();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // The file is empty, so the read is short and `rest` is called.
            ring.transfer(64, &entry, &mut |_, _| panic!("on purpose"))
        }));
        assert!(outcome.is_err());
        file.set_len(64).unwrap();
        assert!(ring.read(&file, 0, &mut bytes).is_err());
    }
}
