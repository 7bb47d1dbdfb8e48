//! A three-stage pipeline: one thread reads, several threads compute, and the caller consumes the results in
//! the order in which the items were read.
//!
//! The number of items in flight, from reading to consuming, is bounded, so that neither a slow item nor a
//! slow consumer lets results pile up.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::mpsc;
use std::thread;

use crate::DataError;

/// Produces the items.
pub(crate) trait Source {
    type Item: Send;

    fn next(&mut self) -> Result<Option<Self::Item>, DataError>;
}

/// Items in flight per compute thread.
pub(crate) const AHEAD: usize = 3;

/// Runs until the source is exhausted, or until the first error of reading or consuming in the order of the items.
pub(crate) fn run<S: Source + Send, R: Send>(
    threads: usize,
    mut source: S,
    compute: impl Fn(S::Item) -> R + Sync,
    mut take: impl FnMut(R) -> Result<(), DataError>,
) -> Result<(), DataError> {
    if threads <= 1 {
        while let Some(item) = source.next()? {
            take(compute(item))?;
        }
        return Ok(());
    }
    let (tickets, ticket) = mpsc::sync_channel::<()>(threads * AHEAD);
    let (items, item) = mpsc::sync_channel::<(usize, S::Item)>(threads * AHEAD);
    let (results, result) = mpsc::channel::<(usize, thread::Result<R>)>();
    let item = Mutex::new(item);
    let (item, compute) = (&item, &compute);
    thread::scope(|scope| {
        // No thread can wait forever: each waits only for channels whose other end is dropped when the scope's
        // closure returns or another thread panics.
        let reader = scope.spawn(move || -> Result<(), DataError> {
            for number in 0.. {
                if tickets.send(()).is_err() {
                    break;
                }
                let Some(next) = source.next()? else { break };
                if items.send((number, next)).is_err() {
                    break;
                }
            }
            Ok(())
        });
        for _ in 0..threads {
            let results = results.clone();
            scope.spawn(move || {
                loop {
                    let next = item.lock().map(|item| item.recv());
                    let Ok(Ok((number, next))) = next else { break };
                    // Forward a panic: otherwise the consumer would wait for this item forever.
                    let computed = catch_unwind(AssertUnwindSafe(|| compute(next)));
                    if results.send((number, computed)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(results);
        let taken = in_order(&result, &mut take, &ticket);
        drop((ticket, result));
        // Items that were read before a read error have been consumed by now, so the error comes last.
        let read = reader.join().unwrap_or_else(|panic| resume_unwind(panic));
        taken.and(read)
    })
}

fn in_order<R>(
    result: &mpsc::Receiver<(usize, thread::Result<R>)>,
    take: &mut dyn FnMut(R) -> Result<(), DataError>,
    ticket: &mpsc::Receiver<()>,
) -> Result<(), DataError> {
    let mut early: BTreeMap<usize, R> = BTreeMap::new();
    let mut next = 0;
    while let Ok((number, value)) = result.recv() {
        early.insert(number, value.unwrap_or_else(|panic| resume_unwind(panic)));
        while let Some(value) = early.remove(&next) {
            take(value)?;
            next += 1;
            // Never blocks: every item in flight has a ticket in the channel.
            let _ = ticket.recv();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    struct Count {
        next: u64,
        end: u64,
        fail_at: u64,
    }

    impl Source for Count {
        type Item = u64;

        fn next(&mut self) -> Result<Option<u64>, DataError> {
            if self.next == self.fail_at {
                return Err(DataError::NoFiles);
            }
            self.next += 1;
            Ok((self.next <= self.end).then_some(self.next - 1))
        }
    }

    #[test]
    fn results_arrive_in_order_and_errors_after_earlier_items() {
        for threads in [1, 2, 5] {
            let mut seen = Vec::new();
            let count = Count { next: 0, end: 500, fail_at: u64::MAX };
            // Early items take the longest.
            let slow = |n: u64| {
                thread::sleep(std::time::Duration::from_micros(500 - n));
                n * n
            };
            run(threads, count, slow, |n| {
                seen.push(n);
                Ok(())
            })
            .unwrap();
            assert_eq!(seen, (0..500).map(|n| n * n).collect::<Vec<u64>>());

            let (mut last, count) = (0, Count { next: 0, end: 500, fail_at: 99 });
            let ended = run(
                threads,
                count,
                |n| n,
                |n| {
                    last = n;
                    Ok(())
                },
            );
            assert!(matches!(ended, Err(DataError::NoFiles)));
            assert_eq!(last, 98);

            let count = Count { next: 0, end: u64::MAX, fail_at: u64::MAX };
            let ended = run(threads, count, |n| n, |n| if n < 7 { Ok(()) } else { Err(DataError::NoFiles) });
            assert!(ended.is_err());
        }
    }

    #[test]
    fn the_number_of_items_in_flight_is_bounded() {
        let (in_flight, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let compute = |n: u64| {
            most.fetch_max(in_flight.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            if n == 0 {
                thread::sleep(std::time::Duration::from_millis(30));
            }
        };
        let take = |()| {
            in_flight.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        };
        run(2, Count { next: 0, end: 2000, fail_at: u64::MAX }, compute, take).unwrap();
        assert!(most.into_inner() <= 2 * AHEAD + 1);
    }
}
