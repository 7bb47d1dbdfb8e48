//! The commands of the documents, run as they are printed there, with a stand-in for the Hub.
//!
//! In a document, a `yaml` block that begins with `# NAME.yaml` is a file, a `sh` block is commands that must succeed, in
//! order, and a `console` block is one command with its output. Commands after `# on HOST` lines run at the same time.
//! `LOCKSTEP_UPDATE_DOCS=1 cargo test -p lockstep docs::` writes the real output into the `console` blocks.

use std::fs;
use std::process::{Command, Stdio};

use lockstep_testkit::HubStandIn;

use crate::launch::{free_port, ran};
use crate::support::{Folder, Ran};
use crate::tidy;

/// Beginnings of commands that install the program: this test was built by one of them.
const NOT_RUN: [&str; 2] = ["cargo install ", "pip install "];

const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}\
                        {% if add_generation_prompt %}assistant: {% endif %}";

const CARD: &str = "---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: train.jsonl}\n  \
                    - {split: test, path: test.jsonl}\n---\n";

/// Where a document's commands run: a folder, and a Hub with small repositories under the names that documents use.
struct Workplace {
    folder: Folder,
    hub: HubStandIn,
    port: String,
}

impl Workplace {
    fn new() -> Workplace {
        let folder = Folder::new(
            "model: {architectures: [Qwen3ForCausalLM], hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16, \
             intermediate_size: 64, max_position_embeddings: 2048}\n\
             train_files: data.jsonl\nmax_steps: 0\noutput_dir: made\n",
        );
        folder.succeeds(&["train", "run.yaml"]);
        folder.write("made/model/chat_template.jinja", TEMPLATE);
        let hub = HubStandIn::start();
        hub.add_model_folder("Qwen/Qwen3-0.6B", &folder.path("made/model"));
        let [train, test] = [40, 4].map(conversations);
        let files: [(&str, &[u8]); 3] = [
            ("README.md", CARD.as_bytes()),
            ("train.jsonl", train.as_bytes()),
            ("test.jsonl", test.as_bytes()),
        ];
        hub.add_dataset("trl-lib/Capybara", &files);
        for name in ["run.yaml", "data.jsonl"] {
            fs::remove_file(folder.path(name)).unwrap();
        }
        fs::remove_dir_all(folder.path("made")).unwrap();
        Workplace { folder, hub, port: free_port() }
    }

    /// A shell command as a user types it, on one host whose name is `alpha`.
    fn shell(&self, line: &str) -> Command {
        let line =
            line.replace("--master-addr alpha", "--master-addr 127.0.0.1").replace("29500", &self.port);
        // The environment is that of the tests; the shell finds the program by its name.
        let mut command = self.folder.command(&[]);
        let bin = std::path::Path::new(command.get_program()).parent().unwrap().to_path_buf();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(std::iter::once(bin).chain(std::env::split_paths(&path))).unwrap();
        let environment: Vec<_> =
            command.get_envs().map(|(name, value)| (name.to_owned(), value.map(ToOwned::to_owned))).collect();
        command = Command::new("sh");
        for (name, value) in environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.args(["-c", &line]).current_dir(self.folder.path("")).stdin(Stdio::null());
        command
            .env("PATH", path)
            .env("HF_ENDPOINT", self.hub.endpoint())
            .env("HF_HOME", self.folder.path("hf"));
        command.env_remove("HF_HUB_OFFLINE");
        command
    }

    /// Runs the commands of a block, in order.
    fn runs(&self, block: &str) {
        for line in commands(block) {
            let ran = ran(self.shell(&line).output().unwrap());
            assert_eq!(ran.code, Some(0), "{line}: {ran:#?}");
        }
    }

    /// Runs each host's commands at the same time.
    fn runs_on_hosts(&self, hosts: &[&str]) {
        let lines: Vec<String> = hosts.iter().map(|block| commands(block).join("; ")).collect();
        let piped =
            |line: &String| self.shell(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let started: Vec<_> = lines.iter().map(piped).collect();
        let ended: Vec<Ran> =
            started.into_iter().map(|child| ran(child.wait_with_output().unwrap())).collect();
        assert!(ended.iter().all(|ran| ran.code == Some(0)), "{lines:#?}: {ended:#?}");
    }
}

/// Rows of a chat data set.
fn conversations(count: usize) -> String {
    let row = |i| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"What follows {i}?\"}}, \
             {{\"role\": \"assistant\", \"content\": \"After {i} comes {}.\"}}]}}\n",
            i + 1
        )
    };
    (0..count).map(row).collect()
}

/// The language and the text of every code block.
fn blocks(document: &str) -> Vec<(&str, &str)> {
    document
        .split("\n```")
        .skip(1)
        .step_by(2)
        .map(|block| block.split_once('\n').expect("a block has a first line"))
        .collect()
}

/// The commands of a block, without comments, continued lines joined.
fn commands(block: &str) -> Vec<String> {
    block
        .replace("\\\n", " ")
        .lines()
        .map(|line| line.split(" # ").next().expect("a first part").trim().to_string())
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .filter(|line| !NOT_RUN.iter().any(|not_run| line.starts_with(not_run)))
        .collect()
}

/// Runs a document. `steady` replaces what differs from run to run in the outputs that are compared.
fn runs(name: &str, steady: fn(&str) -> String) {
    let path = tidy::root().join(name);
    let document = fs::read_to_string(&path).unwrap();
    let workplace = Workplace::new();
    let mut updated = document.clone();
    let mut num_commands = 0;
    for (language, block) in blocks(&document) {
        match language {
            "yaml" => {
                if let Some(file) = block.lines().next().and_then(|line| line.strip_prefix("# ")) {
                    workplace.folder.write(file, block);
                }
            }
            "sh" if block.starts_with("# on ") => {
                let hosts: Vec<&str> = block.split("# on ").filter(|host| !host.is_empty()).collect();
                let lines: Vec<&str> = hosts.iter().map(|host| host.split_once('\n').unwrap().1).collect();
                workplace.runs_on_hosts(&lines);
                num_commands += lines.len();
            }
            "sh" => {
                workplace.runs(block);
                num_commands += commands(block).len();
            }
            "console" => {
                let block_text = block.strip_prefix("$ ").expect("a console block begins with a command");
                let (line, shown) = block_text.split_once('\n').unwrap_or((block_text, ""));
                let ran = ran(workplace.shell(line).output().unwrap());
                assert_eq!(ran.code, Some(0), "{line}: {ran:#?}");
                if std::env::var_os("LOCKSTEP_UPDATE_DOCS").is_some() {
                    updated = updated.replace(block, &format!("$ {line}\n{}", ran.stdout.trim_end()));
                } else {
                    assert_eq!(steady(shown.trim_end()), steady(ran.stdout.trim_end()), "{name}: {line}");
                }
                num_commands += 1;
            }
            _ => {}
        }
    }
    assert!(num_commands > 0, "{name} has commands");
    if updated != document {
        fs::write(path, updated).unwrap();
    }
}

/// Numbers depend on the machine: speeds and memory always, the last digits of a loss on its C library.
fn without_numbers(text: &str) -> String {
    let mut steady = String::new();
    for c in text.replace("[wrong]", "[right]").chars() {
        match c {
            '0'..='9' | '.' if steady.ends_with('#') => {}
            '0'..='9' => steady.push('#'),
            _ => steady.push(c),
        }
    }
    // Units and widths follow the numbers.
    steady.replace("KiB", "MiB").replace("GiB", "MiB").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn readme() {
    runs("README.md", without_numbers);
}

#[test]
fn tutorial() {
    runs("docs/tutorial.md", str::to_string);
}

#[test]
fn one_step() {
    runs("docs/one-step.md", str::to_string);
}
