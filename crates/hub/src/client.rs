//! The client: resolves revisions and downloads files.

use std::path::PathBuf;

use serde_json::Value;

use crate::api::{self, RemoteFile};
use crate::cache::RepoCache;
use crate::digest::{ContentHash, is_safe_etag};
use crate::error::HubError;
use crate::http::{Http, Method, Subject};
use crate::progress::DownloadProgress;
use crate::repo::{Repo, RepoKind, below, check_revision};
use crate::retry::{Backoff, Failed, RetryPolicy};
use crate::select::INDEX;
use crate::settings::HubSettings;
use crate::transfer::Transfer;
use crate::url::{encode, encode_path};

/// With the repository in the cache, an unreachable Hub is not worth a long wait.
const ATTEMPTS_IF_CACHED: u32 = 2;
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// A repository at a commit.
#[derive(Clone, Debug)]
pub struct ResolvedRepo {
    pub repo: Repo,
    /// What was asked for.
    pub revision: String,
    /// What it is.
    pub commit: String,
    /// Sorted by name.
    pub files: Vec<RemoteFile>,
    /// Why nothing can be requested: the files are those of the cache.
    cached: Option<CachedBecause>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CachedBecause {
    Offline,
    Unreachable,
}

impl ResolvedRepo {
    pub fn file_names(&self) -> Vec<&str> {
        self.files.iter().map(RemoteFile::name).collect()
    }
}

/// A client of the Hub.
pub struct Hub {
    http: Http,
    settings: HubSettings,
}

impl Hub {
    pub fn new(settings: HubSettings) -> Result<Hub, HubError> {
        Ok(Hub { http: Http::new(&settings)?, settings })
    }

    pub fn settings(&self) -> &HubSettings {
        &self.settings
    }

    /// Resolves a branch, tag or commit. If the Hub cannot be reached, the commit that was downloaded last serves.
    pub fn resolve(
        &self,
        repo: &Repo,
        revision: &str,
        progress: &mut dyn DownloadProgress,
    ) -> Result<ResolvedRepo, HubError> {
        check_revision(revision)?;
        let cached = self.cache(repo).commit_of(revision);
        if self.settings.offline {
            return match cached {
                Some(commit) => self.resolved_in_cache(repo, revision, commit, CachedBecause::Offline),
                None => Err(HubError::Offline {
                    repo: repo.clone(),
                    revision: revision.into(),
                    cache: self.settings.home.hub.clone(),
                }),
            };
        }
        let attempts = self.settings.retry.attempts;
        let attempts = if cached.is_some() { attempts.min(ATTEMPTS_IF_CACHED) } else { attempts };
        match (self.request_files(repo, revision, attempts, progress), cached) {
            (Ok((commit, files)), _) => Ok(ResolvedRepo {
                repo: repo.clone(),
                revision: revision.into(),
                commit,
                files,
                cached: None,
            }),
            (Err(error), Some(commit)) if error.is_unreachable() => {
                progress.note(&format!("{error}; using {repo} from the cache, commit {}", &commit[..12]));
                self.resolved_in_cache(repo, revision, commit, CachedBecause::Unreachable)
            }
            (Err(error), _) => Err(error),
        }
    }

    /// Downloads `files` of a repository, unless they are in the cache. Returns the snapshot folder.
    pub fn download(
        &self,
        resolved: &ResolvedRepo,
        files: &[String],
        progress: &mut dyn DownloadProgress,
    ) -> Result<PathBuf, HubError> {
        let snapshot = self.fetch(resolved, files, progress)?;
        if resolved.cached.is_none() {
            self.cache(&resolved.repo).write_ref(&resolved.revision, &resolved.commit)?;
        }
        Ok(snapshot)
    }

    /// Downloads `files` without recording the revision: more files follow.
    fn fetch(
        &self,
        resolved: &ResolvedRepo,
        files: &[String],
        progress: &mut dyn DownloadProgress,
    ) -> Result<PathBuf, HubError> {
        let ResolvedRepo { repo, revision, commit, .. } = resolved;
        let cache = self.cache(repo);
        if let Some(because) = resolved.cached {
            self.check_cached(resolved, files, because)?;
            return Ok(cache.snapshot(commit));
        }
        let mut missing = Vec::new();
        for name in files.iter().filter(|name| !cache.has(commit, name)) {
            let listed = resolved.files.iter().find(|file| file.name() == name);
            let file = listed.ok_or_else(|| HubError::FileMissing {
                repo: repo.clone(),
                file: name.clone(),
                revision: revision.clone(),
            })?;
            missing.push(file);
        }
        cache.make_folders(commit)?;
        if !missing.is_empty() {
            let total = missing.iter().filter_map(|file| file.size).sum();
            progress.start(repo, missing.len(), total);
            let mut bytes_before = 0;
            for file in missing {
                progress.file(file.name());
                bytes_before += self.download_file(resolved, file, bytes_before, progress)?;
                progress.position(bytes_before);
            }
            progress.finish();
        }
        Ok(cache.snapshot(commit))
    }

    /// The folder of a repository at a commit, whether it has been downloaded or not.
    pub fn snapshot(&self, repo: &Repo, commit: &str) -> PathBuf {
        self.cache(repo).snapshot(commit)
    }

    /// Downloads a small text file, such as a data set's card, and returns its text. `None` if there is none.
    pub fn read_text(
        &self,
        resolved: &ResolvedRepo,
        name: &str,
        max_bytes: u64,
        progress: &mut dyn DownloadProgress,
    ) -> Result<Option<String>, HubError> {
        let listed = resolved.files.iter().find(|file| file.name() == name);
        if listed.is_none_or(|file| file.size.is_some_and(|size| size > max_bytes)) {
            return Ok(None);
        }
        let path = below(&self.fetch(resolved, &[name.to_owned()], progress)?, name);
        let read = read_limited(&path, max_bytes).map_err(|source| HubError::Read { path, source })?;
        Ok(Some(String::from_utf8_lossy(&read).into_owned()))
    }

    fn cache(&self, repo: &Repo) -> RepoCache {
        RepoCache::new(&self.settings.home.hub, repo)
    }

    /// Asks for the commit of a revision and the files at it.
    fn request_files(
        &self,
        repo: &Repo,
        revision: &str,
        attempts: u32,
        progress: &mut dyn DownloadProgress,
    ) -> Result<(String, Vec<RemoteFile>), HubError> {
        let (kind, name) = (repo.kind().plural(), repo.name());
        // With `blobs`, the answer has the size and the hash of every file.
        let url = self.http.url(&format!("/api/{kind}/{name}/revision/{}?blobs=true", encode(revision)))?;
        let subject = Subject { repo, revision, file: None };
        let limits = self.settings.limits;
        let mut backoff = Backoff::new(RetryPolicy { attempts, ..self.settings.retry });
        loop {
            let answer = self.http.send(Method::Get, &url, None, subject);
            match answer.and_then(|answer| self.http.read_limited(answer, limits.json_bytes)) {
                Ok(json) => {
                    return api::parse(repo, &self.http.endpoint().origin(), &json, limits.num_files);
                }
                Err(Failed::Transient(failed)) => backoff.wait(*failed, progress)?,
                Err(Failed::Permanent(error)) => return Err(error),
            }
        }
    }

    fn resolved_in_cache(
        &self,
        repo: &Repo,
        revision: &str,
        commit: String,
        because: CachedBecause,
    ) -> Result<ResolvedRepo, HubError> {
        let names = self.cache(repo).files(&commit)?;
        let files = names.iter().map(|name| RemoteFile::named(repo, name)).collect::<Result<_, _>>()?;
        let (repo, revision) = (repo.clone(), revision.to_owned());
        Ok(ResolvedRepo { repo, revision, commit, files, cached: Some(because) })
    }

    /// Checks that the cache has all that is needed, since the list of files is the cache's own.
    fn check_cached(
        &self,
        resolved: &ResolvedRepo,
        files: &[String],
        because: CachedBecause,
    ) -> Result<(), HubError> {
        let (repo, cache) = (&resolved.repo, self.cache(&resolved.repo));
        let mut needed = files.to_vec();
        if repo.kind() == RepoKind::Model && files.iter().any(|name| name == INDEX) {
            needed.extend(shards(&below(&cache.snapshot(&resolved.commit), INDEX)));
        }
        needed.sort();
        needed.dedup();
        needed.retain(|name| !cache.has(&resolved.commit, name));
        match needed.is_empty() {
            true => Ok(()),
            false => Err(HubError::Incomplete {
                repo: repo.clone(),
                revision: resolved.revision.clone(),
                files: needed,
                offline: because == CachedBecause::Offline,
            }),
        }
    }

    /// Downloads one file and returns its size.
    fn download_file(
        &self,
        resolved: &ResolvedRepo,
        file: &RemoteFile,
        bytes_before: u64,
        progress: &mut dyn DownloadProgress,
    ) -> Result<u64, HubError> {
        let ResolvedRepo { repo, commit, .. } = resolved;
        let kind = match repo.kind() {
            RepoKind::Model => "",
            RepoKind::Dataset => "datasets/",
        };
        let url = format!("/{kind}{}/resolve/{commit}/{}", repo.name(), encode_path(file.name()));
        let url = self.http.url(&url)?;
        let subject = Subject { repo, revision: commit, file: Some(file.name()) };
        let (etag, size) = match (&file.hash, file.size) {
            (Some(hash), Some(size)) => (hash.hex().to_owned(), Some(size)),
            _ => self.request_etag(&url, subject, progress)?,
        };
        let hash = file.hash.clone().or_else(|| ContentHash::from_etag(&etag));
        let cache = self.cache(repo);
        let lock = cache.lock(&etag, progress)?;
        let transfer = Transfer {
            http: &self.http,
            cache: &cache,
            subject,
            file: file.name(),
            url,
            etag: &etag,
            size,
            hash: hash.as_ref(),
            retry: self.settings.retry,
            bytes_before,
        };
        transfer.run(progress)?;
        cache.link(commit, file.name(), &etag)?;
        drop(lock);
        Ok(cache.blob(&etag).metadata().map_or(0, |found| found.len()))
    }

    /// Asks for the ETag and the size of a file that the list of files does not have: mirrors leave them out.
    fn request_etag(
        &self,
        url: &crate::url::Url,
        subject: Subject<'_>,
        progress: &mut dyn DownloadProgress,
    ) -> Result<(String, Option<u64>), HubError> {
        let mut backoff = Backoff::new(self.settings.retry);
        loop {
            match self.http.send(Method::Head, url, None, subject) {
                Ok(answer) => {
                    let size = answer.linked_size.or(answer.body.content_length());
                    return match answer.etag.filter(|etag| is_safe_etag(etag)) {
                        Some(etag) => Ok((etag, size)),
                        None => Err(HubError::BadAnswer {
                            origin: answer.origin,
                            why: "it has no ETag for the file".into(),
                        }),
                    };
                }
                Err(Failed::Transient(failed)) => backoff.wait(*failed, progress)?,
                Err(Failed::Permanent(error)) => return Err(error),
            }
        }
    }
}

/// The names of the shards that an index of weights lists. Reading the model reports an index that is damaged.
fn shards(index: &std::path::Path) -> Vec<String> {
    let json = read_limited(index, MAX_INDEX_BYTES).ok();
    let index: Option<Value> = json.and_then(|json| serde_json::from_slice(&json).ok());
    let map = index.as_ref().and_then(|index| index.get("weight_map")?.as_object());
    let names = map.into_iter().flat_map(|map| map.values()).filter_map(Value::as_str);
    names.filter(|name| crate::repo::file_name_problem(name).is_none()).map(String::from).collect()
}

fn read_limited(path: &std::path::Path, max_bytes: u64) -> std::io::Result<Vec<u8>> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(max_bytes).read_to_end(&mut bytes)?;
    Ok(bytes)
}
