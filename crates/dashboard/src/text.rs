//! Text from files, made visible: a page shows it as it is, so what would be invisible or move other text is written out.

use std::borrow::Cow;

/// Whether a character is shown as an escape. Lines and tabs stay.
fn is_hidden(c: char) -> bool {
    let turns_direction =
        matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (c.is_control() && !matches!(c, '\n' | '\t')) || turns_direction
}

/// The text with control characters and those that turn the direction of text as escapes.
pub(crate) fn visible(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_hidden(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// At most the first `chars` characters, made visible, and whether there are more.
pub(crate) fn beginning(text: &str, chars: usize) -> (Cow<'_, str>, bool) {
    match text.char_indices().nth(chars) {
        Some((at, _)) => (visible(&text[..at]), true),
        None => (visible(text), false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_characters_are_written_out() {
        assert_eq!(visible("a\tb\n<b>é"), "a\tb\n<b>é");
        assert_eq!(visible("\u{1b}[31m\r\u{202e}x\u{9b}"), "\\u{1b}[31m\\r\\u{202e}x\\u{9b}");
        assert_eq!(beginning("añb", 2), ("añ".into(), true));
        assert_eq!(beginning("añb", 3), ("añb".into(), false));
    }
}
