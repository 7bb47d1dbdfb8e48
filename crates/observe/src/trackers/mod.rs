//! Trackers: where the metrics of a run go besides `metrics.jsonl`.
//!
//! A tracker never stops or slows a run. If it fails, the caller gets one warning, and the tracker gets no more data.
//! TensorBoard, CSV and wandb are files, written at once; MLflow and Trackio are servers, which a thread of their own
//! talks to (`background`).

mod background;
mod csv;
mod http;
mod mlflow;
mod trackio;
mod wandb;

use std::path::PathBuf;
use std::time::SystemTime;

use crate::error::ObserveError;
use crate::record::{EvalRecord, NamedMetric, StepRecord};
use crate::tensorboard::TensorBoard;

pub use http::{BadAddress, ServerAddress};

/// A tracker to report to.
#[derive(Clone, Debug)]
pub enum TrackerTarget {
    /// The folder of the event files.
    TensorBoard(PathBuf),
    /// `metrics.csv` in the run's folder.
    Csv,
    /// An offline run in the run's folder, for `wandb sync`.
    Wandb {
        project: String,
        entity: Option<String>,
    },
    Mlflow {
        address: ServerAddress,
        experiment: String,
    },
    Trackio {
        address: ServerAddress,
        project: String,
    },
}

/// What trackers show of a run.
#[derive(Clone, Debug)]
pub struct TrackedRun {
    pub name: String,
    /// The run's output folder.
    pub dir: PathBuf,
    /// The configuration as text, without secrets.
    pub config: String,
    /// The settings that differ from their defaults.
    pub settings: Vec<(String, String)>,
    /// The number of completed steps of a resumed run.
    pub resume_step: Option<u64>,
}

/// The numbers of a step or of an evaluation.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) step: u64,
    pub(crate) at: SystemTime,
    pub(crate) numbers: Vec<NamedMetric>,
}

/// Why a tracker failed, as the end of a sentence that begins with its name.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrackerError {
    #[error(transparent)]
    File(#[from] ObserveError),
    #[error("{0}")]
    Server(String),
}

/// One tracker.
pub(crate) trait Tracker: Send {
    fn row(&mut self, row: &Row) -> Result<(), TrackerError>;

    /// A text such as a sample.
    fn text(&mut self, _step: u64, _tag: &str, _text: &str) -> Result<(), TrackerError> {
        Ok(())
    }

    /// Something that the user should know, while the tracker still works.
    fn warning(&mut self) -> Option<String> {
        None
    }

    /// Called where `metrics.jsonl` is synced.
    fn sync(&mut self) -> Result<(), TrackerError> {
        Ok(())
    }

    /// The run ends. `completed`: it was not stopped.
    fn finish(&mut self, _completed: bool) -> Result<(), TrackerError> {
        Ok(())
    }
}

/// The trackers of a run that still work.
#[derive(Default)]
pub struct Trackers {
    active: Vec<(&'static str, Box<dyn Tracker>)>,
    warnings: Vec<String>,
}

impl Trackers {
    /// Opens all targets. Those that cannot be opened warn.
    pub fn open(targets: &[TrackerTarget], run: &TrackedRun) -> Trackers {
        let mut trackers = Trackers::default();
        for target in targets {
            let (name, opened) = open(target, run);
            match opened {
                Ok(tracker) => trackers.active.push((name, tracker)),
                Err(cause) => trackers.warnings.push(warning(name, &cause)),
            }
        }
        trackers.text(run.resume_step.unwrap_or(0), "config", &format!("```yaml\n{}\n```", run.config));
        trackers
    }

    pub fn step(&mut self, record: &StepRecord) {
        self.row(record.step, || record.scalars());
    }

    pub fn evaluation(&mut self, record: &EvalRecord) {
        self.row(record.step, || record.scalars());
    }

    fn row(&mut self, step: u64, numbers: impl FnOnce() -> Vec<NamedMetric>) {
        if !self.active.is_empty() {
            let row = Row { step, at: SystemTime::now(), numbers: numbers() };
            self.each(|tracker| tracker.row(&row));
        }
    }

    /// A text such as a sample, for trackers that show texts.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) {
        self.each(|tracker| tracker.text(step, tag, text));
    }

    pub fn sync(&mut self) {
        self.each(|tracker| tracker.sync());
    }

    /// Ends the run. Waits a few seconds at most for trackers on a network.
    pub fn finish(&mut self, completed: bool) {
        self.each(|tracker| tracker.finish(completed));
        self.collect_warnings();
        self.active.clear();
    }

    /// The warnings since the last call: at most one for each tracker.
    pub fn take_warnings(&mut self) -> Vec<String> {
        self.collect_warnings();
        std::mem::take(&mut self.warnings)
    }

    fn collect_warnings(&mut self) {
        for (name, tracker) in &mut self.active {
            self.warnings.extend(tracker.warning().map(|why| format!("{name}: {why}; the run continues")));
        }
    }

    /// Calls each tracker, and removes those that fail.
    fn each(&mut self, mut call: impl FnMut(&mut dyn Tracker) -> Result<(), TrackerError>) {
        let warnings = &mut self.warnings;
        self.active.retain_mut(|(name, tracker)| match call(&mut **tracker) {
            Ok(()) => true,
            Err(cause) => {
                warnings.push(warning(name, &cause));
                false
            }
        });
    }
}

impl std::fmt::Debug for Trackers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.active.iter().map(|(name, _)| name)).finish()
    }
}

fn warning(name: &str, cause: &TrackerError) -> String {
    format!("{name} gets no more metrics: {cause}; the run continues, and metrics.jsonl is complete")
}

fn open(target: &TrackerTarget, run: &TrackedRun) -> (&'static str, Result<Box<dyn Tracker>, TrackerError>) {
    fn boxed<T: Tracker + 'static, E: Into<TrackerError>>(
        opened: Result<T, E>,
    ) -> Result<Box<dyn Tracker>, TrackerError> {
        opened.map(|tracker| Box::new(tracker) as Box<dyn Tracker>).map_err(Into::into)
    }
    match target {
        TrackerTarget::TensorBoard(dir) => ("TensorBoard", boxed(TensorBoard::open(dir, run.resume_step))),
        TrackerTarget::Csv => {
            ("CSV", boxed(csv::CsvFile::open(&run.dir.join("metrics.csv"), run.resume_step)))
        }
        TrackerTarget::Wandb { project, entity } => {
            ("wandb", boxed(wandb::WandbFile::open(run, project, entity.as_deref())))
        }
        TrackerTarget::Mlflow { address, experiment } => {
            ("MLflow", boxed(mlflow::start(address, experiment, run)))
        }
        TrackerTarget::Trackio { address, project } => {
            ("Trackio", boxed(trackio::start(address, project, run)))
        }
    }
}

impl Tracker for TensorBoard {
    fn row(&mut self, row: &Row) -> Result<(), TrackerError> {
        Ok(self.scalars(row.step, &row.numbers)?)
    }

    fn text(&mut self, step: u64, tag: &str, text: &str) -> Result<(), TrackerError> {
        Ok(TensorBoard::text(self, step, tag, text)?)
    }

    fn sync(&mut self) -> Result<(), TrackerError> {
        Ok(TensorBoard::sync(self)?)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::record::tests::RECORD;

    pub(crate) fn run(dir: &std::path::Path) -> TrackedRun {
        TrackedRun {
            name: "first".into(),
            dir: dir.to_path_buf(),
            config: "max_steps: 3".into(),
            settings: vec![("max_steps".into(), "3".into())],
            resume_step: None,
        }
    }

    #[test]
    fn a_tracker_that_fails_warns_once_and_others_go_on() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("runs"), "").unwrap();
        let targets = [TrackerTarget::TensorBoard(dir.path().join("runs")), TrackerTarget::Csv];
        let mut trackers = Trackers::open(&targets, &run(dir.path()));
        let warnings = trackers.take_warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].starts_with("TensorBoard gets no more metrics: cannot open "), "{warnings:?}");
        trackers.step(&RECORD);
        trackers.finish(true);
        assert!(trackers.take_warnings().is_empty());
        let text = std::fs::read_to_string(dir.path().join("metrics.csv")).unwrap();
        assert!(text.starts_with("step,train/loss,"), "{text}");
    }
}
