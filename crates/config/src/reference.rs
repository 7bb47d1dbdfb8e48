//! Generates the reference page of all keys from the tables that the parser uses.

use std::fmt::Write;

use crate::error::join;
use crate::foreign::{INERT, REFUSED};
use crate::keys::{KEYS, Key, Section};
use crate::sections::AlgorithmName;

/// The sections of the page with their titles, in order.
pub(crate) const SECTIONS: [(Section, &str); 16] = [
    (Section::Model, "Model"),
    (Section::Algorithm, "Algorithm"),
    (Section::Data, "Data"),
    (Section::Batch, "Batch"),
    (Section::Optim, "Optimizer"),
    (Section::Precision, "Precision"),
    (Section::Device, "Device"),
    (Section::Eval, "Evaluation"),
    (Section::Plan, "Plan"),
    (Section::Output, "Output"),
    (Section::Preference, "Losses of reward models, DPO and GRPO"),
    (Section::Reference, "Reference model"),
    (Section::Generation, "Generation of completions (PPO, GRPO, RLOO)"),
    (Section::Rewards, "Rewards"),
    (Section::Groups, "GRPO and RLOO"),
    (Section::Ppo, "PPO"),
];

/// The reference page of all keys, in Markdown.
pub fn reference() -> String {
    let mut page = String::from(
        "# Configuration keys\n\n\
         Put keys at the top level of a YAML or JSON file, or under `training:`. Dashes are the same as\n\
         underscores, and `a.b: x` is the same as `a: {b: x}`. On the command line, `key=value` overrides\n\
         the file. Names follow Hugging Face's Trainer and TRL where they have one.\n",
    );
    for (section, title) in SECTIONS {
        let _ = write!(page, "\n## {title}\n\n| Key | Default | Description |\n|---|---|---|\n");
        for key in KEYS.iter().filter(|k| k.section == section) {
            let _ = write!(page, "| `{}` | {} | {}", key.name, default(key), key.doc);
            if key.algorithms() != AlgorithmName::ALL {
                let names: Vec<String> = key.algorithms().iter().map(ToString::to_string).collect();
                let _ = write!(page, " Used by {}.", join(&names, "and"));
            }
            if !key.aliases.is_empty() {
                let _ = write!(page, " Aliases: {}.", quoted(key.aliases));
            }
            page.push_str(" |\n");
        }
    }
    page.push_str("\n## Accepted without effect\n\n| Key | Values | Reason |\n|---|---|---|\n");
    for inert in INERT {
        let values = if inert.only.is_empty() { "any".into() } else { quoted(inert.only) };
        let _ = writeln!(page, "| {} | {values} | {} |", quoted(inert.names), inert.why);
    }
    page.push_str("\n## Not implemented\n\n| Key | Alternative |\n|---|---|\n");
    for (name, instead) in REFUSED {
        let _ = writeln!(page, "| `{name}` | {instead} |");
    }
    page
}

/// The default, with the algorithms if it depends on them: "`0.1` (dpo), `0.0` (grpo)".
fn default(key: &Key) -> String {
    let mut defaults: Vec<(&str, Vec<&str>)> = Vec::new();
    for algorithm in key.algorithms() {
        let text = key.default_for(*algorithm);
        match defaults.iter_mut().find(|(other, _)| *other == text) {
            Some((_, names)) => names.push(algorithm.name()),
            None => defaults.push((text, vec![algorithm.name()])),
        }
    }
    let single = defaults.len() == 1;
    let shown = defaults.into_iter().filter(|(text, _)| *text != "null").map(|(text, names)| match single {
        true => format!("`{text}`"),
        false => format!("`{text}` ({})", names.join(", ")),
    });
    shown.collect::<Vec<_>>().join(", ")
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_on_the_page() {
        let page = reference();
        for key in KEYS {
            assert!(page.contains(&format!("\n| `{}` |", key.name)), "{}", key.name);
        }
        // A `|` inside a cell would end it.
        assert!(page.lines().filter(|l| l.starts_with('|')).all(|l| matches!(l.matches('|').count(), 3 | 4)));
    }
}
