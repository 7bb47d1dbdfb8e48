//! Configuration keys as flags: `--learning_rate 1e-4`, as other trainers' users type them, is
//! `learning_rate=1e-4`.

use clap::CommandFactory;

use crate::args::Cli;

/// Rewrites what was typed: flags that no command has and the configuration knows become settings.
pub(crate) fn to_settings(typed: Vec<String>) -> Vec<String> {
    let cli = Cli::command();
    let Some(command) = typed.get(1).and_then(|name| cli.find_subcommand(name)) else {
        return without_secrets(typed);
    };
    if !command.get_positionals().any(|arg| arg.get_id() == "settings") {
        return without_secrets(typed);
    }
    let is_own = |name: &str| {
        command.get_arguments().any(|arg| {
            arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|all| all.contains(&name))
        })
    };
    let mut out = Vec::with_capacity(typed.len());
    let mut rest = typed.into_iter().peekable();
    while let Some(arg) = rest.next() {
        let Some(flag) = arg.strip_prefix("--").filter(|flag| !flag.is_empty()) else {
            out.push(arg);
            continue;
        };
        let (name, given) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (flag, None),
        };
        let key = name.replace('-', "_");
        if is_own(name) {
            out.push(arg);
        } else if key == "config" {
            // TRL's way to name the file, which here stands by itself.
            out.extend(given.or_else(|| rest.next()));
        } else if lockstep_config::is_known_key(&key) || lockstep_config::is_secret(&key) {
            // A secret is refused as a setting, which hides its value; clap would print it.
            let value = given.or_else(|| rest.next_if(|next| !next.starts_with("--")));
            out.push(format!("{key}={}", value.as_deref().unwrap_or("true")));
        } else {
            out.push(arg);
        }
    }
    out
}

/// The same for commands that take no settings: clap, which refuses flags that it does not know, prints them as they
/// are.
fn without_secrets(typed: Vec<String>) -> Vec<String> {
    let bare = |arg: String| match arg.strip_prefix("--").and_then(|flag| flag.split_once('=')) {
        Some((name, _)) if lockstep_config::is_secret(name) => format!("--{name}"),
        _ => arg,
    };
    typed.into_iter().map(bare).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(line: &str) -> String {
        to_settings(line.split(' ').map(String::from).collect()).join(" ")
    }

    #[test]
    fn keys_become_settings_and_flags_stay() {
        assert_eq!(
            rewritten("lockstep train --config run.yaml --dataset_name wikitext --bf16 --learning-rate=1e-4"),
            "lockstep train run.yaml dataset_name=wikitext bf16=true learning_rate=1e-4"
        );
        assert_eq!(rewritten("lockstep train run.yaml --nproc 2"), "lockstep train run.yaml --nproc 2");
        assert_eq!(
            rewritten("lockstep launch --nproc_per_node 2 --seed 3 run.yaml"),
            "lockstep launch --nproc_per_node 2 seed=3 run.yaml"
        );
        // A number may be negative; what nobody knows is clap's to refuse.
        assert_eq!(
            rewritten("lockstep train --max_steps -1 --what 3"),
            "lockstep train max_steps=-1 --what 3"
        );
        assert_eq!(rewritten("lockstep generate out --seed 3"), "lockstep generate out --seed 3");
    }
}
