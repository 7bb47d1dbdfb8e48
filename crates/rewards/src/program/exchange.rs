//! One batch of samples and answers between this process and one process of a reward program.

use std::time::{Duration, Instant};

use super::lines::{LineTooLong, MAX_LINE_BYTES};
use super::process::{Process, ReadState};
use crate::fault::{ProgramExit, ProgramFault};
use crate::function::Sample;
use crate::wire::{Answer, BadReward, SampleMessage, excerpt};

/// How often to look whether the process has ended: its pipes stay open if another process holds them.
const EXIT_CHECK: Duration = Duration::from_millis(50);
/// How long a process may take to end after it has closed its stdout.
const EXIT_PATIENCE: Duration = Duration::from_millis(200);

/// What came of one sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SampleOutcome {
    Waiting,
    Reward(Option<f64>),
    /// The answer was there, but is no reward.
    Bad,
}

/// What came of a batch.
pub(crate) struct BatchOutcome {
    pub(crate) samples: Vec<SampleOutcome>,
    /// The first answer that is no reward. The program goes on.
    pub(crate) bad_reward: Option<ProgramFault>,
    /// The program broke the protocol or ended, and was stopped.
    pub(crate) fault: Option<ProgramFault>,
}

/// What is wrong with a process between two batches, if something is. Then it was stopped.
pub(crate) fn check_idle(process: &mut Process) -> Option<ProgramFault> {
    process.read_stderr();
    // Before reading: all that a process has written is in the pipe when it has ended.
    let exited = process.has_exited();
    let read = process.read_stdout();
    let fault = match process.lines.next_line() {
        Ok(Some(line)) => ProgramFault::ExtraOutput { line: excerpt(&line) },
        Err(LineTooLong) => ProgramFault::LineTooLong { limit_bytes: MAX_LINE_BYTES },
        Ok(None) => match read {
            Err(cause) => ProgramFault::Pipe { cause },
            Ok(ReadState::Closed) => return Some(ended(process, 0, 0)),
            Ok(_) if exited => return Some(ended(process, 0, 0)),
            Ok(_) => return None,
        },
    };
    process.stop();
    Some(fault)
}

/// Sends the samples, whose ids count from `first_id`, and collects the answers. After a fault the process is stopped.
pub(crate) fn exchange(
    process: &mut Process,
    samples: &[&Sample<'_>],
    first_id: u64,
    timeout: Duration,
) -> BatchOutcome {
    let mut batch = Batch {
        samples,
        first_id,
        outcomes: vec![SampleOutcome::Waiting; samples.len()],
        num_answered: 0,
        num_encoded: 0,
        outbox: Vec::new(),
        bad_reward: None,
    };
    let fault = batch.run(process, timeout).err();
    if fault.is_some() {
        process.stop();
    }
    BatchOutcome { samples: batch.outcomes, bad_reward: batch.bad_reward, fault }
}

struct Batch<'a> {
    samples: &'a [&'a Sample<'a>],
    first_id: u64,
    outcomes: Vec<SampleOutcome>,
    num_answered: usize,
    num_encoded: usize,
    /// What is left to write of the samples that are encoded. At most one sample: a batch may be large.
    outbox: Vec<u8>,
    bad_reward: Option<ProgramFault>,
}

impl Batch<'_> {
    fn run(&mut self, process: &mut Process, timeout: Duration) -> Result<(), ProgramFault> {
        let expected = self.samples.len();
        let deadline = Instant::now() + timeout;
        while self.num_answered < expected {
            let now = Instant::now();
            if now >= deadline {
                let timeout_s = timeout.as_secs_f64();
                return Err(ProgramFault::Timeout { answered: self.num_answered, expected, timeout_s });
            }
            let wants_write = !self.outbox.is_empty() || self.num_encoded < expected;
            process.wait_ready(wants_write && process.is_writable(), EXIT_CHECK.min(deadline - now));
            self.write(process).map_err(|cause| ProgramFault::Pipe { cause })?;
            process.read_stderr();
            let exited = process.has_exited();
            let read = process.read_stdout().map_err(|cause| ProgramFault::Pipe { cause })?;
            self.accept_lines(process)?;
            let is_over = read == ReadState::Closed || (exited && read == ReadState::Empty);
            if is_over && self.num_answered < expected {
                return Err(ended(process, self.num_answered, expected));
            }
        }
        Ok(())
    }

    /// Writes samples until the pipe is full.
    fn write(&mut self, process: &mut Process) -> std::io::Result<()> {
        loop {
            if self.outbox.is_empty() {
                let Some(sample) = self.samples.get(self.num_encoded) else { return Ok(()) };
                let id = self.first_id + self.num_encoded as u64;
                self.num_encoded += 1;
                let last = self.num_encoded == self.samples.len();
                self.outbox = serde_json::to_vec(&SampleMessage::with_id(sample, id, last))?;
                self.outbox.push(b'\n');
            }
            let count = process.write(&self.outbox)?;
            self.outbox.drain(..count);
            if !self.outbox.is_empty() {
                return Ok(());
            }
        }
    }

    /// Handles all complete lines, also those after the last answer: they are one too many.
    fn accept_lines(&mut self, process: &mut Process) -> Result<(), ProgramFault> {
        let too_long = |LineTooLong| ProgramFault::LineTooLong { limit_bytes: MAX_LINE_BYTES };
        while let Some(line) = process.lines.next_line().map_err(too_long)? {
            self.accept(&line)?;
        }
        Ok(())
    }

    fn accept(&mut self, line: &[u8]) -> Result<(), ProgramFault> {
        let not_an_answer = |why: String| ProgramFault::NotAnAnswer { line: excerpt(line), why };
        let answer = Answer::parse(line).map_err(|error| not_an_answer(error.to_string()))?;
        let Some(id) = answer.value.get("id").and_then(serde_json::Value::as_u64) else {
            return Err(not_an_answer("it has no `id`".into()));
        };
        let index = id.checked_sub(self.first_id).and_then(|index| usize::try_from(index).ok());
        let Some(outcome) = index.and_then(|index| self.outcomes.get_mut(index)) else {
            return Err(ProgramFault::UnknownId { id });
        };
        if *outcome != SampleOutcome::Waiting {
            // It is unknown which of the two answers is right.
            *outcome = SampleOutcome::Bad;
            return Err(ProgramFault::RepeatedId { id });
        }
        let reward = match answer.value.get("reward") {
            Some(value) => answer.reward(value),
            None => Err(BadReward::WrongType("nothing".into())),
        };
        self.num_answered += 1;
        *outcome = reward.as_ref().map_or(SampleOutcome::Bad, |reward| SampleOutcome::Reward(*reward));
        if let Err(bad) = reward {
            self.bad_reward.get_or_insert(match bad {
                BadReward::NotFinite(found) => ProgramFault::NotFinite { id, found },
                BadReward::WrongType(found) => ProgramFault::WrongType { id, found },
            });
        }
        Ok(())
    }
}

/// The fault of a process that has ended, or that has closed its stdout. It is stopped.
fn ended(process: &mut Process, answered: usize, expected: usize) -> ProgramFault {
    let exited = process.wait_exit(EXIT_PATIENCE);
    let exit = process.stop().unwrap_or(ProgramExit::Code(0));
    match exited {
        true => ProgramFault::Ended { exit, answered, expected },
        false => ProgramFault::ClosedOutput { answered, expected },
    }
}
