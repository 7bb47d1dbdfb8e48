//! Downloads one file into the cache: resumes what is there, checks size and hash, and only then gives the file its
//! final name.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use lockstep_core::Bytes;

use crate::cache::{RepoCache, writing};
use crate::digest::ContentHash;
use crate::error::HubError;
use crate::http::{Answer, Http, Method, Subject, cut};
use crate::progress::DownloadProgress;
use crate::retry::{Backoff, Failed, RetryPolicy, Transient, WORTHWHILE_BYTES};
use crate::url::Url;

const BUFFER_BYTES: usize = 256 << 10;

/// A file to download.
pub(crate) struct Transfer<'a> {
    pub(crate) http: &'a Http,
    pub(crate) cache: &'a RepoCache,
    pub(crate) subject: Subject<'a>,
    pub(crate) file: &'a str,
    pub(crate) url: Url,
    pub(crate) etag: &'a str,
    pub(crate) size: Option<u64>,
    pub(crate) hash: Option<&'a ContentHash>,
    pub(crate) retry: RetryPolicy,
    /// The bytes of the files before this one, for the progress.
    pub(crate) bytes_before: u64,
}

impl Transfer<'_> {
    /// Downloads the blob, unless it is in the cache. The caller holds the lock.
    pub(crate) fn run(&self, progress: &mut dyn DownloadProgress) -> Result<(), HubError> {
        let blob = self.cache.blob(self.etag);
        if let Ok(found) = blob.metadata() {
            if found.is_file() && self.size.is_none_or(|size| size == found.len()) {
                return Ok(());
            }
            // Verified when it was written, and damaged since.
            fs::remove_file(&blob).map_err(writing(&blob))?;
        }
        let mut backoff = Backoff::new(self.retry);
        let mut was_damaged = false;
        loop {
            let before = self.downloaded();
            let outcome = self.attempt(progress).and_then(|()| self.verify().map_err(Failed::from));
            match outcome {
                Ok(()) => {
                    let incomplete = self.cache.incomplete(self.etag);
                    return fs::rename(&incomplete, &blob).map_err(writing(&blob));
                }
                Err(Failed::Transient(failed)) => {
                    if self.downloaded() >= before + WORTHWHILE_BYTES {
                        backoff.reset();
                    }
                    backoff.wait(*failed, progress)?;
                }
                Err(Failed::Permanent(error @ (HubError::WrongSize { .. } | HubError::WrongHash { .. }))) => {
                    let incomplete = self.cache.incomplete(self.etag);
                    fs::remove_file(&incomplete).map_err(writing(&incomplete))?;
                    if std::mem::replace(&mut was_damaged, true) {
                        return Err(error);
                    }
                    progress.note(&format!("{error}; downloading it again"));
                }
                Err(Failed::Permanent(error)) => return Err(error),
            }
        }
    }

    fn downloaded(&self) -> u64 {
        self.cache.incomplete(self.etag).metadata().map_or(0, |found| found.len())
    }

    /// One request. What arrives is kept, also if the connection breaks.
    fn attempt(&self, progress: &mut dyn DownloadProgress) -> Result<(), Failed> {
        let path = self.cache.incomplete(self.etag);
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(writing(&path))?;
        let mut done = file.seek(SeekFrom::End(0)).map_err(writing(&path))?;
        if self.size.is_some_and(|size| done > size) {
            done = start_anew(&mut file, &path)?;
        }
        if self.size != Some(done) || done == 0 {
            let answer = self.http.send(Method::Get, &self.url, (done > 0).then_some(done), self.subject);
            let answer = match answer {
                // The range is not there: what we have does not belong to this file.
                Err(Failed::Permanent(HubError::Status { status: 416, .. })) if done > 0 => {
                    start_anew(&mut file, &path)?;
                    self.http.send(Method::Get, &self.url, None, self.subject)?
                }
                answer => answer?,
            };
            if answer.status != 206 || answer.range_start != Some(done) {
                if answer.status == 206 {
                    start_anew(&mut file, &path)?;
                    return Err(self.broken(&answer.origin, "the server sent another range than requested"));
                }
                // The server ignores ranges and sends the file from its start.
                done = start_anew(&mut file, &path)?;
            }
            self.receive(answer, &mut file, done, progress)?;
        }
        file.sync_all().map_err(writing(&path))?;
        Ok(())
    }

    fn receive(
        &self,
        answer: Answer,
        file: &mut File,
        mut done: u64,
        progress: &mut dyn DownloadProgress,
    ) -> Result<(), Failed> {
        let path = self.cache.incomplete(self.etag);
        let announced = answer.body.content_length().map(|length| done + length);
        if let (Some(size), Some(found)) = (self.size, announced)
            && size != found
        {
            return Err(self.wrong_size(size, found).into());
        }
        let mut reader = answer.body.into_with_config().limit(u64::MAX).reader();
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let length = match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => length,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(cut(&answer.origin, &e)),
            };
            done += length as u64;
            if let Some(size) = self.size.filter(|size| done > *size) {
                return Err(self.wrong_size(size, done).into());
            }
            file.write_all(&buffer[..length]).map_err(writing(&path))?;
            progress.position(self.bytes_before + done);
        }
        match self.size.or(announced) {
            Some(size) if done < size => Err(self.broken(
                &answer.origin,
                &format!("the connection closed after {} of {}", Bytes(done), Bytes(size)),
            )),
            _ => Ok(()),
        }
    }

    fn verify(&self) -> Result<(), HubError> {
        let path = self.cache.incomplete(self.etag);
        let reading = |source| HubError::Read { path: path.clone(), source };
        let found = path.metadata().map_err(reading)?.len();
        if let Some(size) = self.size.filter(|size| *size != found) {
            return Err(self.wrong_size(size, found));
        }
        let Some(expected) = self.hash else { return Ok(()) };
        let found = expected.of_file(&path).map_err(reading)?;
        if found == expected.hex() {
            return Ok(());
        }
        Err(HubError::WrongHash {
            repo: self.subject.repo.clone(),
            file: self.file.into(),
            kind: expected.kind(),
            expected: expected.hex().into(),
            found,
        })
    }

    fn wrong_size(&self, expected: u64, found: u64) -> HubError {
        let (repo, file) = (self.subject.repo.clone(), self.file.to_owned());
        HubError::WrongSize { repo, file, expected, found }
    }

    fn broken(&self, origin: &str, cause: &str) -> Failed {
        let error = HubError::Network { origin: origin.into(), cause: cause.into() };
        Failed::Transient(Box::new(Transient { error, retry_after: None }))
    }
}

fn start_anew(file: &mut File, path: &Path) -> Result<u64, HubError> {
    file.set_len(0).and_then(|()| file.rewind()).map_err(writing(path))?;
    Ok(0)
}
