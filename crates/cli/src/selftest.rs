//! `lockstep selftest`: checks the operations and training steps of a device against references; with several ranks, the
//! collectives between them (`selftest_ranks`).

use std::fmt;
use std::process::ExitCode;

use lockstep_core::{Fault, FaultClass};
use lockstep_device::{Device, Queue};
use lockstep_ops::selftest::{Check, Selection};

use crate::args::Selftest;
use crate::report::{self, Failure};
use crate::train::{boxed, launch_failed};
use crate::{gpu, ranks, selftest_ranks};

/// The largest number of elements of an input with `--small`.
const SMALL: usize = 20_000;

#[derive(Debug)]
pub(crate) struct ChecksFailed {
    pub(crate) failed: usize,
    pub(crate) all: usize,
}

impl fmt::Display for ChecksFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} checks failed", self.failed, self.all)
    }
}

impl std::error::Error for ChecksFailed {}

impl Fault for ChecksFailed {
    fn class(&self) -> FaultClass {
        FaultClass::Unavailable
    }

    fn hint(&self) -> Option<String> {
        Some("Do not train on this device: its results are wrong. The failed checks are listed above.".into())
    }
}

pub(crate) fn run(args: &Selftest) -> Result<ExitCode, Failure> {
    match ranks::world(None).map_err(launch_failed)? {
        Some(world) if world.world_size > 1 => selftest_ranks::as_rank(args, &world),
        None if args.launch.starts_ranks() || !args.settings.is_empty() => selftest_ranks::start(args),
        _ => check_device(args),
    }
}

/// Checks one device, in this process.
fn check_device(args: &Selftest) -> Result<ExitCode, Failure> {
    let seed = args.seed.unwrap_or_else(fresh_seed);
    let device = gpu::choose(args.device.into())?;
    let queue = device.queue(2).map_err(|e| -> Failure { Box::new(e) })?;
    report::print_line(&format!("{}, seed {seed}", named(&queue)));
    if let Device::Cuda(gpu) = device {
        gpu.compile_ahead(&lockstep_ops::all_kernel_sources(gpu.sm))
            .map_err(|e| -> Failure { Box::new(e) })?;
    }
    let (mut all, mut failed) = (0, 0);
    let mut each = |check: Check| {
        all += 1;
        failed += usize::from(!check.passed());
        if args.verbose || !check.passed() {
            report::print_line(&line(&check));
        }
    };
    let largest = if args.small { SMALL } else { usize::MAX };
    let selection = Selection { largest, only: &args.only };
    lockstep_ops::selftest::run(selection, &queue, seed, &mut each)
        .map_err(|e| boxed(lockstep_engine::EngineError::from(e).into()))?;
    if !args.operations && args.only.is_empty() {
        lockstep_train::selftest_steps(device, seed, &mut each).map_err(boxed)?;
    }
    if failed > 0 {
        return Err(Box::new(ChecksFailed { failed, all }));
    }
    report::print_line(&format!("all {all} checks passed"));
    Ok(ExitCode::SUCCESS)
}

fn named(queue: &Queue) -> String {
    match queue.device() {
        Device::Cpu => "the CPU".into(),
        Device::Cuda(gpu) => format!("{} (sm_{})", gpu.name, gpu.sm),
    }
}

fn line(check: &Check) -> String {
    let status = if check.passed() { "ok  " } else { "FAIL" };
    let note = check.note.as_ref().map_or_else(String::new, |note| format!("; {note}"));
    format!("{status} {:.1e} (at most {:.0e})  {}{note}", check.error, check.tolerance, check.name)
}

/// A new seed for each run. It is printed, so that a failure can be reproduced.
fn fresh_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64 % 1_000_000
}
