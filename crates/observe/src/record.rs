//! Records of steps and evaluations, and their two forms: a JSON line and a line of text.

use std::borrow::Cow;
use std::fmt::Write;

/// The metrics of one completed step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepRecord {
    /// The number of completed steps, including this one. The first step is 1.
    pub step: u64,
    pub epoch: f64,
    pub loss: f64,
    pub grad_norm: f64,
    pub learning_rate: f64,
    /// Supervised tokens of this step, over all ranks.
    pub tokens: u64,
    /// All tokens processed so far.
    pub tokens_total: u64,
    pub tokens_per_second: f64,
    pub step_seconds: f64,
    /// The update was skipped, because a value was not finite.
    pub skipped: bool,
    /// The loss scale, in fp16.
    pub loss_scale: Option<f64>,
    /// The metrics of the algorithm.
    pub others: Vec<NamedMetric>,
    /// What the step cost.
    pub cost: StepCost,
}

/// What a step cost: numbers by the keys that docs/metrics.md lists, without those that do not apply.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepCost {
    pub numbers: Vec<(&'static str, f64)>,
    /// For each rank, the seconds that it did not wait for others. Empty for one rank and for very many.
    pub rank_busy_seconds: Vec<f64>,
}

impl StepCost {
    /// No numbers.
    pub const NONE: StepCost = StepCost { numbers: Vec::new(), rank_busy_seconds: Vec::new() };

    pub fn get(&self, key: &str) -> Option<f64> {
        self.numbers.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
    }

    /// Where the time of the step went, as text: `forward 310.00 ms (42 %) | backward …`. `None` if nothing was measured.
    pub fn breakdown(&self, step_seconds: f64) -> Option<String> {
        let parts = self.numbers.iter().filter_map(|(key, value)| {
            let name = key.strip_suffix("_seconds")?.replace('_', " ");
            let share = if step_seconds > 0.0 { 100.0 * value / step_seconds } else { 0.0 };
            let time = match *value {
                1.0.. => format!("{value:.2} s"),
                _ => format!("{:.2} ms", 1e3 * value),
            };
            (*value > 0.0).then(|| format!("{name} {time} ({share:.0} %)"))
        });
        let parts: Vec<String> = parts.collect();
        (!parts.is_empty()).then(|| parts.join(" | "))
    }
}

/// A metric of an algorithm, such as `rewards/margins`.
pub type NamedMetric = (Cow<'static, str>, f64);

/// The metrics of algorithms that lines of text show, in this order.
const SHOWN: [&str; 6] =
    ["reward", "accuracy", "rewards/accuracies", "rewards/margins", "kl", "completions/mean_length"];

/// ` | name value` for each of the shown metrics.
fn push_shown(out: &mut String, others: &[NamedMetric]) {
    for name in SHOWN {
        if let Some((_, value)) = others.iter().find(|(other, _)| other == name) {
            let _ = write!(out, " | {name} {}", decimals(*value, 3));
        }
    }
}

impl StepRecord {
    /// A JSON object on one line, with the keys always in the same order. A number that JSON cannot represent is
    /// null, and the key `<key>_text` holds it as text.
    pub fn json(&self) -> String {
        let mut out = format!("{{\"step\":{}", self.step);
        push_float(&mut out, "epoch", self.epoch);
        push_float(&mut out, "loss", self.loss);
        push_float(&mut out, "grad_norm", self.grad_norm);
        push_float(&mut out, "learning_rate", self.learning_rate);
        let _ = write!(out, ",\"tokens\":{},\"tokens_total\":{}", self.tokens, self.tokens_total);
        push_float(&mut out, "tokens_per_second", self.tokens_per_second);
        push_float(&mut out, "step_seconds", self.step_seconds);
        let _ = write!(out, ",\"skipped\":{}", self.skipped);
        if let Some(scale) = self.loss_scale {
            push_float(&mut out, "loss_scale", scale);
        }
        for (name, value) in &self.others {
            push_float(&mut out, name, *value);
        }
        for (name, value) in &self.cost.numbers {
            push_float(&mut out, name, rounded(*value));
        }
        if !self.cost.rank_busy_seconds.is_empty() {
            let seconds: Vec<f64> = self.cost.rank_busy_seconds.iter().map(|s| rounded(*s)).collect();
            let _ = write!(out, ",\"rank_busy_seconds\":{}", serde_json::json!(seconds));
        }
        out.push('}');
        out
    }

    /// All numbers that trackers show, under the names that Hugging Face uses.
    pub fn scalars(&self) -> Vec<NamedMetric> {
        let mut scalars: Vec<NamedMetric> = vec![
            ("train/loss".into(), self.loss),
            ("train/learning_rate".into(), self.learning_rate),
            ("train/grad_norm".into(), self.grad_norm),
            ("train/tokens_per_second".into(), self.tokens_per_second),
            ("train/epoch".into(), self.epoch),
        ];
        scalars.extend(self.loss_scale.map(|scale| ("train/loss_scale".into(), scale)));
        scalars.extend(self.others.iter().map(|(name, value)| (format!("train/{name}").into(), *value)));
        scalars.extend(self.cost.numbers.iter().map(|(name, value)| (format!("cost/{name}").into(), *value)));
        scalars
    }

    /// A line of text in the format of the log, without a line break. `total` adds `/total` after the step.
    pub fn line(&self, total: Option<u64>) -> String {
        let mut out = format!("step {}", self.step);
        if let Some(total) = total {
            let _ = write!(out, "/{total}");
        }
        let _ = write!(out, " | {}", self.loss_text());
        push_shown(&mut out, &self.others);
        let _ = write!(out, " | grad_norm {}", decimals(self.grad_norm, 2));
        let rate = self.learning_rate;
        if rate.is_finite() {
            let _ = write!(out, " | lr {rate:.2e}");
        } else {
            let _ = write!(out, " | lr {}", not_finite(rate));
        }
        let _ = write!(out, " | {} tok/s", decimals(self.tokens_per_second, 0));
        let _ = write!(out, " | {} s", decimals(self.step_seconds, 2));
        if self.skipped {
            out.push_str(" | skipped");
            // Not called `loss_scale`, because `loss` may only appear before the loss itself.
            let scale = self.loss_scale.map(|scale| format!(", scale {}", decimals(scale, 0)));
            out.push_str(&scale.unwrap_or_default());
        }
        out
    }

    /// The metrics of the algorithm that lines of text show, each as ` | name value`.
    pub(crate) fn shown_metrics(&self) -> String {
        let mut out = String::new();
        push_shown(&mut out, &self.others);
        out
    }

    /// `loss: 3.456789`, or for example `objective nan` if the value is negative or not finite.
    pub(crate) fn loss_text(&self) -> String {
        let number = decimals(self.loss, 6);
        if number.starts_with(|c: char| c.is_ascii_digit()) {
            format!("loss: {number}")
        } else {
            format!("objective {number}")
        }
    }
}

/// The metrics of one evaluation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EvalRecord {
    /// The number of completed steps; 0 before the first.
    pub step: u64,
    pub epoch: f64,
    /// The mean over all supervised tokens of all ranks, or the loss of the algorithm. `None`: only rewards are measured.
    pub loss: Option<f64>,
    /// Supervised tokens, over all ranks, if the loss is their mean.
    pub tokens: Option<u64>,
    pub seconds: f64,
    /// The metrics of the algorithm.
    pub others: Vec<NamedMetric>,
}

impl EvalRecord {
    /// A metric of the algorithm.
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.others.iter().find(|(other, _)| other == name).map(|(_, value)| *value)
    }

    /// Only a mean over tokens has a perplexity.
    pub fn perplexity(&self) -> Option<f64> {
        self.tokens.and(self.loss).map(f64::exp)
    }

    /// All numbers that trackers show, under the names that Hugging Face uses.
    pub fn scalars(&self) -> Vec<NamedMetric> {
        let mut scalars: Vec<NamedMetric> = Vec::new();
        scalars.extend(self.loss.map(|loss| ("eval/loss".into(), loss)));
        scalars.extend(self.perplexity().map(|perplexity| ("eval/perplexity".into(), perplexity)));
        scalars.push(("eval/runtime".into(), self.seconds));
        scalars.extend(self.others.iter().map(|(name, value)| (format!("eval/{name}").into(), *value)));
        scalars
    }

    /// Like [`StepRecord::json`].
    pub fn json(&self) -> String {
        let mut out = format!("{{\"step\":{}", self.step);
        push_float(&mut out, "epoch", self.epoch);
        if let Some(loss) = self.loss {
            push_float(&mut out, "eval_loss", loss);
        }
        if let Some(perplexity) = self.perplexity() {
            push_float(&mut out, "eval_perplexity", perplexity);
        }
        if let Some(tokens) = self.tokens {
            let _ = write!(out, ",\"eval_tokens\":{tokens}");
        }
        push_float(&mut out, "eval_seconds", self.seconds);
        for (name, value) in &self.others {
            push_float(&mut out, &format!("eval_{name}"), *value);
        }
        out.push('}');
        out
    }

    /// A line of text. It says `nll` or `objective` and not `loss`, so that parsers do not mistake it for the loss of a
    /// step.
    pub fn line(&self) -> String {
        let mut out = format!("step {} | evaluation", self.step);
        if let Some(loss) = self.loss {
            let name = if self.tokens.is_some() { "nll" } else { "objective" };
            let _ = write!(out, " | {name} {}", decimals(loss, 6));
        }
        if let Some(perplexity) = self.perplexity() {
            let _ = write!(out, " | perplexity {}", decimals(perplexity, 3));
        }
        push_shown(&mut out, &self.others);
        if let Some(tokens) = self.tokens {
            let _ = write!(out, " | {tokens} tokens");
        }
        let _ = write!(out, " | {} s", decimals(self.seconds, 2));
        out
    }
}

/// Converts free text to lines in the format of the log: the word `loss` is reserved for steps, so it is replaced by
/// `objective`, and control characters are escaped.
pub(crate) fn log_lines(text: &str) -> impl Iterator<Item = String> {
    text.lines().map(|line| {
        let mut plain = String::new();
        for c in line.chars() {
            if c.is_control() { plain.extend(c.escape_default()) } else { plain.push(c) }
        }
        // Converting ASCII to lower case does not change byte positions.
        let lower = plain.to_ascii_lowercase();
        let mut out = String::new();
        let mut done = 0;
        for (at, word) in lower.match_indices("loss") {
            out.push_str(&plain[done..at]);
            out.push_str("objective");
            done = at + word.len();
        }
        out.push_str(&plain[done..]);
        out
    })
}

/// A measured number to six decimals: a microsecond.
fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

fn push_float(out: &mut String, key: &str, value: f64) {
    let _ = match serde_json::Number::from_f64(value) {
        Some(number) => write!(out, ",\"{key}\":{number}"),
        None => write!(out, ",\"{key}\":null,\"{key}_text\":\"{}\"", not_finite(value)),
    };
}

fn decimals(value: f64, digits: usize) -> String {
    if value.is_finite() { format!("{value:.digits$}") } else { not_finite(value).into() }
}

fn not_finite(value: f64) -> &'static str {
    match (value.is_nan(), value > 0.0) {
        (true, _) => "nan",
        (false, true) => "inf",
        (false, false) => "-inf",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) const RECORD: StepRecord = StepRecord {
        step: 12,
        epoch: 0.25,
        loss: 3.456789,
        grad_norm: 1.234,
        learning_rate: 3e-4,
        tokens: 2000,
        tokens_total: 24576,
        tokens_per_second: 2345.4,
        step_seconds: 0.873,
        skipped: false,
        loss_scale: None,
        others: Vec::new(),
        cost: StepCost::NONE,
    };

    /// Parses a line like typical log parsers: searches for `step (\d+)` and `loss: (\d+\.\d+)` anywhere in it.
    pub(crate) fn parsed(line: &str) -> Option<(u64, f64)> {
        let digits = |text: &str| text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let step = line.match_indices("step ").find_map(|(at, word)| {
            let rest = &line[at + word.len()..];
            rest[..digits(rest)].parse().ok()
        })?;
        let loss = line.match_indices("loss: ").find_map(|(at, word)| {
            let rest = &line[at + word.len()..];
            let whole = digits(rest);
            let fraction = digits(rest[whole..].strip_prefix('.')?);
            (whole > 0 && fraction > 0).then(|| rest[..whole + 1 + fraction].parse().ok())?
        })?;
        Some((step, loss))
    }

    #[test]
    fn a_step_as_a_line() {
        let line = "step 12 | loss: 3.456789 | grad_norm 1.23 | lr 3.00e-4 | 2345 tok/s | 0.87 s";
        assert_eq!(RECORD.line(None), line);
        assert_eq!(parsed(line), Some((12, 3.456789)));
        let skipped = StepRecord { loss: f64::NAN, skipped: true, ..RECORD };
        assert_eq!(
            skipped.line(Some(100)),
            "step 12/100 | objective nan | grad_norm 1.23 | lr 3.00e-4 | 2345 tok/s | 0.87 s | skipped"
        );
        let scaled = StepRecord { loss_scale: Some(32768.0), ..skipped.clone() };
        assert!(scaled.line(None).ends_with(" | skipped, scale 32768"));
        let negative = StepRecord { loss: -0.5, ..RECORD };
        assert!(negative.line(None).starts_with("step 12 | objective -0.500000 | "));
    }

    #[test]
    fn a_step_as_json() {
        assert_eq!(
            RECORD.json(),
            "{\"step\":12,\"epoch\":0.25,\"loss\":3.456789,\"grad_norm\":1.234,\"learning_rate\":0.0003,\
             \"tokens\":2000,\"tokens_total\":24576,\"tokens_per_second\":2345.4,\"step_seconds\":0.873,\
             \"skipped\":false}"
        );
        let scaled = StepRecord { loss_scale: Some(65536.0), ..RECORD };
        assert!(scaled.json().ends_with(",\"skipped\":false,\"loss_scale\":65536.0}"));
        let nan = StepRecord { loss: f64::NAN, grad_norm: f64::INFINITY, ..RECORD };
        assert!(
            nan.json().contains(
                "\"loss\":null,\"loss_text\":\"nan\",\"grad_norm\":null,\"grad_norm_text\":\"inf\""
            )
        );
    }

    #[test]
    fn a_breakdown_shows_what_took_time() {
        let numbers = vec![
            ("mfu", 0.5),
            ("forward_seconds", 0.25),
            ("reduce_wait_seconds", 1.5),
            ("copy_seconds", 0.0),
        ];
        let cost = StepCost { numbers, ..StepCost::NONE };
        let text = cost.breakdown(2.0).unwrap();
        assert_eq!(text, "forward 250.00 ms (12 %) | reduce wait 1.50 s (75 %)");
        assert_eq!(StepCost::NONE.breakdown(2.0), None);
    }

    #[test]
    fn costs_are_in_the_line() {
        let cost =
            StepCost { numbers: vec![("forward_seconds", 0.123_456_789)], rank_busy_seconds: vec![0.5, 1.0] };
        let line = StepRecord { cost, ..RECORD }.json();
        assert!(
            line.ends_with(
                ",\"skipped\":false,\"forward_seconds\":0.123457,\"rank_busy_seconds\":[0.5,1.0]}"
            ),
            "{line}"
        );
    }

    #[test]
    fn an_evaluation_cannot_be_mistaken_for_a_step() {
        let record = EvalRecord {
            step: 20,
            epoch: 0.5,
            loss: Some(0.0),
            tokens: Some(77),
            seconds: 1.25,
            others: vec![],
        };
        let line = "step 20 | evaluation | nll 0.000000 | perplexity 1.000 | 77 tokens | 1.25 s";
        assert_eq!(record.line(), line);
        assert!(!line.contains("loss"));
        assert_eq!(
            record.json(),
            "{\"step\":20,\"epoch\":0.5,\"eval_loss\":0.0,\"eval_perplexity\":1.0,\"eval_tokens\":77,\
             \"eval_seconds\":1.25}"
        );
    }

    #[test]
    fn the_word_loss_is_replaced_in_events() {
        let lines: Vec<_> = log_lines("Loss is flat\nlolossss, no loss\u{7}").collect();
        assert_eq!(lines, ["objective is flat", "loobjectivess, no objective\\u{7}"]);
    }

    fn any_float() -> impl Strategy<Value = f64> {
        prop_oneof![
            any::<f64>(),
            -10.0..10.0,
            Just(f64::NAN),
            Just(f64::INFINITY),
            Just(f64::NEG_INFINITY),
            Just(-0.0)
        ]
    }

    prop_compose! {
        pub(crate) fn any_record()(
            step in any::<u64>(),
            floats in prop::array::uniform6(any_float()),
            tokens in any::<[u64; 2]>(),
            skipped in any::<bool>(),
            loss_scale in any::<Option<f64>>(),
        ) -> StepRecord {
            let [epoch, loss, grad_norm, learning_rate, tokens_per_second, step_seconds] = floats;
            let [tokens, tokens_total] = tokens;
            StepRecord {
                step, epoch, loss, grad_norm, learning_rate, tokens, tokens_total, tokens_per_second,
                step_seconds, skipped, loss_scale, others: Vec::new(), cost: StepCost::NONE,
            }
        }
    }

    proptest! {
        #[test]
        fn a_line_that_contains_loss_parses(record in any_record(), total in any::<Option<u64>>()) {
            let line = record.line(total);
            prop_assert!(!line.contains('\n'));
            if line.to_lowercase().contains("loss") {
                let (step, loss) = parsed(&line).expect("the grammar holds");
                prop_assert_eq!(step, record.step);
                prop_assert!((loss - record.loss).abs() <= 1e-6 + 1e-12 * record.loss);
            } else {
                prop_assert!(!record.loss.is_finite() || record.loss.is_sign_negative());
            }
        }

        #[test]
        fn an_event_never_contains_loss(text in "(\\PC|\n|\t|loss|Loss|lo|ss|step 3 ){0,30}") {
            for line in log_lines(&text) {
                prop_assert!(!line.to_ascii_lowercase().contains("loss"));
                prop_assert!(!line.chars().any(char::is_control));
            }
        }

        #[test]
        fn json_reads_back(record in any_record()) {
            let value: serde_json::Value = serde_json::from_str(&record.json()).unwrap();
            prop_assert_eq!(value["step"].as_u64(), Some(record.step));
            prop_assert_eq!(value["loss"].as_f64().is_some(), record.loss.is_finite());
            prop_assert_eq!(value["loss_text"].is_string(), !record.loss.is_finite());
            prop_assert_eq!(value["skipped"].as_bool(), Some(record.skipped));
        }
    }
}
