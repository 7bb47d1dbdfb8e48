//! The command line that repeats a run, as text to paste into a shell, without secrets.

use lockstep_config::{RunConfig, is_secret, redact_setting};

use crate::inputs::LINE;

/// `words` are what the user typed after `train`: files, settings and a launch line.
pub(crate) fn of_run(words: &[String], config: &RunConfig) -> String {
    let mut line = String::from("lockstep train");
    // In a launch line, these are its own flags.
    if !words.iter().any(|word| word == LINE) {
        let counts = [("nnodes", config.plan.nodes), ("nproc", config.plan.nproc_per_node)];
        let several = counts.iter().filter(|(_, count)| *count > 1);
        several.for_each(|(flag, count)| line.push_str(&format!(" --{flag} {count}")));
    }
    let mut hides_next = false;
    for word in words {
        let name = word.strip_prefix("--").map(|flag| flag.split_once('=').map_or(flag, |(name, _)| name));
        let shown = match name {
            Some(name) if is_secret(name) && word.contains('=') => format!("--{name}=[hidden]"),
            None if hides_next => "[hidden]".into(),
            _ => redact_setting(word),
        };
        hides_next = name.is_some_and(is_secret) && !word.contains('=');
        line.push(' ');
        line.push_str(&quoted(&shown));
    }
    line
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_-./=:,@+%".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use lockstep_config::{Source, load};

    use super::*;

    fn line(words: &[&str], text: &str) -> String {
        let text = format!("model: tiny\noutput_dir: out\n{text}");
        let config = load(Some(Source { name: "run.yaml", text: &text }), &[]).unwrap();
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        of_run(&words, &config)
    }

    #[test]
    fn a_shell_reads_the_line_as_it_was_typed() {
        assert_eq!(
            line(&["run.yaml", "model={a: 1}", "x=it's"], "nproc_per_node: 2\n"),
            "lockstep train --nproc 2 run.yaml 'model={a: 1}' 'x=it'\\''s'"
        );
    }

    #[test]
    fn secrets_are_hidden() {
        let words = ["--", "trl", "sft", "--hub_token", "hf_secret1", "--api-key=hf_secret2", "--seed", "3"];
        assert_eq!(
            line(&words, "nproc_per_node: 2\n"),
            "lockstep train -- trl sft --hub_token '[hidden]' '--api-key=[hidden]' --seed 3"
        );
        assert_eq!(line(&["hub_token=hf_secret"], ""), "lockstep train 'hub_token=[hidden]'");
    }
}
