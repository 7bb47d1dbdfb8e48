//! `lockstep completions`: scripts that complete commands, flags and configuration keys in a shell.
//!
//! The scripts are generated here and not by clap_complete: its generators and clap_mangen's would add 245 KB to the binary,
//! and they do not know the configuration keys.

use clap::{Command, CommandFactory as _};

use crate::args::{Cli, Completions, Shell};
use crate::recipe::RECIPES;
use crate::report::{self, Failure};

/// A command and what can follow it. Every word has a description.
struct CommandWords {
    /// Its full name, such as `lockstep bench step`.
    path: String,
    /// Its full name with each of its aliases.
    aliases: Vec<String>,
    /// Subcommands and values.
    words: Vec<(String, String)>,
    flags: Vec<FlagWord>,
    takes_settings: bool,
}

struct FlagWord {
    name: String,
    about: String,
    takes_value: bool,
}

pub(crate) fn run(args: &Completions) -> Result<(), Failure> {
    let commands = all_commands();
    report::print(&match args.shell {
        Shell::Bash => bash(&commands),
        Shell::Zsh => zsh(&commands),
        Shell::Fish => fish(&commands),
    })
}

fn all_commands() -> Vec<CommandWords> {
    let mut root = Cli::command();
    root.build();
    let mut all = Vec::new();
    collect(&root, "", &mut all);
    all
}

fn collect(command: &Command, parent: &str, all: &mut Vec<CommandWords>) {
    let full = |name: &str| format!("{parent} {name}").trim().to_owned();
    let path = full(command.get_name());
    let text = |about: Option<&clap::builder::StyledStr>| about.map(ToString::to_string).unwrap_or_default();
    let subcommands =
        || command.get_subcommands().filter(|sub| sub.get_name() != "help" && !sub.is_hide_set());
    let mut words: Vec<(String, String)> =
        subcommands().map(|sub| (sub.get_name().to_owned(), text(sub.get_about()))).collect();
    for value in command.get_positionals().flat_map(|arg| arg.get_possible_values()) {
        words.push((value.get_name().to_owned(), text(value.get_help())));
    }
    if ["lockstep recipe show", "lockstep recipe cp"].contains(&path.as_str()) {
        words.extend(RECIPES.iter().map(|recipe| (recipe.name.to_owned(), recipe.about().to_owned())));
    }
    let flag = |arg: &clap::Arg| {
        let name = format!("--{}", arg.get_long()?);
        let takes_value = arg.get_action().takes_values();
        (!arg.is_hide_set()).then(|| FlagWord { name, about: text(arg.get_help()), takes_value })
    };
    all.push(CommandWords {
        aliases: command.get_all_aliases().map(full).collect(),
        words,
        flags: command.get_arguments().filter_map(flag).collect(),
        takes_settings: command.get_positionals().any(|arg| arg.get_id() == "settings"),
        path: path.clone(),
    });
    subcommands().for_each(|sub| collect(sub, &path, all));
}

/// The configuration keys, each with `=`.
fn keys() -> String {
    lockstep_config::key_names().map(|key| format!("{key}=")).collect::<Vec<_>>().join(" ")
}

/// A text in single quotes, in which `escape` stands for a single quote.
fn quoted(text: &str, escape: &str) -> String {
    format!("'{}'", text.replace('\'', escape))
}

/// The arms of a `case` that follow the typed commands, for bash and zsh.
fn case_of_paths(commands: &[CommandWords]) -> String {
    let arm = |command: &CommandWords| {
        let names: Vec<String> = std::iter::once(&command.path)
            .chain(&command.aliases)
            .map(|name| format!("\"{name}\""))
            .collect();
        format!("            {}) at=\"{}\" ;;\n", names.join("|"), command.path)
    };
    commands.iter().skip(1).map(arm).collect()
}

fn bash(commands: &[CommandWords]) -> String {
    let arm = |command: &CommandWords| {
        let words: Vec<&str> = command.words.iter().map(|(word, _)| word.as_str()).collect();
        let flags: Vec<&str> = command.flags.iter().map(|flag| flag.name.as_str()).collect();
        let keys = if command.takes_settings { " keys=1" } else { "" };
        let (words, flags) = (words.join(" "), flags.join(" "));
        format!("        \"{}\") words=\"{words}\" flags=\"{flags}\"{keys} ;;\n", command.path)
    };
    let (paths, arms, keys) = (case_of_paths(commands), commands.iter().map(arm).collect::<String>(), keys());
    format!(
        r#"# Completions of lockstep for bash. Put this line into ~/.bashrc:
#     source <(lockstep completions bash)
_lockstep() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} at=lockstep words= flags= keys= i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$at ${{COMP_WORDS[i]}}" in
{paths}        esac
    done
    case "$at" in
{arms}    esac
    # Without a beginning, file names are completed and not the many keys.
    [[ $keys && $cur ]] && words+=" {keys}"
    [[ $cur == -* ]] && words=$flags
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
    [[ ${{#COMPREPLY[@]}} == 1 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
    return 0
}}
complete -o bashdefault -o default -F _lockstep lockstep
"#
    )
}

fn zsh(commands: &[CommandWords]) -> String {
    let arm = |command: &CommandWords| {
        // A colon ends the word, and a description may have more of them.
        let item = |word: &str, about: &str| quoted(&format!("{word}:{about}"), "'\\''");
        let words: Vec<String> = command.words.iter().map(|(word, about)| item(word, about)).collect();
        let flags: Vec<String> = command.flags.iter().map(|flag| item(&flag.name, &flag.about)).collect();
        let keys = if command.takes_settings { " keys=1" } else { "" };
        let (words, flags) = (words.join(" "), flags.join(" "));
        format!("        \"{}\") list=({words}) flags=({flags}){keys} ;;\n", command.path)
    };
    let (paths, arms, keys) = (case_of_paths(commands), commands.iter().map(arm).collect::<String>(), keys());
    format!(
        r#"#compdef lockstep
# Completions of lockstep for zsh. Put this line into ~/.zshrc, after compinit:
#     source <(lockstep completions zsh)
_lockstep() {{
    local at=lockstep word keys= ret=1
    local -a list flags
    for word in $words[2,CURRENT-1]; do
        case "$at $word" in
{paths}        esac
    done
    case "$at" in
{arms}    esac
    if [[ $PREFIX == -* ]]; then
        _describe -o option flags
        return
    fi
    (( $#list )) && _describe word list && ret=0
    [[ -n $keys && -n $PREFIX ]] && compadd -S '' -- {keys} && ret=0
    _files && ret=0
    return ret
}}
if [[ $funcstack[1] == _lockstep ]]; then _lockstep "$@"; else compdef _lockstep lockstep; fi
"#
    )
}

fn fish(commands: &[CommandWords]) -> String {
    let case = |command: &CommandWords| {
        let names: Vec<String> =
            std::iter::once(&command.path).chain(&command.aliases).map(|n| format!("'{n}'")).collect();
        let path = &command.path;
        format!("            case {}\n                set at '{path}'\n", names.join(" "))
    };
    let cases: String = commands.iter().skip(1).map(case).collect();
    let mut text = format!(
        "# Completions of lockstep for fish. Save them with\n\
         #     lockstep completions fish > ~/.config/fish/completions/lockstep.fish\n\
         set -g __lockstep_keys {}\n\
         function __lockstep_at\n    set -l at lockstep\n    for word in (commandline -opc)\n        switch \"$at $word\"\n\
         {cases}        end\n    end\n    test \"$at\" = \"$argv\"\nend\n",
        keys()
    );
    for command in commands {
        let begin = format!("complete -c lockstep -n '__lockstep_at {}'", command.path);
        let about = |text: &str| quoted(&text.replace('\\', "\\\\"), "\\'");
        for (word, description) in &command.words {
            text.push_str(&format!("{begin} -f -a {word} -d {}\n", about(description)));
        }
        for FlagWord { name, about: description, takes_value } in &command.flags {
            let value = if *takes_value { " -r" } else { "" };
            let name = name.trim_start_matches('-');
            text.push_str(&format!("{begin} -l {name}{value} -d {}\n", about(description)));
        }
        if command.takes_settings {
            text.push_str(&format!("{begin} -a '$__lockstep_keys'\n"));
        }
    }
    text
}
