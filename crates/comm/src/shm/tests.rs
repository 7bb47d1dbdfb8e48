//! Invalid data in a peer's control block leads to errors and nothing worse.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lockstep_core::{Bytes, DType, Rank};
use lockstep_device::{Memory, Pool};

use super::*;
use crate::call::CallKind;

const CALL: Call =
    Call { kind: CallKind::Broadcast, dtype: DType::F32, elems: 4096, tag: 1, group: 2, shape: 3 };

/// Two connected ranks in this process.
fn pair() -> (ShmCarrier, ShmCarrier) {
    let memory = || Arc::new(Memory::allocate_shared(Bytes(1 << 16), &Pool::new(1)).unwrap());
    let export = [0, 1].map(|rank| ShmExport::new(rank, 2, &[memory()]).unwrap());
    let addresses = [0, 1].map(|i: usize| Some(export[i].address().unwrap()));
    let times = (Duration::from_millis(200), Duration::ZERO);
    let mut ranks = (0..)
        .zip(export)
        .map(|(r, export)| ShmCarrier::open(Rank(r), export, &addresses, times, Abort::default()).unwrap());
    (ranks.next().unwrap(), ranks.next().unwrap())
}

/// Rank 1 posts a whole region and then corrupts its own cell with `corrupt`. Returns the error on rank 0.
fn error_after(corrupt: impl Fn(&block::Cell)) -> CommError {
    let (mut a, mut b) = pair();
    let memory = b.regions[0].clone();
    b.post(Rank(0), &CALL, &[memory.view(0, 4096, DType::F32)]).unwrap();
    corrupt(b.block.cell(0));
    a.post(Rank(1), &CALL, &[]).unwrap();
    let into = a.regions[0].clone();
    a.meet(Rank(1), &CALL)
        .and_then(|()| a.pull(Rank(1), into.view(0, 4096, DType::F32)))
        .expect_err("the cell is corrupt")
}

#[test]
fn invalid_data_in_a_cell_is_an_error() {
    let slot = |cell: &block::Cell, f: &dyn Fn(&Slot)| f(cell.slot(1));
    let range = |r: RegionRange| move |s: &Slot| store(&s.ranges[0], r.to_words());
    let good = RegionRange { region: 0, offset: 0, len: 4096, dtype: DType::F32 };
    type Corruption = Box<dyn Fn(&Slot)>;
    let corruptions: [Corruption; 11] = [
        Box::new(|s| s.call[0].store(0xff, Ordering::Relaxed)),
        Box::new(|s| s.offers.store(33, Ordering::Relaxed)),
        Box::new(|s| s.offers.store(u64::MAX, Ordering::Relaxed)),
        Box::new(|s| s.offers.store(0, Ordering::Relaxed)),
        Box::new(|s| s.offers.store(1 | INLINE, Ordering::Relaxed)),
        Box::new(range(RegionRange { len: u64::MAX, ..good })),
        Box::new(range(RegionRange { len: 4095, ..good })),
        Box::new(range(RegionRange { offset: 64, len: 1 << 14, ..good })),
        Box::new(range(RegionRange { region: 7, ..good })),
        Box::new(range(RegionRange { dtype: DType::U32, ..good })),
        Box::new(|s| s.ranges[0][0].store(u64::MAX, Ordering::Relaxed)),
    ];
    for corrupt in corruptions {
        let error = error_after(|cell| slot(cell, &corrupt));
        assert!(matches!(error, CommError::InvalidData { rank: Rank(0), peer: Rank(1), .. }), "{error}");
    }
    let error = error_after(|cell| cell.posted.store(9, Ordering::Relaxed));
    assert!(error.to_string().contains("posted call 9"), "{error}");
    let error = error_after(|cell| cell.posted.store(0, Ordering::Relaxed));
    assert!(matches!(error, CommError::TimedOut { .. }), "{error}");
}

#[test]
fn memory_that_peers_cannot_read_is_not_offered() {
    let (mut a, _b) = pair();
    let private = Memory::allocate(Bytes(1 << 16), &Pool::new(1)).unwrap();
    let error = a.post(Rank(1), &CALL, &[private.view(0, 4096, DType::F32)]).expect_err("private");
    assert!(error.to_string().contains("memory that peers cannot read"), "{error}");
    // Small offers are stored in the cell itself, so private memory is fine.
    a.post(Rank(1), &CALL, &[private.view(0, 1024, DType::F32)]).unwrap();
}

/// A rank can sleep on a futex in a mapping that it cannot write, and is woken through another mapping.
#[test]
fn a_doorbell_works_through_a_read_only_mapping() {
    use rustix::event::Timespec;
    use rustix::io::Errno;
    use rustix::thread::futex;
    let (a, b) = pair();
    let doorbell = &a.link(Rank(1)).peer.block.cell(0).doorbell;
    let time = |millis: i64| Timespec { tv_sec: millis / 1000, tv_nsec: millis % 1000 * 1_000_000 };
    let sleep = |value, millis| futex::wait(doorbell, futex::Flags::empty(), value, Some(&time(millis)));
    assert_eq!(sleep(0, 20), Err(Errno::TIMEDOUT));
    assert_eq!(sleep(1, 20), Err(Errno::AGAIN));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Only the kernel knows when the other thread sleeps; the flag says that it is about to.
            a.block.cell(1).waiting.store(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(50));
            b.ring_doorbell(Rank(0));
        });
        let start = std::time::Instant::now();
        assert!(matches!(sleep(0, 20_000), Ok(()) | Err(Errno::AGAIN)));
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    });
}
