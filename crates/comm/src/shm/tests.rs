//! Peers that write nonsense: errors, and nothing worse.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lockstep_core::{Bytes, DType, Rank};
use lockstep_device::{Memory, Pool};

use super::*;
use crate::call::CallKind;

const CALL: Call =
    Call { kind: CallKind::Broadcast, dtype: DType::F32, elems: 4096, tag: 1, group: 2, shape: 3 };

/// Two ranks of this process.
fn two() -> (ShmCarrier, ShmCarrier) {
    let memory = || Arc::new(Memory::allocate_shared(Bytes(1 << 16), &Pool::new(1)).unwrap());
    let prepared = [0, 1].map(|rank| Prepared::new(rank, 2, &[memory()]).unwrap());
    let addresses = [0, 1].map(|i: usize| Some(prepared[i].address().unwrap()));
    let times = (Duration::from_millis(200), Duration::ZERO);
    let mut ranks = (0..).zip(prepared).map(|(r, prepared)| {
        ShmCarrier::open(Rank(r), prepared, &addresses, times, Abort::default()).unwrap()
    });
    (ranks.next().unwrap(), ranks.next().unwrap())
}

/// Rank 1 posts a whole region, then `spoil`s its own cell; what rank 0 makes of it.
fn spoiled(spoil: impl Fn(&block::Cell)) -> CommError {
    let (mut a, mut b) = two();
    let memory = b.regions[0].clone();
    b.post(Rank(0), &CALL, &[memory.view(0, 4096, DType::F32)]).unwrap();
    spoil(b.block.cell(0));
    a.post(Rank(1), &CALL, &[]).unwrap();
    let into = a.regions[0].clone();
    a.meet(Rank(1), &CALL)
        .and_then(|()| a.pull(Rank(1), into.view(0, 4096, DType::F32)))
        .expect_err("nonsense")
}

#[test]
fn nonsense_in_a_cell_is_an_error() {
    let slot = |cell: &block::Cell, f: &dyn Fn(&Slot)| f(cell.slot(1));
    let place = |p: Place| move |s: &Slot| store(&s.places[0], p.to_words());
    let good = Place { region: 0, offset: 0, len: 4096, dtype: DType::F32 };
    type Spoil = Box<dyn Fn(&Slot)>;
    let spoilers: [Spoil; 11] = [
        Box::new(|s| s.call[0].store(0xff, Ordering::Relaxed)),
        Box::new(|s| s.offers.store(33, Ordering::Relaxed)),
        Box::new(|s| s.offers.store(u64::MAX, Ordering::Relaxed)),
        Box::new(|s| s.offers.store(0, Ordering::Relaxed)),
        Box::new(|s| s.offers.store(1 | INLINE, Ordering::Relaxed)),
        Box::new(place(Place { len: u64::MAX, ..good })),
        Box::new(place(Place { len: 4095, ..good })),
        Box::new(place(Place { offset: 64, len: 1 << 14, ..good })),
        Box::new(place(Place { region: 7, ..good })),
        Box::new(place(Place { dtype: DType::U32, ..good })),
        Box::new(|s| s.places[0][0].store(u64::MAX, Ordering::Relaxed)),
    ];
    for spoil in spoilers {
        let error = spoiled(|cell| slot(cell, &spoil));
        assert!(matches!(error, CommError::Garbled { rank: Rank(0), peer: Rank(1), .. }), "{error}");
    }
    let error = spoiled(|cell| cell.posted.store(9, Ordering::Relaxed));
    assert!(error.to_string().contains("posted call 9"), "{error}");
    let error = spoiled(|cell| cell.posted.store(0, Ordering::Relaxed));
    assert!(matches!(error, CommError::TimedOut { .. }), "{error}");
}

#[test]
fn what_peers_cannot_read_is_not_offered() {
    let (mut a, _b) = two();
    let private = Memory::allocate(Bytes(1 << 16), &Pool::new(1)).unwrap();
    let error = a.post(Rank(1), &CALL, &[private.view(0, 4096, DType::F32)]).expect_err("private");
    assert!(error.to_string().contains("memory that peers cannot read"), "{error}");
    // Little enough goes in the cell itself.
    a.post(Rank(1), &CALL, &[private.view(0, 1024, DType::F32)]).unwrap();
}

/// A sleeper really sleeps, on a mapping that it cannot write, and is woken through another.
#[test]
fn a_bell_in_a_read_only_mapping_can_be_slept_on() {
    use rustix::event::Timespec;
    use rustix::io::Errno;
    use rustix::thread::futex;
    let (a, b) = two();
    let bell = &a.link(Rank(1)).peer.block.cell(0).bell;
    let time = |millis: i64| Timespec { tv_sec: 0, tv_nsec: millis * 1_000_000 };
    let sleep = |value, millis| futex::wait(bell, futex::Flags::empty(), value, Some(&time(millis)));
    assert_eq!(sleep(0, 20), Err(Errno::TIMEDOUT));
    assert_eq!(sleep(1, 20), Err(Errno::AGAIN));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Nobody but the kernel knows when the other sleeps; the flag says that it is about to.
            a.block.cell(1).waiting.store(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(50));
            b.ring(Rank(0));
        });
        let start = std::time::Instant::now();
        assert!(matches!(sleep(0, 900), Ok(()) | Err(Errno::AGAIN)));
        assert!(start.elapsed() < Duration::from_millis(800), "{:?}", start.elapsed());
    });
}
