//! A stand-in for the Hugging Face Hub: a small HTTP server on the loopback that serves repositories from memory, and
//! misbehaves on request.
//!
//! It answers like the Hub: `/api/{models,datasets}/NAME/revision/REVISION`, and `/NAME/resolve/COMMIT/FILE` with
//! `X-Linked-Etag` and a redirect to a storage path for large files. A second stand-in can be that storage host.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::json;
use sha1::{Digest as _, Sha1};
use sha2::Sha256;

/// Connections that send nothing are closed, so that no test hangs.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The size of the text that stands for a large file in git.
const POINTER_BYTES: u64 = 134;

/// What the stand-in does wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misbehavior {
    /// Close the connection after so many bytes of a file.
    CutAfter(usize),
    /// Send one byte less than the file has, as if that were all.
    TooShort,
    /// Send a file in which one byte is changed.
    Corrupt,
    /// Send the whole file although a part was requested.
    IgnoreRange,
    /// Send nothing for so long, then close the connection.
    Stall(Duration),
    /// Send so many bytes of a file, then nothing for so long, then close the connection.
    StallAfter(usize, Duration),
    /// Answer with a status and headers.
    Status(u16, Vec<(String, String)>),
    /// Redirect to an address.
    Redirect(String),
    /// Answer with this body.
    Body(Vec<u8>),
}

/// A request that the stand-in has received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenRequest {
    pub method: String,
    pub path: String,
    pub authorization: Option<String>,
    pub range: Option<String>,
}

#[derive(Clone)]
struct StoredFile {
    content: Arc<Vec<u8>>,
    large: bool,
    etag: String,
}

struct StoredRepo {
    commit: String,
    files: BTreeMap<String, StoredFile>,
}

#[derive(Default)]
struct State {
    /// By `models/NAME` or `datasets/NAME`.
    repos: BTreeMap<String, StoredRepo>,
    /// By hash.
    storage: BTreeMap<String, Arc<Vec<u8>>>,
    /// How often to misbehave for paths that contain a text.
    misbehaviors: Vec<(String, usize, Misbehavior)>,
    requests: Vec<SeenRequest>,
    /// Where large files are stored; this server if `None`.
    storage_endpoint: Option<String>,
    /// The token without which every request is refused.
    required_token: Option<String>,
    /// Leave sizes and hashes out of lists, as some mirrors do.
    hide_blobs: bool,
}

/// A running stand-in. Dropping it stops it.
pub struct HubStandIn {
    addr: SocketAddr,
    state: Arc<Mutex<State>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HubStandIn {
    pub fn start() -> HubStandIn {
        let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback has a free port");
        let addr = listener.local_addr().expect("a bound socket has an address");
        let state = Arc::new(Mutex::new(State::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, stopped) = (Arc::clone(&state), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let (Ok(stream), state) = (stream, Arc::clone(&shared)) else { continue };
                std::thread::spawn(move || Connection { stream, state, addr }.serve());
            }
        });
        HubStandIn { addr, state, stop, thread: Some(thread) }
    }

    /// The value for `HF_ENDPOINT`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Adds a model with these files and returns its commit.
    pub fn add_model(&self, name: &str, files: &[(&str, &[u8])]) -> String {
        self.add("models", name, files)
    }

    /// Adds a data set with these files and returns its commit.
    pub fn add_dataset(&self, name: &str, files: &[(&str, &[u8])]) -> String {
        self.add("datasets", name, files)
    }

    /// Adds a model with the files in a folder and below.
    pub fn add_model_folder(&self, name: &str, folder: &Path) -> String {
        self.add_folder("models", name, folder)
    }

    /// Adds a data set with the files in a folder and below.
    pub fn add_dataset_folder(&self, name: &str, folder: &Path) -> String {
        self.add_folder("datasets", name, folder)
    }

    /// Misbehaves for the next `times` requests whose path contains `path`.
    pub fn misbehave(&self, path: &str, times: usize, how: Misbehavior) {
        self.state().misbehaviors.push((path.into(), times, how));
    }

    /// Redirects requests for large files to `other`, which gets them.
    pub fn store_on(&self, other: &HubStandIn) {
        let mut state = self.state();
        state.storage_endpoint = Some(other.endpoint());
        other.state().storage.append(&mut state.storage);
    }

    /// Refuses every request without this token.
    pub fn require_token(&self, token: &str) {
        self.state().required_token = Some(token.into());
    }

    /// Leaves sizes and hashes out of lists of files.
    pub fn hide_blobs(&self) {
        self.state().hide_blobs = true;
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<SeenRequest> {
        self.state().requests.clone()
    }

    /// The number of GET requests so far whose path ends with `end`.
    pub fn count(&self, end: &str) -> usize {
        self.state().requests.iter().filter(|r| r.method == "GET" && r.path.ends_with(end)).count()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn add_folder(&self, kind: &str, name: &str, folder: &Path) -> String {
        let mut files = Vec::new();
        let mut open = vec![folder.to_path_buf()];
        while let Some(dir) = open.pop() {
            for entry in dir.read_dir().expect("the folder is readable") {
                let path = entry.expect("the folder is readable").path();
                if path.is_dir() {
                    open.push(path);
                } else {
                    let below = path.strip_prefix(folder).expect("it was found there").to_string_lossy();
                    files.push((below.into_owned(), std::fs::read(&path).expect("the file is readable")));
                }
            }
        }
        files.sort();
        let files: Vec<(&str, &[u8])> = files.iter().map(|(name, c)| (name.as_str(), c.as_slice())).collect();
        self.add(kind, name, &files)
    }

    fn add(&self, kind: &str, name: &str, files: &[(&str, &[u8])]) -> String {
        let mut state = self.state();
        let mut hasher = Sha1::new();
        let mut stored = BTreeMap::new();
        for (file, content) in files {
            hasher.update(file.as_bytes());
            hasher.update(content);
            let large = [".safetensors", ".parquet", ".bin"].iter().any(|end| file.ends_with(end));
            let etag = match large {
                true => hex(&Sha256::digest(content)),
                false => {
                    let blob = Sha1::new().chain_update(format!("blob {}\0", content.len()));
                    hex(&blob.chain_update(content).finalize())
                }
            };
            let content = Arc::new(content.to_vec());
            if large {
                state.storage.insert(etag.clone(), Arc::clone(&content));
            }
            stored.insert(file.to_string(), StoredFile { content, large, etag });
        }
        let commit = hex(&hasher.finalize());
        state.repos.insert(format!("{kind}/{name}"), StoredRepo { commit: commit.clone(), files: stored });
        commit
    }
}

impl Drop for HubStandIn {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.addr);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Connection {
    stream: TcpStream,
    state: Arc<Mutex<State>>,
    addr: SocketAddr,
}

struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Arc<Vec<u8>>,
    /// Close the connection after so many bytes of the body.
    cut_after: Option<usize>,
    /// How long to wait before that.
    stall: Duration,
}

impl Reply {
    fn new(status: u16, headers: &[(&str, &str)], body: Vec<u8>) -> Reply {
        let headers = headers.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        Reply { status, headers, body: Arc::new(body), cut_after: None, stall: Duration::ZERO }
    }

    fn error(status: u16, code: &str) -> Reply {
        Reply::new(status, &[("X-Error-Code", code), ("X-Error-Message", code)], Vec::new())
    }
}

impl Connection {
    /// Answers requests until the client or a misbehavior closes the connection.
    fn serve(mut self) {
        let _ = self.stream.set_read_timeout(Some(READ_TIMEOUT));
        let Ok(clone) = self.stream.try_clone() else { return };
        let mut reader = BufReader::new(clone);
        while let Some(request) = read_request(&mut reader) {
            lock(&self.state).requests.push(request.clone());
            let Some(reply) = self.reply(&request) else { return };
            let is_cut = reply.cut_after.is_some();
            if self.write(&request, &reply).is_err() || is_cut {
                return;
            }
        }
    }

    /// `None` closes the connection.
    fn reply(&self, request: &SeenRequest) -> Option<Reply> {
        let path = request.path.split('?').next().unwrap_or_default();
        let misbehavior = self.next_misbehavior(path);
        let required = lock(&self.state).required_token.clone();
        if required.is_some_and(|token| request.authorization != Some(format!("Bearer {token}"))) {
            return Some(Reply::error(401, "Unauthorized"));
        }
        match misbehavior {
            Some(Misbehavior::Stall(time)) => {
                std::thread::sleep(time);
                None
            }
            Some(Misbehavior::Status(status, headers)) => {
                Some(Reply { headers, ..Reply::new(status, &[], Vec::new()) })
            }
            Some(Misbehavior::Redirect(to)) => Some(Reply::new(302, &[("Location", &to)], Vec::new())),
            Some(Misbehavior::Body(body)) => Some(Reply::new(200, &[], body)),
            other => Some(self.proper_reply(request, path, other)),
        }
    }

    fn next_misbehavior(&self, path: &str) -> Option<Misbehavior> {
        let mut state = lock(&self.state);
        let (_, left, how) = state
            .misbehaviors
            .iter_mut()
            .find(|(part, left, _)| *left > 0 && path.contains(part.as_str()))?;
        *left -= 1;
        Some(how.clone())
    }

    fn proper_reply(&self, request: &SeenRequest, path: &str, wrong: Option<Misbehavior>) -> Reply {
        let state = lock(&self.state);
        if let Some(hash) = path.strip_prefix("/storage/") {
            return match state.storage.get(hash) {
                Some(content) => file_reply(content, hash, request, wrong),
                None => Reply::error(403, "AccessDenied"),
            };
        }
        if let Some((name, _)) = path.strip_prefix("/api/").and_then(|rest| rest.split_once("/tree/")) {
            return match state.repos.get(name) {
                None => Reply::error(404, "RepoNotFound"),
                Some(repo) => Reply::new(200, &[], tree(repo)),
            };
        }
        if let Some((name, _)) = path.strip_prefix("/api/").and_then(|rest| rest.split_once("/revision/")) {
            let revision = path.rsplit('/').next().unwrap_or_default();
            return match state.repos.get(name) {
                None => Reply::error(404, "RepoNotFound"),
                Some(repo) if revision != "main" && revision != repo.commit => {
                    Reply::error(404, "RevisionNotFound")
                }
                Some(repo) => Reply::new(200, &[], list(name, repo, state.hide_blobs)),
            };
        }
        let Some((name, rest)) = path.trim_start_matches('/').split_once("/resolve/") else {
            return Reply::error(404, "RepoNotFound");
        };
        let key = if name.starts_with("datasets/") { name.to_owned() } else { format!("models/{name}") };
        let file = rest.split_once('/').map_or("", |(_, file)| file).replace("%20", " ");
        let Some(repo) = state.repos.get(&key) else { return Reply::error(404, "RepoNotFound") };
        let mut reply = match repo.files.get(&file) {
            None => return Reply::error(404, "EntryNotFound"),
            Some(file) if file.large => {
                let here = format!("http://{}", self.addr);
                let host = state.storage_endpoint.as_ref().unwrap_or(&here);
                let location = format!("{host}/storage/{}", file.etag);
                let (etag, size) = (format!("\"{}\"", file.etag), file.content.len().to_string());
                let headers = [("Location", &*location), ("X-Linked-Etag", &etag), ("X-Linked-Size", &size)];
                Reply::new(302, &headers, Vec::new())
            }
            Some(file) => file_reply(&file.content, &file.etag, request, wrong),
        };
        reply.headers.push(("X-Repo-Commit".into(), repo.commit.clone()));
        reply
    }

    fn write(&mut self, request: &SeenRequest, reply: &Reply) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} X\r\nContent-Length: {}\r\n", reply.status, reply.body.len());
        for (name, value) in &reply.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        self.stream.write_all(format!("{head}\r\n").as_bytes())?;
        if request.method != "HEAD" {
            let end = reply.cut_after.unwrap_or(reply.body.len()).min(reply.body.len());
            self.stream.write_all(&reply.body[..end])?;
        }
        self.stream.flush()?;
        std::thread::sleep(reply.stall);
        Ok(())
    }
}

/// The list of a repository's files, as the Hub's API sends it.
fn list(name: &str, repo: &StoredRepo, hide_blobs: bool) -> Vec<u8> {
    let file = |(name, file): (&String, &StoredFile)| {
        let size = file.content.len();
        match (hide_blobs, file.large) {
            (true, _) => json!({ "rfilename": name }),
            (false, true) => {
                let lfs = json!({ "sha256": file.etag, "size": size, "pointerSize": POINTER_BYTES });
                json!({ "rfilename": name, "size": size, "lfs": lfs })
            }
            (false, false) => json!({ "rfilename": name, "size": size, "blobId": file.etag }),
        }
    };
    let files: Vec<_> = repo.files.iter().map(file).collect();
    let id = name.split_once('/').map_or(name, |(_, id)| id);
    json!({ "id": id, "sha": repo.commit, "private": false, "siblings": files }).to_string().into_bytes()
}

/// The same list in the form that `huggingface_hub` asks for.
fn tree(repo: &StoredRepo) -> Vec<u8> {
    let file = |(name, file): (&String, &StoredFile)| {
        let size = file.content.len();
        let mut entry = json!({ "type": "file", "path": name, "oid": "0".repeat(40), "size": size });
        match file.large {
            true => entry["lfs"] = json!({ "oid": file.etag, "size": size, "pointerSize": POINTER_BYTES }),
            false => entry["oid"] = file.etag.as_str().into(),
        }
        entry
    };
    json!(repo.files.iter().map(file).collect::<Vec<_>>()).to_string().into_bytes()
}

/// A file, or the requested part of it.
fn file_reply(
    content: &Arc<Vec<u8>>,
    etag: &str,
    request: &SeenRequest,
    wrong: Option<Misbehavior>,
) -> Reply {
    let range = request.range.as_ref().filter(|_| wrong != Some(Misbehavior::IgnoreRange));
    let start =
        range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let etag = format!("\"{etag}\"");
    let mut reply = match start {
        None => Reply::new(200, &[("ETag", &etag)], content.to_vec()),
        Some(start) if start >= content.len() => Reply::error(416, "RangeNotSatisfiable"),
        Some(start) => {
            let range = format!("bytes {start}-{}/{}", content.len() - 1, content.len());
            Reply::new(206, &[("ETag", &etag), ("Content-Range", &range)], content[start..].to_vec())
        }
    };
    match wrong {
        Some(Misbehavior::CutAfter(bytes)) => reply.cut_after = Some(bytes),
        Some(Misbehavior::StallAfter(bytes, time)) => (reply.cut_after, reply.stall) = (Some(bytes), time),
        Some(Misbehavior::TooShort) => _ = Arc::make_mut(&mut reply.body).pop(),
        Some(Misbehavior::Corrupt) => {
            if let Some(byte) = Arc::make_mut(&mut reply.body).first_mut() {
                *byte ^= 1;
            }
        }
        _ => {}
    }
    reply
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<SeenRequest> {
    const MAX_LINE_BYTES: u64 = 64 << 10;
    let mut line = String::new();
    let mut next = |line: &mut String| {
        line.clear();
        reader.by_ref().take(MAX_LINE_BYTES).read_line(line).ok().filter(|read| *read > 0)
    };
    next(&mut line)?;
    let mut words = line.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut request = SeenRequest { method, path, authorization: None, range: None };
    loop {
        next(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { return Some(request) };
        let value = Some(value.trim().to_owned());
        match name.to_ascii_lowercase().as_str() {
            "authorization" => request.authorization = value,
            "range" => request.range = value,
            _ => {}
        }
    }
}
