//! Which rows each step uses.
//!
//! The rows are a pure function of the seed and the step, so there is no iterator to save or replay: a
//! resumed run asks for step `s` and gets the same rows as the original run. Each rank uses its share of them.

use std::sync::{Arc, Mutex, PoisonError};

use lockstep_core::Step;
use lockstep_core::rng::{Purpose, RngStream};

use crate::DataError;

/// The order of rows over all epochs.
#[derive(Debug)]
pub struct SampleOrder {
    seed: u64,
    num_rows: usize,
    rows_per_step: usize,
    drop_last: bool,
    shuffle: bool,
    /// The permutation of the epoch that was asked for last. A cache only: results do not depend on it.
    cached: Mutex<Option<(u64, Arc<[u32]>)>>,
}

impl SampleOrder {
    /// An order of `num_rows` rows, of which each step uses `rows_per_step` (over all ranks and micro-batches).
    /// With `drop_last` the rows that do not fill a step are left out of the epoch; without it, the last step of
    /// the epoch has fewer rows.
    pub fn new(
        seed: u64,
        num_rows: usize,
        rows_per_step: usize,
        drop_last: bool,
        shuffle: bool,
    ) -> Result<Self, DataError> {
        assert!(rows_per_step > 0, "a step needs at least one row");
        if num_rows == 0 || (drop_last && num_rows < rows_per_step) {
            return Err(DataError::TooFewRows { num_rows, rows_per_step });
        }
        Ok(SampleOrder { seed, num_rows, rows_per_step, drop_last, shuffle, cached: Mutex::new(None) })
    }

    pub fn steps_per_epoch(&self) -> u64 {
        let steps = if self.drop_last {
            self.num_rows / self.rows_per_step
        } else {
            self.num_rows.div_ceil(self.rows_per_step)
        };
        steps as u64
    }

    /// Replaces the content of `out` with the rows of `step`.
    pub fn rows(&self, step: Step, out: &mut Vec<u32>) {
        let epoch = step.0 / self.steps_per_epoch();
        let start = (step.0 % self.steps_per_epoch()) as usize * self.rows_per_step;
        let end = (start + self.rows_per_step).min(self.num_rows);
        out.clear();
        if self.shuffle {
            out.extend_from_slice(&self.permutation(epoch)[start..end]);
        } else {
            out.extend(start as u32..end as u32);
        }
    }

    /// The number of epochs completed when `step` begins, as a fraction.
    pub fn epoch(&self, step: Step) -> f64 {
        step.0 as f64 / self.steps_per_epoch() as f64
    }

    fn permutation(&self, epoch: u64) -> Arc<[u32]> {
        // The cache is replaced in one assignment, so a panic cannot leave it half written: ignore poisoning.
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        match &*cached {
            Some((known, order)) if *known == epoch => Arc::clone(order),
            _ => {
                // The permutations repeat after 2^32 epochs.
                let stream = RngStream::new(self.seed, Purpose::DataOrder, epoch as u32, 0);
                let order: Arc<[u32]> = stream.permutation(self.num_rows).into();
                *cached = Some((epoch, Arc::clone(&order)));
                order
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rows(order: &SampleOrder, step: u64) -> Vec<u32> {
        let mut out = vec![99; 3];
        order.rows(Step(step), &mut out);
        out
    }

    #[test]
    fn without_shuffling_rows_keep_their_order() {
        let order = SampleOrder::new(0, 5, 2, false, false).unwrap();
        assert_eq!(order.steps_per_epoch(), 3);
        let steps: Vec<Vec<u32>> = (0..4).map(|s| rows(&order, s)).collect();
        assert_eq!(steps, [vec![0, 1], vec![2, 3], vec![4], vec![0, 1]]);
        assert_eq!(order.epoch(Step(4)), 4.0 / 3.0);
        let order = SampleOrder::new(0, 5, 2, true, false).unwrap();
        assert_eq!(rows(&order, 2), [0, 1]);
    }

    #[test]
    fn too_few_rows_is_an_error_only_if_no_step_remains() {
        assert!(SampleOrder::new(0, 3, 4, true, true).is_err());
        assert!(SampleOrder::new(0, 0, 4, false, true).is_err());
        assert_eq!(SampleOrder::new(0, 3, 4, false, true).unwrap().steps_per_epoch(), 1);
    }

    proptest! {
        #[test]
        fn an_epoch_has_every_row_once_and_steps_are_stateless(
            seed in any::<u64>(), num_rows in 1usize..200, rows_per_step in 1usize..40, epoch in 0u64..5,
        ) {
            let order = SampleOrder::new(seed, num_rows, rows_per_step, false, true).unwrap();
            let per_epoch = order.steps_per_epoch();
            let steps: Vec<Vec<u32>> =
                (epoch * per_epoch..(epoch + 1) * per_epoch).map(|s| rows(&order, s)).collect();
            let mut all = steps.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..num_rows as u32).collect::<Vec<_>>());
            for (idx, expected) in steps.iter().enumerate().rev() {
                let fresh = SampleOrder::new(seed, num_rows, rows_per_step, false, true).unwrap();
                prop_assert_eq!(&rows(&fresh, epoch * per_epoch + idx as u64), expected);
            }
            if num_rows >= rows_per_step {
                let whole = SampleOrder::new(seed, num_rows, rows_per_step, true, true).unwrap();
                for step in 0..whole.steps_per_epoch() {
                    prop_assert_eq!(rows(&whole, step).len(), rows_per_step);
                }
            }
        }
    }
}
