//! The metrics of a run in bounded memory: a run may have millions of steps.

use std::collections::VecDeque;

use crate::run_files::MetricsLine;

/// The most buckets of a column. A chart has fewer points.
const MAX_BUCKETS: usize = 4096;
/// The newest evaluations that are kept whole.
const MAX_EVALUATIONS: usize = 500;
/// The steps over which the busy seconds of ranks are averaged.
const RANK_STEPS: usize = 20;

/// All metrics of a run: each number as a [`Column`], and the newest lines whole.
#[derive(Clone, Debug, Default)]
pub struct History {
    columns: Vec<Column>,
    pub last_step: Option<MetricsLine>,
    /// The newest ones.
    pub evaluations: VecDeque<MetricsLine>,
    /// The `rank_busy_seconds` of the newest steps.
    busy: VecDeque<Vec<f64>>,
}

/// The values of one key over the steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Column {
    pub key: String,
    /// Of evaluations, not of steps.
    pub evaluation: bool,
    pub buckets: Vec<Bucket>,
    /// The values that a bucket holds when it is full.
    bucket_len: u32,
}

/// Adjacent values of a column: one, until there are many.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bucket {
    pub first_step: u64,
    pub last_step: u64,
    /// Of the finite values.
    pub low: f64,
    pub high: f64,
    sum: f64,
    /// The number of finite values.
    finite: u32,
    /// The number of values.
    len: u32,
}

impl Bucket {
    fn of(step: u64, value: f64) -> Bucket {
        let mut bucket = Bucket {
            first_step: step,
            last_step: step,
            low: f64::INFINITY,
            high: f64::NEG_INFINITY,
            sum: 0.0,
            finite: 0,
            len: 1,
        };
        if value.is_finite() {
            (bucket.low, bucket.high, bucket.sum, bucket.finite) = (value, value, value, 1);
        }
        bucket
    }

    /// With the values of a later bucket.
    fn joined(self, later: Bucket) -> Bucket {
        Bucket {
            first_step: self.first_step,
            last_step: later.last_step,
            low: self.low.min(later.low),
            high: self.high.max(later.high),
            sum: self.sum + later.sum,
            finite: self.finite + later.finite,
            len: self.len + later.len,
        }
    }

    /// `None`: no value is finite.
    pub fn mean(&self) -> Option<f64> {
        (self.finite > 0).then(|| self.sum / f64::from(self.finite))
    }

    /// The sum of the finite values.
    pub fn sum(&self) -> f64 {
        self.sum
    }

    pub fn middle_step(&self) -> f64 {
        (self.first_step as f64 + self.last_step as f64) / 2.0
    }
}

impl Column {
    fn push(&mut self, step: u64, value: f64) {
        let new = Bucket::of(step, value);
        match self.buckets.last_mut() {
            Some(last) if last.len < self.bucket_len => *last = last.joined(new),
            _ => self.buckets.push(new),
        }
        if self.buckets.len() > MAX_BUCKETS {
            let pairs = self.buckets.chunks(2);
            self.buckets =
                pairs.map(|pair| pair.iter().copied().reduce(Bucket::joined).expect("one or two")).collect();
            self.bucket_len *= 2;
        }
    }

    /// The mean of the newest tenth of the values.
    pub fn recent(&self) -> Option<f64> {
        let all: u64 = self.buckets.iter().map(|bucket| u64::from(bucket.finite)).sum();
        let (mut sum, mut count) = (0.0, 0);
        for bucket in self.buckets.iter().rev() {
            if count >= all.div_ceil(10) {
                break;
            }
            sum += bucket.sum;
            count += u64::from(bucket.finite);
        }
        (count > 0).then(|| sum / count as f64)
    }

    /// The mean of the newest values: of so many, or more in a long run.
    pub fn mean_of_newest(&self, most: usize) -> Option<f64> {
        let newest = &self.buckets[self.buckets.len().saturating_sub(most)..];
        let count: u64 = newest.iter().map(|bucket| u64::from(bucket.finite)).sum();
        (count > 0).then(|| newest.iter().map(Bucket::sum).sum::<f64>() / count as f64)
    }

    /// The newest value, or the mean of the newest ones of a long run.
    pub fn newest(&self) -> Option<f64> {
        self.buckets.last()?.mean()
    }

    pub fn low(&self) -> Option<f64> {
        self.buckets.iter().filter(|bucket| bucket.finite > 0).map(|bucket| bucket.low).min_by(f64::total_cmp)
    }

    pub fn high(&self) -> Option<f64> {
        self.buckets
            .iter()
            .filter(|bucket| bucket.finite > 0)
            .map(|bucket| bucket.high)
            .max_by(f64::total_cmp)
    }

    /// The points of a line, averaged over the newest `window` buckets at each. Values that are not finite are gaps.
    pub fn points(&self, window: usize) -> Vec<(f64, f64)> {
        let window = window.max(1);
        let mut recent: VecDeque<f64> = VecDeque::with_capacity(window);
        let mut point = |bucket: &Bucket| {
            let Some(mean) = bucket.mean() else { return (bucket.middle_step(), f64::NAN) };
            if recent.len() == window {
                recent.pop_front();
            }
            recent.push_back(mean);
            (bucket.middle_step(), recent.iter().sum::<f64>() / recent.len() as f64)
        };
        self.buckets.iter().map(&mut point).collect()
    }
}

impl History {
    pub fn push(&mut self, line: MetricsLine) {
        for (key, value) in &line.numbers {
            self.column_mut(key, line.evaluation).push(line.step, *value);
        }
        if line.evaluation {
            if self.evaluations.len() == MAX_EVALUATIONS {
                self.evaluations.pop_front();
            }
            self.evaluations.push_back(line);
            return;
        }
        if let Some((_, busy)) = line.lists.iter().find(|(key, _)| key == "rank_busy_seconds") {
            // A resumed run may have another number of ranks.
            self.busy.retain(|earlier| earlier.len() == busy.len());
            if self.busy.len() == RANK_STEPS {
                self.busy.pop_front();
            }
            self.busy.push_back(busy.clone());
        }
        self.last_step = Some(line);
    }

    fn column_mut(&mut self, key: &str, evaluation: bool) -> &mut Column {
        let found =
            self.columns.iter().position(|column| column.key == key && column.evaluation == evaluation);
        let at = found.unwrap_or_else(|| {
            self.columns.push(Column { key: key.to_owned(), evaluation, buckets: Vec::new(), bucket_len: 1 });
            self.columns.len() - 1
        });
        &mut self.columns[at]
    }

    /// All columns, in the order in which the run has first written them.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// The values of a key of steps.
    pub fn column(&self, key: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.key == key && !column.evaluation)
    }

    /// The values of a key of evaluations.
    pub fn evaluation_column(&self, key: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.key == key && column.evaluation)
    }

    /// The mean of a number over the newest tenth of the steps.
    pub fn recent(&self, key: &str) -> Option<f64> {
        self.column(key)?.recent()
    }

    /// The mean of a number over the newest steps: so many, or more in a long run. A step without it counts as zero: only
    /// some steps save a checkpoint.
    pub fn per_step(&self, key: &str, newest: u64) -> Option<f64> {
        let cutoff = self.steps().saturating_sub(newest);
        let timed = self.column("step_seconds")?.buckets.iter().rev();
        let timed: Vec<&Bucket> = timed.take_while(|bucket| bucket.last_step > cutoff).collect();
        let (first, steps) =
            (timed.last()?.first_step, timed.iter().map(|bucket| f64::from(bucket.len)).sum::<f64>());
        let of_key = self.column(key)?.buckets.iter().rev();
        Some(of_key.take_while(|bucket| bucket.last_step >= first).map(Bucket::sum).sum::<f64>() / steps)
    }

    /// The number of completed steps.
    pub fn steps(&self) -> u64 {
        self.last_step.as_ref().map_or(0, |line| line.step)
    }

    /// The mean busy seconds of each rank over the newest steps. Empty for one rank and for very many.
    pub fn rank_busy_seconds(&self) -> Vec<f64> {
        let ranks = self.busy.back().map_or(0, Vec::len);
        let mean =
            |rank: usize| self.busy.iter().map(|busy| busy[rank]).sum::<f64>() / self.busy.len() as f64;
        (0..ranks).map(mean).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(step: u64, loss: f64) -> MetricsLine {
        MetricsLine { step, numbers: vec![("loss".into(), loss)], ..MetricsLine::default() }
    }

    #[test]
    fn few_values_are_kept_one_by_one() {
        let mut history = History::default();
        for (step, loss) in [(1, 4.0), (2, f64::NAN), (3, 2.0), (4, 1.0)] {
            history.push(line(step, loss));
        }
        let column = history.column("loss").unwrap();
        assert_eq!((column.low(), column.high(), column.newest()), (Some(1.0), Some(4.0), Some(1.0)));
        let points = column.points(2);
        assert!(points[1].1.is_nan(), "a value that is not finite is a gap");
        assert_eq!([points[0], points[2], points[3]], [(1.0, 4.0), (3.0, 3.0), (4.0, 1.5)]);
        assert_eq!([1, 2, 3].map(|most| column.mean_of_newest(most)), [Some(1.0), Some(1.5), Some(1.5)]);
        assert_eq!((history.steps(), history.recent("loss"), history.recent("mfu")), (4, Some(1.0), None));
    }

    #[test]
    fn evaluations_and_ranks_are_apart_from_steps() {
        let mut history = History::default();
        for busy in [vec![1.0], vec![1.0, 2.0], vec![3.0, 4.0]] {
            let lists = vec![("rank_busy_seconds".to_owned(), busy)];
            history.push(MetricsLine { lists, ..line(1, 1.0) });
        }
        assert_eq!(history.rank_busy_seconds(), [2.0, 3.0]);
        history.push(MetricsLine { evaluation: true, ..line(7, 9.0) });
        assert_eq!((history.steps(), history.evaluations.len()), (1, 1));
        assert_eq!(history.evaluation_column("loss").unwrap().newest(), Some(9.0));
    }

    #[test]
    fn rare_costs_are_spread_over_the_steps() {
        let mut history = History::default();
        for step in 1..=100 {
            let mut numbers = vec![("step_seconds".to_owned(), 0.5), ("forward_seconds".to_owned(), 0.25)];
            numbers.extend((step % 50 == 10).then(|| ("checkpoint_seconds".to_owned(), 4.0)));
            history.push(MetricsLine { step, numbers, ..MetricsLine::default() });
        }
        let costs = |newest| {
            ["forward_seconds", "checkpoint_seconds", "none"].map(|key| history.per_step(key, newest))
        };
        assert_eq!(costs(20), [Some(0.25), Some(0.0), None]);
        assert_eq!(costs(50), [Some(0.25), Some(0.08), None]);
        assert_eq!(History::default().per_step("forward_seconds", 9), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn long_runs_stay_small_and_keep_their_extremes(len in 1u64..30_000, peak in 0u64..30_000) {
            let mut history = History::default();
            (1..=len).for_each(|step| history.push(line(step, if step == peak { 1e6 } else { step as f64 })));
            let column = history.column("loss").unwrap();
            prop_assert!(column.buckets.len() <= MAX_BUCKETS);
            let values: u64 = column.buckets.iter().map(|bucket| u64::from(bucket.len)).sum();
            prop_assert_eq!(values, len);
            prop_assert!(column.buckets.is_sorted_by(|a, b| a.last_step < b.first_step));
            let highest = if (1..=len).contains(&peak) { 1e6 } else { len as f64 };
            prop_assert_eq!(column.high(), Some(highest));
            prop_assert_eq!((column.buckets[0].first_step, column.buckets.last().unwrap().last_step), (1, len));
        }
    }
}
