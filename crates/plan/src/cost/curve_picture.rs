//! Draws the memory over a step: as text for a terminal, and as SVG.

use std::fmt::Write;

use lockstep_core::Bytes;

use crate::cost::memory_curve::MemoryCurve;

/// Lines of the picture in a terminal, without its axis.
const HEIGHT: usize = 8;
const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The curve in block characters, `width` columns wide with its labels, at least 20. From left to right: the operations
/// of the schedule. A column shows the most memory in use by its operations.
pub fn curve_text(curve: &MemoryCurve, width: usize) -> String {
    let top = curve.peak();
    let label = top.to_string();
    let margin = label.chars().count().max("0 B".len());
    let columns = width.max(20) - margin - 2;
    let levels: Vec<u64> = most_live(curve, columns)
        .map(|bytes| {
            let eighths = (bytes.0 as u128 * (8 * HEIGHT) as u128).div_ceil(u128::from(top.0.max(1)));
            eighths as u64
        })
        .collect();
    let mut out = String::new();
    for line in (0..HEIGHT).rev() {
        let label = if line + 1 == HEIGHT { label.as_str() } else { "" };
        let filled = |level: &u64| BLOCKS[level.saturating_sub(8 * line as u64).min(8) as usize];
        let cells: String = levels.iter().map(filled).collect();
        let _ = writeln!(out, "{}", format!("{label:>margin$} │{cells}").trim_end());
    }
    let _ = writeln!(out, "{:>margin$} └{}", "0 B", "─".repeat(columns));
    let _ = writeln!(
        out,
        "{:>margin$}  {} operations of phase {}; residents {}, peak {top}",
        "",
        curve.points.len(),
        curve.phase,
        curve.residents
    );
    out
}

/// The most live bytes in each of `columns` equal parts of the curve.
fn most_live(curve: &MemoryCurve, columns: usize) -> impl Iterator<Item = Bytes> {
    let len = curve.points.len();
    (0..columns).map(move |column| {
        let start = (column * len / columns).min(len.saturating_sub(1));
        let end = ((column + 1) * len / columns).max(start + 1).min(len);
        curve.points[start..end].iter().map(|point| point.live).max().unwrap_or(curve.residents)
    })
}

const SVG_WIDTH: f64 = 800.0;
const SVG_HEIGHT: f64 = 320.0;
const LEFT: f64 = 80.0;
const TOP: f64 = 30.0;
const RIGHT: f64 = 20.0;
const BOTTOM: f64 = 40.0;

/// The curve as an SVG picture: residents, what is live above them, and the budget, if there is one.
pub fn curve_svg(curve: &MemoryCurve, budget: Option<Bytes>) -> String {
    let scale_top = curve.peak().max(budget.unwrap_or_default()).0.max(1) as f64 * 1.05;
    let (plot_width, plot_height) = (SVG_WIDTH - LEFT - RIGHT, SVG_HEIGHT - TOP - BOTTOM);
    let bottom = TOP + plot_height;
    let y = |bytes: Bytes| bottom - bytes.0 as f64 / scale_top * plot_height;
    let step = plot_width / curve.points.len().max(1) as f64;
    let mut area = format!("M{LEFT:.1} {:.1}", y(curve.residents));
    for (i, point) in curve.points.iter().enumerate() {
        let (from, to) = (LEFT + i as f64 * step, LEFT + (i + 1) as f64 * step);
        let _ = write!(area, " L{from:.1} {at:.1} L{to:.1} {at:.1}", at = y(point.live));
    }
    let right = LEFT + plot_width;
    let _ = write!(area, " L{right:.1} {:.1} Z", y(curve.residents));
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {SVG_WIDTH} {SVG_HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n"
    );
    let _ = writeln!(out, "<rect width=\"{SVG_WIDTH}\" height=\"{SVG_HEIGHT}\" fill=\"white\"/>");
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"18\">Device memory over phase {}: peak {}</text>",
        escaped(&curve.phase),
        curve.peak()
    );
    let residents_at = y(curve.residents);
    let _ = writeln!(
        out,
        "<rect x=\"{LEFT}\" y=\"{residents_at:.1}\" width=\"{plot_width:.1}\" height=\"{:.1}\" fill=\"#8da0cb\"/>",
        bottom - residents_at
    );
    let _ = writeln!(out, "<path d=\"{area}\" fill=\"#fc8d62\"/>");
    label(&mut out, "residents", residents_at, curve.residents);
    label(&mut out, "peak", y(curve.peak()), curve.peak());
    if let Some(budget) = budget {
        let at = y(budget);
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right:.1}\" y2=\"{at:.1}\" stroke=\"black\" \
             stroke-dasharray=\"4 3\"/>"
        );
        label(&mut out, "budget", at, budget);
    }
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{:.1}\">{} operations, in the order of the schedule</text>",
        bottom + 20.0,
        curve.points.len()
    );
    out.push_str("</svg>\n");
    out
}

/// A size beside the vertical axis.
fn label(out: &mut String, name: &str, at: f64, bytes: Bytes) {
    let x = LEFT - 6.0;
    let _ = writeln!(
        out,
        "<text x=\"{x}\" y=\"{at:.1}\" text-anchor=\"end\"><title>{name}</title>{bytes}</text>"
    );
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
