//! The help of every command, as a snapshot.

use crate::support::{Folder, RUN};

fn help(folder: &Folder, command: &str) -> String {
    let args: Vec<&str> = command.split_whitespace().chain(["--help"]).collect();
    let output = folder.command(&args).env("COLUMNS", "100").output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{command}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The commands that a help text lists.
fn listed(text: &str) -> Vec<String> {
    let list = text.split_once("Commands:\n").map_or("", |(_, list)| list);
    let names =
        list.lines().take_while(|line| !line.is_empty()).filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(String::from).collect()
}

#[test]
fn help_of_every_command() {
    let folder = Folder::new(RUN);
    let mut open = vec![String::new()];
    let mut seen = 0;
    while let Some(command) = open.pop() {
        let text = help(&folder, &command);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{command}: {text}");
        assert!(text.lines().count() <= 50, "the help of `{command}` fits a screen: {text}");
        open.extend(listed(&text).iter().map(|name| format!("{command} {name}").trim().to_string()));
        let name = if command.is_empty() { "lockstep".into() } else { command.replace(' ', "_") };
        insta::assert_snapshot!(name, text);
        seen += 1;
    }
    assert!(seen >= 18, "all commands are found: {seen}");
}

#[test]
fn other_names_of_train() {
    let folder = Folder::new(RUN);
    for name in ["launch", "sft", "reward", "dpo", "ppo", "grpo", "rloo"] {
        assert_eq!(help(&folder, "train"), help(&folder, name));
    }
}
