//! Reduces a series to what a chart can show: for each of some equal parts of the axis, the lowest, the highest and the
//! mean number.

use std::fmt::Write;

/// A series for a chart. `low` and `high` are empty if each point is one number.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Reduced {
    pub(crate) x: Vec<f64>,
    pub(crate) y: Vec<f64>,
    pub(crate) low: Vec<f64>,
    pub(crate) high: Vec<f64>,
    /// Numbers that are not finite, with their positions: a chart marks them.
    pub(crate) not_finite: Vec<(f64, f64)>,
}

/// A chart that is full of marks shows no more with further ones.
const MAX_MARKS: usize = 200;

/// A part of the axis.
#[derive(Clone, Copy)]
struct Bucket {
    x: f64,
    sum: f64,
    count: f64,
    low: f64,
    high: f64,
}

/// Reduces the points from `from` to `to`, with one more on each side, so that lines reach the borders. Points must be in
/// the order of `x`.
pub(crate) fn reduce(
    points: impl Iterator<Item = (f64, f64)> + Clone,
    from: f64,
    to: f64,
    buckets: usize,
) -> Reduced {
    let mut before = None;
    let mut wanted = 0usize;
    let (mut first, mut last) = (f64::INFINITY, f64::NEG_INFINITY);
    for (x, _) in points.clone() {
        if x < from {
            before = Some(x);
        } else if x <= to {
            wanted += 1;
            (first, last) = (first.min(x), last.max(x));
        } else {
            break;
        }
    }
    let start = before.unwrap_or(f64::NEG_INFINITY);
    let mut reduced = Reduced::default();
    let all = wanted <= 2 * buckets;
    let width = (last - first) / buckets as f64;
    let mut open: Option<(i64, Bucket)> = None;
    for (x, y) in points.skip_while(|(x, _)| *x < start) {
        if !y.is_finite() {
            if (from..=to).contains(&x) && reduced.not_finite.len() < MAX_MARKS {
                reduced.not_finite.push((x, y));
            }
            continue;
        }
        let outside = x < from || x > to;
        if all || outside {
            close(&mut reduced, open.take());
            reduced.push(x, y, y, y);
        } else {
            let at = ((x - first) / width) as i64;
            let one = Bucket { x, sum: y, count: 1.0, low: y, high: y };
            open = match open.take() {
                Some((open_at, bucket)) if open_at == at => Some((at, bucket.with(x, y))),
                other => {
                    close(&mut reduced, other);
                    Some((at, one))
                }
            };
        }
        if x > to {
            break;
        }
    }
    close(&mut reduced, open);
    if all {
        (reduced.low, reduced.high) = (Vec::new(), Vec::new());
    }
    reduced
}

impl Bucket {
    fn with(self, x: f64, y: f64) -> Bucket {
        Bucket { x, sum: self.sum + y, count: self.count + 1.0, low: self.low.min(y), high: self.high.max(y) }
    }
}

fn close(reduced: &mut Reduced, open: Option<(i64, Bucket)>) {
    if let Some((_, bucket)) = open {
        reduced.push(bucket.x, bucket.sum / bucket.count, bucket.low, bucket.high);
    }
}

impl Reduced {
    fn push(&mut self, x: f64, y: f64, low: f64, high: f64) {
        self.x.push(x);
        self.y.push(y);
        self.low.push(low);
        self.high.push(high);
    }

    /// Adds the series to JSON, as an object.
    pub(crate) fn write_json(&self, out: &mut String, key: &str) {
        let _ = write!(out, "{{\"key\":{}", serde_json::json!(key));
        for (name, numbers) in [("x", &self.x), ("y", &self.y), ("low", &self.low), ("high", &self.high)] {
            let _ = write!(out, ",\"{name}\":");
            write_numbers(out, numbers);
        }
        out.push_str(",\"not_finite\":[");
        for (i, (x, y)) in self.not_finite.iter().enumerate() {
            let text = if y.is_nan() {
                "nan"
            } else if *y > 0.0 {
                "inf"
            } else {
                "-inf"
            };
            let _ = write!(out, "{}[{},\"{text}\"]", if i > 0 { "," } else { "" }, serde_json::json!(x));
        }
        out.push_str("]}");
    }
}

fn write_numbers(out: &mut String, numbers: &[f64]) {
    out.push('[');
    for (i, number) in numbers.iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        // Whole numbers, such as steps, without a fraction.
        let _ = match number.fract() == 0.0 && number.abs() < 1e15 {
            true => write!(out, "{}", *number as i64),
            false => write!(out, "{}", serde_json::json!(number)),
        };
    }
    out.push(']');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn series(len: usize) -> Vec<(f64, f64)> {
        (0..len).map(|i| (i as f64, ((i * 7919) % 1000) as f64)).collect()
    }

    #[test]
    fn short_series_stay_and_long_ones_shrink() {
        let short = reduce(series(100).into_iter(), 0.0, 99.0, 100);
        assert_eq!((short.x.len(), short.low.len()), (100, 0));
        let mut points = series(100_000);
        points[54_321].1 = 5e9;
        points[12].1 = f64::NAN;
        let long = reduce(points.into_iter(), 0.0, 1e9, 500);
        assert!((500..=501).contains(&long.x.len()), "{}", long.x.len());
        assert_eq!(long.high.iter().copied().fold(0.0, f64::max), 5e9);
        assert_eq!(long.not_finite.len(), 1);
        assert!(long.low.iter().zip(&long.y).all(|(low, mean)| low <= mean));
    }

    #[test]
    fn a_part_has_one_neighbour_on_each_side() {
        let part = reduce(series(100).into_iter(), 10.5, 12.5, 100);
        assert_eq!(part.x, [10.0, 11.0, 12.0, 13.0]);
        assert!(reduce(series(0).into_iter(), 0.0, 1.0, 10).x.is_empty());
        let mut out = String::new();
        let points = [(1.0, 0.5), (2.0, f64::INFINITY), (3.0, f64::NAN)];
        reduce(points.into_iter(), 0.0, 9.0, 10).write_json(&mut out, "a\"b");
        assert_eq!(
            out,
            r#"{"key":"a\"b","x":[1],"y":[0.5],"low":[],"high":[],"not_finite":[[2.0,"inf"],[3.0,"nan"]]}"#
        );
    }

    proptest! {
        #[test]
        fn extremes_and_bounds_hold(
            mut xs in prop::collection::vec(-1e6..1e6f64, 0..400),
            ys in prop::collection::vec(prop_oneof![9 => -1e9..1e9f64, 1 => Just(f64::NAN)], 400),
            from in -1e6..1e6f64,
            width in 0.0..2e6f64,
            buckets in 1..50usize,
        ) {
            xs.sort_by(f64::total_cmp);
            let points: Vec<(f64, f64)> = xs.iter().copied().zip(ys).collect();
            let to = from + width;
            let reduced = reduce(points.iter().copied(), from, to, buckets);
            prop_assert!(reduced.x.len() <= 2 * buckets + 3);
            prop_assert!(reduced.x.windows(2).all(|pair| pair[0] <= pair[1]));
            let inside = points.iter().filter(|(x, y)| (from..=to).contains(x) && y.is_finite());
            let highs = if reduced.high.is_empty() { &reduced.y } else { &reduced.high };
            let highest = inside.map(|(_, y)| *y).fold(f64::NEG_INFINITY, f64::max);
            prop_assert!(highest == f64::NEG_INFINITY || highs.iter().any(|high| *high >= highest));
        }
    }
}
