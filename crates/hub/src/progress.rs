//! How a download reports its progress.

use crate::repo::Repo;

/// Receives the progress of a download.
pub trait DownloadProgress {
    /// A download begins. Files that are already in the cache are not counted.
    fn start(&mut self, repo: &Repo, num_files: usize, total_bytes: u64);

    /// The next file begins.
    fn file(&mut self, name: &str);

    /// The bytes of all files so far. The number falls if a file has to start anew.
    fn position(&mut self, done_bytes: u64);

    /// All files are in the cache.
    fn finish(&mut self);

    /// Something that the user should know, such as a retry.
    fn note(&mut self, text: &str);
}

/// Shows nothing.
#[derive(Debug)]
pub struct NoDownloadProgress;

impl DownloadProgress for NoDownloadProgress {
    fn start(&mut self, _: &Repo, _: usize, _: u64) {}

    fn file(&mut self, _: &str) {}

    fn position(&mut self, _: u64) {}

    fn finish(&mut self) {}

    fn note(&mut self, _: &str) {}
}
