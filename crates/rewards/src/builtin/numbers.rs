//! Numbers in text.

use std::sync::LazyLock;

use regex::Regex;

/// Digits with or without thousands separators, a fraction, an exponent. Signs are handled by [`signed`].
static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
        .expect("the pattern is valid")
});

/// The last number of a text.
pub(super) fn last_number(text: &str) -> Option<&str> {
    NUMBER.find_iter(text).last().map(|found| signed(text, found.start(), found.end()))
}

/// The first number of a text.
pub(super) fn first_number(text: &str) -> Option<&str> {
    NUMBER.find(text).map(|found| signed(text, found.start(), found.end()))
}

/// The text after the last `marker`.
pub(super) fn after_marker<'a>(text: &'a str, marker: &str) -> Option<&'a str> {
    text.rfind(marker).map(|start| &text[start + marker.len()..])
}

/// The content of the last complete `\boxed{…}`.
pub(super) fn last_boxed(text: &str) -> Option<&str> {
    const OPEN: &str = "\\boxed{";
    // From the end: an unfinished box may follow a complete one. Each is scanned to its own end only, and boxes inside
    // boxes are rare, so this takes linear time for all but hostile texts. Those are cut off.
    let starts = text.rmatch_indices(OPEN).take(16).map(|(start, _)| start + OPEN.len());
    starts.filter_map(|start| closing_brace(&text[start..]).map(|end| &text[start..start + end])).next()
}

/// Where the brace that was opened before `text` is closed.
fn closing_brace(text: &str) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 0 => return Some(at),
            b'}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// The number with its sign and currency, as in `-$5` or `$-5`. A minus between two numbers is not a sign: `5-3` ends
/// with 3.
fn signed(text: &str, start: usize, end: usize) -> &str {
    let digits = &text[start..end];
    let before = text[..start].trim_end_matches(is_currency);
    let Some(sign) = before.chars().next_back().filter(|c| matches!(c, '-' | '−' | '+')) else {
        return digits;
    };
    let start = before.len() - sign.len_utf8();
    let is_operand = |c: char| c.is_alphanumeric() || matches!(c, ')' | ']' | '}');
    if text[..start].chars().next_back().is_some_and(is_operand) { digits } else { &text[start..end] }
}

pub(super) fn is_currency(c: char) -> bool {
    matches!(c, '$' | '€' | '£' | '¥')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_is_found() {
        for (text, number) in [
            ("It is 42.", Some("42")),
            ("3 apples, then 1,234,567.50!", Some("1,234,567.50")),
            ("between 1,2", Some("2")),
            ("12,34", Some("34")),
            ("$-7", Some("-7")),
            ("-$7", Some("-$7")),
            ("costs $7", Some("7")),
            ("so x = −2", Some("−2")),
            ("5-3", Some("3")),
            ("5 -3", Some("-3")),
            ("about .5%", Some(".5")),
            ("6.02e23 and no more", Some("6.02e23")),
            ("2e", Some("2")),
            ("none", None),
            ("", None),
        ] {
            assert_eq!(last_number(text), number, "{text}");
        }
        assert_eq!(first_number("x: 3 or 4"), Some("3"));
    }

    #[test]
    fn boxes_are_found() {
        assert_eq!(last_boxed(r"\boxed{1} and \boxed{\text{is } {2}} end"), Some(r"\text{is } {2}"));
        assert_eq!(last_boxed(r"\boxed{1} and \boxed{2"), Some("1"));
        assert_eq!(last_boxed(r"\boxed 3"), None);
        assert_eq!(after_marker("a #### 1 #### 2", "####"), Some(" 2"));
        assert_eq!(last_boxed(&"\\boxed{".repeat(100_000)), None);
    }
}
