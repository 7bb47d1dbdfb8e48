//! A temporary folder with a configuration and data, and the program run inside it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// A model of a few thousand parameters on eight rows; a step takes a millisecond or two.
pub(crate) const RUN: &str = "\
model: {architectures: [LlamaForCausalLM], hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, \
intermediate_size: 64, max_position_embeddings: 64}
train_files: data.jsonl
max_length: 64
per_device_train_batch_size: 2
max_steps: 2
output_dir: out
threads: 2
";

/// The same on the model folder that [`Folder::with_model`] makes.
pub(crate) const TUNE: &str = "\
model_name_or_path: model
train_files: data.jsonl
max_length: 64
per_device_train_batch_size: 2
max_steps: 2
output_dir: out
threads: 2
";

/// A temporary folder with `run.yaml` and `data.jsonl`, in which commands run.
pub(crate) struct Folder {
    temp: tempfile::TempDir,
}

/// The user's cache folder, for commands that run in a [`Folder`].
pub(crate) const CACHE: &str = "user-cache";

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// What `plan` prints below the table of strategies, whose times depend on the machine.
pub(crate) fn below_the_strategies(plan: &str) -> &str {
    &plan[plan.find("\npolicy ").map_or(0, |at| at + 1)..]
}

impl Folder {
    pub(crate) fn new(config: &str) -> Folder {
        let folder = Folder { temp: tempfile::tempdir().unwrap() };
        folder.write("run.yaml", config);
        folder.write("data.jsonl", rows(8));
        folder
    }

    /// A folder with a model in `model/`, and [`TUNE`] as its configuration.
    pub(crate) fn with_model() -> Folder {
        let folder = Folder::new(RUN);
        folder.succeeds(&["train", "run.yaml", "max_steps=0"]);
        fs::rename(folder.path("out/model"), folder.path("model")).unwrap();
        fs::remove_dir_all(folder.path("out")).unwrap();
        folder.write("run.yaml", TUNE);
        folder
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
        command.args(args).current_dir(self.temp.path()).stdin(Stdio::null());
        // A misspelled folder may look like a name on the Hub, and no test may use the network.
        command.env("HF_HUB_OFFLINE", "1");
        // Nothing is written to the home of the user who runs the tests.
        command.env("XDG_CACHE_HOME", self.path(CACHE));
        // Measured rates differ from run to run.
        command.env("LOCKSTEP_MEASURE", "0");
        // Kernels take seconds to compile, so all tests share them.
        command.env("LOCKSTEP_KERNEL_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels"));
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        let Output { status, stdout, stderr } = self.command(args).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Ran { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
    }

    /// Starts a command and leaves it running.
    pub(crate) fn start(&self, args: &[&str]) -> Child {
        self.command(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Runs a command that must succeed, and returns what it printed.
    pub(crate) fn succeeds(&self, args: &[&str]) -> String {
        let ran = self.run(args);
        assert!(ran.code == Some(0) && ran.stderr.is_empty(), "{args:?}: {ran:#?}");
        self.assert_no_partial();
        ran.stdout
    }

    /// Runs a command that must fail with `code` before its first step. It changes nothing on the disk, except for
    /// complete prepared data, and prints at most two lines besides the error, which is returned.
    pub(crate) fn refused(&self, args: &[&str], code: i32) -> String {
        let before = self.tree();
        let ran = self.run(args);
        assert_eq!(ran.code, Some(code), "{args:?}: {ran:#?}");
        assert!(ran.stdout.lines().count() <= 2, "{args:?}: {ran:#?}");
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
        let mut after = self.tree();
        let prepared =
            |path: &PathBuf| path.starts_with(CACHE) && path.extension().is_none_or(|e| e == "tokens");
        after.retain(|path, _| before.contains_key(path) || !prepared(path));
        if !before.contains_key(Path::new("out"))
            && !after.keys().any(|path| path.parent() == Some(Path::new("out")))
        {
            after.remove(Path::new("out"));
        }
        assert!(after == before, "{:#?} became {:#?}", before.keys(), after.keys());
        ran.stderr
    }

    /// `train run.yaml` with further settings, refused.
    pub(crate) fn train_refused(&self, settings: &[&str], code: i32) -> String {
        let args: Vec<&str> = ["train", "run.yaml"].into_iter().chain(settings.iter().copied()).collect();
        self.refused(&args, code)
    }

    /// Every file below the folder with its content, and every folder.
    pub(crate) fn tree(&self) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
        let mut tree = BTreeMap::new();
        walk(self.temp.path(), &mut |path, content| {
            tree.insert(path.strip_prefix(self.temp.path()).unwrap().to_path_buf(), content);
        });
        tree
    }

    pub(crate) fn assert_no_partial(&self) {
        let left: Vec<PathBuf> = self.tree().into_keys().collect();
        let unfinished =
            |path: &PathBuf| path.extension().is_some_and(|e| e == "partial" || e == "trash" || e == "old");
        assert!(!left.iter().any(unfinished), "{left:#?}");
        assert!(!left.iter().any(|path| path.ends_with(".lock")), "{left:#?}");
    }
}

fn walk(dir: &Path, found: &mut dyn FnMut(&Path, Option<Vec<u8>>)) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_symlink() {
            found(&path, None);
        } else if path.is_dir() {
            found(&path, None);
            walk(&path, found);
        } else {
            let content = fs::read(&path).unwrap();
            found(&path, Some(content));
        }
    }
}

/// `count` rows of text of various lengths, as jsonl.
pub(crate) fn rows(count: usize) -> String {
    let words = ["one ", "step ", "follows ", "the ", "other ", "in ", "lockstep, ", "again "];
    (0..count)
        .map(|row| {
            let text: String = (0..3 + row % 5).map(|i| words[(row * 3 + i) % words.len()]).collect();
            format!("{{\"text\": \"{row}: {text}\"}}\n")
        })
        .collect()
}

/// Replaces what differs between runs: speeds, times, and sizes that depend on the machine.
pub(crate) fn steady(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let parts: Vec<String> = line.split(" | ").map(steady_part).collect();
        out.push_str(&parts.join(" | "));
        out.push('\n');
    }
    out
}

fn steady_part(part: &str) -> String {
    let number = |text: &str| text.parse::<f64>().is_ok();
    match part.split_once(' ') {
        Some((value, "tok/s")) if number(value) => "[speed]".into(),
        Some((value, "s")) if number(value) => "[time]".into(),
        Some(("memory", _)) => "memory [size]".into(),
        Some(("peak", _)) => "peak memory [size] (planned [size])".into(),
        _ => part.into(),
    }
}
