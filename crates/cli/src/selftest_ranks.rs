//! `lockstep selftest --nproc N`: checks the collectives between ranks.
//!
//! Starts this program again as every rank, as `train` does, on one node or several. Every rank reduces and gathers known
//! values over the transport that a run would use, compares the results, and measures the speed. Rank 0 prints a line for
//! each rank.

use std::process::ExitCode;

use lockstep_config::{DeviceKind, LaunchSettings, Purpose, RunConfig};
use lockstep_launch::{Session, World};

use crate::args::Selftest;
use crate::bench::per_second;
use crate::collectives::{Collectives, Operation, SingleRank};
use crate::report::{self, Failure};
use crate::selftest::ChecksFailed;
use crate::train::launch_failed;
use crate::{foreign_launch, gpu, inputs, launch, ranks};

/// Elements of the tensors with known values: one for a few ranks, and many that no number of ranks divides.
const CHECKED_ELEMS: [usize; 2] = [5, (1 << 20) + 7];
/// The size of the tensor whose speed is measured, and the number of calls.
const MEASURED_BYTES: usize = 16 << 20;
const CALLS: usize = 4;

/// The settings of the ranks. The model is not used, but every configuration has one.
fn settings(args: &Selftest) -> Vec<String> {
    let device = match args.device.into() {
        DeviceKind::Auto => None,
        DeviceKind::Cpu => Some("device=cpu".to_owned()),
        DeviceKind::Cuda => Some("device=cuda".to_owned()),
    };
    device.into_iter().chain(args.settings.iter().cloned()).collect()
}

fn with_model(settings: &[String]) -> Vec<String> {
    std::iter::once("model=tiny".to_owned()).chain(settings.iter().cloned()).collect()
}

/// Starts the ranks.
pub(crate) fn start(args: &Selftest) -> Result<ExitCode, Failure> {
    let nnodes = if args.launch.standalone { Some(1) } else { args.launch.nnodes };
    let world = launch::world_settings(nnodes, args.launch.nproc)?;
    let settings = settings(args);
    let (config, _) = inputs::load(Purpose::Plan, &with_model(&settings), &world)?;
    if config.plan.world_size() == 1 {
        return Err(Box::new(SingleRank));
    }
    let flags = foreign_launch::filled(&args.launch, &LaunchSettings::default())?;
    launch::start(&flags, &config, &["selftest"], &settings)
}

/// Runs the checks as one of the ranks.
pub(crate) fn as_rank(args: &Selftest, world: &World) -> Result<ExitCode, Failure> {
    let (config, text) = ranks::load(Purpose::Plan, &with_model(&settings(args)), world)?;
    let mut session = match ranks::join_world(world, &text, args.launch.join_timeout) {
        Ok(session) => session,
        Err(error) => return Ok(ExitCode::from(ranks::report_abort(&error, world))),
    };
    if let Err(fault) = check(&config, &mut session) {
        return Ok(ranks::fail(session, &*fault));
    }
    match session.leave() {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => Ok(ExitCode::from(ranks::report_abort(&error, world))),
    }
}

fn check(config: &RunConfig, session: &mut Session) -> Result<(), Failure> {
    let world = session.world().clone();
    let device = gpu::choose_for_rank(config.device, world.local_rank, world.local_world_size)?;
    let mut collectives = Collectives::connect(MEASURED_BYTES, config, session, device)?;
    let (mut failed, mut notes) = (0, Vec::new());
    for operation in Operation::ALL {
        let mut wrong = 0;
        for elems in CHECKED_ELEMS {
            wrong += collectives.count_wrong(operation, elems)?;
        }
        let seconds = collectives.timed(operation, MEASURED_BYTES, CALLS);
        let seconds = seconds.map_err(|e| -> Failure { Box::new(e) })? / CALLS as f64;
        failed += usize::from(wrong > 0);
        notes.push(match wrong {
            0 => format!("{operation} {}", per_second(MEASURED_BYTES as f64 / seconds, "B").trim()),
            wrong => format!("{operation} wrong in {wrong} elements"),
        });
    }
    let status = if failed == 0 { "ok  " } else { "FAIL" };
    let mine = format!("{failed} {status}  {}", notes.join(", "));
    let all = session.exchange("the self-test", mine.as_bytes()).map_err(launch_failed)?;
    if world.rank == 0 {
        report::print_line(&format!("{} ranks, {}", world.world_size, collectives.carrier));
    }
    let mut all_failed = 0;
    for (rank, result) in all.iter().enumerate() {
        let result = String::from_utf8_lossy(result);
        let (failed, line) = result.split_once(' ').unwrap_or(("1", &result));
        all_failed += failed.parse::<usize>().unwrap_or(1);
        if world.rank == 0 {
            report::print_line(&format!("rank {rank:<4} {line}"));
        }
    }
    let num_checks = all.len() * Operation::ALL.len();
    if all_failed > 0 {
        return Err(Box::new(ChecksFailed { failed: all_failed, all: num_checks }));
    }
    if world.rank == 0 {
        report::print_line(&format!("all {num_checks} checks passed"));
    }
    Ok(())
}
