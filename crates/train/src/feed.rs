//! The windows of a run's steps, and whether the run waits for them.

use std::sync::Arc;
use std::time::Instant;

use lockstep_config::RunConfig;
use lockstep_core::Rank;
use lockstep_data::{DataError, Dataset, Loader, Order, Share, Window};

/// Steps over which waiting is measured.
const MEASURED_STEPS: u64 = 20;
/// At most one note in so many steps.
const STEPS_PER_NOTE: u64 = 100;
/// The share of the time above which waiting is worth a note.
const TOLERATED: f64 = 0.1;

pub(crate) struct Feed {
    loader: Loader,
    spent: Option<Window>,
    waits: Waits,
}

impl Feed {
    /// Feeds the steps `first..end` of one rank.
    pub(crate) fn new(
        config: &RunConfig,
        dataset: &Arc<Dataset>,
        order: &Arc<Order>,
        rank: Rank,
        first: u64,
        end: u64,
    ) -> Feed {
        let share = Share {
            rank: rank.0 as usize,
            world: config.plan.world_size() as usize,
            rows_per_micro: config.batch.per_device_train_batch_size as usize,
            micros: config.batch.gradient_accumulation_steps as usize,
        };
        let data = &config.data;
        let (workers, ahead) = (data.dataloader_num_workers, data.dataloader_prefetch_factor);
        let (dataset, order) = (Arc::clone(dataset), Arc::clone(order));
        let loader = Loader::new(dataset, order, share, first, end, workers as usize, ahead as usize);
        Feed { loader, spent: None, waits: Waits::default() }
    }

    /// The next step's window; it comes back through [`Feed::done`].
    pub(crate) fn next(&mut self) -> Result<Window, DataError> {
        let start = Instant::now();
        let window = self.loader.next(self.spent.take());
        self.waits.waited += start.elapsed().as_secs_f64();
        window
    }

    /// Takes a window back after a step of `seconds`, the wait included. Returns what is worth telling.
    pub(crate) fn done(&mut self, window: Window, seconds: f64) -> Option<String> {
        self.spent = Some(window);
        self.waits.step(seconds)
    }
}

/// How much of the time goes into waiting for data.
#[derive(Debug, Default)]
struct Waits {
    waited: f64,
    taken: f64,
    steps: u64,
    /// Steps until the next note may come.
    quiet: u64,
}

impl Waits {
    fn step(&mut self, seconds: f64) -> Option<String> {
        self.taken += seconds;
        self.steps += 1;
        self.quiet = self.quiet.saturating_sub(1);
        if self.steps < MEASURED_STEPS {
            return None;
        }
        let share = if self.taken > 0.0 { self.waited / self.taken } else { 0.0 };
        let quiet = self.quiet;
        *self = Waits { quiet, ..Waits::default() };
        if share <= TOLERATED || quiet > 0 {
            return None;
        }
        self.quiet = STEPS_PER_NOTE;
        Some(format!(
            "data is the bottleneck: {:.0} % of the last {MEASURED_STEPS} steps went into waiting for batches; raise \
             dataloader_num_workers or dataloader_prefetch_factor, or put data_cache_dir on a faster disk",
            share * 100.0
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps, from 1, after which something was said.
    fn noted(wait: f64, steps: u64) -> Vec<u64> {
        let mut waits = Waits::default();
        let step = |step: &u64| {
            waits.waited += wait;
            waits.step(1.0).is_some_and(|text| text.contains("bottleneck")).then_some(*step)
        };
        (1..=steps).collect::<Vec<_>>().iter().filter_map(step).collect()
    }

    #[test]
    fn waiting_is_told_once_in_a_hundred_steps() {
        assert_eq!(noted(0.2, 250), [20, 120, 220]);
        assert!(noted(0.09, 250).is_empty());
    }
}
