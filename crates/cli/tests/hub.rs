//! Models and data sets by their names, from a stand-in for the Hub: what is downloaded, by whom, and what errors say.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use insta::assert_snapshot;
use lockstep_testkit::{HubStandIn, Misbehavior};

use crate::launch::{TOKEN, free_port, ran, run_all};
use crate::support::{Folder, Ran, rows};

const RUN_BY_NAMES: &str = "\
model_name_or_path: org/model
dataset_name: org/data
max_length: 64
per_device_train_batch_size: 2
max_steps: 2
output_dir: out
threads: 1
device: cpu
";

const CARD: &str = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: rows-*.jsonl\n  \
                    - split: test\n    path: held-out.jsonl\n---\n# Rows\n";

/// A folder with a configuration that names a model and a data set, and a server that has them.
struct HubFolder {
    folder: Folder,
    hub: HubStandIn,
    model_commit: String,
    data_commit: String,
}

impl HubFolder {
    fn new() -> HubFolder {
        let (folder, hub) = (Folder::with_model(), HubStandIn::start());
        folder.write("model/pytorch_model.bin", "pickled");
        folder.write("model/README.md", "# A model");
        let model_commit = hub.add_model_folder("org/model", &folder.path("model"));
        fs::remove_dir_all(folder.path("model")).unwrap();
        let (data, more) = (rows(8), rows(4));
        let files: [(&str, &[u8]); 5] = [
            ("README.md", CARD.as_bytes()),
            ("rows-1.jsonl", data.as_bytes()),
            ("rows-2.jsonl", more.as_bytes()),
            ("held-out.jsonl", data.as_bytes()),
            ("not-declared.jsonl", b"{}"),
        ];
        let data_commit = hub.add_dataset("org/data", &files);
        folder.write("run.yaml", RUN_BY_NAMES);
        HubFolder { folder, hub, model_commit, data_commit }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.folder.command(args);
        for name in
            ["HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN", "HF_DATASETS_CACHE", "TRANSFORMERS_OFFLINE"]
        {
            command.env_remove(name);
        }
        command.env("HF_ENDPOINT", self.hub.endpoint()).env("HF_HOME", self.folder.path("hf"));
        command
    }

    fn run(&self, args: &[&str]) -> Ran {
        ran(self.command(args).output().unwrap())
    }

    fn succeeds(&self, args: &[&str]) -> Ran {
        let ran = self.run(args);
        assert_eq!(ran.code, Some(0), "{args:?}: {ran:#?}");
        ran
    }

    /// The error of a command that must fail with `code`, with addresses and folders left out.
    fn refused(&self, args: &[&str], code: i32) -> String {
        let ran = self.run(args);
        assert_eq!(ran.code, Some(code), "{args:?}: {ran:#?}");
        let folder = self.folder.path("").to_string_lossy().into_owned();
        ran.stderr.replace(&self.hub.endpoint(), "http://hub").replace(&folder, "")
    }

    /// How often files were sent whose names end like this.
    fn sent(&self, name: &str) -> usize {
        self.hub.count(name)
    }
}

#[test]
fn a_run_downloads_what_it_names() {
    let names = HubFolder::new();
    let ran = names.succeeds(&["train", "run.yaml"]);
    assert!(ran.stdout.contains("step 2/2"), "{ran:#?}");
    assert!(ran.stderr.contains("downloading model org/model: "), "{ran:#?}");
    assert!(ran.stderr.contains("downloaded dataset org/data: "), "{ran:#?}");
    let needed = ["/config.json", "tokenizer.json", "model.safetensors", "rows-1.jsonl", "rows-2.jsonl"];
    for name in needed {
        assert_eq!(names.sent(name), 1, "{name}: {:#?}", names.hub.requests());
    }
    for name in ["pytorch_model.bin", "held-out.jsonl", "not-declared.jsonl", "model/README.md"] {
        assert_eq!(names.sent(name), 0, "{name} is not needed");
    }
    // The commits are recorded where the configuration is.
    let log = names.folder.read("out/logs/training.log");
    assert!(log.contains(&format!("model org/model is at commit {}", names.model_commit)), "{log}");
    assert!(log.contains(&format!("dataset org/data is at commit {}", names.data_commit)), "{log}");

    // Everything is in the cache: a run without a network takes it from there.
    let requests = names.hub.requests().len();
    let mut offline = names.command(&["train", "run.yaml", "overwrite_output_dir=true"]);
    let offline = self::ran(offline.env("HF_HUB_OFFLINE", "1").output().unwrap());
    assert!(offline.code == Some(0) && offline.stderr.is_empty(), "{offline:#?}");
    assert_eq!(names.hub.requests().len(), requests);

    // A folder of that name wins.
    fs::create_dir_all(names.folder.path("org/model")).unwrap();
    let refused = names.refused(&["train", "run.yaml", "overwrite_output_dir=true"], 66);
    assert!(refused.contains("org/model"), "{refused}");
}

#[test]
fn two_ranks_download_once() {
    let names = HubFolder::new();
    let ran = names.succeeds(&["train", "run.yaml", "--nproc", "2"]);
    assert!(ran.stdout.contains("step 2/2"), "{ran:#?}");
    let requests = names.hub.requests();
    let resolved = requests.iter().filter(|r| r.path.starts_with("/api/")).count();
    assert_eq!(resolved, 4, "rank 0 asks for each repository's commit, then for its files: {requests:#?}");
    assert_eq!((names.sent("model.safetensors"), names.sent("rows-1.jsonl")), (1, 1));
}

/// Each host downloads for itself, the commit that rank 0 has resolved.
#[test]
fn two_hosts_download_the_same_commit() {
    let names = HubFolder::new();
    let port = free_port();
    let rank = |rank: &str, home: &str| {
        let mut command = names.command(&["train", "run.yaml"]);
        command.envs([("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1"), ("GROUP_RANK", rank)]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port), ("LOCKSTEP_TOKEN", TOKEN)]);
        command.env("HF_HOME", names.folder.path(home));
        command
    };
    let ranks = run_all(vec![rank("1", "hf-1"), rank("0", "hf-0")]);
    assert!(ranks.iter().all(|ran| ran.code == Some(0)), "{ranks:#?}");
    let requests = names.hub.requests();
    let api =
        |end: &str| requests.iter().filter(|r| r.path.contains("/api/") && r.path.contains(end)).count();
    assert_eq!((api("/revision/main"), api(&names.model_commit), api(&names.data_commit)), (2, 2, 2));
    assert_eq!((names.sent("model.safetensors"), names.sent("rows-1.jsonl")), (2, 2));
    for home in ["hf-0", "hf-1"] {
        assert_eq!(
            names.folder.read(&format!("{home}/hub/models--org--model/refs/main")),
            names.model_commit
        );
    }
}

/// A rank that cannot download ends all of them, with its reason.
#[test]
fn ranks_that_wait_learn_of_a_failed_download() {
    let names = HubFolder::new();
    names.hub.misbehave("model.safetensors", 100, Misbehavior::Status(404, Vec::new()));
    let refused = names.refused(&["train", "run.yaml", "--nproc", "2"], 66);
    assert!(refused.contains("has no file model.safetensors"), "{refused}");
    assert!(!names.folder.path("out/checkpoints").exists());
}

#[test]
fn a_plan_needs_no_weights_and_no_data() {
    let names = HubFolder::new();
    let ran = names.succeeds(&["plan", "run.yaml"]);
    assert!(ran.stdout.contains("fingerprint"), "{ran:#?}");
    assert_eq!((names.sent("/config.json"), names.sent("tokenizer.json")), (1, 1));
    assert_eq!((names.sent("model.safetensors"), names.sent(".jsonl")), (0, 0));
    names.succeeds(&["prepare", "run.yaml"]);
    assert_eq!((names.sent("model.safetensors"), names.sent("rows-1.jsonl")), (0, 1));
    assert_eq!(names.sent("/config.json"), 1, "what the cache has is not requested again");
}

#[test]
fn models_by_name_on_the_command_line() {
    let names = HubFolder::new();
    let ran =
        names.succeeds(&["generate", "org/model", "-p", "x", "--max-new-tokens", "3", "--device", "cpu"]);
    assert!(ran.stdout.starts_with('x'), "{ran:#?}");
    let settings = ["dataset_name=org/data", "dataset_test_split=test", "max_length=64", "device=cpu"];
    let ran = names.succeeds(&[&["eval", "org/model"], &settings[..]].concat());
    assert!(ran.stdout.starts_with("loss "), "{ran:#?}");
    assert_eq!((names.sent("held-out.jsonl"), names.sent("rows-1.jsonl")), (1, 0));
    assert_eq!(names.sent("model.safetensors"), 1);
}

#[test]
fn downloads_ahead_of_a_run() {
    let names = HubFolder::new();
    let shown = |ran: Ran| {
        let folder = names.folder.path("").to_string_lossy().into_owned();
        let text = ran.stdout.replace(&folder, "").replace(&names.model_commit, "COMMIT");
        text.replace(&names.data_commit, "COMMIT")
    };
    assert_snapshot!(shown(names.succeeds(&["download", "org/model"])), @r"
    model org/model, commit COMMIT
      hf/hub/models--org--model/snapshots/COMMIT
    ");
    let dataset = ["download", "org/data", "--repo-type", "dataset", "--revision", &names.data_commit];
    assert_snapshot!(shown(names.succeeds(&dataset)), @r"
    dataset org/data, commit COMMIT
      hf/hub/datasets--org--data/snapshots/COMMIT
    ");
    assert_eq!(names.sent("not-declared.jsonl"), 1, "all data files of a data set");
    assert_snapshot!(shown(names.succeeds(&["download", "run.yaml"])), @r"
    model org/model, commit COMMIT
      hf/hub/models--org--model/snapshots/COMMIT
    dataset org/data, commit COMMIT
      hf/hub/datasets--org--data/snapshots/COMMIT
    ");
    assert_eq!(names.sent("model.safetensors"), 1);
    let mut train = names.command(&["train", "run.yaml"]);
    let trained = ran(train.env("HF_HUB_OFFLINE", "1").output().unwrap());
    assert_eq!(trained.code, Some(0), "{trained:#?}");
}

#[test]
fn two_processes_download_each_file_once() {
    let names = HubFolder::new();
    let download = || names.command(&["download", "org/model"]);
    let both = run_all(vec![download(), download()]);
    assert!(both.iter().all(|ran| ran.code == Some(0)), "{both:#?}");
    assert_eq!((names.sent("model.safetensors"), names.sent("tokenizer.json")), (1, 1));
}

/// A killed process leaves a lock file and a part of a file behind. Neither is in the way of the next one.
#[test]
fn a_killed_download_is_continued() {
    let names = HubFolder::new();
    let stall = Misbehavior::StallAfter(1000, Duration::from_secs(20));
    names.hub.misbehave("/storage/", 1, stall);
    let mut killed = names.command(&["download", "org/model"]).stderr(Stdio::null()).spawn().unwrap();
    let part = || {
        let blobs = fs::read_dir(names.folder.path("hf/hub/models--org--model/blobs")).into_iter().flatten();
        let parts = blobs.filter_map(|entry| entry.unwrap().metadata().ok()).map(|found| found.len());
        parts.filter(|length| *length == 1000).count()
    };
    let start = Instant::now();
    while part() == 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "nothing was downloaded");
        std::thread::sleep(Duration::from_millis(20));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    names.succeeds(&["download", "org/model"]);
    assert!(names.hub.requests().iter().any(|r| r.range.as_deref() == Some("bytes=1000-")));
}

#[test]
fn a_revision_is_a_branch_a_tag_or_a_commit() {
    let names = HubFolder::new();
    let commit = format!("model_revision={}", names.model_commit);
    names.succeeds(&["plan", "run.yaml", &commit]);
    assert_snapshot!(names.refused(&["plan", "run.yaml", "model_revision=v9"], 66), @r"
    error: model org/model has no revision `v9`
    hint: check the branches and tags on the repository's page.
    ");
    assert_snapshot!(names.refused(&["plan", "run.yaml", "model_revision=../x"], 64), @r"
    error: `../x` is not a valid revision
    hint: give a branch, a tag or a commit hash.
    ");
}

#[test]
fn what_cannot_be_downloaded() {
    let names = HubFolder::new();
    let train = |settings: &[&str], code| names.refused(&[&["train", "run.yaml"], settings].concat(), code);
    assert_snapshot!(train(&["model_name_or_path=org/none"], 66), @r"
    error: model org/none was not found at http://hub
    hint: check the spelling. If it is private, set HF_TOKEN to a token of an account that has access, or log in with `hf auth login`. To use a folder on this machine, write its path, such as ./folder.
    ");
    assert_snapshot!(train(&["dataset_train_split=validation"], 66), @r"
    error: dataset org/data has no split `validation`; found train, test
    hint: set dataset_train_split or dataset_test_split to one of them.
    ");
    assert_snapshot!(train(&["dataset_config=fr"], 64), @r"
    error: dataset org/data has no configuration `fr`; found default
    hint: set dataset_config to one of them.
    ");
    assert_eq!(names.sent("model.safetensors"), 0, "errors come before large downloads");
    names.hub.add_model("org/pickled", &[("config.json", b"{}"), ("pytorch_model.bin", b"x")]);
    assert_snapshot!(train(&["model_name_or_path=org/pickled"], 65), @r"
    error: model org/pickled has pickled weights only: pytorch_model.bin
    hint: pickled files can run code when they are loaded, so they are not supported. Convert the model, in Python: AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(FOLDER, safe_serialization=True); or look for a revision with safetensors.
    ");
    let gated = vec![("X-Error-Code".to_owned(), "GatedRepo".to_owned())];
    names.hub.misbehave("/api/models/org/model", 1, Misbehavior::Status(403, gated));
    assert_snapshot!(train(&[], 77), @r"
    error: model org/model is gated: its owners decide who may download it
    hint: visit http://hub/org/model, accept the conditions, and set HF_TOKEN to a token of that account.
    ");
    assert_snapshot!(names.refused(&["download", "org/none", "--repo-type", "dataset"], 66), @r"
    error: dataset org/none was not found at http://hub
    hint: check the spelling. If it is private, set HF_TOKEN to a token of an account that has access, or log in with `hf auth login`. To use a folder on this machine, write its path, such as ./folder.
    ");
    assert_snapshot!(names.refused(&["download", "run.yaml", "--revision", "v1"], 64), @r"
    error: --revision needs the name of a single repository
    hint: in a configuration, set model_revision and dataset_revision instead.
    ");
    assert_snapshot!(names.refused(&["download", "model=tiny"], 64), @r"
    error: the configuration names no model or dataset on the Hub
    hint: set model_name_or_path or dataset_name to a name such as org/name; paths that exist on this machine need no download.
    ");
    assert_snapshot!(names.refused(&["download", "a/b/c"], 64), @r"
    error: `a/b/c` is not the name of a Hub repository: it has more than one slash
    hint: names look like `org/name`; a path begins with `./` or `/`.
    ");
}

#[test]
fn offline_nothing_is_requested() {
    let names = HubFolder::new();
    let mut command = names.command(&["train", "run.yaml"]);
    let ran = ran(command.env("HF_HUB_OFFLINE", "1").output().unwrap());
    assert_eq!(ran.code, Some(66), "{ran:#?}");
    assert_snapshot!(ran.stderr.replace(&*names.folder.path("").to_string_lossy(), ""), @r"
    error: model org/model (revision main) is not in the cache hf/hub, and HF_HUB_OFFLINE is set
    hint: unset HF_HUB_OFFLINE, or run `lockstep download org/model` on a machine with a network and the same cache (HF_HOME).
    ");
    assert_eq!(names.hub.requests(), []);
}

#[test]
fn the_token_is_sent_and_never_shown() {
    let names = HubFolder::new();
    names.hub.require_token("hf_secret_word");
    let mut command = names.command(&["train", "run.yaml"]);
    let trained = ran(command.env("HF_TOKEN", "hf_secret_word").output().unwrap());
    assert_eq!(trained.code, Some(0), "{trained:#?}");
    let wrong = names.command(&["train", "run.yaml"]).env("HF_TOKEN", "hf_wrong_word").output().unwrap();
    let wrong = ran(wrong);
    assert_eq!(wrong.code, Some(77), "{wrong:#?}");
    let shown = format!("{trained:?}{wrong:?}");
    assert!(!shown.contains("hf_secret_word") && !shown.contains("hf_wrong_word"), "{shown}");
    for (path, content) in names.folder.tree() {
        let content = content.unwrap_or_default();
        let found = content.windows(14).any(|part| part == b"hf_secret_word");
        assert!(!found, "{} holds the token", path.display());
    }
}
