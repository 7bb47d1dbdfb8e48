//! Fills the batches of upcoming steps while a step runs.
//!
//! Worker `w` of `n` fills the steps `s` with `s mod n = w`, a few steps ahead, and every worker has its own
//! queue. The training loop reads the queue of the worker that owns the step, so the batches and their order
//! do not depend on the number or speed of the workers. The dataset's task determines the layout of the batches.
//! A used [`StepBatches`] goes back to the worker that filled it, so that nothing is allocated after the first few
//! steps. Without workers, the training loop's own thread fills the batches.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};

use lockstep_core::Step;

use crate::{Batch, DataError, Dataset, SampleOrder};

/// How the rows of a step are divided among ranks and micro-batches, and which rank this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankShare {
    pub rank: usize,
    pub world: usize,
    pub rows_per_micro_batch: usize,
    /// Micro-batches per step and rank.
    pub num_micro_batches: usize,
}

/// All micro-batches of one rank for one step.
#[derive(Debug, Default)]
pub struct StepBatches {
    pub step: u64,
    /// All rows of the step, over all ranks.
    pub rows: Vec<u32>,
    /// The micro-batches of this rank.
    pub micro_batches: Vec<Batch>,
    /// The number of targets that count in the loss, over all ranks.
    pub supervised: u64,
    /// The number of positions, over all ranks.
    pub tokens: u64,
    /// The number of preference pairs, over all ranks; 0 for other tasks.
    pub pairs: u64,
    /// The number of targets of chosen documents that count in the loss, over all ranks; 0 for other tasks.
    pub supervised_chosen: u64,
}

/// Hands out the batches of consecutive steps.
#[derive(Debug)]
pub struct Loader {
    filler: Arc<BatchFiller>,
    workers: Vec<Worker>,
    first: u64,
    next: u64,
    end: u64,
}

#[derive(Debug)]
struct Worker {
    full: Receiver<Result<StepBatches, DataError>>,
    empty: Sender<StepBatches>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct BatchFiller {
    dataset: Arc<Dataset>,
    order: Arc<SampleOrder>,
    share: RankShare,
}

impl BatchFiller {
    fn fill(&self, step: u64, batches: &mut StepBatches) -> Result<(), DataError> {
        let RankShare { rank, world, rows_per_micro_batch, num_micro_batches } = self.share;
        batches.step = step;
        self.order.rows(Step(step), &mut batches.rows);
        batches.micro_batches.resize_with(num_micro_batches, Batch::default);
        for (idx, batch) in batches.micro_batches.iter_mut().enumerate() {
            // The last step of an epoch may have fewer rows: its last micro-batches are then empty.
            let mine = batches.rows.chunks(rows_per_micro_batch).nth(idx * world + rank);
            batch.fill(&self.dataset, mine.unwrap_or(&[]))?;
        }
        // The loss is normalized over the whole step on all ranks. Every rank can count that by itself.
        let rows = || batches.rows.iter().map(|row| *row as usize);
        batches.supervised = rows().map(|row| self.dataset.row_supervised(row)).sum();
        batches.tokens = rows().map(|row| self.dataset.row_tokens(row) as u64).sum();
        batches.supervised_chosen = rows().map(|row| self.dataset.row_supervised_chosen(row)).sum();
        batches.pairs = rows().map(|row| self.dataset.row_pairs(row)).sum();
        Ok(())
    }
}

impl Loader {
    /// Loads the steps `first..end` with `workers` threads, each of which stays up to `ahead` steps ahead.
    pub fn new(
        dataset: Arc<Dataset>,
        order: Arc<SampleOrder>,
        share: RankShare,
        first: u64,
        end: u64,
        workers: usize,
        ahead: usize,
    ) -> Loader {
        let filler = Arc::new(BatchFiller { dataset, order, share });
        let workers = (0..workers as u64).map(|w| {
            // Worker w fills the steps first + w, first + w + n, and so on.
            Worker::start(Arc::clone(&filler), (first + w..end).step_by(workers), ahead.max(1))
        });
        Loader { workers: workers.collect(), filler, first, next: first, end }
    }

    /// Waits for the batches of the next step. `used`: batches of an earlier step, whose memory is reused.
    ///
    /// # Panics
    /// If called more often than there are steps, or if a worker panicked.
    pub fn next(&mut self, used: Option<StepBatches>) -> Result<StepBatches, DataError> {
        assert!(self.next < self.end, "step {} is beyond the last", self.next);
        let step = self.next;
        self.next += 1;
        if self.workers.is_empty() {
            let mut batches = used.unwrap_or_default();
            self.filler.fill(step, &mut batches)?;
            return Ok(batches);
        }
        if let Some(batches) = used {
            let owner = self.worker_of(batches.step);
            // Sending fails if the worker has filled its last step; then the memory is not needed any more.
            let _ = self.workers[owner].empty.send(batches);
        }
        let owner = self.worker_of(step);
        let worker = &mut self.workers[owner];
        match worker.full.recv() {
            Ok(batches) => batches,
            Err(_) => match worker.thread.take().map(JoinHandle::join) {
                Some(Err(panic)) => std::panic::resume_unwind(panic),
                _ => unreachable!("a worker ends after its last step"),
            },
        }
    }

    /// The index of the worker that fills `step`.
    fn worker_of(&self, step: u64) -> usize {
        ((step - self.first) % self.workers.len() as u64) as usize
    }
}

impl Worker {
    fn start(
        filler: Arc<BatchFiller>,
        steps: impl Iterator<Item = u64> + Send + 'static,
        ahead: usize,
    ) -> Worker {
        // One less than `ahead`: the worker holds another step while it fills it.
        let (full_out, full) = sync_channel(ahead - 1);
        let (empty, empty_in) = channel();
        let thread = thread::spawn(move || fill_steps(&filler, steps, &full_out, &empty_in));
        Worker { full, empty, thread: Some(thread) }
    }
}

/// The worker's thread. Ends after the last step, after the first error, or when the loader is dropped.
fn fill_steps(
    filler: &BatchFiller,
    steps: impl Iterator<Item = u64>,
    full: &SyncSender<Result<StepBatches, DataError>>,
    empty: &Receiver<StepBatches>,
) {
    for step in steps {
        let mut batches = empty.try_recv().unwrap_or_default();
        let filled = filler.fill(step, &mut batches).map(|()| batches);
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
            // The worker ends once it has filled its current step. A panic was already raised in `next`.
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
    fn batches_do_not_depend_on_the_workers() {
        let dir = tempfile::tempdir().unwrap();
        let dataset = dataset(dir.path());
        let order = Arc::new(SampleOrder::new(5, dataset.num_rows(), 12, false, true).unwrap());
        let share = RankShare { rank: 1, world: 2, rows_per_micro_batch: 2, num_micro_batches: 3 };
        let all = |workers: usize, ahead: usize, first: u64| {
            let (dataset, order) = (Arc::clone(&dataset), Arc::clone(&order));
            let mut loader = Loader::new(dataset, order, share, first, 11, workers, ahead);
            let (mut seen, mut used) = (Vec::new(), None);
            for step in first..11 {
                let batches = loader.next(used.take()).unwrap();
                assert_eq!(batches.step, step);
                let StepBatches { rows, micro_batches, supervised, tokens, .. } = &batches;
                seen.push((rows.clone(), micro_batches.clone(), *supervised, *tokens));
                used = Some(batches);
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
    fn errors_arrive_at_their_step_and_a_dropped_loader_ends() {
        let dir = tempfile::tempdir().unwrap();
        let dataset = dataset(dir.path());
        let order = Arc::new(SampleOrder::new(5, dataset.num_rows(), 4, false, false).unwrap());
        let share = RankShare { rank: 0, world: 1, rows_per_micro_batch: 4, num_micro_batches: 1 };
        // Truncate the file while it is open, as only another program would.
        std::fs::OpenOptions::new().write(true).open(dataset.path()).unwrap().set_len(100).unwrap();
        for workers in [0, 1, 2] {
            let mut loader = Loader::new(Arc::clone(&dataset), Arc::clone(&order), share, 0, 9, workers, 2);
            let (mut step, mut used) = (0, None);
            let error = loop {
                match loader.next(used.take()) {
                    Ok(batches) => used = Some(batches),
                    Err(error) => break error,
                }
                step += 1;
            };
            assert!(matches!(error, DataError::Read { .. }), "{error}");
            assert!((1..9).contains(&step), "{step}");
        }
    }
}
