//! The command that repeats a run, for its page. It has no secrets: it is written to the output folder.

use lockstep_config::{RunConfig, is_secret, redact_setting};

/// The command line of a run with these words: files, settings, and perhaps the launch line of another launcher.
pub(crate) fn command_line(words: &[String], config: &RunConfig) -> String {
    let mut parts = vec!["lockstep".to_owned(), "train".to_owned()];
    let mut hides_next = false;
    for word in words {
        let is_hidden = std::mem::replace(&mut hides_next, false);
        // `--hub-token SECRET`, in a launch line.
        hides_next = word.strip_prefix("--").is_some_and(|name| !name.contains('=') && is_secret(name));
        parts.push(if is_hidden { "[hidden]".into() } else { quoted(&redact_setting(word)) });
    }
    let sets = |key: &str| words.iter().any(|word| word.split('=').next() == Some(key));
    for (flag, key, count) in
        [("--nnodes", "nodes", config.plan.nodes), ("--nproc", "nproc_per_node", config.plan.nproc_per_node)]
    {
        // A launch line after `--` says this itself.
        if count > 1 && !sets(key) && !words.iter().any(|word| word == "--") {
            parts.insert(2, format!("{flag} {count}"));
        }
    }
    parts.join(" ")
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use lockstep_config::Purpose;

    use super::*;

    fn line(words: &[&str], settings: &[&str]) -> String {
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        let settings: Vec<String> = settings.iter().map(ToString::to_string).collect();
        let (config, _) = crate::inputs::load(Purpose::Plan, &settings, &["model=tiny".into()]).unwrap();
        command_line(&words, &config)
    }

    #[test]
    fn a_command_repeats_the_run_and_has_no_secret() {
        assert_eq!(line(&["a b.yaml", "seed=3"], &[]), "lockstep train 'a b.yaml' seed=3");
        assert_eq!(line(&["it's.yaml"], &["nproc_per_node=2"]), "lockstep train --nproc 2 'it'\\''s.yaml'");
        assert_eq!(line(&["nproc_per_node=2"], &["nproc_per_node=2"]), "lockstep train nproc_per_node=2");
        let secret = line(
            &["hub_token=hf_abc", "--", "WANDB_API_KEY=xyz", "torchrun", "--hub-token", "hf_abc", "x.py"],
            &[],
        );
        assert!(!secret.contains("hf_abc") && !secret.contains("xyz"), "{secret}");
        assert!(secret.contains("torchrun") && secret.ends_with(" x.py"), "{secret}");
    }
}
