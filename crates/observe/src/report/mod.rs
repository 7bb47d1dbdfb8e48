//! `report.html`: one page about a run. It has everything in it, asks for nothing over the network and needs no scripts.

mod html;
mod sections;

use std::fs;
use std::io;
use std::path::Path;

use crate::error::ObserveError;
use crate::history::History;
use crate::run_files::{Completion, RunFiles, RunInfo};
use crate::run_state::{RunSigns, RunState};

/// The completions on the page.
const COMPLETIONS: usize = 6;
const STYLE: &str = include_str!("style.css");

/// What is known of a run for its page.
#[derive(Clone, Debug)]
pub struct RunReport {
    /// The output folder.
    pub path: String,
    pub info: RunInfo,
    pub history: History,
    pub state: RunState,
    /// Why the run stopped early.
    pub stop: Option<String>,
    pub completions: Vec<Completion>,
}

impl RunReport {
    pub fn read(files: &RunFiles) -> io::Result<RunReport> {
        let (info, history) = (files.info(), files.history()?);
        let signs = RunSigns {
            steps: history.steps(),
            step_seconds: history.recent("step_seconds"),
            silent: files.silent(),
            alive: files.is_alive(),
            stop: files.stop_reason(),
        };
        Ok(RunReport {
            path: files.dir().display().to_string(),
            state: signs.state(&info),
            stop: signs.stop,
            completions: files.completions(COMPLETIONS),
            info,
            history,
        })
    }

    fn name(&self) -> &str {
        if self.info.name.is_empty() { &self.path } else { &self.info.name }
    }

    /// The page.
    pub fn page(&self) -> String {
        let name = html::text(self.name());
        let parts = [
            sections::summary(self),
            sections::charts(self),
            sections::costs(self),
            sections::memory(self),
            sections::ranks(self),
            sections::evaluations(self),
            sections::completions(self),
            sections::configuration(self),
            sections::command(self),
        ];
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
             <meta name=\"referrer\" content=\"no-referrer\">\n\
             <title>{name}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{name}</h1>\n{}</main>\n\
             <footer>Written by lockstep {}.</footer>\n</body>\n</html>\n",
            parts.concat(),
            env!("CARGO_PKG_VERSION"),
        )
    }
}

/// Writes the page of a run to a file, and replaces one of the same name at once.
pub fn report_file(files: &RunFiles, path: &Path) -> Result<(), ObserveError> {
    let report = RunReport::read(files)
        .map_err(|source| ObserveError::Read { path: files.dir().join("metrics.jsonl"), source })?;
    let partial = path.with_extension("html.partial");
    let written = fs::write(&partial, report.page()).and_then(|()| fs::rename(&partial, path));
    written.map_err(|source| {
        let _ = fs::remove_file(&partial);
        ObserveError::Write { path: path.to_owned(), source }
    })
}

#[cfg(test)]
mod tests;
