//! `lockstep man`: manual pages, one for each command.

use std::path::Path;

use clap::{Arg, Command, CommandFactory as _};
use lockstep_core::{Fault, FaultClass};

use crate::args::{Cli, Man};
use crate::output_file;
use crate::report::{self, Failure};

/// A folder that cannot be created.
#[derive(Debug)]
struct NoFolder {
    path: std::path::PathBuf,
    cause: std::io::Error,
}

impl std::fmt::Display for NoFolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot create the folder {}: {}", self.path.display(), self.cause)
    }
}

impl std::error::Error for NoFolder {}

impl Fault for NoFolder {
    fn class(&self) -> FaultClass {
        FaultClass::CannotWrite
    }

    fn hint(&self) -> Option<String> {
        Some("Give another folder with --dir.".into())
    }
}

pub(crate) fn run(args: &Man) -> Result<(), Failure> {
    let mut root = Cli::command();
    root.build();
    let Some(folder) = &args.dir else { return report::print(&page(&root, root.get_name())) };
    std::fs::create_dir_all(folder)
        .map_err(|cause| -> Failure { Box::new(NoFolder { path: folder.clone(), cause }) })?;
    let num_pages = write_pages(&root, root.get_name(), folder)?;
    let shown = folder.display();
    report::print_line(&format!(
        "wrote {num_pages} pages to {shown}; read one with `man -l {shown}/lockstep.1`"
    ));
    Ok(())
}

fn subcommands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|sub| sub.get_name() != "help" && !sub.is_hide_set())
}

/// Writes the pages of a command and its subcommands. Returns their number.
fn write_pages(command: &Command, path: &str, folder: &Path) -> Result<usize, Failure> {
    output_file::write(&folder.join(format!("{path}.1")), &page(command, path))?;
    let mut num_pages = 1;
    for sub in subcommands(command) {
        num_pages += write_pages(sub, &format!("{path}-{}", sub.get_name()), folder)?;
    }
    Ok(num_pages)
}

/// The page of a command as roff. `path` is its name with dashes.
fn page(command: &Command, path: &str) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").split_whitespace().collect::<Vec<_>>().join(" ");
    let mut text = format!(
        ".TH {} 1 \"\" \"lockstep {version}\" \"Lockstep manual\"\n.SH NAME\n{} \\- {}\n.SH SYNOPSIS\n{}\n",
        path.to_uppercase(),
        escaped(path),
        escaped(&about),
        escaped(&usage)
    );
    let mut section = |title: &str, entries: Vec<(String, String)>| {
        if !entries.is_empty() {
            text.push_str(&format!(".SH {title}\n"));
        }
        for (name, help) in entries {
            text.push_str(&format!(".TP\n\\fB{}\\fR\n{}\n", escaped(&name), escaped(&help)));
        }
    };
    let visible = |arg: &&Arg| !arg.is_hide_set();
    section(
        "ARGUMENTS",
        command.get_positionals().filter(visible).map(|arg| entry(arg, value_name(arg))).collect(),
    );
    section(
        "OPTIONS",
        command.get_opts().chain(flags(command)).filter(visible).map(|arg| entry(arg, option(arg))).collect(),
    );
    let page_name = |sub: &Command| format!("{path}-{}(1)", sub.get_name());
    let of_command =
        |sub: &Command| (page_name(sub), sub.get_about().map(ToString::to_string).unwrap_or_default());
    section("COMMANDS", subcommands(command).map(of_command).collect());
    if let Some(notes) = command.get_after_help() {
        let paragraphs = notes.to_string().split("\n\n").map(escaped).collect::<Vec<_>>().join("\n.PP\n");
        text.push_str(&format!(".SH NOTES\n{paragraphs}\n"));
    }
    text.push_str(".SH SEE ALSO\nlockstep(1). \\fBlockstep keys\\fR lists all configuration keys.\n");
    text
}

/// Flags without a value.
fn flags(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| !arg.is_positional() && !arg.get_action().takes_values())
}

fn entry(arg: &Arg, name: String) -> (String, String) {
    let mut help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if !defaults.is_empty() && !arg.is_hide_default_value_set() && arg.get_action().takes_values() {
        help.push_str(&format!(" [default: {}]", defaults.join(", ")));
    }
    (name, help)
}

/// The names of an option, with that of its value.
fn option(arg: &Arg) -> String {
    let short = arg.get_short().map(|short| format!("-{short}"));
    let long = arg.get_long().map(|long| format!("--{long}"));
    let names = short.into_iter().chain(long).collect::<Vec<_>>().join(", ");
    match arg.get_action().takes_values() {
        true => format!("{names} {}", value_name(arg)),
        false => names,
    }
}

fn value_name(arg: &Arg) -> String {
    let name = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    name.unwrap_or_else(|| arg.get_id().as_str().to_uppercase())
}

/// Text in which roff finds no command, in ASCII.
fn escaped(text: &str) -> String {
    let mut roff = String::new();
    for c in text.chars() {
        match c {
            '\\' => roff.push_str("\\e"),
            '-' => roff.push_str("\\-"),
            '\n' => roff.push(' '),
            '.' | '\'' if roff.is_empty() => roff.push_str(&format!("\\&{c}")),
            c if c.is_ascii() => roff.push(c),
            c => roff.push_str(&format!("\\[u{:04X}]", u32::from(c))),
        }
    }
    roff
}
