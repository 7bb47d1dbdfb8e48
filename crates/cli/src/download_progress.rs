//! Shows the progress of downloads: a bar on a terminal, a line every few seconds elsewhere. On the error stream, because
//! other programs may read the output.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use lockstep_core::Bytes;
use lockstep_hub::{DownloadProgress, Repo};

use crate::report;

const LINE_INTERVAL: Duration = Duration::from_secs(5);
const TEMPLATE: &str = "{msg}  {wide_bar}  {bytes} of {total_bytes}  {bytes_per_sec}  {eta}";

/// How this process shows downloads.
pub(crate) fn progress() -> Box<dyn DownloadProgress> {
    match std::io::stderr().is_terminal() {
        true => Box::new(Bar { bar: ProgressBar::hidden() }),
        false => Box::new(Lines { download: None }),
    }
}

struct Bar {
    bar: ProgressBar,
}

impl DownloadProgress for Bar {
    fn start(&mut self, repo: &Repo, num_files: usize, total_bytes: u64) {
        report::print_aside(&announcement(repo, num_files, total_bytes));
        let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
        self.bar = ProgressBar::new(total_bytes).with_style(style);
    }

    fn file(&mut self, name: &str) {
        self.bar.set_message(name.to_owned());
    }

    fn position(&mut self, done_bytes: u64) {
        self.bar.set_position(done_bytes);
    }

    fn finish(&mut self) {
        self.bar.finish_and_clear();
    }

    fn note(&mut self, text: &str) {
        self.bar.suspend(|| report::print_aside(text));
    }
}

/// A download in progress.
struct CurrentDownload {
    repo: String,
    file: String,
    start: Instant,
    last_line: Instant,
    done_bytes: u64,
    total_bytes: u64,
}

struct Lines {
    download: Option<CurrentDownload>,
}

impl DownloadProgress for Lines {
    fn start(&mut self, repo: &Repo, num_files: usize, total_bytes: u64) {
        report::print_aside(&announcement(repo, num_files, total_bytes));
        let now = Instant::now();
        self.download = Some(CurrentDownload {
            repo: repo.to_string(),
            file: String::new(),
            start: now,
            last_line: now,
            done_bytes: 0,
            total_bytes,
        });
    }

    fn file(&mut self, name: &str) {
        if let Some(download) = &mut self.download {
            download.file = name.into();
        }
    }

    fn position(&mut self, done_bytes: u64) {
        let Some(download) = &mut self.download else { return };
        download.done_bytes = done_bytes;
        if download.last_line.elapsed() >= LINE_INTERVAL {
            download.last_line = Instant::now();
            let (done, total) = (Bytes(done_bytes), Bytes(download.total_bytes));
            report::print_aside(&format!("  {done} of {total}, {}", download.file));
        }
    }

    fn finish(&mut self) {
        if let Some(download) = self.download.take() {
            let seconds = download.start.elapsed().as_secs_f64();
            report::print_aside(&format!(
                "downloaded {}: {} in {seconds:.1} s",
                download.repo,
                Bytes(download.done_bytes)
            ));
        }
    }

    fn note(&mut self, text: &str) {
        report::print_aside(text);
    }
}

fn announcement(repo: &Repo, num_files: usize, total_bytes: u64) -> String {
    let files = if num_files == 1 { "file" } else { "files" };
    format!("downloading {repo}: {num_files} {files}, {}", Bytes(total_bytes))
}
