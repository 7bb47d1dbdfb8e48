//! Secrets in configurations and on the command line are not printed, logged or kept.

use crate::support::{Folder, RUN};

const SECRET: &str = "hf_S3cretWord";

/// Checks that neither the output nor a file of a command contains the secret; `input` is the user's own file.
fn assert_hidden(folder: &Folder, args: &[&str], code: i32) -> String {
    let ran = folder.run(args);
    assert_eq!(ran.code, Some(code), "{args:?}: {ran:#?}");
    let found = |text: &str| text.to_lowercase().contains(&SECRET.to_lowercase());
    assert!(!found(&ran.stdout) && !found(&ran.stderr), "{args:?}: {ran:#?}");
    for (path, content) in folder.tree() {
        let text = String::from_utf8_lossy(content.as_deref().unwrap_or_default()).into_owned();
        assert!(path == std::path::Path::new("run.yaml") || !found(&text), "{} has it", path.display());
    }
    ran.stderr
}

#[test]
fn a_file_with_a_secret_is_refused_without_it() {
    for line in [
        "hub_token: SECRET",
        "hub-token: 'SECRET'",
        "training: {hub_token: SECRET}",
        "training:\n  api_key: SECRET",
        "training: {hub_token: SECRET, sede: 3}",
        "training: {sede: 3, hub_token: \"SECRET\"}",
        "hub_token: |\n  SECRET\n  SECRET",
        "hub_token: \"a\n  SECRET\"",
        "credentials:\n  user: SECRET\n  list:\n  - SECRET",
        "credentials:\n- SECRET",
        "hub_token: SECRET\nhub_token: SECRET",
        "hub_token: [SECRET",
        "{hub_token: SECRET",
        "sede: &x SECRET\nhub_token: *x",
        "training: {hub_token: SECRET}\nseed: many # SECRET",
        "deepspeed: {hub_token: SECRET}",
    ] {
        let folder = Folder::new(&format!("{RUN}{}\n", line.replace("SECRET", SECRET)));
        assert_hidden(&folder, &["train", "run.yaml"], 64);
        assert_hidden(&folder, &["plan", "run.yaml"], 64);
    }
    let folder = Folder::new(&format!("{RUN}hub_token: {SECRET}\n"));
    insta::assert_snapshot!(assert_hidden(&folder, &["train", "run.yaml"], 64), @r"
    error: run.yaml:8:1: unknown key `hub_token`
      |
    8 | hub_token: [hidden]
      | ^^^^^^^^^
    ");
}

#[test]
fn a_json_file_with_a_secret_is_refused_without_it() {
    for text in [
        "{\"hub_token\": \"SECRET\"}",
        "{\n\"hub_token\":\n\"SECRET\",\n\"seed\": 3}",
        "{\"a\": {\"token\":\"SECRET\"}}",
    ] {
        let folder = Folder::new(&text.replace("SECRET", SECRET));
        assert_hidden(&folder, &["train", "run.yaml"], 64);
    }
}

#[test]
fn a_secret_on_the_command_line_is_refused_without_it() {
    let folder = Folder::new(RUN);
    for (typed, code) in [
        (vec!["hub_token=SECRET"], 64),
        (vec!["--hub_token", "SECRET"], 64),
        (vec!["--hub-token=SECRET"], 64),
        (vec!["training.hub_token=SECRET"], 64),
        (vec!["training={hub_token: SECRET}"], 64),
        (vec!["training={sede: 3, token: SECRET}"], 64),
        // Not a setting, so the name of a file.
        (vec!["hub_token: SECRET"], 66),
        (vec!["hub_token=[SECRET"], 64),
    ] {
        let typed: Vec<String> = typed.iter().map(|arg| arg.replace("SECRET", SECRET)).collect();
        let mut args = vec!["train", "run.yaml"];
        args.extend(typed.iter().map(String::as_str));
        assert_hidden(&folder, &args, code);
    }
    let flag = format!("--hub_token={SECRET}");
    assert_hidden(&folder, &["generate", "out", &flag], 2);
    assert_hidden(&folder, &["train", &format!("hub_token: {SECRET}")], 66);
}

/// A run stores its configuration in its checkpoints, without secrets in comments.
#[test]
fn a_run_keeps_no_secret() {
    let text = RUN.replace(
        "max_position_embeddings: 64}",
        &format!("max_position_embeddings: 64, hub_token: {SECRET}}}"),
    );
    let folder = Folder::new(&format!("# export HF_TOKEN={SECRET}\n{text}# hub_token: {SECRET}\n"));
    assert_hidden(&folder, &["train", "run.yaml", &format!("model.api_key={SECRET}")], 0);
    let manifest = folder.read("out/checkpoints/step-2/manifest.json");
    for kept in
        ["max_position_embeddings: 64, hub_token: [hidden]}", "# model.api_key=[hidden]", "max_steps: 2"]
    {
        assert!(manifest.contains(kept), "{manifest}");
    }
}

/// Ranks compare their configurations, and report differences.
#[test]
fn ranks_exchange_no_secret() {
    let text = RUN.replace(
        "max_position_embeddings: 64}",
        &format!("max_position_embeddings: 64, hub_token: {SECRET}}}"),
    );
    let folder = Folder::new(&text);
    assert_hidden(&folder, &["train", "run.yaml", "--nproc", "2", "threads=1"], 0);
}
