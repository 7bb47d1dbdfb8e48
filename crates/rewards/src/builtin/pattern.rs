//! Regular expressions of users. Matching takes time linear in the text; compiled patterns have a maximum size.

use regex::{Regex, RegexBuilder};

use crate::error::RewardError;

const MAX_PATTERN_BYTES: usize = 16 << 10;
const MAX_COMPILED_BYTES: usize = 2 << 20;
const MAX_DFA_BYTES: usize = 8 << 20;

/// Compiles the pattern of `option`. A dot also matches newlines, because completions have several lines.
pub(super) fn compile(function: &str, option: &'static str, pattern: &str) -> Result<Regex, RewardError> {
    let bad = |why: String| RewardError::BadPattern { function: function.to_owned(), option, why };
    if pattern.len() > MAX_PATTERN_BYTES {
        return Err(bad(format!("it has {} bytes, and {MAX_PATTERN_BYTES} is the limit", pattern.len())));
    }
    RegexBuilder::new(pattern)
        .dot_matches_new_line(true)
        .size_limit(MAX_COMPILED_BYTES)
        .dfa_size_limit(MAX_DFA_BYTES)
        .build()
        .map_err(|error| bad(error.to_string()))
}

/// Compiles a pattern that must match a whole text.
pub(super) fn compile_whole(
    function: &str,
    option: &'static str,
    pattern: &str,
) -> Result<Regex, RewardError> {
    // On its own first: a pattern such as `a)|(b` must not become valid by the group around it.
    compile(function, option, pattern)?;
    // The newline ends a comment, if the pattern has the flag `x`. The flag does not reach beyond the group.
    let whole = compile(function, option, &format!(r"\A(?:{pattern})\z"));
    whole.or_else(|_| compile(function, option, &format!("\\A(?:{pattern}\n)\\z")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_have_limits() {
        let why = |pattern: &str| compile("f", "pattern", pattern).unwrap_err().to_string();
        assert!(why("(").contains("unclosed group"), "{}", why("("));
        assert!(why("(?=x)").contains("look-around"), "{}", why("(?=x)"));
        assert!(why(r"(\w{1000}){1000}").contains("size limit"));
        assert!(why(&"x".repeat(20_000)).contains("20000 bytes"));
    }

    #[test]
    fn the_whole_text_must_match() {
        let whole =
            |pattern: &str, text: &str| compile_whole("f", "pattern", pattern).unwrap().is_match(text);
        assert!(whole("a|ab", "ab") && !whole("a|ab", "abc") && !whole("b", "ab"));
        assert!(whole("a.b", "a\nb"));
        assert!(whole("(?x) a b # comment", "ab"));
        assert!(compile_whole("f", "pattern", "a)|(b").is_err());
    }
}
