//! `generate`, `chat` and `quickstart`.

use std::io::Write;
use std::process::Stdio;

use insta::assert_snapshot;
use serde_json::Value;

use crate::support::{Folder, RUN};

/// A run whose model is random.
fn random_model() -> Folder {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml", "max_steps=0"]);
    folder
}

fn rows(folder: &Folder, args: &[&str]) -> Vec<Value> {
    let ran = folder.run(&[&["generate", "out", "--json", "--threads", "2"], args].concat());
    assert_eq!(ran.code, Some(0), "{ran:#?}");
    assert!(ran.stderr.contains("tokens/s"), "{}", ran.stderr);
    ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_same_seed_draws_the_same_tokens_in_any_company() {
    let folder = random_model();
    folder.write("p.jsonl", "{\"prompt\": \"one\"}\n\n{\"prompt\": \"another\", \"id\": 3}\n");
    let drawn = ["--temperature", "1", "--max-new-tokens", "12"];
    let two = rows(&folder, &[&["--prompts", "p.jsonl"], &drawn[..]].concat());
    assert_eq!(two.len(), 2);
    assert_eq!(two[1]["prompt"], "another");
    assert_eq!(two[0]["tokens"].as_array().unwrap().len(), 12);
    assert_eq!(two[0]["log_probs"].as_array().unwrap().len(), 12);
    assert!(two[0]["log_probs"][0].as_f64().unwrap() < 0.0);
    assert_eq!(two[0]["end"], "length");
    let one = rows(&folder, &[&["-p", "one", "--slots", "1"], &drawn[..]].concat());
    assert_eq!(one[0], two[0]);
    let many = rows(&folder, &[&["-p", "one", "--samples", "3"], &drawn[..]].concat());
    assert_eq!((many.len(), &many[0]["tokens"]), (3, &two[0]["tokens"]));
    assert_ne!(many[1]["tokens"], many[0]["tokens"]);
    let other = rows(&folder, &[&["-p", "one", "--seed", "7"], &drawn[..]].concat());
    assert_ne!(other[0]["tokens"], two[0]["tokens"]);
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let folder = random_model();
    let all = rows(&folder, &["-p", "x", "--max-new-tokens", "30"]);
    let text = all[0]["completion"].as_str().unwrap();
    let stop: String = text.chars().skip(4).take(1).collect();
    let at = text.find(&stop).unwrap();
    let ended = rows(&folder, &["-p", "x", "--max-new-tokens", "30", "--stop", &stop]);
    assert_eq!(
        (ended[0]["completion"].as_str(), ended[0]["end"].as_str()),
        (Some(&text[..at]), Some("stop_string"))
    );
    // Streamed text is the same text.
    let streamed = folder.run(&["generate", "out", "-p", "x", "--max-new-tokens", "30", "--stop", &stop]);
    assert_eq!(streamed.stdout, format!("x{}\n", &text[..at]));
}

#[test]
fn bad_prompts_are_reported() {
    let folder = random_model();
    assert_snapshot!(folder.refused(&["generate", "out"], 64), @r"
    error: there is no prompt
    hint: give --prompt TEXT, once or several times, or --prompts FILE with one JSON object with a `prompt` per line.
    ");
    assert_snapshot!(folder.refused(&["generate", "nowhere", "-p", "x"], 66), @r"
    error: model folder nowhere does not exist
    hint: give a folder with a model, or the name of a model on the Hugging Face Hub, such as org/name.
    ");
    folder.write("p.jsonl", "{\"prompt\": \"one\"}\n{\"text\": \"two\"}\n");
    assert_snapshot!(folder.refused(&["generate", "out", "--prompts", "p.jsonl"], 65), @r"
    error: p.jsonl row 2: `prompt` is missing or not a text
    hint: each line must be a JSON object with a text as `prompt`.
    ");
    assert_snapshot!(folder.refused(&["generate", "out", "-p", &"long ".repeat(20)], 64), @r"
    error: prompt 0 has 100 tokens; the context has 64, and the reply needs at least one of them
    hint: shorten the prompt, or increase the context with --context.
    ");
    assert_snapshot!(folder.refused(&["generate", "out", "-p", "x", "--top-p", "1.5"], 2), @r"
    error: invalid value '1.5' for '--top-p <P>': expected a number from 0 to 1

    For more information, try '--help'.
    ");
    assert_snapshot!(folder.refused(&["chat", "out"], 66), @r"
    error: no chat template at out/model
    hint: set chat_template_path (on the command line: --chat-template) to a Jinja template or to a folder with a chat_template.jinja, or use `builtin` for the plain template.
    ");
}

#[test]
fn a_conversation_with_commands() {
    let folder = random_model();
    let mut command = folder.command(&["chat", "out", "--chat-template", "builtin", "--max-new-tokens", "3"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = "hi\n/nonsense\n/system be brief\nagain\n/undo\n\n/new\nhi\n/quit\nnot read\n";
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.ends_with('\n'), "{text:?}");
    let printed = String::from_utf8(output.stderr).unwrap();
    assert!(printed.contains("unknown command /nonsense") && !printed.contains("error"), "{printed}");
}

#[test]
fn the_quickstart_trains_and_tests() {
    let folder = Folder::new(RUN);
    let text = folder.succeeds(&["quickstart", "output_dir=quick", "max_steps=3", "threads=2"]);
    assert!(text.contains("problems in quick/problems.jsonl"), "{text}");
    assert!(text.contains("of 200 held-out problems solved"), "{text}");
    assert!(text.contains("step 3/3"), "{text}");
    for file in ["model/model.safetensors", "model/config.json", "model/tokenizer.json", "quickstart.yaml"] {
        assert!(folder.path("quick").join(file).exists(), "{file}");
    }
    // The configuration that it writes can be trained again.
    folder.succeeds(&["train", "quick/quickstart.yaml", "max_steps=1"]);
}
