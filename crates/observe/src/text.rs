//! Text and numbers of a run's files, for terminals and pages.

/// Text for a terminal or a page: characters that control it, hide, or reorder the text around them are escaped.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_hidden(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// The value of a setting on one line: a map with its parts separated by commas.
pub fn one_line(text: &str) -> String {
    printable(&text.lines().map(str::trim).collect::<Vec<_>>().join(", "))
}

/// Whether a character is not shown itself but changes how others are shown: controls, marks of direction, and
/// characters without a width.
pub(crate) fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        || matches!(c, '\u{e0000}'..='\u{e007f}')
}

/// A number for a table.
pub fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        1e-2..1e7 if value.fract() == 0.0 => format!("{value:.0}"),
        1e-2..1e3 => format!("{value:.4}"),
        1e3..1e7 => format!("{value:.1}"),
        _ => format!("{value:.3e}"),
    }
}

/// Seconds of a part of a step: `250.00 ms`, or `1.50 s` from a second on.
pub fn short_seconds(seconds: f64) -> String {
    match seconds {
        1.0.. => format!("{seconds:.2} s"),
        _ => format!("{:.2} ms", 1e3 * seconds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_control_the_terminal_are_escaped() {
        assert_eq!(
            printable("a\x1b[31mb\u{202e}c\u{200b}\u{85}é漢"),
            "a\\u{1b}[31mb\\u{202e}c\\u{200b}\\u{85}é漢"
        );
        assert_eq!(one_line(" a: 1\n  b: 2\n"), "a: 1, b: 2");
    }

    #[test]
    fn numbers_have_few_digits() {
        let all = [0.0, 3.0, 0.123456, 1234.56, 1e9, 1e-5, f64::NAN].map(number);
        assert_eq!(all, ["0", "3", "0.1235", "1234.6", "1.000e9", "1.000e-5", "NaN"]);
        assert_eq!([0.00025, 1.5].map(short_seconds), ["0.25 ms", "1.50 s"]);
    }
}
