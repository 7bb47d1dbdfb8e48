//! Keys, from the bytes that a terminal sends for them.

use crate::view::Key;

/// The keys in a read. Sequences that mean nothing here are skipped.
pub(crate) fn keys(bytes: &[u8]) -> Vec<Key> {
    let mut keys = Vec::new();
    let mut rest = bytes;
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        match first {
            0x1b => {
                let (key, len) = escape(after);
                keys.extend(key);
                rest = &after[len..];
            }
            b'\t' => keys.push(Key::Next),
            0x03 | 0x04 => keys.push(Key::Interrupt),
            0x20..0x7f => keys.push(Key::Char(char::from(*first))),
            _ => {}
        }
    }
    keys
}

/// The key of an escape sequence, and its length after the escape character.
fn escape(after: &[u8]) -> (Option<Key>, usize) {
    let Some(b'[' | b'O') = after.first() else { return (Some(Key::Escape), 0) };
    let parameters = after[1..].iter().take_while(|byte| matches!(byte, 0x20..0x40)).count();
    let key = match after.get(1 + parameters) {
        Some(b'A' | b'D' | b'Z') => Some(Key::Previous),
        Some(b'B' | b'C') => Some(Key::Next),
        _ => None,
    };
    (key, (2 + parameters).min(after.len()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keys_of_a_terminal() {
        assert_eq!(keys(b"q?\t"), [Key::Char('q'), Key::Char('?'), Key::Next]);
        assert_eq!(
            keys(b"\x1b[C\x1bOB\x1b[1;5D\x1b[Z"),
            [Key::Next, Key::Next, Key::Previous, Key::Previous]
        );
        assert_eq!(keys(b"\x1b[3~l\x1b"), [Key::Char('l'), Key::Escape]);
        assert_eq!(keys(b"\x03\xc3\xa4\r"), [Key::Interrupt]);
        assert_eq!(keys(b"\x1b["), []);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            prop_assert!(keys(&bytes).len() <= bytes.len());
        }
    }
}
