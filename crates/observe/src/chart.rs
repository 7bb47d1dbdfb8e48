//! Draws metrics as an SVG line chart.

use std::fmt::Write;

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
/// Points of a line. More would not be visible.
const MAX_POINTS: usize = 1600;
/// Colours that people who are colour-blind can tell apart.
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555"];

/// A line of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    pub name: String,
    /// In the order of x. Values that are not finite are gaps.
    pub points: Vec<(f64, f64)>,
}

impl Series {
    /// The moving average over `window` points.
    #[must_use]
    pub fn smoothed(&self, window: usize) -> Series {
        let window = window.max(1);
        let mean = |i: usize| {
            let part = &self.points[(i + 1).saturating_sub(window)..=i];
            part.iter().map(|(_, y)| y).sum::<f64>() / part.len() as f64
        };
        let points = self.points.iter().enumerate().map(|(i, (x, _))| (*x, mean(i))).collect();
        Series { name: self.name.clone(), points }
    }

    /// At most [`MAX_POINTS`] points: of each part of a longer line, the lowest and the highest.
    fn thinned(&self) -> Vec<(f64, f64)> {
        if self.points.len() <= MAX_POINTS {
            return self.points.clone();
        }
        let part_len = self.points.len().div_ceil(MAX_POINTS / 2);
        let mut out = Vec::new();
        for part in self.points.chunks(part_len) {
            let finite = || part.iter().enumerate().filter(|(_, (_, y))| y.is_finite());
            let low = finite().min_by(|(_, a), (_, b)| a.1.total_cmp(&b.1));
            let high = finite().max_by(|(_, a), (_, b)| a.1.total_cmp(&b.1));
            let mut kept: Vec<(usize, (f64, f64))> =
                low.into_iter().chain(high).map(|(i, p)| (i, *p)).collect();
            kept.sort_by_key(|(i, _)| *i);
            kept.dedup_by_key(|(i, _)| *i);
            out.extend(kept.into_iter().map(|(_, point)| point));
        }
        out
    }
}

/// The chart. `log_y`: the vertical axis is logarithmic, and values that are not positive are left out.
pub fn line_chart(title: &str, x_label: &str, series: &[Series], log_y: bool) -> String {
    let scaled = |y: f64| if log_y { y.log10() } else { y };
    let lines: Vec<Vec<(f64, f64)>> =
        series.iter().map(|one| one.thinned().into_iter().map(|(x, y)| (x, scaled(y))).collect()).collect();
    let x_axis = Axis::of(lines.iter().flatten().map(|(x, _)| *x), LEFT, WIDTH - RIGHT);
    let y_axis = Axis::of(lines.iter().flatten().map(|(_, y)| *y), HEIGHT - BOTTOM, TOP);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<title>{title}</title>\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"14\">{title}</text>\n",
        title = escaped(title)
    );
    for tick in y_axis.ticks() {
        let (at, text) = (y_axis.position(tick), tick_text(if log_y { 10f64.powf(tick) } else { tick }));
        let _ = writeln!(
            out,
            "<path d=\"M{LEFT} {at:.1} H{:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0
        );
    }
    for tick in x_axis.ticks() {
        let (at, text) = (x_axis.position(tick), tick_text(tick));
        let _ = writeln!(
            out,
            "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{text}</text>",
            HEIGHT - BOTTOM + 18.0
        );
    }
    let (middle, below) = ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 10.0);
    let _ = writeln!(
        out,
        "<text x=\"{middle:.1}\" y=\"{below:.1}\" text-anchor=\"middle\">{}</text>",
        escaped(x_label)
    );
    for (i, (one, points)) in series.iter().zip(&lines).enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let path = path(points, &x_axis, &y_axis);
        let _ = writeln!(out, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>");
        let y = TOP + 8.0 + 16.0 * i as f64;
        let x = WIDTH - RIGHT - 8.0;
        let name = escaped(&one.name);
        let _ =
            writeln!(out, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"end\" fill=\"{colour}\">{name}</text>");
    }
    out.push_str("</svg>\n");
    out
}

/// A line with gaps where values are missing.
fn path(points: &[(f64, f64)], x_axis: &Axis, y_axis: &Axis) -> String {
    let mut out = String::new();
    let mut pen_down = false;
    for (x, y) in points {
        if !x.is_finite() || !y.is_finite() {
            pen_down = false;
            continue;
        }
        let command = if pen_down { 'L' } else { 'M' };
        let _ = write!(out, "{command}{:.1} {:.1}", x_axis.position(*x), y_axis.position(*y));
        pen_down = true;
    }
    out
}

/// Maps values to positions.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn of(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Axis {
        let range = values.filter(|v| v.is_finite()).fold(None, |range: Option<(f64, f64)>, value| {
            Some(range.map_or((value, value), |(low, high)| (low.min(value), high.max(value))))
        });
        let (low, high) = range.unwrap_or((0.0, 1.0));
        let spare = if high > low { 0.0 } else { low.abs().max(1.0) * 0.1 };
        Axis { low: low - spare, high: high + spare, from, to }
    }

    fn position(&self, value: f64) -> f64 {
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    /// Five or so round numbers.
    fn ticks(&self) -> Vec<f64> {
        let rough = (self.high - self.low) / 5.0;
        let power = 10f64.powf(rough.log10().floor());
        let step =
            [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= rough).unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        (first..)
            .map(|i| i as f64 * step)
            .take_while(|tick| *tick <= self.high + step * 1e-9)
            .take(20)
            .collect()
    }
}

fn tick_text(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        1e-3..1e6 => {
            let text = format!("{value:.4}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
        _ => format!("{value:.1e}"),
    }
}

fn escaped(text: &str) -> String {
    let plain: String = text.chars().filter(|c| !c.is_control()).collect();
    plain.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(points: &[(f64, f64)]) -> Series {
        Series { name: "a<b>".into(), points: points.to_vec() }
    }

    #[test]
    fn a_chart_has_lines_with_gaps_and_escaped_names() {
        let svg =
            line_chart("loss & more", "step", &[series(&[(1.0, 3.0), (2.0, f64::NAN), (3.0, 1.0)])], false);
        assert!(svg.contains("<path d=\"M70.0 40.0M780.0 350.0\""), "{svg}");
        assert!(svg.contains("loss &amp; more") && svg.contains("a&lt;b&gt;") && !svg.contains("a<b>"));
        assert!(svg.ends_with("</svg>\n"));
        for points in [&[][..], &[(1.0, 2.0)], &[(1.0, f64::NAN)]] {
            assert!(!line_chart("t", "x", &[series(points)], false).contains("NaN"));
        }
        let log = line_chart("t", "x", &[series(&[(1.0, 100.0), (2.0, 0.0), (3.0, 1.0)])], true);
        assert!(log.contains("M70.0 40.0M780.0 350.0"), "{log}");
    }

    #[test]
    fn long_lines_are_thinned_but_keep_their_extremes() {
        let mut points: Vec<(f64, f64)> =
            (0..100_000).map(|i| (f64::from(i), (f64::from(i) / 50.0).sin())).collect();
        points[77_777].1 = 9.0;
        let thin = series(&points).thinned();
        assert!(thin.len() <= MAX_POINTS + 2 && thin.contains(&(77_777.0, 9.0)));
        assert!(thin.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn ticks_are_round_and_smoothing_averages() {
        let axis = Axis { low: 0.13, high: 3.9, from: 0.0, to: 1.0 };
        assert_eq!(axis.ticks().iter().map(|t| tick_text(*t)).collect::<Vec<_>>(), ["1", "2", "3"]);
        assert_eq!(tick_text(1.5e-5), "1.5e-5");
        let smooth = series(&[(1.0, 1.0), (2.0, 3.0), (3.0, 5.0)]).smoothed(2);
        assert_eq!(smooth.points, [(1.0, 1.0), (2.0, 2.0), (3.0, 4.0)]);
    }
}
