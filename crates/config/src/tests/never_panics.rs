//! No text causes a panic, and errors contain no control characters.

use proptest::prelude::*;

use super::run;
use crate::keys::KEYS;

fn check(text: &str, overrides: &[&str]) {
    if let Err(errors) = run(text, overrides) {
        assert!(!errors.0.is_empty());
        let text = errors.to_string();
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    }
}

/// Lines that look like a configuration most of the time.
fn line() -> impl Strategy<Value = String> {
    let key = prop_oneof![
        8 => (0..KEYS.len()).prop_map(|idx| KEYS[idx].name.to_owned()),
        1 => "[a-z_.-]{1,12}",
        1 => Just("training".to_owned()),
    ];
    let value = prop_oneof![
        Just("true".to_owned()),
        Just("null".to_owned()),
        Just("{device: cpu}".to_owned()),
        Just("[a, b]".to_owned()),
        Just("1e999".to_owned()),
        Just("-1".to_owned()),
        Just("99999999999999999999".to_owned()),
        "[0-9.e-]{1,6}",
        "[ -~]{0,12}",
    ];
    ("( {0,3})", key, value).prop_map(|(indent, key, value)| format!("{indent}{key}: {value}\n"))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn on_any_text(text in "\\PC{0,200}", flag in "\\PC{0,40}") {
        check(&text, &[&flag]);
    }

    #[test]
    fn on_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        check(&String::from_utf8_lossy(&bytes), &[]);
    }

    #[test]
    fn on_yaml_punctuation(text in "[\\[\\]{}:,&*!|>'\"#\\-? \nab]{0,80}") {
        check(&text, &[]);
    }

    #[test]
    fn on_likely_lines(lines in prop::collection::vec(line(), 0..12), flag in line()) {
        check(&lines.concat(), &[&flag.trim().replacen(": ", "=", 1)]);
    }
}

#[test]
fn on_configurations_as_large_as_allowed() {
    let lines = |line: &dyn Fn(usize) -> String| (0..9_000).map(line).collect::<String>();
    check(&lines(&|i| format!("unknown_key_{i}: 1\n")), &[]);
    check(&lines(&|i| format!("model.part_{i}: 1\n")), &[]);
    check(&format!("train_files:\n{}", lines(&|i| format!("- {{a: {i}}}\n"))), &[]);
    check(&format!("model: {{a: [{}]}}", lines(&|_| "x, ".into())), &[]);
}
