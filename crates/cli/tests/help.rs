//! The help of every command, as a snapshot.

use crate::support::{Folder, RUN};

const COMMANDS: [&str; 19] = [
    "",
    "quickstart",
    "train",
    "plan",
    "generate",
    "chat",
    "eval",
    "export",
    "prepare",
    "selftest",
    "bench",
    "bench step",
    "bench kernels",
    "bench matmul",
    "bench attention",
    "bench collectives",
    "doctor",
    "keys",
    "download",
];

fn help(folder: &Folder, command: &str) -> Option<String> {
    let args: Vec<&str> = command.split(' ').filter(|word| !word.is_empty()).chain(["--help"]).collect();
    let output = folder.command(&args).env("COLUMNS", "100").output().unwrap();
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
}

#[test]
fn help_of_every_command() {
    let folder = Folder::new(RUN);
    for command in COMMANDS {
        let Some(text) = help(&folder, command) else { continue };
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{command}: {text}");
        let name = if command.is_empty() { "lockstep".into() } else { command.replace(' ', "_") };
        insta::assert_snapshot!(name, text);
    }
}

/// No command is missing from the list above.
#[test]
fn every_command_is_in_a_snapshot() {
    let folder = Folder::new(RUN);
    for group in ["", "bench"] {
        let text = help(&folder, group).unwrap();
        let (_, list) = text.split_once("Commands:\n").unwrap();
        for line in list.lines().take_while(|line| !line.is_empty()) {
            let name = line.split_whitespace().next().unwrap();
            let command = format!("{group} {name}");
            assert!(name == "help" || COMMANDS.contains(&command.trim()), "`{command}` has no snapshot");
        }
    }
}

#[test]
fn launch_is_another_name_of_train() {
    let folder = Folder::new(RUN);
    let [train, launch] = ["train", "launch"].map(|command| help(&folder, command).unwrap());
    assert_eq!(train, launch);
}
