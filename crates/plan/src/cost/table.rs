//! Plain columns of text: the first column is left-aligned, the others are right-aligned.

/// Lines of equal columns, without trailing spaces. The first row is the header.
pub(crate) fn columns(rows: &[Vec<String>]) -> String {
    let num_columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..num_columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(i, (cell, width))| match i {
            0 => format!("{cell:<width$}"),
            _ => format!("  {cell:>width$}"),
        });
        out.push_str(cells.collect::<String>().trim_end());
        out.push('\n');
    }
    out
}

/// Three significant digits with a unit: `1.88 s`, `471 ms`.
pub(crate) fn seconds_text(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s >= 0.9995 => (s, "s"),
        s if s >= 0.9995e-3 => (s * 1e3, "ms"),
        s => (s * 1e6, "µs"),
    };
    let digits = match value {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {unit}")
}

/// A whole number with separators: `1,234,567`.
pub(crate) fn count_text(count: f64) -> String {
    let digits = format!("{count:.0}");
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

pub(crate) fn percent_text(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let texts = [1.884, 0.4712, 0.99999, 12.34, 0.000_012_3].map(seconds_text);
        assert_eq!(texts, ["1.88 s", "471 ms", "1.00 s", "12.3 s", "12.3 µs"]);
        assert_eq!([999.0, 1234.4, 1_234_567.0].map(count_text), ["999", "1,234", "1,234,567"]);
        assert_eq!(percent_text(0.925), "92 %");
    }
}
