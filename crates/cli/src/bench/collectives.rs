//! `lockstep bench collectives`: measures collectives between ranks of this host.
//!
//! Starts this program again as every rank, as `train --nproc` does. All ranks make the same calls, and rank 0 measures
//! the time.

use std::process::ExitCode;

use lockstep_comm::CommError;
use lockstep_config::{Purpose, RunConfig};
use lockstep_core::Bytes;
use lockstep_launch::{Session, World};
use serde_json::json;

use super::table::per_second;
use crate::args::{BenchCollectives, LaunchFlags};
use crate::collectives::{Collectives, Operation, SingleRank};
use crate::report::{self, Failure};
use crate::train::launch_failed;
use crate::{gpu, inputs, launch, ranks};

const SMALLEST: usize = 1 << 20;
/// Measurements per size. The first is not counted.
const BATCHES: usize = 8;
/// The bytes of one measurement: small sizes are called many times.
const BATCH_BYTES: usize = 64 << 20;

/// The times of one call in seconds, sorted.
struct Measured {
    operation: Operation,
    bytes: usize,
    seconds: Vec<f64>,
}

pub(crate) fn run(args: &BenchCollectives) -> Result<ExitCode, Failure> {
    match ranks::world(None).map_err(launch_failed)? {
        Some(world) if world.world_size > 1 => as_rank(args, &world),
        Some(_) => Err(Box::new(SingleRank)),
        None => start(args),
    }
}

/// The settings of the ranks. The model is not used, but every configuration has one.
fn settings(args: &BenchCollectives) -> Vec<String> {
    [String::from("model=tiny")].into_iter().chain(given(args)).collect()
}

/// The settings that the command line gives.
fn given(args: &BenchCollectives) -> impl Iterator<Item = String> {
    args.settings.iter().cloned().chain(args.carrier.iter().map(|name| format!("carrier={name}")))
}

fn start(args: &BenchCollectives) -> Result<ExitCode, Failure> {
    let world = launch::world_settings(None, Some(args.nproc))?;
    let (config, _) = inputs::load(Purpose::Plan, &settings(args), &world)?;
    if config.plan.world_size() == 1 {
        return Err(Box::new(SingleRank));
    }
    let largest = format!("--largest={}", args.largest);
    let mut words = vec!["bench", "collectives", &largest];
    words.extend(args.json.then_some("--json"));
    launch::start(&LaunchFlags::default(), &config, &words, &given(args).collect::<Vec<_>>())
}

fn as_rank(args: &BenchCollectives, world: &World) -> Result<ExitCode, Failure> {
    let (config, text) = ranks::load(Purpose::Plan, &settings(args), world)?;
    let mut session = match ranks::join_world(world, &text, None) {
        Ok(session) => session,
        Err(error) => return Ok(ExitCode::from(ranks::report_abort(&error, world))),
    };
    if let Err(fault) = measure(args, &config, &mut session) {
        return Ok(ranks::fail(session, &*fault));
    }
    match session.leave() {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => Ok(ExitCode::from(ranks::report_abort(&error, world))),
    }
}

fn measure(args: &BenchCollectives, config: &RunConfig, session: &mut Session) -> Result<(), Failure> {
    let world = session.world().clone();
    let device = gpu::choose_for_rank(config.device, world.local_rank, world.local_world_size)?;
    let largest = usize::from(args.largest) << 20;
    let mut bench = Collectives::connect(largest, config, session, device)?;
    let prints = world.rank == 0;
    if prints && !args.json {
        report::print_line(&format!("{} ranks, {}", world.world_size, bench.carrier));
    }
    let mut all = Vec::new();
    for operation in Operation::ALL {
        let mut bytes = SMALLEST;
        while bytes <= largest {
            let seconds =
                call_seconds(&mut bench, operation, bytes).map_err(|e| -> Failure { Box::new(e) })?;
            let measured = Measured { operation, bytes, seconds };
            if prints && !args.json {
                report::print_line(&measured.line());
            }
            all.push(measured);
            bytes *= 4;
        }
    }
    if prints && args.json {
        let rates: Vec<_> = all.iter().map(Measured::as_json).collect();
        let object = json!({
            "program": "lockstep", "version": env!("CARGO_PKG_VERSION"), "ranks": world.world_size,
            "carrier": bench.carrier, "rates": rates,
        });
        report::print(&format!("{object}\n"))?;
    }
    Ok(())
}

/// The times of one call, sorted.
fn call_seconds(ranks: &mut Collectives, operation: Operation, bytes: usize) -> Result<Vec<f64>, CommError> {
    let calls = BATCH_BYTES.div_ceil(bytes);
    let mut seconds = Vec::with_capacity(BATCHES);
    for batch in 0..BATCHES {
        let one = ranks.timed(operation, bytes, calls)?;
        if batch > 0 {
            seconds.push(one / calls as f64);
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds)
}

impl Measured {
    fn median(&self) -> f64 {
        self.seconds[self.seconds.len() / 2]
    }

    fn line(&self) -> String {
        let Measured { operation, bytes, .. } = self;
        let rate = per_second(*bytes as f64 / self.median(), "B");
        format!(
            "{:<16}{:>12}{:>12.1} µs{rate:>15}",
            operation.to_string(),
            Bytes(*bytes as u64).to_string(),
            1e6 * self.median()
        )
    }

    fn as_json(&self) -> serde_json::Value {
        json!({
            "operation": self.operation.to_string(), "bytes": self.bytes, "seconds": self.median(),
            "fastest": self.seconds[0], "slowest": self.seconds[self.seconds.len() - 1],
            "bytes_per_second": self.bytes as f64 / self.median(),
        })
    }
}
