//! Fills the batches of coming steps while a step runs.
//!
//! Worker `w` of `n` fills the steps `s` with `s mod n = w`, a few ahead, and each has its own queue: the
//! loop asks the one whose turn it is, so what comes, and in which order, does not depend on their number
//! or speed. Windows go back to the worker that filled them, so that after the first few nothing is
//! allocated. With no worker at all the loop's own thread fills.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};

use lockstep_core::Step;

use crate::{Batch, DataError, Dataset, Order};

/// What one rank takes of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub rank: usize,
    pub world: usize,
    /// Rows of a micro-batch.
    pub rows_per_micro: usize,
    /// Micro-batches of a step.
    pub micros: usize,
}

/// The batches of one step.
#[derive(Debug, Default)]
pub struct Window {
    pub step: u64,
    /// All rows of the step, on all ranks.
    pub rows: Vec<u32>,
    /// One for each micro-batch of this rank.
    pub batches: Vec<Batch>,
    /// Targets of all rows that count in the loss.
    pub supervised: u64,
    /// Positions of all rows.
    pub tokens: u64,
}

/// Gives the windows of steps in order.
#[derive(Debug)]
pub struct Loader {
    filler: Arc<Filler>,
    workers: Vec<Worker>,
    first: u64,
    next: u64,
    end: u64,
}

#[derive(Debug)]
struct Worker {
    full: Receiver<Result<Window, DataError>>,
    empty: Sender<Window>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Filler {
    dataset: Arc<Dataset>,
    order: Arc<Order>,
    share: Share,
}

impl Filler {
    fn fill(&self, step: u64, window: &mut Window) -> Result<(), DataError> {
        let Share { rank, world, rows_per_micro, micros } = self.share;
        window.step = step;
        self.order.rows(Step(step), &mut window.rows);
        window.batches.resize_with(micros, Batch::default);
        for (micro, batch) in window.batches.iter_mut().enumerate() {
            // The last step of an epoch may be short: its last micro-batches are empty.
            let mine = window.rows.chunks(rows_per_micro).nth(micro * world + rank);
            batch.fill(&self.dataset, mine.unwrap_or(&[]))?;
        }
        // Denominators are those of the whole window on all ranks, which everybody can count.
        window.supervised = window.rows.iter().map(|row| self.dataset.row_supervised(*row as usize)).sum();
        window.tokens = window.rows.iter().map(|row| self.dataset.row_tokens(*row as usize) as u64).sum();
        Ok(())
    }
}

impl Loader {
    /// Windows of the steps `first..end`. `workers` threads fill, each up to `ahead` windows in advance.
    pub fn new(
        dataset: Arc<Dataset>,
        order: Arc<Order>,
        share: Share,
        first: u64,
        end: u64,
        workers: usize,
        ahead: usize,
    ) -> Loader {
        let filler = Arc::new(Filler { dataset, order, share });
        let workers = (0..workers as u64).map(|w| {
            // Worker w fills first + w, first + w + n, and so on.
            Worker::start(Arc::clone(&filler), (first + w..end).step_by(workers), ahead.max(1))
        });
        Loader { workers: workers.collect(), filler, first, next: first, end }
    }

    /// The window of the next step, waiting for it if need be. `back`: a window that is done with.
    ///
    /// # Panics
    /// If asked for more steps than there are, or if a worker panicked.
    pub fn next(&mut self, back: Option<Window>) -> Result<Window, DataError> {
        assert!(self.next < self.end, "step {} is beyond the last", self.next);
        let step = self.next;
        self.next += 1;
        if self.workers.is_empty() {
            let mut window = back.unwrap_or_default();
            self.filler.fill(step, &mut window)?;
            return Ok(window);
        }
        if let Some(window) = back {
            // A worker that is done needs it no more.
            let turn = self.turn(window.step);
            let _ = self.workers[turn].empty.send(window);
        }
        let turn = self.turn(step);
        let worker = &mut self.workers[turn];
        match worker.full.recv() {
            Ok(window) => window,
            Err(_) => match worker.thread.take().map(JoinHandle::join) {
                Some(Err(panic)) => std::panic::resume_unwind(panic),
                _ => unreachable!("a worker ends after its last step"),
            },
        }
    }
}

impl Loader {
    /// The worker that fills `step`.
    fn turn(&self, step: u64) -> usize {
        ((step - self.first) % self.workers.len() as u64) as usize
    }
}

impl Worker {
    fn start(filler: Arc<Filler>, steps: impl Iterator<Item = u64> + Send + 'static, ahead: usize) -> Worker {
        // What waits in the queue, what is being filled, and what the loop works on.
        let (full_out, full) = sync_channel(ahead - 1);
        let (empty, empty_in) = channel();
        let thread = thread::spawn(move || work(&filler, steps, &full_out, &empty_in));
        Worker { full, empty, thread: Some(thread) }
    }
}

/// Ends after the last step, the first error, or when nobody listens any more.
fn work(
    filler: &Filler,
    steps: impl Iterator<Item = u64>,
    full: &SyncSender<Result<Window, DataError>>,
    empty: &Receiver<Window>,
) {
    for step in steps {
        let mut window = empty.try_recv().unwrap_or_default();
        let filled = filler.fill(step, &mut window).map(|()| window);
        let failed = filled.is_err();
        if full.send(filled).is_err() || failed {
            return;
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        for Worker { full, empty, thread } in self.workers.drain(..) {
            drop((full, empty));
            // It ends as soon as it has filled what it is at; a panic was met by whoever waited for it.
            let _ = thread.map(JoinHandle::join);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataSpec, Tokenizer, TokenizerSource, prepare};

    fn dataset(dir: &std::path::Path) -> Arc<Dataset> {
        let file = dir.join("a.jsonl");
        let rows: String =
            (0..37).map(|i| format!("{{\"text\": \"{}\"}}\n", "x".repeat(i % 9 + 1))).collect();
        std::fs::write(&file, rows).unwrap();
        let byte = Tokenizer::load(&TokenizerSource::Byte).unwrap();
        Arc::new(prepare(&DataSpec::new(vec![file], &dir.join("cache")), &byte, None).unwrap())
    }

    #[test]
    fn what_comes_does_not_depend_on_the_workers() {
        let dir = tempfile::tempdir().unwrap();
        let dataset = dataset(dir.path());
        let order = Arc::new(Order::new(5, dataset.num_rows(), 12, false, true).unwrap());
        let share = Share { rank: 1, world: 2, rows_per_micro: 2, micros: 3 };
        let all = |workers: usize, ahead: usize, first: u64| {
            let (dataset, order) = (Arc::clone(&dataset), Arc::clone(&order));
            let mut loader = Loader::new(dataset, order, share, first, 11, workers, ahead);
            let (mut seen, mut back) = (Vec::new(), None);
            for step in first..11 {
                let window = loader.next(back.take()).unwrap();
                assert_eq!(window.step, step);
                seen.push((window.rows.clone(), window.batches.clone(), window.supervised, window.tokens));
                back = Some(window);
            }
            seen
        };
        let expected = all(0, 1, 0);
        assert_eq!(expected.iter().map(|(rows, ..)| rows.len()).sum::<usize>(), 37 * 2 + 36);
        for (workers, ahead) in [(1, 1), (1, 4), (3, 1), (3, 2), (20, 2)] {
            assert_eq!(all(workers, ahead, 0), expected, "{workers} workers, {ahead} ahead");
            assert_eq!(all(workers, ahead, 4), expected[4..], "{workers} workers from step 4");
        }
    }

    #[test]
    fn an_error_arrives_at_its_step_and_a_dropped_loader_ends() {
        let dir = tempfile::tempdir().unwrap();
        let dataset = dataset(dir.path());
        let order = Arc::new(Order::new(5, dataset.num_rows(), 4, false, false).unwrap());
        let share = Share { rank: 0, world: 1, rows_per_micro: 4, micros: 1 };
        // Cut under the reader, as nothing but another program would.
        std::fs::OpenOptions::new().write(true).open(dataset.path()).unwrap().set_len(100).unwrap();
        for workers in [0, 1, 2] {
            let mut loader = Loader::new(Arc::clone(&dataset), Arc::clone(&order), share, 0, 9, workers, 2);
            let (mut step, mut back) = (0, None);
            let error = loop {
                match loader.next(back.take()) {
                    Ok(window) => back = Some(window),
                    Err(error) => break error,
                }
                step += 1;
            };
            assert!(matches!(error, DataError::Read { .. }), "{error}");
            assert!((1..9).contains(&step), "{step}");
        }
    }
}
