//! Reads training logs line by line: ours, those that the usual scripts parse (`step 12 … loss: 3.45`), the dictionaries
//! that Hugging Face prints, and `Step: 12, Loss: 3.45` in its variants.

/// The numbers of a line.
#[derive(Clone, Debug, PartialEq)]
pub struct LoggedStep {
    /// The number of the line, from 1.
    pub line: usize,
    /// Logs without steps are counted from 1.
    pub step: u64,
    /// Under the names of `metrics.jsonl`; always with a `loss`.
    pub numbers: Vec<(&'static str, f64)>,
}

/// Names of a metric in logs, in lower case, and its name in `metrics.jsonl`.
const NAMES: [(&str, &str); 13] = [
    ("train_loss", "loss"),
    ("train/loss", "loss"),
    ("lm loss", "loss"),
    ("loss", "loss"),
    ("objective", "loss"),
    ("grad_norm", "grad_norm"),
    ("grad norm", "grad_norm"),
    ("gradnorm", "grad_norm"),
    ("learning_rate", "learning_rate"),
    ("learning rate", "learning_rate"),
    ("lr", "learning_rate"),
    ("epoch", "epoch"),
    ("perplexity", "perplexity"),
];

/// The steps of a log. Lines that have no loss are left out, and so are evaluations.
pub fn read_log(text: &str) -> Vec<LoggedStep> {
    let mut steps: Vec<LoggedStep> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let lower = line.to_ascii_lowercase();
        if lower.contains("eval_loss") || lower.contains("| evaluation |") {
            continue;
        }
        let mut numbers: Vec<(&'static str, f64)> = Vec::new();
        for (name, key) in NAMES {
            if !numbers.iter().any(|(known, _)| *known == key)
                && let Some(value) = value_of(&lower, name)
            {
                numbers.push((key, value));
            }
        }
        if let Some(speed) = value_before(&lower, " tok/s") {
            numbers.push(("tokens_per_second", speed));
        }
        if !numbers.iter().any(|(key, _)| *key == "loss") {
            continue;
        }
        let step = ["global_step", "global step", "step", "iteration", "iter"]
            .iter()
            .find_map(|name| value_of(&lower, name))
            .filter(|step| *step >= 0.0 && step.fract() == 0.0);
        let counted = steps.last().map_or(1, |last| last.step + 1);
        steps.push(LoggedStep { line: index + 1, step: step.map_or(counted, |step| step as u64), numbers });
    }
    steps
}

/// The number after a name: `loss: 3.5`, `loss=3.5`, `'loss': 3.5`, `loss 3.5`, `step 12/100`, `step [12/100]`.
fn value_of(line: &str, name: &str) -> Option<f64> {
    line.match_indices(name).find_map(|(at, _)| {
        let begins_word = !line[..at].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_' || c == '/');
        let rest = line[at + name.len()..].trim_start_matches(['\'', '"']);
        let value = rest.trim_start_matches([' ', ':', '=', '[', '\'', '"', '\t', '#']);
        (begins_word && value.len() < rest.len()).then(|| number(value)).flatten()
    })
}

/// The number before a unit.
fn value_before(line: &str, unit: &str) -> Option<f64> {
    let before = &line[..line.find(unit)?];
    let start = before.rfind(|c: char| !c.is_ascii_digit() && c != '.').map_or(0, |at| at + 1);
    before[start..].parse().ok()
}

/// The number at the beginning of a text.
fn number(text: &str) -> Option<f64> {
    for word in ["nan", "inf", "-inf"] {
        if text.starts_with(word) {
            return word.parse().ok();
        }
    }
    let len = text
        .char_indices()
        .find(|(at, c)| {
            let sign = matches!(c, '+' | '-') && (*at == 0 || text[..*at].ends_with('e'));
            !(c.is_ascii_digit() || *c == '.' || sign || (*c == 'e' && *at > 0))
        })
        .map_or(text.len(), |(at, _)| at);
    text[..len].trim_end_matches(['.', 'e']).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::RECORD;

    fn shown(text: &str) -> Vec<String> {
        read_log(text).iter().map(|step| format!("{} {} {:?}", step.line, step.step, step.numbers)).collect()
    }

    #[test]
    fn our_own_lines() {
        let text = format!(
            "2026-01-01T00:00:00.000Z {}\n2026 checkpoint x\n{}\n",
            RECORD.line(None),
            RECORD.line(Some(100))
        );
        let numbers = r#"12 [("loss", 3.456789), ("grad_norm", 1.23), ("learning_rate", 0.0003), ("tokens_per_second", 2345.0)]"#;
        assert_eq!(shown(&text), [format!("1 {numbers}"), format!("3 {numbers}")]);
        assert!(shown("step 20 | evaluation | nll 2.5 | 77 tokens | 1.25 s").is_empty());
        assert_eq!(
            shown("step 3 | objective nan | lr 1.00e-4"),
            [r#"1 3 [("loss", NaN), ("learning_rate", 0.0001)]"#]
        );
    }

    #[test]
    fn lines_of_other_programs() {
        for (line, step) in [
            ("step 7 loss: 2.500000", 7),
            ("[rank0] Epoch 1 | Step: 7, Loss: 2.5, LR: 0.1", 7),
            ("INFO global_step=7 loss=2.5", 7),
            ("Step [7/100], Loss: 2.5.", 7),
            ("iteration 7 | lm loss: 2.500E+00 | grad norm: 1.0", 7),
            ("{'loss': 2.5, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 0.01}", 1),
        ] {
            let found = read_log(line);
            assert_eq!(found.len(), 1, "{line}");
            assert_eq!((found[0].step, found[0].numbers[0]), (step, ("loss", 2.5)), "{line}");
        }
        let dictionary =
            &read_log("{'loss': 2.5, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 0.01}")[0];
        assert_eq!(dictionary.numbers[1..], [("grad_norm", 1.25), ("learning_rate", 5e-5), ("epoch", 0.01)]);
        for line in
            ["the loss is global", "lossless 3", "", "step 3", "{'eval_loss': 2.5, 'epoch': 1.0}", "loss: -"]
        {
            assert!(read_log(line).is_empty(), "{line}");
        }
    }
}
