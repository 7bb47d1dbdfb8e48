//! Rewards from an external program, which gets samples as JSON lines on its stdin and answers on its stdout.
//! `docs/rewards.md` describes the protocol.
//!
//! The program is started once per worker and lives as long as the function. The samples of a batch are divided over the
//! workers. One thread per worker writes and reads, and none outlives the batch. A worker that breaks the protocol, ends
//! or takes too long is stopped, and restarted for the next batch; the rewards that it had given are kept.

mod environment;
mod exchange;
mod lines;
mod process;

pub use environment::EnvVar;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::Duration;

use crate::error::RewardError;
use crate::fault::ProgramFault;
use crate::function::{RewardFunction, Sample, ScoreFailure, ScoreReport};
use crate::spec::RewardContext;
use exchange::{SampleOutcome, check_idle, exchange};
use process::{Process, stop_all};

const MAX_TIMEOUT_S: f64 = 86_400.0;
const MAX_WORKERS: usize = 256;
/// How long a program may take to end after the end of its stdin.
const END_PATIENCE: Duration = Duration::from_secs(1);

/// An external program.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// The program and its arguments. No shell is involved.
    pub command: Vec<String>,
    /// How long a batch may take. The first batch includes the time that the program needs to start.
    pub timeout_s: f64,
    /// How many processes of the program run at once.
    pub workers: usize,
    /// Variables of its environment besides those that every program gets. Names of secrets are refused.
    pub env: Vec<EnvVar>,
    /// How many times in a row a worker is restarted without finishing a batch. One more failure ends the run under
    /// any policy.
    pub max_restarts: u32,
}

impl Program {
    /// A program with default options: one worker, 60 seconds per batch, three restarts.
    pub fn new(command: Vec<String>) -> Program {
        Program { command, timeout_s: 60.0, workers: 1, env: Vec::new(), max_restarts: 3 }
    }

    pub(crate) fn check(&self, name: &str) -> Result<(), RewardError> {
        let bad = |option, value: String, why: String| {
            Err(RewardError::BadOption { function: name.to_owned(), option, value, why })
        };
        if self.command.first().is_none_or(String::is_empty) {
            return bad("command", "empty".into(), "give the program and its arguments".into());
        }
        if self.command.iter().any(|part| part.contains('\0')) {
            return bad("command", format!("{:?}", self.command), "it contains a zero byte".into());
        }
        if !(self.timeout_s > 0.0 && self.timeout_s <= MAX_TIMEOUT_S) {
            let why = format!("it must be more than 0 and at most {MAX_TIMEOUT_S} seconds");
            return bad("timeout_s", self.timeout_s.to_string(), why);
        }
        if !(1..=MAX_WORKERS).contains(&self.workers) {
            return bad("workers", self.workers.to_string(), format!("it must be from 1 to {MAX_WORKERS}"));
        }
        environment::check(name, &self.env)
    }
}

pub(crate) struct ProgramReward {
    settings: Settings,
    workers: Vec<Worker>,
    /// Ids are never used twice, so that a late answer is not mistaken for another sample's.
    next_id: u64,
}

struct Settings {
    name: String,
    command: Vec<String>,
    timeout: Duration,
    environment: BTreeMap<OsString, OsString>,
    max_restarts: u32,
}

#[derive(Default)]
struct Worker {
    /// `None` after a failure.
    process: Option<Process>,
    /// Failures since the last batch without one.
    num_failures: u32,
}

impl ProgramReward {
    /// Starts all workers.
    pub(crate) fn start(
        name: &str,
        options: &Program,
        context: &RewardContext,
    ) -> Result<ProgramReward, RewardError> {
        options.check(name)?;
        let settings = Settings {
            name: name.to_owned(),
            command: options.command.clone(),
            timeout: Duration::from_secs_f64(options.timeout_s),
            environment: environment::for_program(&context.environment, &options.env),
            max_restarts: options.max_restarts,
        };
        let start = |_| Ok(Worker { process: Some(settings.start()?), num_failures: 0 });
        let workers = (0..options.workers).map(start).collect::<Result<_, RewardError>>()?;
        Ok(ProgramReward { settings, workers, next_id: 0 })
    }
}

impl Settings {
    fn start(&self) -> Result<Process, RewardError> {
        Process::start(&self.command, &self.environment).map_err(|cause| RewardError::Start {
            function: self.name.clone(),
            program: self.command[0].clone(),
            cause,
        })
    }

    fn error(&self, worker: usize, fault: ProgramFault, stderr: Vec<String>) -> RewardError {
        RewardError::Program { function: self.name.clone(), worker, fault, stderr }
    }
}

impl Worker {
    /// Scores the samples of this worker. The rewards and indices of the report are in the order of `samples`.
    fn score(
        &mut self,
        settings: &Settings,
        index: usize,
        samples: &[&Sample<'_>],
        first_id: u64,
    ) -> ScoreReport {
        let mut report = ScoreReport { rewards: vec![None; samples.len()], failures: Vec::new() };
        if let Some(process) = &mut self.process
            && let Some(fault) = check_idle(process)
        {
            let stderr = process.tail.take();
            let error = settings.error(index, fault, stderr);
            self.fail(settings, index, error, Vec::new(), &mut report);
        }
        let process = match self.process.take().map_or_else(|| settings.start(), Ok) {
            Ok(process) => self.process.insert(process),
            Err(error) => {
                self.fail(settings, index, error, (0..samples.len()).collect(), &mut report);
                return report;
            }
        };
        let outcome = exchange(process, samples, first_id, settings.timeout);
        // A fault's own lines, and not those of earlier batches.
        let stderr = process.tail.take();
        let with = |wanted: SampleOutcome| {
            let all = outcome.samples.iter().enumerate();
            all.filter(|(_, outcome)| **outcome == wanted).map(|(index, _)| index).collect::<Vec<usize>>()
        };
        let (mut waiting, bad) = (with(SampleOutcome::Waiting), with(SampleOutcome::Bad));
        for (reward, outcome) in report.rewards.iter_mut().zip(&outcome.samples) {
            if let SampleOutcome::Reward(given) = outcome {
                *reward = *given;
            }
        }
        match outcome.bad_reward {
            Some(fault) => {
                let error = settings.error(index, fault, Vec::new());
                report.failures.push(ScoreFailure { error, samples: bad });
            }
            None => waiting.extend(bad),
        }
        match outcome.fault {
            Some(fault) => {
                let error = settings.error(index, fault, stderr);
                self.fail(settings, index, error, waiting, &mut report);
            }
            None => self.num_failures = 0,
        }
        report
    }

    /// Counts a failure, and gives up after too many.
    fn fail(
        &mut self,
        settings: &Settings,
        worker: usize,
        error: RewardError,
        samples: Vec<usize>,
        report: &mut ScoreReport,
    ) {
        self.process = None;
        self.num_failures += 1;
        let (function, failures) = (settings.name.clone(), self.num_failures);
        let error = match failures > settings.max_restarts {
            true => RewardError::GaveUp { function, worker, failures, last: Box::new(error) },
            false => error,
        };
        report.failures.push(ScoreFailure { error, samples });
    }
}

impl RewardFunction for ProgramReward {
    fn name(&self) -> &str {
        &self.settings.name
    }

    fn score(&mut self, samples: &[Sample<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        self.score_each(samples).into_result()
    }

    fn score_each(&mut self, samples: &[Sample<'_>]) -> ScoreReport {
        let (settings, num_workers) = (&self.settings, self.workers.len());
        let mut report = ScoreReport { rewards: vec![None; samples.len()], failures: Vec::new() };
        // Round-robin: the completions of one prompt, which take about the same time, go to different workers.
        let indices = |worker: usize| (worker..samples.len()).step_by(num_workers);
        let mut next_id = self.next_id;
        let reports: Vec<ScoreReport> = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (index, worker) in self.workers.iter_mut().enumerate().take(samples.len()) {
                let own: Vec<&Sample<'_>> = indices(index).map(|at| &samples[at]).collect();
                let first_id = next_id;
                next_id += own.len() as u64;
                threads.push(scope.spawn(move || worker.score(settings, index, &own, first_id)));
            }
            let join = |thread: std::thread::ScopedJoinHandle<'_, ScoreReport>| {
                thread.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload))
            };
            threads.into_iter().map(join).collect()
        });
        self.next_id = next_id;
        for (worker, part) in reports.into_iter().enumerate() {
            let indices: Vec<usize> = indices(worker).collect();
            for (index, reward) in indices.iter().zip(part.rewards) {
                report.rewards[*index] = reward;
            }
            for mut failure in part.failures {
                failure.samples.iter_mut().for_each(|own| *own = indices[*own]);
                report.failures.push(failure);
            }
        }
        report
    }
}

impl Drop for ProgramReward {
    fn drop(&mut self) {
        let processes = self.workers.iter_mut().filter_map(|worker| worker.process.as_mut());
        stop_all(&mut processes.collect::<Vec<_>>(), END_PATIENCE);
    }
}
