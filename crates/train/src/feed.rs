//! Provides the batches of a run's steps, and measures how long the run waits for them.

use std::sync::Arc;
use std::time::Instant;

use lockstep_config::RunConfig;
use lockstep_core::Rank;
use lockstep_data::{DataError, Dataset, Loader, RankShare, SampleOrder, StepBatches};

/// The number of steps over which waiting is measured.
const MEASURED_STEPS: u64 = 20;
/// At most one warning in this many steps.
const STEPS_PER_NOTE: u64 = 100;
/// The fraction of the time spent waiting above which to warn.
const TOLERATED_FRACTION: f64 = 0.1;

/// The batches of one rank.
pub(crate) struct Feed {
    loader: Loader,
    used: Option<StepBatches>,
    waits: DataWaitMonitor,
}

impl Feed {
    /// Feeds the steps `first..end` of one rank.
    pub(crate) fn new(
        config: &RunConfig,
        dataset: &Arc<Dataset>,
        order: &Arc<SampleOrder>,
        rank: Rank,
        first: u64,
        end: u64,
    ) -> Feed {
        let share = RankShare {
            rank: rank.0 as usize,
            world: config.plan.world_size() as usize,
            rows_per_micro_batch: config.batch.per_device_train_batch_size as usize,
            num_micro_batches: config.batch.gradient_accumulation_steps as usize,
        };
        let data = &config.data;
        let (workers, ahead) = (data.dataloader_num_workers, data.dataloader_prefetch_factor);
        let (dataset, order) = (Arc::clone(dataset), Arc::clone(order));
        let loader = Loader::new(dataset, order, share, first, end, workers as usize, ahead as usize);
        Feed { loader, used: None, waits: DataWaitMonitor::default() }
    }

    /// Waits for the batches of the next step. Return them with [`Feed::done`].
    pub(crate) fn next(&mut self) -> Result<StepBatches, DataError> {
        let start = Instant::now();
        let batches = self.loader.next(self.used.take());
        self.waits.waited_seconds += start.elapsed().as_secs_f64();
        batches
    }

    /// Takes batches back after a step of `seconds`, including the wait. Returns a warning if the run waits too long.
    pub(crate) fn done(&mut self, batches: StepBatches, seconds: f64) -> Option<String> {
        self.used = Some(batches);
        self.waits.step(seconds)
    }
}

/// Measures how much of the time the run waits for data.
#[derive(Debug, Default)]
struct DataWaitMonitor {
    waited_seconds: f64,
    total_seconds: f64,
    steps: u64,
    /// Steps until the next warning is allowed.
    quiet_steps: u64,
}

impl DataWaitMonitor {
    fn step(&mut self, seconds: f64) -> Option<String> {
        self.total_seconds += seconds;
        self.steps += 1;
        self.quiet_steps = self.quiet_steps.saturating_sub(1);
        if self.steps < MEASURED_STEPS {
            return None;
        }
        let fraction = if self.total_seconds > 0.0 { self.waited_seconds / self.total_seconds } else { 0.0 };
        let quiet_steps = self.quiet_steps;
        *self = DataWaitMonitor { quiet_steps, ..DataWaitMonitor::default() };
        if fraction <= TOLERATED_FRACTION || quiet_steps > 0 {
            return None;
        }
        self.quiet_steps = STEPS_PER_NOTE;
        Some(format!(
            "data loading is the bottleneck: the last {MEASURED_STEPS} steps spent {:.0} % of their time waiting for \
             batches; raise dataloader_num_workers or dataloader_prefetch_factor, or put data_cache_dir on a faster disk",
            fraction * 100.0
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps, from 1, after which there was a warning.
    fn warned(wait_seconds: f64, steps: u64) -> Vec<u64> {
        let mut waits = DataWaitMonitor::default();
        let step = |step: &u64| {
            waits.waited_seconds += wait_seconds;
            waits.step(1.0).is_some_and(|text| text.contains("bottleneck")).then_some(*step)
        };
        (1..=steps).collect::<Vec<_>>().iter().filter_map(step).collect()
    }

    #[test]
    fn waiting_is_reported_once_in_a_hundred_steps() {
        assert_eq!(warned(0.2, 250), [20, 120, 220]);
        assert!(warned(0.09, 250).is_empty());
    }
}
