//! The run's log, which rank 0 keeps and the others do not.

use std::path::Path;

use lockstep_observe::{ObserveError, RunLog, StepRecord};

pub(crate) struct Journal(Option<RunLog>);

impl Journal {
    pub(crate) fn open(dir: &Path, resume_step: Option<u64>) -> Result<Journal, ObserveError> {
        Ok(Journal(Some(RunLog::open(dir, resume_step)?)))
    }

    pub(crate) fn closed() -> Journal {
        Journal(None)
    }

    pub(crate) fn step(&mut self, record: &StepRecord) -> Result<(), ObserveError> {
        self.0.as_mut().map_or(Ok(()), |log| log.step(record))
    }

    pub(crate) fn event(&mut self, text: &str) -> Result<(), ObserveError> {
        self.0.as_mut().map_or(Ok(()), |log| log.event(text))
    }

    pub(crate) fn sync(&mut self) -> Result<(), ObserveError> {
        self.0.as_mut().map_or(Ok(()), |log| log.sync())
    }
}
