//! `lockstep train`

use lockstep_plan::ModelId;
use std::io::IsTerminal;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use lockstep_config::RunConfig;
use lockstep_core::{Elems, Rank, panics};
use lockstep_launch::{LaunchError, STOPPED, Session, World};
use lockstep_observe::{NoProgress, PlainLines, Progress, TerminalBar};

use crate::args::{Launch, Train};
use crate::report::{self, Bug, Failure};
use crate::stop::Stopper;
use crate::{gpu, host, launch, ranks};

pub(crate) fn run(args: &Train) -> Result<ExitCode, Failure> {
    let world = ranks::world(args.local_rank).map_err(launch_failed)?;
    match world.filter(|_| args.nproc.is_none()) {
        Some(world) if world.world_size > 1 => as_rank(args, &world),
        Some(world) => {
            let stopper = Stopper::listen(args.grace, Some(&world))?;
            let (mut config, mut text) = ranks::load(&args.run.settings, &world)?;
            if world.restart > 0 {
                ranks::apply_restart_point(ranks::restart_point(&config), &mut config, &mut text);
            }
            alone(&config, &text, &stopper)
        }
        None if args.nproc.is_some() => {
            launch::run(&Launch::on_this_host(&args.run.settings, args.nproc, args.grace))
        }
        None => {
            let (config, text) = report::load(&args.run.settings, &[])?;
            // A configuration that says how many ranks there are needs no flag to start them.
            if config.plan.world_size() > 1 {
                launch::run(&Launch::on_this_host(&args.run.settings, args.nproc, args.grace))
            } else {
                alone(&config, &text, &Stopper::listen(args.grace, None)?)
            }
        }
    }
}

pub(crate) fn alone(config: &RunConfig, text: &str, stopper: &Stopper) -> Result<ExitCode, Failure> {
    train(config, text, None, stopper)
}

/// One of several ranks. From joining on, the others hear how it ends.
fn as_rank(args: &Train, world: &World) -> Result<ExitCode, Failure> {
    let stopper = Stopper::listen(args.grace, Some(world))?;
    let (mut config, mut text) = ranks::load(&args.run.settings, world)?;
    let mut session = match ranks::world_of_ranks(world, &text) {
        Ok(session) => session,
        Err(error) => return Ok(ExitCode::from(ranks::tell_abort(&error, world))),
    };
    let prepared = stopper
        .notify_through(&session)
        .and_then(|()| ranks::agree_on_restart_point(&mut session, &mut config, &mut text))
        .map_err(launch_failed);
    let trained = prepared.and_then(|()| guarded(|| train(&config, &text, Some(&mut session), &stopper)));
    let code = match trained {
        Ok(code) => code,
        Err(fault) => return Ok(ranks::fail(session, &*fault)),
    };
    match session.leave() {
        Ok(()) => Ok(code),
        Err(error) => Ok(ExitCode::from(ranks::tell_abort(&error, world))),
    }
}

/// Turns a panic into a failure, so that the other ranks are notified at once, with the reason.
fn guarded(work: impl FnOnce() -> Result<ExitCode, Failure>) -> Result<ExitCode, Failure> {
    let caught = catch_unwind(AssertUnwindSafe(work));
    caught.unwrap_or_else(|payload| Err(Box::new(Bug(panics::from_payload(&*payload)))))
}

/// Trains to the end, or until a stop is requested. Returns the exit code.
fn train(
    config: &RunConfig,
    text: &str,
    mut session: Option<&mut Session>,
    stopper: &Stopper,
) -> Result<ExitCode, Failure> {
    let rank = Rank(session.as_ref().map_or(0, |session| session.world().rank));
    ranks::arm_failpoint(rank)?;
    // Rank 0 speaks for all.
    let say = |line: &str| {
        if rank == Rank(0) {
            report::say(line);
        }
    };
    let (local_rank, ranks) =
        session.as_ref().map_or((0, 1), |s| (s.world().local_rank, s.world().local_world_size));
    let device = gpu::chosen_by_rank(config.device, local_rank, ranks)?;
    let mut prepared = lockstep_train::prepare(config, rank, device).map_err(boxed)?;
    prepared.peak_memory = host::peak_memory;
    prepared.stop = stopper.request.clone();
    prepared.launch_id = ranks::launch_id();
    if let Some(session) = &mut session {
        let all = prepared.must_agree(config);
        let pairs: Vec<(&str, String)> =
            all.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        session.agree("the plan", &pairs).map_err(launch_failed)?;
    }
    let mut progress: Box<dyn Progress> = if rank != Rank(0) {
        Box::new(NoProgress)
    } else if std::io::stderr().is_terminal() {
        Box::new(TerminalBar::new())
    } else {
        Box::new(PlainLines::new(std::io::stdout()))
    };
    let stats = prepared.dataset.stats();
    let plan = &prepared.plan;
    let model = plan.input.model(ModelId::FIRST);
    let each = if session.is_some() { " each" } else { "" };
    let world = session.as_ref().map_or_else(String::new, |s| format!("{} ranks of ", s.world().world_size));
    say(&format!(
        "{}, {} parameters | {} {} on {world}{} | memory {}{each}",
        model.shape.architecture.class_name(),
        Elems(model.params()),
        plan.input.storage,
        lockstep_plan::chosen_strategy(config, &prepared.shape),
        gpu::described(&prepared.machine),
        if plan.input.has_separate_memory() { plan.device_bytes() } else { plan.process_bytes() },
    ));
    say(&format!("{} documents in {} rows, {} tokens", stats.docs, stats.rows, stats.tokens));
    if let Some(eval) = &prepared.eval {
        let stats = eval.stats();
        say(&format!(
            "{} documents in {} rows to evaluate on, {} tokens",
            stats.docs, stats.rows, stats.tokens
        ));
    }
    if stats.skipped > 0 {
        let rows = if stats.skipped == 1 { "bad row" } else { "bad rows" };
        say(&format!("{} {rows} skipped; the first: {}", stats.skipped, first_skipped(&prepared.dataset)));
    }
    let connect = session.map(|session| ranks::connect(session, config, device)).transpose()?;
    let outcome = lockstep_train::train(config, text, prepared, connect, &mut *progress).map_err(boxed)?;
    drop(progress);
    if outcome.stopped {
        return Ok(ExitCode::from(STOPPED));
    }
    say(&format!("model in {}", outcome.model_dir.display()));
    if let Some(checkpoint) = outcome.checkpoint {
        say(&format!("checkpoint in {}", checkpoint.display()));
    }
    if let Some(memory) = outcome.memory {
        say(&format!("peak memory {} (planned {})", memory.peak, memory.planned()));
    }
    Ok(ExitCode::SUCCESS)
}

fn first_skipped(dataset: &lockstep_data::Dataset) -> String {
    dataset
        .skipped()
        .first()
        .map_or_else(String::new, |s| format!("{} row {}: {}", s.file.display(), s.row, s.why))
}

pub(crate) fn boxed(error: lockstep_train::TrainError) -> Failure {
    Box::new(error)
}

pub(crate) fn launch_failed(error: LaunchError) -> Failure {
    Box::new(error)
}
