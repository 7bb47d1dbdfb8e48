//! A line chart of braille dots: two columns and four rows of them in each cell.

use ratatui_core::style::Style;

use crate::canvas::{Canvas, DIM};

/// A line of a chart, in the order of x. Values that are not finite are gaps.
pub(crate) struct Line {
    pub(crate) points: Vec<(f64, f64)>,
    pub(crate) style: Style,
}

/// A chart with its title and note, below which the lines are drawn; later ones are drawn over earlier ones.
pub(crate) struct Chart<'a> {
    pub(crate) title: &'a str,
    pub(crate) note: &'a str,
    pub(crate) lines: Vec<Line>,
    /// The vertical axis is logarithmic, and values that are not positive are left out.
    pub(crate) log_scale: bool,
}

impl Chart<'_> {
    pub(crate) fn draw(&self, canvas: &mut Canvas<'_>) {
        canvas.title(self.title, self.note);
        let scaled = |y: f64| if self.log_scale { y.log10() } else { y };
        let lines: Vec<Vec<(f64, f64)>> = self
            .lines
            .iter()
            .map(|line| line.points.iter().map(|(x, y)| (*x, scaled(*y))).collect())
            .collect();
        let finite = || lines.iter().flatten().filter(|(x, y)| x.is_finite() && y.is_finite());
        let (Some(x), Some(y)) = (Range::of(finite().map(|p| p.0)), Range::of(finite().map(|p| p.1))) else {
            canvas.put(2, 1, "no values yet", DIM);
            return;
        };
        let shown = |value: f64| tick(if self.log_scale { 10f64.powf(value) } else { value });
        let (width, height) = (canvas.width(), canvas.height());
        if height < 4 || width < 16 {
            return;
        }
        let plot_height = height - 2;
        let ticks = match plot_height {
            ..5 => vec![(0, y.high), (plot_height - 1, y.low)],
            _ => vec![(0, y.high), (plot_height / 2, y.at(0.5)), (plot_height - 1, y.low)],
        };
        let labels: Vec<(u16, String)> = ticks.into_iter().map(|(row, value)| (row, shown(value))).collect();
        let axis = labels.iter().map(|(_, label)| label.chars().count() as u16).max().unwrap_or(0) + 1;
        for (row, label) in &labels {
            canvas.put_right(axis - 1, 1 + row, label, DIM);
        }
        let plot_width = width.saturating_sub(axis);
        let mut dots = Dots::new(plot_width, plot_height);
        for (i, points) in lines.iter().enumerate() {
            dots.line(points, &x, &y, i);
        }
        dots.draw(&mut canvas.part(axis, 1, plot_width, plot_height), &self.lines);
        canvas.put(axis, height - 1, &tick(x.low), DIM);
        canvas.put_right(width, height - 1, &tick(x.high), DIM);
    }
}

/// A range of values, never empty.
struct Range {
    low: f64,
    high: f64,
}

impl Range {
    fn of(values: impl Iterator<Item = f64>) -> Option<Range> {
        let (low, high) =
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        let spare = if high > low { 0.0 } else { low.abs().max(1e-6) * 0.1 };
        (low <= high).then_some(Range { low: low - spare, high: high + spare })
    }

    fn at(&self, share: f64) -> f64 {
        self.low + (self.high - self.low) * share
    }

    fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }
}

/// A number for an axis: four digits.
fn tick(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => return "0".into(),
        1e5.. => return format!("{value:.1e}"),
        100.0.. => 1,
        10.0.. => 2,
        1e-2.. => 4,
        _ => return format!("{value:.1e}"),
    };
    let text = format!("{value:.digits$}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The dots of a plot, and the line that has drawn each cell last.
struct Dots {
    width: u16,
    height: u16,
    bits: Vec<u8>,
    of_line: Vec<usize>,
}

impl Dots {
    fn new(width: u16, height: u16) -> Dots {
        let cells = usize::from(width) * usize::from(height);
        Dots { width, height, bits: vec![0; cells], of_line: vec![0; cells] }
    }

    fn line(&mut self, points: &[(f64, f64)], x: &Range, y: &Range, line: usize) {
        let (columns, rows) = (i32::from(self.width) * 2, i32::from(self.height) * 4);
        let dot = |share: f64, count: i32| (share.clamp(0.0, 1.0) * f64::from(count - 1)).round() as i32;
        let mut last: Option<(i32, i32)> = None;
        for (px, py) in points {
            if !px.is_finite() || !py.is_finite() {
                last = None;
                continue;
            }
            let here = (dot(x.share(*px), columns), dot(1.0 - y.share(*py), rows));
            self.segment(last.unwrap_or(here), here, line);
            last = Some(here);
        }
    }

    /// All dots from one to another.
    fn segment(&mut self, from: (i32, i32), to: (i32, i32), line: usize) {
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let steps = dx.abs().max(dy.abs()).max(1);
        for i in 0..=steps {
            let at = |from: i32, by: i32| from + (f64::from(by * i) / f64::from(steps)).round() as i32;
            self.set(at(from.0, dx), at(from.1, dy), line);
        }
    }

    fn set(&mut self, x: i32, y: i32, line: usize) {
        /// The bits of a cell's left and right column, from top to bottom.
        const BITS: [[u8; 4]; 2] = [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]];
        let cell = (y / 4) * i32::from(self.width) + x / 2;
        if let Some(bits) = usize::try_from(cell).ok().and_then(|cell| self.bits.get_mut(cell)) {
            *bits |= BITS[(x % 2) as usize][(y % 4) as usize];
            self.of_line[cell as usize] = line;
        }
    }

    fn draw(&self, canvas: &mut Canvas<'_>, lines: &[Line]) {
        for (cell, bits) in self.bits.iter().enumerate().filter(|(_, bits)| **bits != 0) {
            let (x, y) = (cell % usize::from(self.width), cell / usize::from(self.width));
            let symbol = char::from_u32(0x2800 + u32::from(*bits)).expect("a braille pattern");
            canvas.cell(x as u16, y as u16, symbol, lines[self.of_line[cell]].style);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ratatui_core::buffer::Buffer;
    use ratatui_core::layout::Rect;

    use super::*;
    use crate::canvas::PLAIN;

    fn drawn(points: Vec<(f64, f64)>, log_scale: bool, width: u16, height: u16) -> Vec<String> {
        let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
        let chart = Chart { title: "loss", note: "", lines: vec![Line { points, style: PLAIN }], log_scale };
        let area = buffer.area;
        chart.draw(&mut Canvas::new(&mut buffer, area));
        let row = |y| (0..width).map(|x| buffer[(x, y)].symbol().to_owned()).collect::<String>();
        (0..height).map(|y| row(y).trim_end().to_owned()).collect()
    }

    #[test]
    fn a_line_with_a_gap() {
        let points = vec![(1.0, 4.0), (10.0, 2.0), (11.0, f64::NAN), (12.0, 2.0), (20.0, 1.0)];
        insta::assert_snapshot!(drawn(points, false, 24, 8).join("\n"), @r"
        ─ loss ─────────────────
          4 ⠑⢄⡀
              ⠈⠢⡀
                ⠈⠑⢄
        2.5        ⠑⠢⡀ ⢀
                        ⠉⠒⠤⣀
          1                 ⠉⠒⠤⣀
            1                 20
        ");
    }

    #[test]
    fn a_logarithmic_axis_leaves_zero_out() {
        let rows = drawn(vec![(1.0, 1000.0), (2.0, 0.0), (3.0, 10.0)], true, 24, 8);
        assert!(rows[1].starts_with("1000 ") && rows[6].starts_with("  10 "), "{rows:#?}");
        assert_eq!(drawn(vec![(1.0, -1.0)], true, 24, 8)[1], "  no values yet");
    }

    #[test]
    fn ticks_have_few_digits() {
        let all = [0.0, 0.05, 1.25, 42.129, 123.456, 9431.26, 1.2e6, 3e-4].map(tick);
        assert_eq!(all, ["0", "0.05", "1.25", "42.13", "123.5", "9431.3", "1.2e6", "3.0e-4"]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_values_at_any_size(
            points in prop::collection::vec((any::<f64>(), any::<f64>()), 0..40),
            log_scale in any::<bool>(),
            width in 0u16..60,
            height in 0u16..20,
        ) {
            drawn(points, log_scale, width, height);
        }
    }
}
