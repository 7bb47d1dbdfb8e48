//! The run's log and TensorBoard files. Only rank 0 writes them.

use std::path::Path;

use lockstep_observe::{EvalRecord, ObserveError, RunLog, StepRecord, TensorBoard};

use crate::numerics::NumericsFingerprint;

/// Writes the log and TensorBoard files on rank 0, and nothing on other ranks.
pub(crate) struct Journal {
    log: Option<RunLog>,
    board: Option<TensorBoard>,
}

impl Journal {
    /// `board` is the folder of TensorBoard's files, if enabled.
    pub(crate) fn open(
        dir: &Path,
        board: Option<&Path>,
        resume_step: Option<u64>,
    ) -> Result<Journal, ObserveError> {
        let board = board.map(|dir| TensorBoard::open(dir, resume_step)).transpose()?;
        Ok(Journal { log: Some(RunLog::open(dir, resume_step)?), board })
    }

    pub(crate) fn closed() -> Journal {
        Journal { log: None, board: None }
    }

    /// Logs a step. TensorBoard gets only the steps that are `shown`.
    pub(crate) fn step(&mut self, record: &StepRecord, shown: bool) -> Result<(), ObserveError> {
        if let Some(board) = self.board.as_mut().filter(|_| shown) {
            board.step(record)?;
        }
        self.log.as_mut().map_or(Ok(()), |log| log.step(record))
    }

    pub(crate) fn evaluation(&mut self, record: &EvalRecord) -> Result<(), ObserveError> {
        if let Some(board) = &mut self.board {
            board.evaluation(record)?;
        }
        self.log.as_mut().map_or(Ok(()), |log| log.evaluation(record))
    }

    pub(crate) fn event(&mut self, text: &str) -> Result<(), ObserveError> {
        self.log.as_mut().map_or(Ok(()), |log| log.event(text))
    }

    pub(crate) fn fingerprint(&mut self, numerics: &NumericsFingerprint) -> Result<(), ObserveError> {
        self.log.as_mut().map_or(Ok(()), |log| log.fingerprint(&numerics.hash(), numerics.fields()))
    }

    pub(crate) fn sync(&mut self) -> Result<(), ObserveError> {
        if let Some(board) = &mut self.board {
            board.sync()?;
        }
        self.log.as_mut().map_or(Ok(()), |log| log.sync())
    }
}
