//! Completions and manual pages: they name every command, and shells and roff can read them.

use std::process::{Command, Stdio};

use crate::support::{Folder, RUN};

/// Runs a shell with the generated script and returns what it printed. `None`: this machine does not have the shell.
fn in_shell(folder: &Folder, shell: &str, script: &str) -> Option<String> {
    let mut command = Command::new(shell);
    command.args(["-c", script]).current_dir(folder.path("")).stdin(Stdio::null());
    let Ok(output) = command.output() else {
        println!("skipped: there is no {shell}");
        return None;
    };
    assert!(output.status.success() && output.stderr.is_empty(), "{shell} {script}: {output:?}");
    Some(String::from_utf8(output.stdout).unwrap())
}

/// What bash completes for words of which the last is unfinished.
fn completed(folder: &Folder, words: &str) -> Option<Vec<String>> {
    let script = format!(
        "compopt() {{ :; }}; source script.bash; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
         _lockstep; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    );
    let text = in_shell(folder, "bash", &script)?;
    Some(text.lines().filter(|line| !line.is_empty()).map(String::from).collect())
}

#[test]
fn bash_completes_commands_flags_and_keys() {
    let folder = Folder::new(RUN);
    folder.write("script.bash", folder.succeeds(&["completions", "bash"]));
    let Some(commands) = completed(&folder, "lockstep ''") else { return };
    for name in ["train", "init", "recipe", "completions", "bench"] {
        assert!(commands.iter().any(|word| word == name), "{name}: {commands:?}");
    }
    let is = |words: &str, expected: &[&str]| {
        assert_eq!(completed(&folder, words).unwrap(), expected, "{words}");
    };
    is("lockstep recipe c", &["cp"]);
    is("lockstep recipe show gr", &["grpo"]);
    is("lockstep completions ''", &["bash", "zsh", "fish"]);
    is("lockstep train run.yaml learning_r", &["learning_rate="]);
    is("lockstep train --nproc 2 run.yaml --max-r", &["--max-restarts"]);
    // `dpo` is another name of `train`.
    is("lockstep dpo learning_r", &["learning_rate="]);
    is("lockstep bench step --le", &["--length"]);
    // File names are left to the shell.
    is("lockstep train ''", &[]);
}

#[test]
fn other_shells_read_their_scripts() {
    let folder = Folder::new(RUN);
    for shell in ["bash", "zsh", "fish"] {
        let script = folder.succeeds(&["completions", shell]);
        for word in
            ["quickstart", "convert-config", "collectives", "nproc", "learning_rate=", "llama-7b-fsdp"]
        {
            assert!(script.contains(word), "{shell}: {word}");
        }
        let words = script.split_whitespace().any(|word| word == "--local-rank" || word == "local-rank");
        assert!(!words, "{shell}: hidden flags are left out");
        folder.write("script", &script);
        in_shell(&folder, shell, &format!("{shell} -n script"));
    }
    let error = folder.refused(&["completions", "tcsh"], 2);
    assert!(error.contains("[possible values: bash, zsh, fish]"), "{error}");
}

#[test]
fn manual_pages() {
    let folder = Folder::new(RUN);
    let page = folder.succeeds(&["man"]);
    assert!(page.contains("lockstep\\-train(1)") && page.contains(".SH SYNOPSIS"), "{page}");
    let printed = folder.succeeds(&["man", "--dir", "share/man1"]);
    let mut names: Vec<String> = std::fs::read_dir(folder.path("share/man1"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(printed.starts_with(&format!("wrote {} pages", names.len())), "{printed}");
    assert!(names.iter().any(|name| name == "lockstep-bench-step.1") && names.len() >= 24, "{names:?}");
    let train = folder.read("share/man1/lockstep-train.1");
    for text in ["\\fB\\-\\-nproc N\\fR", ".SH NOTES", "[default: 30]"] {
        assert!(train.contains(text), "{text}: {train}");
    }
    for name in &names {
        let script = format!("groff -man -Tutf8 -ww share/man1/{name} 2>&1 >/dev/null");
        let has_groff =
            in_shell(&folder, "bash", "command -v groff || true").is_some_and(|path| !path.is_empty());
        if has_groff {
            assert_eq!(in_shell(&folder, "bash", &script).unwrap(), "", "{name}");
        }
    }
    folder.write("file", "");
    let error = folder.refused(&["man", "--dir", "file/x"], 73);
    assert!(error.contains("cannot create the folder file/x"), "{error}");
}
