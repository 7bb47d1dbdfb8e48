//! Rewrites flags before clap parses them. Users of other trainers type configuration keys as flags:
//! `--learning_rate 1e-4` becomes `learning_rate=1e-4`. An unknown flag is an error that suggests what was meant.

use std::net::{IpAddr, SocketAddr};

use clap::{Command, CommandFactory};

use crate::args::Cli;
use crate::inputs::LINE;

/// A flag that neither a command nor the configuration has.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UnknownFlag {
    pub(crate) message: String,
    pub(crate) hint: String,
}

/// Flags of torchrun, `accelerate launch` and `deepspeed` that have no counterpart of the same name, and what to use
/// instead. Dashes and underscores are the same.
const FOREIGN_FLAGS: &[(&[&str], &str)] = &[
    (&["local_addr"], "nodes find each other by --master-addr and --master-port. Remove it."),
    (
        &["role", "event_log_handler", "logs_specs", "monitor_interval"],
        "ranks have no roles or event logs. Remove it.",
    ),
    (&["start_method"], "ranks are always started as new processes. Remove it."),
    (
        &["module", "no_python", "run_path", "use_env"],
        "ranks run this program, not a Python script. Remove it.",
    ),
    (&["redirects"], "use --tee to copy the output of ranks into files."),
    (&["numa_binding"], "every rank is pinned to its share of the cores; LOCKSTEP_PIN=0 turns that off."),
    (&["num_machines"], "use --nnodes."),
    (&["machine_rank"], "use --node-rank."),
    (&["main_process_ip"], "use --master-addr."),
    (&["main_process_port"], "use --master-port."),
    (&["multi_gpu"], "use --nproc gpu to start one rank per GPU."),
    (
        &["hostfile", "include", "exclude", "launcher"],
        "run the same command on every node with its own --node-rank.",
    ),
];

/// Rewrites the arguments of the process: flags that the command does not have and the configuration knows become
/// settings.
pub(crate) fn to_settings(mut typed: Vec<String>) -> Result<Vec<String>, UnknownFlag> {
    let cli = Cli::command();
    // `lockstep dpo run.yaml` trains with this algorithm.
    if let Some(word) = typed.get(1).filter(|word| lockstep_config::is_algorithm(word)) {
        let setting = format!("{}={word}", lockstep_config::COMMAND_KEY);
        typed.splice(1..2, ["train".to_owned(), setting]);
    }
    let Some(command) = typed.get(1).and_then(|name| cli.find_subcommand(name)) else {
        return Ok(without_secrets(typed, &cli));
    };
    if !command.get_positionals().any(|arg| arg.get_id() == "settings") {
        return Ok(without_secrets(typed, command));
    }
    let mut out = Vec::with_capacity(typed.len());
    let mut rest = typed.into_iter().peekable();
    while let Some(arg) = rest.next() {
        if arg == LINE {
            // The flags of a launch line are not ours.
            out.push(arg);
            out.extend(rest);
            break;
        }
        let Some(flag) = arg.strip_prefix("--").filter(|flag| !flag.is_empty()) else {
            out.push(arg);
            continue;
        };
        let (name, given) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (flag, None),
        };
        let key = name.replace('-', "_");
        if name == "help" || flags(command).any(|own| own == name) {
            out.push(arg);
        } else if key == "config" {
            // TRL names the file with a flag.
            out.extend(given.or_else(|| rest.next()));
        } else if lockstep_config::is_known_key(&key) || lockstep_config::is_secret(&key) {
            // The configuration refuses secrets without printing them, which clap would.
            // The dashboard has an address of its own, so what follows may be something else.
            let is_value = |next: &String| key != "dashboard" || is_dashboard_address(next);
            let value = given.or_else(|| rest.next_if(|next| !next.starts_with("--") && is_value(next)));
            out.push(format!("{key}={}", value.as_deref().unwrap_or("true")));
        } else {
            return Err(unknown(command, name));
        }
    }
    Ok(out)
}

/// Whether a word can be the value of `--dashboard`.
fn is_dashboard_address(word: &str) -> bool {
    let is_ip = |text: &str| text.parse::<IpAddr>().is_ok() || text.parse::<SocketAddr>().is_ok();
    matches!(word, "true" | "false" | "localhost")
        || word.parse::<u16>().is_ok()
        || word.starts_with("localhost:")
        || is_ip(word)
}

/// The long flags of a command, in all spellings.
fn flags(command: &Command) -> impl Iterator<Item = &str> {
    command
        .get_arguments()
        .flat_map(|arg| arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default()))
}

fn unknown(command: &Command, name: &str) -> UnknownFlag {
    let (key, command_name) = (name.replace('-', "_"), command.get_name());
    let is_train = command_name == "train";
    if let Some((_, instead)) =
        FOREIGN_FLAGS.iter().find(|(names, _)| is_train && names.contains(&key.as_str()))
    {
        let message = format!("--{name} is a flag of other launchers and has no meaning here");
        return UnknownFlag { message, hint: (*instead).into() };
    }
    let own =
        lockstep_core::closest(&name.replace('_', "-"), flags(command).filter(|flag| !flag.contains('_')));
    let hint = match own.or_else(|| lockstep_config::suggested_key(&key)) {
        Some(meant) => format!("did you mean --{meant}?"),
        None => format!(
            "`lockstep {command_name} --help` lists the flags of this command, and `lockstep keys` all configuration keys."
        ),
    };
    UnknownFlag { message: format!("unknown flag --{name}"), hint }
}

/// Removes the values of secrets. Commands without settings leave unknown flags to clap, which prints them in full. The
/// command's own flags, such as `--token-file`, have no secrets as values.
fn without_secrets(typed: Vec<String>, command: &Command) -> Vec<String> {
    let is_own = |name: &str| flags(command).any(|own| own == name);
    let bare = |arg: String| match arg.strip_prefix("--").and_then(|flag| flag.split_once('=')) {
        Some((name, _)) if lockstep_config::is_secret(name) && !is_own(name) => format!("--{name}"),
        _ => arg,
    };
    typed.into_iter().map(bare).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(line: &str) -> Vec<String> {
        line.split(' ').map(String::from).collect()
    }

    fn rewritten(line: &str) -> String {
        to_settings(typed(line)).unwrap().join(" ")
    }

    fn hint(line: &str) -> String {
        to_settings(typed(line)).unwrap_err().hint
    }

    #[test]
    fn keys_become_settings_and_flags_stay() {
        assert_eq!(
            rewritten("lockstep train --config run.yaml --dataset_name wikitext --bf16 --learning-rate=1e-4"),
            "lockstep train run.yaml dataset_name=wikitext bf16=true learning_rate=1e-4"
        );
        assert_eq!(
            rewritten("lockstep train run.yaml --nproc 2 --help"),
            "lockstep train run.yaml --nproc 2 --help"
        );
        assert_eq!(
            rewritten("lockstep launch --nproc_per_node 2 --seed 3 run.yaml"),
            "lockstep launch --nproc_per_node 2 seed=3 run.yaml"
        );
        assert_eq!(
            rewritten("lockstep grpo --config run.yaml --num_generations 8 --beta=0.1 --nproc 2"),
            "lockstep train command=grpo run.yaml num_generations=8 beta=0.1 --nproc 2"
        );
        assert_eq!(
            rewritten("lockstep train --dashboard run.yaml --dashboard 8421 --dashboard [::1]:80 seed=3"),
            "lockstep train dashboard=true run.yaml dashboard=8421 dashboard=[::1]:80 seed=3"
        );
        assert_eq!(rewritten("lockstep serve --token-file=t out"), "lockstep serve --token-file=t out");
        assert_eq!(rewritten("lockstep serve --token=secret out"), "lockstep serve --token out");
        assert_eq!(rewritten("lockstep train --algorithm dpo"), "lockstep train algorithm=dpo");
        assert_eq!(rewritten("lockstep kto run.yaml"), "lockstep train command=kto run.yaml");
        // A number may be negative.
        assert_eq!(rewritten("lockstep train --max_steps -1"), "lockstep train max_steps=-1");
        assert_eq!(rewritten("lockstep generate out --seed 3"), "lockstep generate out --seed 3");
    }

    #[test]
    fn unknown_flags_get_a_suggestion() {
        assert_eq!(hint("lockstep train --lr 1e-4"), "did you mean --learning_rate?");
        assert_eq!(hint("lockstep train --nproc_per_nod 2"), "did you mean --nproc-per-node?");
        assert_eq!(hint("lockstep launch --nnode=2"), "did you mean --nnodes?");
        assert_eq!(hint("lockstep plan --nproc-per-nodes 2"), "did you mean --nproc-per-node?");
        assert!(hint("lockstep train --local_addr alpha").contains("--master-addr"));
        assert!(hint("lockstep train --use-env").contains("not a Python script"));
        assert!(hint("lockstep train --foo_bar_baz 3").starts_with("`lockstep train --help` lists"));
        let error = to_settings(typed("lockstep train --my_api_kee=abcdef123")).unwrap_err();
        assert!(!error.message.contains("abcdef"), "values are not printed: {error:?}");
    }
}
