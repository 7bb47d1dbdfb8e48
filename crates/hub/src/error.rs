//! Why something could not be downloaded. Every message says what, where and why; the hint says what to do. No message
//! contains the token or the query of a URL, which may hold a signature.

use std::io;
use std::path::PathBuf;

use lockstep_core::{Fault, FaultClass};

use crate::repo::{Repo, RepoKind};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    #[error("`{name}` is not the name of a Hub repository: {why}")]
    BadName { name: String, why: &'static str },
    #[error("`{revision}` is not a valid revision")]
    BadRevision { revision: String },
    #[error("HF_ENDPOINT is `{value}`, which is not an http or https address")]
    BadEndpoint { value: String },
    #[error("the token in {source_name} contains characters that a token cannot have")]
    BadToken { source_name: String },
    #[error("cannot use the certificates in {}: {why}", path.display())]
    BadCertificates { path: PathBuf, why: String },

    #[error("the Hub rejected the token (status {status}) while reading {repo}")]
    TokenRejected { repo: Repo, status: u16 },
    #[error("{repo} is gated: its owners decide who may download it")]
    Gated { repo: Repo, page: String, had_token: bool },
    #[error("access to {repo} is denied{}", Reason(message))]
    Forbidden { repo: Repo, message: String, had_token: bool },
    #[error("{repo} was not found at {endpoint}")]
    RepoMissing { repo: Repo, endpoint: String, had_token: bool },
    #[error("{repo} has no revision `{revision}`")]
    RevisionMissing { repo: Repo, revision: String },
    #[error("{repo} has no file {file} at revision {revision}")]
    FileMissing { repo: Repo, file: String, revision: String },

    #[error("{origin} answered with status {status}{}", Reason(message))]
    Status { origin: String, status: u16, message: String },
    #[error("cannot download from {origin}: {cause}")]
    Network { origin: String, cause: String },
    #[error("{origin} redirects in circles, or more than {limit} times")]
    TooManyRedirects { origin: String, limit: usize },
    #[error("{origin} redirects to {target}: {why}")]
    BadRedirect { origin: String, target: String, why: &'static str },
    #[error("the answer of {origin} cannot be used: {why}")]
    BadAnswer { origin: String, why: String },

    #[error("{repo} contains a file with the unsafe name {name:?}: {why}")]
    UnsafeFileName { repo: Repo, name: String, why: &'static str },
    #[error("{file} of {repo} has {found} bytes, expected {expected}")]
    WrongSize { repo: Repo, file: String, expected: u64, found: u64 },
    #[error("{file} of {repo} has the {kind} {found}, expected {expected}")]
    WrongHash { repo: Repo, file: String, kind: &'static str, expected: String, found: String },
    #[error("{repo} has pickled weights only: {}", files.join(", "))]
    PickledWeights { repo: Repo, files: Vec<String> },
    #[error("{repo} has no safetensors weights")]
    NoWeights { repo: Repo },
    #[error("{repo} has no config.json, so it is not a Transformers model")]
    NoConfig { repo: Repo },

    #[error("{repo} (revision {revision}) is not in the cache {}, and HF_HUB_OFFLINE is set", cache.display())]
    Offline { repo: Repo, revision: String, cache: PathBuf },
    #[error("{repo} is incomplete in the cache{}: {} missing", offline_note(*offline), files.join(", "))]
    Incomplete { repo: Repo, revision: String, files: Vec<String>, offline: bool },

    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
}

fn offline_note(offline: bool) -> &'static str {
    if offline { ", and HF_HUB_OFFLINE is set" } else { ", and the Hub cannot be reached" }
}

/// What the server says, if it says something.
struct Reason<'a>(&'a str);

impl std::fmt::Display for Reason<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ": {}", self.0) }
    }
}

impl HubError {
    /// Whether the Hub could not be reached, so that the cache may serve instead.
    pub(crate) fn is_unreachable(&self) -> bool {
        match self {
            HubError::Network { .. } => true,
            HubError::Status { status, .. } => *status >= 500 || *status == 429,
            _ => false,
        }
    }

    fn access_hint(&self) -> Option<String> {
        const SET_TOKEN: &str =
            "set HF_TOKEN to a token of an account that has access, or log in with `hf auth login`.";
        Some(match self {
            HubError::TokenRejected { .. } => {
                "create a new token at https://huggingface.co/settings/tokens and set HF_TOKEN to it. Public \
                 repositories need no token: unset HF_TOKEN."
                    .into()
            }
            HubError::Gated { page, had_token: true, .. } => format!(
                "visit {page} with the account of your token, accept the conditions, and wait for access. A \
                 fine-grained token also needs the permission to read gated repositories."
            ),
            HubError::Gated { page, .. } => {
                format!("visit {page}, accept the conditions, and set HF_TOKEN to a token of that account.")
            }
            HubError::Forbidden { had_token: true, .. } => {
                "use a token with read access to this repository.".into()
            }
            HubError::Forbidden { .. } => SET_TOKEN.into(),
            HubError::RepoMissing { had_token: true, .. } => {
                "check the spelling. If it is private, the account of your token needs access to it. To use a \
                 folder on this machine, write its path, such as ./folder."
                    .into()
            }
            HubError::RepoMissing { .. } => format!(
                "check the spelling. If it is private, {SET_TOKEN} To use a folder on this machine, write its \
                 path, such as ./folder."
            ),
            _ => return None,
        })
    }

    fn offline_hint(&self) -> Option<String> {
        let (repo, revision, offline) = match self {
            HubError::Offline { repo, revision, .. } => (repo, revision.as_str(), true),
            HubError::Incomplete { repo, revision, offline, .. } => (repo, revision.as_str(), *offline),
            _ => return None,
        };
        let kind = match repo.kind() {
            RepoKind::Model => "",
            RepoKind::Dataset => " --repo-type dataset",
        };
        let revision = if revision == "main" { String::new() } else { format!(" --revision {revision}") };
        let command = format!("lockstep download {}{kind}{revision}", repo.name());
        Some(match offline {
            true => format!(
                "unset HF_HUB_OFFLINE, or run `{command}` on a machine with a network and the same cache (HF_HOME)."
            ),
            false => format!("run `{command}` when the network is back."),
        })
    }
}

impl Fault for HubError {
    fn class(&self) -> FaultClass {
        match self {
            HubError::BadName { .. }
            | HubError::BadRevision { .. }
            | HubError::BadEndpoint { .. }
            | HubError::BadCertificates { .. } => FaultClass::BadConfig,
            HubError::BadToken { .. }
            | HubError::TokenRejected { .. }
            | HubError::Gated { .. }
            | HubError::Forbidden { .. } => FaultClass::NotAuthorised,
            HubError::RepoMissing { .. }
            | HubError::RevisionMissing { .. }
            | HubError::FileMissing { .. }
            | HubError::Offline { .. }
            | HubError::Incomplete { .. } => FaultClass::InputMissing,
            HubError::Status { .. }
            | HubError::Network { .. }
            | HubError::TooManyRedirects { .. }
            | HubError::BadRedirect { .. } => FaultClass::Unavailable,
            HubError::BadAnswer { .. }
            | HubError::UnsafeFileName { .. }
            | HubError::WrongSize { .. }
            | HubError::WrongHash { .. }
            | HubError::PickledWeights { .. }
            | HubError::NoWeights { .. }
            | HubError::NoConfig { .. } => FaultClass::BadData,
            HubError::Write { .. } => FaultClass::CannotWrite,
            HubError::Read { .. } => FaultClass::InputMissing,
        }
    }

    fn hint(&self) -> Option<String> {
        let text = match self {
            HubError::BadName { .. } => "names look like `org/name`; a path begins with `./` or `/`.".into(),
            HubError::BadRevision { .. } => "give a branch, a tag or a commit hash.".into(),
            HubError::BadEndpoint { .. } => "unset it, or set it to an address such as https://huggingface.co.".into(),
            HubError::BadToken { .. } => "write the token alone, without quotes or spaces.".into(),
            HubError::BadCertificates { .. } => {
                "set SSL_CERT_FILE to a file with certificates in PEM format, or unset it.".into()
            }
            HubError::RevisionMissing { .. } => "check the branches and tags on the repository's page.".into(),
            HubError::Status { status: 429, .. } => {
                "there were too many requests: wait a few minutes; a token (HF_TOKEN) raises the limit.".into()
            }
            HubError::Status { status: 500.., .. } => "try again later: finished parts are kept.".into(),
            HubError::Network { .. } => "check the network connection and HF_ENDPOINT, then run the command again: \
                                         finished parts are kept. Behind a proxy, set HTTPS_PROXY; without a \
                                         network, set HF_HUB_OFFLINE=1."
                .into(),
            HubError::TooManyRedirects { .. } | HubError::BadRedirect { .. } | HubError::BadAnswer { .. } => {
                "check HF_ENDPOINT and the proxy: this is not how the Hub answers.".into()
            }
            HubError::UnsafeFileName { .. } => "do not use this repository.".into(),
            HubError::WrongSize { .. } | HubError::WrongHash { .. } => {
                "the file was damaged twice on its way: run the command again, without a proxy that changes files."
                    .into()
            }
            HubError::PickledWeights { .. } => "pickled files can run code when they are loaded, so they are not \
                                                supported. Convert the model, in Python: \
                                                AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(FOLDER, \
                                                safe_serialization=True); or look for a revision with safetensors."
                .into(),
            HubError::NoWeights { .. } => {
                "use a repository with *.safetensors files; GGUF and ONNX files cannot be trained.".into()
            }
            HubError::NoConfig { .. } => "use a repository in the Transformers format.".into(),
            HubError::Write { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                "the disk is full: free some space, or set HF_HOME to a folder on another disk.".into()
            }
            HubError::Write { .. } => "set HF_HOME to a folder that you can write.".into(),
            HubError::Offline { .. } | HubError::Incomplete { .. } => return self.offline_hint(),
            _ => return self.access_hint(),
        };
        Some(text)
    }
}
