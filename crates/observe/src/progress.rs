//! Views that show the progress of a run.

use std::io::Write;

use crate::record::{EvalRecord, StepRecord, log_lines};

/// A view of a running training. A view never fails the run: output that it cannot write is dropped.
pub trait Progress: Send {
    /// The run starts. It will run the steps from `first_step` to `total_steps`, counted from 1.
    fn start(&mut self, first_step: u64, total_steps: u64);
    /// A step is complete.
    fn step(&mut self, record: &StepRecord);
    /// An evaluation is complete.
    fn evaluation(&mut self, record: &EvalRecord) {
        self.note(&record.line());
    }
    /// Shows a message.
    fn note(&mut self, text: &str);
    /// The run has ended.
    fn finish(&mut self);
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn start(&mut self, _first_step: u64, _total_steps: u64) {}
    fn step(&mut self, _record: &StepRecord) {}
    fn note(&mut self, _text: &str) {}
    fn finish(&mut self) {}
}

/// Writes one line per step, in the format of the log: for pipes, files and continuous integration.
#[derive(Debug)]
pub struct PlainLines<W> {
    out: W,
    total_steps: Option<u64>,
}

impl<W: Write> PlainLines<W> {
    pub fn new(out: W) -> Self {
        PlainLines { out, total_steps: None }
    }

    /// Returns the writer.
    pub fn into_inner(self) -> W {
        self.out
    }

    fn push(&mut self, line: &str) {
        // Training continues even if the reader has closed the pipe.
        let _ = self.out.write_all(format!("{line}\n").as_bytes()).and_then(|()| self.out.flush());
    }
}

impl<W: Write + Send> Progress for PlainLines<W> {
    fn start(&mut self, _first_step: u64, total_steps: u64) {
        self.total_steps = Some(total_steps);
    }

    fn step(&mut self, record: &StepRecord) {
        let line = record.line(self.total_steps);
        self.push(&line);
    }

    fn note(&mut self, text: &str) {
        log_lines(text).for_each(|line| self.push(&line));
    }

    fn finish(&mut self) {
        let _ = self.out.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::RECORD;

    #[test]
    fn plain_lines_follow_the_log_format() {
        let mut lines = PlainLines::new(Vec::new());
        lines.start(12, 100);
        lines.note("the loss is global");
        lines.step(&RECORD);
        lines.finish();
        let text = String::from_utf8(lines.into_inner()).unwrap();
        assert_eq!(
            text,
            "the objective is global\n\
             step 12/100 | loss: 3.456789 | grad_norm 1.23 | lr 3.00e-4 | 2345 tok/s | 0.87 s\n"
        );
    }

    #[test]
    fn a_closed_pipe_does_not_fail_the_run() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
        }
        let mut lines = PlainLines::new(Closed);
        lines.step(&RECORD);
        lines.finish();
    }
}
