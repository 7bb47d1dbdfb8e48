//! The numbers of a run in memory: a column for each key, a row for each line of the metrics. A long run would take
//! hundreds of megabytes as lines, and still too many as columns, so its rows are merged: of each group of neighbouring
//! rows two remain, with the lowest and the highest number of each key. No peak disappears. All rows but the newest stand
//! for equally many lines, so the beginning of a run is as clear as its end.

use std::collections::BTreeMap;

use lockstep_observe::MetricsLine;

/// A NaN that no metric has: there is no number.
const ABSENT: f64 = f64::from_bits(0x7ff8_0000_0000_dead);

/// More keys than any algorithm has; a file that is not ours may have any number.
const MAX_KEYS: usize = 4096;
/// Rows that remain of a group.
const KEPT_ROWS: usize = 2;
/// Rows are not merged before there are some.
const MIN_ROWS: usize = 64;

/// What a chart has on its horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    Step,
    Tokens,
    /// Seconds of training: the sum of the steps' times.
    Seconds,
}

/// The position of a row on each axis.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    step: f64,
    tokens: f64,
    seconds: f64,
}

#[derive(Debug)]
pub(crate) struct Columns {
    rows: Vec<Row>,
    /// Shorter than `rows` if the last ones have no number.
    columns: BTreeMap<String, Vec<f64>>,
    max_values: usize,
    /// The first rows, which are merged, and how many lines each of them stands for.
    num_merged: usize,
    span: usize,
    /// Changes when rows are merged or replaced, and so mean something else.
    generation: u64,
}

impl Columns {
    pub(crate) fn new(max_values: usize) -> Columns {
        Columns {
            rows: Vec::new(),
            columns: BTreeMap::new(),
            max_values,
            num_merged: 0,
            span: 1,
            generation: 0,
        }
    }

    pub(crate) fn clear(&mut self) {
        self.rows.clear();
        self.columns.clear();
        (self.num_merged, self.span) = (0, 1);
        self.generation += 1;
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.columns.keys().map(String::as_str)
    }

    pub(crate) fn push(&mut self, line: &MetricsLine) {
        let last = self.rows.last().copied().unwrap_or_default();
        let number = |key: &str| line.get(key).filter(|number| number.is_finite());
        self.rows.push(Row {
            step: line.step as f64,
            tokens: number("tokens_total").unwrap_or(last.tokens),
            seconds: last.seconds + number("step_seconds").unwrap_or(0.0),
        });
        for (key, value) in &line.numbers {
            self.set(key, *value);
        }
        for (key, values) in &line.lists {
            for (i, value) in values.iter().enumerate() {
                self.set(&format!("{key}/{i}"), *value);
            }
        }
        if self.rows.len() > self.max_rows() {
            self.shrink();
        }
    }

    fn max_rows(&self) -> usize {
        (self.max_values / self.columns.len().max(1)).max(MIN_ROWS)
    }

    /// Sets a number of the newest row.
    fn set(&mut self, key: &str, value: f64) {
        // All other NaN are equal.
        let value = if value.is_nan() { f64::NAN } else { value };
        let row = self.rows.len() - 1;
        if !self.columns.contains_key(key) {
            if self.columns.len() >= MAX_KEYS {
                return;
            }
            self.columns.insert(key.to_owned(), Vec::new());
        }
        let Some(column) = self.columns.get_mut(key) else { return };
        column.resize(row, ABSENT);
        column.push(value);
    }

    /// The numbers of a key in order, with their positions.
    pub(crate) fn points(&self, key: &str, axis: Axis, from_row: usize) -> impl Iterator<Item = (f64, f64)> {
        let column = self.columns.get(key).map_or(&[][..], Vec::as_slice);
        let both = column.iter().zip(&self.rows).skip(from_row);
        both.filter(|(value, _)| !is_absent(**value)).map(move |(value, row)| {
            let x = match axis {
                Axis::Step => row.step,
                Axis::Tokens => row.tokens,
                Axis::Seconds => row.seconds,
            };
            (x, *value)
        })
    }

    /// Makes room for at least a quarter of the rows.
    fn shrink(&mut self) {
        if self.span > 1 {
            self.merge(self.num_merged, KEPT_ROWS * self.span);
        }
        if self.rows.len() > self.max_rows() * 3 / 4 {
            self.merge(0, 2 * KEPT_ROWS);
            self.span *= 2;
        }
        self.generation += 1;
    }

    /// Merges groups of as many rows, from a row on. The newest rows stay as they are if they are no full group.
    fn merge(&mut self, start: usize, group: usize) {
        let end = if start == 0 && self.span > 1 { self.num_merged } else { self.rows.len() };
        let end = start + (end - start) / group * group;
        let mut rows: Vec<Row> = self.rows[..start].to_vec();
        rows.extend(self.rows[start..end].chunks(group).flat_map(|rows| [rows[0], rows[group - 1]]));
        self.num_merged = rows.len();
        rows.extend_from_slice(&self.rows[end..]);
        self.rows = rows;
        for column in self.columns.values_mut().filter(|column| column.len() > start) {
            let mut merged = column[..start].to_vec();
            let in_groups = column.len().min(end);
            merged.extend(column[start..in_groups].chunks(group).flat_map(lowest_and_highest));
            if column.len() > end {
                merged.extend_from_slice(&column[end..]);
            }
            *column = merged;
        }
    }
}

fn is_absent(value: f64) -> bool {
    value.to_bits() == ABSENT.to_bits()
}

/// The lowest and the highest number of a group, in their order. A number that is not finite replaces one of them: it
/// must not disappear.
fn lowest_and_highest(group: &[f64]) -> [f64; KEPT_ROWS] {
    let present = || group.iter().enumerate().filter(|(_, value)| !is_absent(**value));
    let finite = || present().filter(|(_, value)| value.is_finite());
    let by_value = |a: &(usize, &f64), b: &(usize, &f64)| a.1.total_cmp(b.1);
    let odd = present().find(|(_, value)| !value.is_finite());
    let (Some(low), Some(high)) = (finite().min_by(by_value).or(odd), finite().max_by(by_value).or(odd))
    else {
        return [ABSENT; KEPT_ROWS];
    };
    let high = odd.unwrap_or(high);
    match low.0.cmp(&high.0) {
        std::cmp::Ordering::Less => [*low.1, *high.1],
        std::cmp::Ordering::Greater => [*high.1, *low.1],
        // A single number stays near its own row.
        std::cmp::Ordering::Equal if low.0 < group.len() / 2 => [*low.1, ABSENT],
        std::cmp::Ordering::Equal => [ABSENT, *low.1],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64, numbers: &[(&str, f64)]) -> MetricsLine {
        let numbers = numbers.iter().map(|(key, value)| ((*key).to_owned(), *value)).collect();
        MetricsLine { step, evaluation: false, numbers, lists: vec![] }
    }

    #[test]
    fn columns_have_gaps() {
        let mut columns = Columns::new(1000);
        columns.push(&line(1, &[("a", 1.0), ("tokens_total", 10.0), ("step_seconds", 0.5)]));
        columns.push(&line(2, &[("b", f64::NAN)]));
        columns.push(&line(3, &[("a", 3.0), ("step_seconds", 0.25)]));
        let points = |key, axis| columns.points(key, axis, 0).collect::<Vec<_>>();
        assert_eq!(points("a", Axis::Step), [(1.0, 1.0), (3.0, 3.0)]);
        assert_eq!(points("a", Axis::Tokens), [(10.0, 1.0), (10.0, 3.0)]);
        assert_eq!(points("a", Axis::Seconds), [(0.5, 1.0), (0.75, 3.0)]);
        assert!(points("b", Axis::Step)[0].1.is_nan() && points("c", Axis::Step).is_empty());
        assert_eq!(columns.points("a", Axis::Step, 1).count(), 1);
    }

    #[test]
    fn a_long_run_stays_small_and_keeps_its_peaks() {
        let mut columns = Columns::new(4000);
        for step in 1..=100_000 {
            let value = match step {
                33_333 => 1e6,
                70_001 => -1e6,
                50_000 => f64::INFINITY,
                _ => (step % 7) as f64,
            };
            let mut numbers = vec![("loss", value), ("lr", 1.0)];
            if step == 44_444 {
                numbers.push(("eval_loss", 5.0));
            }
            columns.push(&line(step, &numbers));
        }
        assert!(columns.num_rows() * 3 <= 4000 && columns.generation() > 5, "{} rows", columns.num_rows());
        let points: Vec<(f64, f64)> = columns.points("loss", Axis::Step, 0).collect();
        let near = |step: f64, value: f64| {
            let found = points.iter().find(|(_, y)| *y == value);
            assert!(found.is_some_and(|(x, _)| (x - step).abs() < 2000.0), "{value} at {found:?}");
        };
        near(33_333.0, 1e6);
        near(70_001.0, -1e6);
        near(50_000.0, f64::INFINITY);
        let early = points.iter().filter(|(x, _)| *x <= 50_000.0).count();
        assert!((points.len() / 4..points.len() * 3 / 5).contains(&early), "{early} of {}", points.len());
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0), "rows stay in order");
        assert_eq!(columns.points("eval_loss", Axis::Step, 0).map(|(_, y)| y).collect::<Vec<_>>(), [5.0]);
    }
}
