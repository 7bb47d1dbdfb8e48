//! `lockstep train`: one rank in this process, or several that it starts.

use std::io::IsTerminal;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use lockstep_config::{LaunchSettings, Purpose, RunConfig, StrategyName};
use lockstep_core::{Elems, Rank, panics};
use lockstep_data::Stats;
use lockstep_launch::{LaunchError, STOPPED, Session, World};
use lockstep_observe::{NoProgress, PlainLines, Progress, TerminalBar};
use lockstep_plan::ModelId;
use lockstep_train::{PreparedRun, TrainOutcome};

use crate::args::{LaunchFlags, Train};
use crate::hub::Need;
use crate::inputs::RunInputs;
use crate::plan::{AutoChoices, PlanSubject};
use crate::report::{self, Bug, Failure};
use crate::stop::Stopper;
use crate::{
    cluster, command_line, dashboard, dry_run, foreign_launch, gpu, host, hub, inputs, launch, plan, ranks,
    run_report, trackers,
};

pub(crate) fn run(args: &Train) -> Result<ExitCode, Failure> {
    if args.dry_run {
        return dry_run::run(args).map(|()| ExitCode::SUCCESS);
    }
    if args.launch.starts_ranks() {
        launch::check_not_a_rank()?;
    }
    foreign_launch::use_variables(inputs::line_variables(&args.run.words())?)?;
    match launch::world(args)? {
        Some(world) if world.world_size > 1 => as_rank(args, &world),
        Some(world) => {
            let stopper = Stopper::listen(args.launch.grace, Some(&world))?;
            let (mut config, mut text) = ranks::load(Purpose::Train, &args.run.words(), &world)?;
            if world.restart > 0 {
                ranks::apply_restart_point(ranks::restart_point(&config), &mut config, &mut text);
            }
            let command = command_line::of_run(&args.run.words(), &config);
            alone(&config, &text, &command, &stopper)
        }
        None => start(args),
    }
}

/// What a launcher starts: what the run is configured by, the flags, and the settings of other launchers' files.
pub(crate) fn read(args: &Train) -> Result<(RunInputs, LaunchFlags, LaunchSettings), Failure> {
    let nnodes = if args.launch.standalone { Some(1) } else { args.launch.nnodes };
    let world = launch::world_settings(nnodes, args.launch.nproc)?;
    let (mut inputs, settings) = foreign_launch::read(&args.run.words(), &world)?;
    let mut flags = foreign_launch::filled(&args.launch, &settings)?;
    cluster::add(&mut inputs, &mut flags, &settings)?;
    Ok((inputs, flags, settings))
}

/// Trains in this process if one rank is enough, and starts ranks otherwise. Configuration errors are reported here,
/// once, and not by every rank.
fn start(args: &Train) -> Result<ExitCode, Failure> {
    let words = args.run.words();
    let (inputs, flags, settings) = read(args)?;
    let (config, text) = inputs.load(Purpose::Train)?;
    foreign_launch::use_gpus(&settings, config.device.kind)?;
    if config.plan.world_size() == 1 && !flags.supervises() {
        let command = command_line::of_run(&words, &config);
        return alone(&config, &text, &command, &Stopper::listen(flags.grace, None)?);
    }
    launch::start(&flags, &config, &["train", &format!("--grace={}", flags.grace)], &words)
}

/// Trains as the only rank. `command`: the line that repeats the run, if there is one.
pub(crate) fn alone(
    config: &RunConfig,
    text: &str,
    command: &str,
    stopper: &Stopper,
) -> Result<ExitCode, Failure> {
    let (mut config, mut text) = (config.clone(), text.to_owned());
    let _dashboard = dashboard::of_run(&config)?;
    hub::provide(&mut config, &mut text, Need::Train)?;
    choose(&mut config)?;
    train(&config, &text, command, None, stopper)
}

/// Trains as one of several ranks. Once it has joined, the other ranks learn how it ends.
fn as_rank(args: &Train, world: &World) -> Result<ExitCode, Failure> {
    let stopper = Stopper::listen(args.launch.grace, Some(world))?;
    let (mut config, mut text) = ranks::load(Purpose::Train, &args.run.words(), world)?;
    let command = command_line::of_run(&args.run.words(), &config);
    let _dashboard = if world.rank == 0 { dashboard::of_run(&config)? } else { None };
    let mut session = match ranks::join_world(world, &text, args.launch.join_timeout) {
        Ok(session) => session,
        Err(error) => return Ok(ExitCode::from(ranks::report_abort(&error, world))),
    };
    let prepared = stopper
        .notify_through(&session)
        .and_then(|()| ranks::agree_on_restart_point(&mut session, &mut config, &mut text))
        .map_err(launch_failed)
        .and_then(|()| hub::provide_to_ranks(&mut session, &mut config, &mut text))
        .and_then(|()| choose(&mut config));
    let trained =
        prepared.and_then(|()| guarded(|| train(&config, &text, &command, Some(&mut session), &stopper)));
    let code = match trained {
        Ok(code) => code,
        Err(fault) => return Ok(ranks::fail(session, &*fault)),
    };
    match session.leave() {
        Ok(()) => Ok(code),
        Err(error) => Ok(ExitCode::from(ranks::report_abort(&error, world))),
    }
}

/// Resolves the strategy and the batch size that are `auto` with the cost model, and notes the reasons. All ranks have the
/// same configuration and hardware, so they choose the same; the plan, on which they agree later, depends on it.
fn choose(config: &mut RunConfig) -> Result<(), Failure> {
    // On one rank all strategies are the same.
    let open_strategy = config.plan.strategy == StrategyName::Auto && config.plan.world_size() > 1;
    if !open_strategy && !config.batch.chooses_rows {
        return Ok(());
    }
    let chosen = PlanSubject::of(config, None)?.choose(config)?;
    if let Some(choice) = chosen.strategy {
        config.notes.push(format!("strategy {}, chosen automatically. {}", choice.strategy, choice.reason));
    }
    if let Some(rows) = chosen.rows {
        let reason = AutoChoices::reason_for_rows(&rows);
        config.notes.push(format!("{} rows in a micro-batch, chosen automatically. {reason}", rows.rows));
    }
    Ok(())
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
    command: &str,
    mut session: Option<&mut Session>,
    stopper: &Stopper,
) -> Result<ExitCode, Failure> {
    let rank = Rank(session.as_ref().map_or(0, |session| session.world().rank));
    ranks::arm_failpoint(rank)?;
    let (local_rank, ranks) =
        session.as_ref().map_or((0, 1), |s| (s.world().local_rank, s.world().local_world_size));
    let device = gpu::choose_for_rank(config.device, local_rank, ranks)?;
    let trackers = trackers::access(config)?;
    let mut prepared =
        lockstep_train::prepare(config, rank, device).map_err(|error| plan::explained(error, config))?;
    prepared.peak_memory = host::peak_memory;
    prepared.environment.environment = std::env::vars_os().collect();
    prepared.trackers = trackers;
    prepared.command = command.to_owned();
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
    // Rank 0 prints for all ranks.
    if rank == Rank(0) {
        print_start(config, &prepared, session.as_ref().map(|session| session.world()));
    }
    let connect = session.map(|session| ranks::connect(session, config, device)).transpose()?;
    let outcome = lockstep_train::train(config, text, prepared, connect, &mut *progress).map_err(boxed)?;
    drop(progress);
    if rank == Rank(0) {
        run_report::write_at_end(&config.output.output_dir);
    }
    if outcome.stopped {
        return Ok(ExitCode::from(STOPPED));
    }
    if rank == Rank(0) {
        print_end(&outcome);
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints what the run trains, on what, and with which data.
fn print_start(config: &RunConfig, prepared: &PreparedRun, world: Option<&World>) {
    let plan = &prepared.plan;
    let model = plan.input.model(ModelId::FIRST);
    let each = if world.is_some() { " each" } else { "" };
    let ranks = world.map_or_else(String::new, |world| format!("{} ranks of ", world.world_size));
    report::print_line(&format!(
        "{}, {} parameters | {} {} on {ranks}{} | memory {}{each}",
        model.shape.architecture.class_name(model.shape.head),
        Elems(model.params()),
        plan.input.storage,
        lockstep_plan::chosen_strategy(config, &model.shape),
        gpu::description(&prepared.machine),
        if plan.input.has_separate_memory() { plan.device_bytes() } else { plan.process_bytes() },
    ));
    let stats = prepared.dataset.stats();
    report::print_line(&data_line(&stats));
    if let Some(eval) = &prepared.eval {
        report::print_line(&format!("evaluation data: {}", data_line(&eval.stats())));
    }
    if stats.skipped > 0 {
        let (rows, first) = (count(stats.skipped, "bad row"), first_skipped(&prepared.dataset));
        report::print_line(&format!("{rows} skipped; the first: {first}"));
    }
}

fn data_line(stats: &Stats) -> String {
    let (docs, rows) = (count(stats.docs, "document"), count(stats.rows, "row"));
    format!("{docs} in {rows}, {} tokens", stats.tokens)
}

fn count(number: u64, name: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {name}{plural}")
}

fn print_end(outcome: &TrainOutcome) {
    report::print_line(&format!("model in {}", outcome.model_dir.display()));
    if let Some(checkpoint) = &outcome.checkpoint {
        report::print_line(&format!("checkpoint in {}", checkpoint.display()));
    }
    if let Some(memory) = outcome.memory {
        report::print_line(&format!("peak memory {} (planned {})", memory.peak, memory.planned()));
    }
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
