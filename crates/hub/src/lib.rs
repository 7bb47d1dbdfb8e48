//! The Hugging Face Hub client: resolves a revision to a commit, downloads files, and writes them into the cache
//! layout that `huggingface_hub` uses, so that both programs share one cache.
//!
//! The server is not trusted. File names are checked before they become paths, answers have a maximum size, and every
//! file is compared with its size and hash before it gets its final name. The token is sent to the endpoint's own host
//! only, also when the endpoint redirects elsewhere.
//!
//! This crate neither prints nor reads the environment, except for the proxy, whose variables the HTTP library reads: the
//! caller passes in what it has read ([`HubSettings`]) and shows the progress ([`DownloadProgress`]). Which files of a data set a run needs is decided by the caller, too.
//!
//! Not implemented: uploads, parallel downloads, and the Xet protocol (its files are served over HTTP as well).

#![forbid(unsafe_code)]

mod api;
mod cache;
mod client;
mod digest;
mod error;
mod http;
mod progress;
mod repo;
mod retry;
mod select;
mod settings;
mod token;
mod transfer;
mod url;

pub use api::RemoteFile;
pub use client::{Hub, ResolvedRepo};
pub use error::HubError;
pub use progress::{DownloadProgress, NoDownloadProgress};
pub use repo::{Repo, RepoKind, looks_like_repo};
pub use retry::RetryPolicy;
pub use select::{ModelFiles, model_files};
pub use settings::{HubHome, HubSettings, Limits};
pub use token::HubToken;
