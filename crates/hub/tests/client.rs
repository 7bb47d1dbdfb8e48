//! The client against a stand-in for the Hub: what it downloads, what it survives, and what it refuses.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lockstep_core::Fault as _;
use lockstep_hub::{
    DownloadProgress, Hub, HubError, HubSettings, HubToken, NoDownloadProgress, Repo, RepoKind, RetryPolicy,
};
use lockstep_testkit::{HubStandIn, Misbehavior};

const TOKEN: &str = "hf_secret_token";

struct Fixture {
    server: HubStandIn,
    home: tempfile::TempDir,
}

impl Fixture {
    /// A server with the model `org/name`.
    fn new() -> Fixture {
        let server = HubStandIn::start();
        server.add_model("org/name", &[("config.json", b"{}\n"), ("model.safetensors", &weights())]);
        Fixture { server, home: tempfile::tempdir().unwrap() }
    }

    fn settings(&self) -> HubSettings {
        let pairs = [
            ("HF_ENDPOINT", self.server.endpoint()),
            ("HF_HOME", self.home.path().display().to_string()),
            ("HF_TOKEN", TOKEN.into()),
        ];
        let get = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
        let mut settings = HubSettings::from_env(&get).unwrap();
        settings.retry = RetryPolicy {
            attempts: 3,
            first_wait: Duration::from_millis(5),
            max_wait: Duration::from_millis(20),
            stall: Duration::from_millis(300),
        };
        settings
    }

    fn hub(&self) -> Hub {
        Hub::new(self.settings()).unwrap()
    }

    fn hub_with(&self, change: impl FnOnce(&mut HubSettings)) -> Hub {
        let mut settings = self.settings();
        change(&mut settings);
        Hub::new(settings).unwrap()
    }

    fn download(&self, files: &[&str]) -> Result<PathBuf, HubError> {
        download(&self.hub(), "main", files)
    }

    fn repo_dir(&self) -> PathBuf {
        self.home.path().join("hub/models--org--name")
    }
}

fn weights() -> Vec<u8> {
    (0..400_000u32).map(|i| (i * 7 + i / 251) as u8).collect()
}

fn repo() -> Repo {
    Repo::new(RepoKind::Model, "org/name").unwrap()
}

fn download(hub: &Hub, revision: &str, files: &[&str]) -> Result<PathBuf, HubError> {
    let resolved = hub.resolve(&repo(), revision, &mut NoDownloadProgress)?;
    let files: Vec<String> = files.iter().map(|name| name.to_string()).collect();
    hub.download(&resolved, &files, &mut NoDownloadProgress)
}

/// An error's text and hint, with the server's address left out and never with the token.
fn described(error: &HubError, server: &HubStandIn) -> String {
    let text =
        format!("{error}\n{}\nexit code {}", error.hint().unwrap_or_default(), error.class().exit_code());
    assert!(!text.contains(TOKEN) && !format!("{error:?}").contains(TOKEN));
    text.replace(&server.endpoint(), "http://hub")
}

fn files_below(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next).unwrap().map(Result::unwrap) {
            match entry.file_type().unwrap().is_dir() {
                true => open.push(entry.path()),
                false => found.push(entry.path().strip_prefix(dir).unwrap().display().to_string()),
            }
        }
    }
    found.sort();
    found
}

#[test]
fn the_cache_has_the_standard_layout() {
    let fixture = Fixture::new();
    let snapshot = fixture.download(&["config.json", "model.safetensors"]).unwrap();
    assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
    let commit = snapshot.file_name().unwrap().to_str().unwrap().to_owned();
    let dir = fixture.repo_dir();
    assert_eq!(snapshot, dir.join("snapshots").join(&commit));
    assert_eq!(fs::read_to_string(dir.join("refs/main")).unwrap(), commit);
    let blob = "0967ef424bce6791893e9a57bb952f80fd536e93";
    let target = fs::read_link(snapshot.join("config.json")).unwrap();
    assert_eq!(target, Path::new("../../blobs").join(blob), "git's hash of the content names the blob");
    let weights = fs::read_link(snapshot.join("model.safetensors")).unwrap();
    assert_eq!(weights.file_name().unwrap().len(), 64, "SHA-256 names the blob of a large file");
    assert_eq!(files_below(&dir).len(), 2 + 2 + 1, "nothing else is left behind: {:?}", files_below(&dir));

    // The second time only the revision is asked for.
    let before = fixture.server.requests().len();
    fixture.download(&["config.json", "model.safetensors"]).unwrap();
    assert_eq!(fixture.server.requests().len(), before + 1);
}

#[test]
fn files_in_folders_link_to_their_blobs() {
    let fixture = Fixture::new();
    fixture.server.add_dataset("org/data", &[("a b/c/train.jsonl", b"{}"), ("README.md", b"---\n---\n")]);
    let repo = Repo::new(RepoKind::Dataset, "org/data").unwrap();
    let hub = fixture.hub();
    let resolved = hub.resolve(&repo, "main", &mut NoDownloadProgress).unwrap();
    assert_eq!(resolved.file_names(), ["README.md", "a b/c/train.jsonl"]);
    let card = hub.read_text(&resolved, "README.md", 1 << 20, &mut NoDownloadProgress).unwrap();
    assert_eq!(card.as_deref(), Some("---\n---\n"));
    assert_eq!(hub.read_text(&resolved, "none.md", 1 << 20, &mut NoDownloadProgress).unwrap(), None);
    let refs = fixture.home.path().join("hub/datasets--org--data/refs/main");
    assert!(!refs.exists(), "the revision is recorded after all files");
    let snapshot = hub.download(&resolved, &["a b/c/train.jsonl".into()], &mut NoDownloadProgress).unwrap();
    assert_eq!(fs::read(snapshot.join("a b/c/train.jsonl")).unwrap(), b"{}");
    assert!(refs.exists());
}

#[test]
fn a_cut_download_continues_where_it_was() {
    let fixture = Fixture::new();
    fixture.server.misbehave("/storage/", 1, Misbehavior::CutAfter(100_000));
    let snapshot = fixture.download(&["model.safetensors"]).unwrap();
    assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
    let ranges: Vec<_> = fixture.server.requests().into_iter().filter_map(|r| r.range).collect();
    assert!(ranges.contains(&"bytes=100000-".to_owned()), "{ranges:?}");
}

#[test]
fn a_later_process_continues_a_download() {
    let fixture = Fixture::new();
    fixture.server.misbehave("/storage/", 100, Misbehavior::CutAfter(50_000));
    let error = fixture.download(&["model.safetensors"]).unwrap_err();
    assert!(matches!(error, HubError::Network { .. }), "{error:?}");
    let left = files_below(&fixture.repo_dir().join("blobs"));
    assert!(left.len() == 1 && left[0].ends_with(".incomplete"), "{left:?}");
    assert!(!fixture.repo_dir().join("refs").exists());

    let server = HubStandIn::start();
    server.add_model("org/name", &[("config.json", b"{}\n"), ("model.safetensors", &weights())]);
    let fixture = Fixture { server, ..fixture };
    fixture.download(&["model.safetensors"]).unwrap();
    assert!(fixture.server.requests().iter().any(|r| r.range.as_deref() == Some("bytes=150000-")));
    assert!(files_below(&fixture.repo_dir().join("blobs")).iter().all(|name| !name.contains("incomplete")));
}

#[test]
fn a_server_without_ranges_sends_the_file_anew() {
    let fixture = Fixture::new();
    fixture.server.misbehave("/storage/", 1, Misbehavior::CutAfter(100_000));
    fixture.server.misbehave("/storage/", 1, Misbehavior::IgnoreRange);
    let snapshot = fixture.download(&["model.safetensors"]).unwrap();
    assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn remains_of_another_file_are_discarded() {
    let fixture = Fixture::new();
    let snapshot = fixture.download(&["config.json"]).unwrap();
    drop(snapshot);
    let blobs = fixture.repo_dir().join("blobs");
    let hash = fixture.hub().resolve(&repo(), "main", &mut NoDownloadProgress).unwrap();
    assert_eq!(hash.files[1].size(), Some(400_000));
    fixture.server.misbehave("/storage/", 1, Misbehavior::CutAfter(10));
    fixture.server.misbehave("/storage/", 9, Misbehavior::Status(503, Vec::new()));
    fixture.download(&["model.safetensors"]).unwrap_err();
    let part = files_below(&blobs).into_iter().find(|name| name.ends_with("incomplete")).unwrap();
    // As long as the file, with other content: the hash differs, so it is downloaded again.
    fs::write(blobs.join(&part), vec![1; 400_000]).unwrap();
    let server = HubStandIn::start();
    server.add_model("org/name", &[("config.json", b"{}\n"), ("model.safetensors", &weights())]);
    let fixture = Fixture { server, ..fixture };
    let snapshot = fixture.download(&["model.safetensors"]).unwrap();
    assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn a_damaged_file_is_downloaded_once_more() {
    for how in [Misbehavior::Corrupt, Misbehavior::TooShort] {
        let fixture = Fixture::new();
        fixture.server.misbehave("/storage/", 1, how.clone());
        fixture.download(&["model.safetensors"]).unwrap();
        assert_eq!(fixture.server.requests().iter().filter(|r| r.path.starts_with("/storage/")).count(), 2);

        let fixture = Fixture::new();
        fixture.server.misbehave("/storage/", 2, how);
        let error = fixture.download(&["model.safetensors"]).unwrap_err();
        assert_eq!(error.class().exit_code(), 65);
        assert_eq!(files_below(&fixture.repo_dir().join("blobs")), [""; 0], "nothing wrong is kept");
    }
    let fixture = Fixture::new();
    fixture.server.misbehave("config.json", 2, Misbehavior::Corrupt);
    let error = fixture.download(&["config.json"]).unwrap_err();
    insta::assert_snapshot!(described(&error, &fixture.server), @r"
    config.json of model org/name has the git hash e8089fb4292d33a198c2ec2b52e0cd5262e480bc, expected 0967ef424bce6791893e9a57bb952f80fd536e93
    the file was damaged twice on its way: run the command again, without a proxy that changes files.
    exit code 65
    ");
}

#[test]
fn a_mirror_without_hashes_is_asked_for_each_file() {
    let fixture = Fixture::new();
    fixture.server.hide_blobs();
    let snapshot = fixture.download(&["config.json", "model.safetensors"]).unwrap();
    assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
    assert_eq!(fs::read_link(snapshot.join("model.safetensors")).unwrap().file_name().unwrap().len(), 64);
    assert_eq!(fixture.server.requests().iter().filter(|r| r.method == "HEAD").count(), 2);
}

#[test]
fn the_token_stays_with_the_endpoint() {
    let fixture = Fixture::new();
    let storage = HubStandIn::start();
    fixture.server.store_on(&storage);
    fixture.server.require_token(TOKEN);
    fixture.download(&["config.json", "model.safetensors"]).unwrap();
    assert!(fixture.server.requests().iter().all(|r| r.authorization == Some(format!("Bearer {TOKEN}"))));
    let there = storage.requests();
    assert_eq!(there.len(), 1);
    assert_eq!(there[0].authorization, None, "the token went to another host");
}

#[test]
fn redirects_are_bounded() {
    let fixture = Fixture::new();
    let to_itself = format!("{}/org/name/resolve/x/config.json", fixture.server.endpoint());
    fixture.server.misbehave("config.json", 100, Misbehavior::Redirect(to_itself));
    let error = fixture.download(&["config.json"]).unwrap_err();
    assert!(matches!(error, HubError::TooManyRedirects { .. }), "{error:?}");
    assert_eq!(fixture.server.count("config.json"), 6);
    for target in ["file:///etc/passwd", "ftp://x/y", "http://user@x/"] {
        let fixture = Fixture::new();
        fixture.server.misbehave("config.json", 1, Misbehavior::Redirect(target.into()));
        let error = fixture.download(&["config.json"]).unwrap_err();
        assert!(matches!(error, HubError::BadRedirect { .. }), "{error:?}");
    }
}

#[test]
fn refusals_explain_what_to_do() {
    let fixture = Fixture::new();
    let refused = |status: u16, code: &str| {
        let headers = vec![("X-Error-Code".to_owned(), code.to_owned())];
        fixture.server.misbehave("/api/", 1, Misbehavior::Status(status, headers));
        described(&fixture.download(&["config.json"]).unwrap_err(), &fixture.server)
    };
    insta::assert_snapshot!(refused(401, ""), @r"
    the Hub rejected the token (status 401) while reading model org/name
    create a new token at https://huggingface.co/settings/tokens and set HF_TOKEN to it. Public repositories need no token: unset HF_TOKEN.
    exit code 77
    ");
    insta::assert_snapshot!(refused(403, "GatedRepo"), @r"
    model org/name is gated: its owners decide who may download it
    visit http://hub/org/name with the account of your token, accept the conditions, and wait for access. A fine-grained token also needs the permission to read gated repositories.
    exit code 77
    ");
    insta::assert_snapshot!(refused(403, ""), @r"
    access to model org/name is denied
    use a token with read access to this repository.
    exit code 77
    ");
    insta::assert_snapshot!(refused(404, "RepoNotFound"), @r"
    model org/name was not found at http://hub
    check the spelling. If it is private, the account of your token needs access to it. To use a folder on this machine, write its path, such as ./folder.
    exit code 66
    ");
    let error = download(&fixture.hub(), "v9", &["config.json"]).unwrap_err();
    insta::assert_snapshot!(described(&error, &fixture.server), @r"
    model org/name has no revision `v9`
    check the branches and tags on the repository's page.
    exit code 66
    ");
    let error = fixture.download(&["tokenizer.json"]).unwrap_err();
    insta::assert_snapshot!(described(&error, &fixture.server), @r"
    model org/name has no file tokenizer.json at revision main

    exit code 66
    ");
}

#[test]
fn refusals_without_a_token() {
    let fixture = Fixture::new();
    let hub = fixture.hub_with(|settings| settings.token = None);
    let gated = vec![("X-Error-Code".to_owned(), "GatedRepo".to_owned())];
    fixture.server.misbehave("/api/", 1, Misbehavior::Status(401, gated));
    let error = download(&hub, "main", &["config.json"]).unwrap_err();
    insta::assert_snapshot!(described(&error, &fixture.server), @r"
    model org/name is gated: its owners decide who may download it
    visit http://hub/org/name, accept the conditions, and set HF_TOKEN to a token of that account.
    exit code 77
    ");
    // The Hub does not disclose whether a private repository exists.
    fixture.server.require_token(TOKEN);
    let error = download(&hub, "main", &["config.json"]).unwrap_err();
    insta::assert_snapshot!(described(&error, &fixture.server), @r"
    model org/name was not found at http://hub
    check the spelling. If it is private, set HF_TOKEN to a token of an account that has access, or log in with `hf auth login`. To use a folder on this machine, write its path, such as ./folder.
    exit code 66
    ");
    let wrong = fixture.hub_with(|settings| settings.token = HubToken::new("hf_other"));
    let error = download(&wrong, "main", &["config.json"]).unwrap_err();
    assert!(matches!(error, HubError::TokenRejected { .. }), "{error:?}");
}

#[test]
fn busy_servers_are_retried() {
    let fixture = Fixture::new();
    let after = vec![("Retry-After".to_owned(), "1".to_owned())];
    fixture.server.misbehave("/api/", 1, Misbehavior::Status(429, after));
    fixture.server.misbehave("config.json", 2, Misbehavior::Status(503, Vec::new()));
    let start = Instant::now();
    fixture.download(&["config.json"]).unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1), "Retry-After was ignored");

    let fixture = Fixture::new();
    fixture.server.misbehave("/api/", 100, Misbehavior::Status(429, Vec::new()));
    let error = fixture.download(&["config.json"]).unwrap_err();
    insta::assert_snapshot!(described(&error, &fixture.server), @r"
    http://hub answered with status 429
    there were too many requests: wait a few minutes; a token (HF_TOKEN) raises the limit.
    exit code 69
    ");
    assert_eq!(fixture.server.requests().len(), 3, "attempts are bounded");
}

#[test]
fn a_stalled_connection_times_out() {
    let fixture = Fixture::new();
    fixture.server.misbehave("config.json", 1, Misbehavior::Stall(Duration::from_secs(5)));
    let start = Instant::now();
    fixture.download(&["config.json"]).unwrap();
    fixture.server.misbehave("/storage/", 1, Misbehavior::StallAfter(100_000, Duration::from_secs(5)));
    let snapshot = fixture.download(&["model.safetensors"]).unwrap();
    assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
    assert!(fixture.server.requests().iter().any(|r| r.range.as_deref() == Some("bytes=100000-")));
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}

#[test]
fn unsafe_file_names_are_refused() {
    for name in ["../../../evil", "/etc/passwd", "a/../b", "a\\b", "a//b", ""] {
        let fixture = Fixture::new();
        fixture.server.add_model("org/name", &[("config.json", b"{}"), (name, b"evil")]);
        let error = fixture.download(&["config.json"]).unwrap_err();
        assert!(matches!(error, HubError::UnsafeFileName { .. }), "{error:?}");
        assert_eq!(error.class().exit_code(), 65);
    }
}

#[test]
fn huge_answers_are_refused() {
    let fixture = Fixture::new();
    let mut settings = fixture.settings();
    settings.limits.json_bytes = 1000;
    fixture.server.misbehave("/api/", 1, Misbehavior::Body(vec![b' '; 5000]));
    let error = download(&Hub::new(settings.clone()).unwrap(), "main", &["config.json"]).unwrap_err();
    assert!(error.to_string().contains("larger than"), "{error}");
    settings.limits.num_files = 1;
    let error = download(&Hub::new(settings).unwrap(), "main", &["config.json"]).unwrap_err();
    assert!(error.to_string().contains("lists 2 files"), "{error}");
    fixture.server.misbehave("/api/", 1, Misbehavior::Body(b"<html>".to_vec()));
    let error = fixture.download(&["config.json"]).unwrap_err();
    assert!(error.to_string().contains("invalid JSON"), "{error}");
}

#[test]
fn offline_nothing_is_requested() {
    let fixture = Fixture::new();
    let offline = || fixture.hub_with(|settings| settings.offline = true);
    let error = download(&offline(), "main", &["config.json"]).unwrap_err();
    let text = described(&error, &fixture.server).replace(&fixture.home.path().display().to_string(), "HOME");
    insta::assert_snapshot!(text, @r"
    model org/name (revision main) is not in the cache HOME/hub, and HF_HUB_OFFLINE is set
    unset HF_HUB_OFFLINE, or run `lockstep download org/name` on a machine with a network and the same cache (HF_HOME).
    exit code 66
    ");
    assert_eq!(fixture.server.requests(), []);
    let snapshot = fixture.download(&["config.json"]).unwrap();
    let before = fixture.server.requests().len();
    assert_eq!(download(&offline(), "main", &["config.json"]).unwrap(), snapshot);
    let commit = snapshot.file_name().unwrap().to_str().unwrap();
    assert_eq!(download(&offline(), commit, &["config.json"]).unwrap(), snapshot);
    let error = download(&offline(), "main", &["config.json", "model.safetensors"]).unwrap_err();
    insta::assert_snapshot!(error.to_string(), @"model org/name is incomplete in the cache, and HF_HUB_OFFLINE is set: model.safetensors missing");
    assert_eq!(fixture.server.requests().len(), before);
}

#[test]
fn offline_an_incomplete_model_is_noticed() {
    let fixture = Fixture::new();
    let index = br#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    let shard = "model-00001-of-00002.safetensors";
    let files: [(&str, &[u8]); 3] =
        [("config.json", b"{}"), ("model.safetensors.index.json", index), (shard, b"x")];
    fixture.server.add_model("org/name", &files);
    let names = ["config.json", "model.safetensors.index.json", shard];
    fixture.download(&names).unwrap();
    let hub = fixture.hub_with(|settings| settings.offline = true);
    let error = download(&hub, "main", &names).unwrap_err();
    assert!(error.to_string().ends_with("model-00002-of-00002.safetensors missing"), "{error}");
}

/// Collects notes.
struct Notes(Vec<String>);

impl DownloadProgress for Notes {
    fn start(&mut self, _: &Repo, num_files: usize, total_bytes: u64) {
        self.0.push(format!("start {num_files} {total_bytes}"));
    }

    fn file(&mut self, name: &str) {
        self.0.push(format!("file {name}"));
    }

    fn position(&mut self, done_bytes: u64) {
        self.0.retain(|line| !line.starts_with("at "));
        self.0.push(format!("at {done_bytes}"));
    }

    fn finish(&mut self) {
        self.0.push("finish".into());
    }

    fn note(&mut self, text: &str) {
        self.0.push(text.into());
    }
}

#[test]
fn progress_counts_files_and_bytes() {
    let fixture = Fixture::new();
    let (hub, mut notes) = (fixture.hub(), Notes(Vec::new()));
    let resolved = hub.resolve(&repo(), "main", &mut notes).unwrap();
    let files: Vec<String> = resolved.file_names().into_iter().map(String::from).collect();
    hub.download(&resolved, &files, &mut notes).unwrap();
    let expected = ["start 2 400003", "file config.json", "file model.safetensors", "at 400003", "finish"];
    assert_eq!(notes.0, expected);
}

#[test]
fn the_cache_serves_when_the_hub_is_unreachable() {
    let fixture = Fixture::new();
    let snapshot = fixture.download(&["config.json"]).unwrap();
    fixture.server.misbehave("/api/", 100, Misbehavior::Status(503, Vec::new()));
    let (hub, mut notes) = (fixture.hub(), Notes(Vec::new()));
    let resolved = hub.resolve(&repo(), "main", &mut notes).unwrap();
    let note = notes.0.pop().unwrap_or_default();
    assert!(note.contains("from the cache"), "{note}");
    assert_eq!(hub.download(&resolved, &["config.json".into()], &mut notes).unwrap(), snapshot);
    let settings = fixture.settings();
    drop(fixture.server);
    let hub = Hub::new(settings).unwrap();
    assert_eq!(download(&hub, "main", &["config.json"]).unwrap(), snapshot, "nobody listens any more");
    let error = download(&hub, "other", &["config.json"]).unwrap_err();
    assert!(matches!(error, HubError::Network { .. }), "{error:?}");
    assert_eq!(error.class().exit_code(), 69);
}

#[test]
fn a_lock_file_without_a_holder_does_not_block() {
    let fixture = Fixture::new();
    let locks = fixture.home.path().join("hub/.locks/models--org--name");
    fs::create_dir_all(&locks).unwrap();
    fs::write(locks.join("0967ef424bce6791893e9a57bb952f80fd536e93.lock"), "").unwrap();
    fixture.download(&["config.json"]).unwrap();
}

#[test]
fn two_downloads_at_once_transfer_each_file_once() {
    let fixture = Fixture::new();
    // Locks of two open files of one process exclude each other as those of two processes do.
    std::thread::scope(|scope| {
        let both = [(); 2].map(|()| scope.spawn(|| fixture.download(&["config.json", "model.safetensors"])));
        for one in both {
            let snapshot = one.join().unwrap().unwrap();
            assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
        }
    });
    assert_eq!(fixture.server.requests().iter().filter(|r| r.path.starts_with("/storage/")).count(), 1);
    assert_eq!(fixture.server.count("config.json"), 1);
}

#[test]
fn a_damaged_blob_is_replaced() {
    let fixture = Fixture::new();
    let snapshot = fixture.download(&["config.json"]).unwrap();
    let blob = fs::canonicalize(snapshot.join("config.json")).unwrap();
    fs::write(&blob, "longer than it should be").unwrap();
    fs::remove_file(snapshot.join("config.json")).unwrap();
    fixture.download(&["config.json"]).unwrap();
    assert_eq!(fs::read(snapshot.join("config.json")).unwrap(), b"{}\n");
}
