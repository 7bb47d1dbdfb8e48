//! This process as one rank of several: joins the others, watches for their failures and reports its own.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use lockstep_comm::{CarrierChoice, CommError, ConnectSpec, Nccl, NcclSpec};
use lockstep_config::{CarrierName, Origin, Purpose, Resume, RunConfig};
use lockstep_core::{Fault, FaultClass, Rank, failpoint};
use lockstep_device::Device;
use lockstep_launch::{
    AbortKind, ErrorNote, JoinOptions, LaunchError, Member, STOPPED, Session, Token, World, cores, names,
};

use crate::args;
use crate::gpu;
use crate::inputs;
use crate::report::{self, Failure};
use crate::reporter::Reporter;
use lockstep_engine::{CommUse, Comms};
use lockstep_train::Connection;

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The time that a rank has to end by itself after another rank failed.
const LAST_MOMENT: Duration = Duration::from_millis(300);
/// The time to wait for the cause after a collective failed: the error may arrive before the abort that caused it.
const NEWS: Duration = Duration::from_millis(150);

/// The value of an environment variable.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Makes this process end with the launcher that started it, if that was ours. `false`: the launcher has already ended.
pub(crate) fn launcher_is_alive() -> bool {
    let pid = variable(names::LAUNCHER_PID).and_then(|pid| pid.parse().ok());
    pid.is_none_or(lockstep_launch::die_with)
}

/// Arms the failpoint that the environment sets for this rank. A restarted rank has none.
pub(crate) fn arm_failpoint(rank: Rank) -> Result<(), Failure> {
    let restarts = variable(names::RESTART).unwrap_or_default();
    let Some(text) = variable(names::FAILPOINT).filter(|_| matches!(&*restarts, "" | "0")) else {
        return Ok(());
    };
    let (of_rank, failpoint) = text.split_once('/').unwrap_or(("0", &text));
    if of_rank == rank.0.to_string() {
        failpoint::arm(failpoint.parse().map_err(|e| -> Failure { Box::new(FailpointError(e)) })?);
    }
    Ok(())
}

#[derive(Debug)]
struct FailpointError(failpoint::BadFailpoint);

impl std::fmt::Display for FailpointError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "environment variable {}: {}", names::FAILPOINT, self.0)
    }
}

impl std::error::Error for FailpointError {}

impl Fault for FailpointError {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        Some("It is meant for tests: unset it.".into())
    }
}

/// The configuration contradicts the world of the launcher.
#[derive(Debug)]
pub(crate) struct WorldDiffers {
    key: &'static str,
    value: u32,
    origin: Origin,
    variable: &'static str,
    launched: u32,
}

impl std::fmt::Display for WorldDiffers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let WorldDiffers { key, value, origin, variable, launched } = self;
        write!(f, "`{key}: {value}` ({origin}), but the launcher started {launched} ({variable})")
    }
}

impl std::error::Error for WorldDiffers {}

impl Fault for WorldDiffers {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        Some(format!("Remove `{}` from the configuration, or start that many.", self.key))
    }
}

/// The world that the environment describes, if any. `--local-rank` replaces LOCAL_RANK if that is not set.
pub(crate) fn world(local_rank: Option<u32>) -> Result<Option<World>, LaunchError> {
    World::read(&|name| match (variable(name), local_rank) {
        (None, Some(rank)) if name == names::LOCAL_RANK => Some(rank.to_string()),
        (value, _) => value,
    })
}

/// Loads the configuration for this rank, with the size of its world.
pub(crate) fn load(
    purpose: Purpose,
    settings: &[String],
    world: &World,
) -> Result<(RunConfig, String), Failure> {
    let extra = [format!("nodes={}", world.nodes()), format!("nproc_per_node={}", world.local_world_size)];
    if variable(names::LAUNCHER_PID).is_none() {
        check_world(settings, world)?;
    }
    let (mut config, text) = inputs::load(purpose, settings, &extra)?;
    use_cores(&mut config, world);
    Ok((config, text))
}

/// Identifies this launch and its restarts, if the launcher sets an id.
pub(crate) fn launch_id() -> Option<String> {
    let torchrun = || variable(names::TORCHELASTIC_RUN_ID).filter(|id| id != "none");
    variable(names::LAUNCH_ID).or_else(torchrun).filter(|id| !id.is_empty())
}

/// What restarted ranks resume from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RestartPoint {
    /// As configured: this launch has not reached its first step.
    AsConfigured,
    /// From the newest checkpoint.
    Resume,
    /// From the start, over the incomplete checkpoints that this launch left behind.
    Overwrite,
}

/// Decides what to resume from after a restart: checkpoints of this launch. Those of an earlier run count only if the
/// configuration asks for them.
pub(crate) fn restart_point(config: &RunConfig) -> RestartPoint {
    let dir = &config.output.output_dir;
    // Without a launch id, every checkpoint counts as one of this launch.
    if launch_id().is_some_and(|id| !lockstep_train::belongs_to(dir, &id)) {
        return RestartPoint::AsConfigured;
    }
    match lockstep_ckpt::latest(&dir.join("checkpoints")) {
        Ok(latest) if latest.path.is_some() => RestartPoint::Resume,
        Ok(latest) if !latest.skipped.is_empty() => RestartPoint::Overwrite,
        _ => RestartPoint::AsConfigured,
    }
}

/// Changes the configuration and its text, which goes into checkpoints.
pub(crate) fn apply_restart_point(from: RestartPoint, config: &mut RunConfig, text: &mut String) {
    match from {
        RestartPoint::AsConfigured => {}
        RestartPoint::Resume => {
            config.output.resume_from_checkpoint = Resume::Latest;
            text.push_str("# resume_from_checkpoint=true\n");
        }
        RestartPoint::Overwrite => {
            config.output.overwrite_output_dir = true;
            text.push_str("# overwrite_output_dir=true\n");
        }
    }
}

/// Agrees on the restart point. Rank 0 decides: its launcher knows which launch this is, and it is the rank that writes
/// the output folder.
pub(crate) fn agree_on_restart_point(
    session: &mut Session,
    config: &mut RunConfig,
    text: &mut String,
) -> Result<(), LaunchError> {
    if session.world().restart == 0 {
        return Ok(());
    }
    let mine = if session.world().rank == 0 { restart_point(config) } else { RestartPoint::AsConfigured };
    let all = session.exchange("the restart point", &[mine as u8])?;
    let every = [RestartPoint::AsConfigured, RestartPoint::Resume, RestartPoint::Overwrite];
    let from = every.into_iter().find(|from| all.first().is_some_and(|first| *first == [*from as u8]));
    apply_restart_point(from.unwrap_or(RestartPoint::AsConfigured), config, text);
    Ok(())
}

/// Checks the configured world against that of a foreign launcher. With our own launcher, flags take precedence.
fn check_world(settings: &[String], world: &World) -> Result<(), Failure> {
    // A configuration with only `world_size` does not load without the launcher's numbers.
    let Ok((config, _)) = inputs::load(Purpose::Plan, settings, &[]) else { return Ok(()) };
    let plan = &config.plan;
    let facts = [
        ("nodes", plan.nodes, "WORLD_SIZE / LOCAL_WORLD_SIZE", world.nodes()),
        ("nproc_per_node", plan.nproc_per_node, names::LOCAL_WORLD_SIZE, world.local_world_size),
    ];
    for (key, value, variable, launched) in facts {
        let origin = config.origin(key).clone();
        if value != launched && origin != Origin::Default {
            return Err(Box::new(WorldDiffers { key, value, origin, variable, launched }));
        }
    }
    Ok(())
}

/// Gives this rank its share of the host's cores. Call it before any thread starts: threads inherit the affinity.
fn use_cores(config: &mut RunConfig, world: &World) {
    if world.local_world_size == 1 {
        return;
    }
    let all = cores::available();
    config.plan.threads.get_or_insert(cores::threads(all.len(), world.local_world_size) as u32);
    if variable(names::PIN).as_deref() != Some("0")
        && let Some(share) = cores::share(&all, world.local_rank, world.local_world_size)
    {
        // Pinning is an optimization: a failure does not matter.
        let _ = cores::pin(share);
    }
}

/// Joins the other ranks, and checks that all have the same configuration. From then on this process ends when another
/// rank fails, even if it is stuck.
pub(crate) fn join_world(
    world: &World,
    text: &str,
    join_timeout: Option<f64>,
) -> Result<Session, LaunchError> {
    let timeout = join_timeout.or_else(|| variable(names::JOIN_TIMEOUT)?.parse().ok());
    let options = JoinOptions {
        token: Token::read(&variable)?,
        version: VERSION.into(),
        timeout: Duration::from_secs_f64(timeout.unwrap_or(args::JOIN_TIMEOUT)),
        log: Box::new(|line| Reporter::of_this_process().line(line)),
    };
    let mut session = lockstep_launch::join(world, options)?;
    let (reason, place) = (session.abort_reason(), world.clone());
    session.on_abort(Box::new(move |_| {
        let end = move || {
            std::thread::sleep(LAST_MOMENT);
            if let Some(error) = reason.get() {
                let code = report_abort(&error, &place);
                std::process::exit(code.into());
            }
        };
        let _ = std::thread::Builder::new().name("last moment".into()).spawn(end);
    }));
    let described = description(text);
    let pairs: Vec<(&str, String)> =
        described.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
    match session.agree("the configuration", &pairs) {
        Ok(()) => Ok(session),
        Err(error) => {
            // Every rank finds this out by itself.
            let _ = session.leave();
            Err(error)
        }
    }
}

/// The lines of a configuration as keys and values, so that an error can name the difference, and a hash of the whole
/// text. The text contains no secrets.
fn description(text: &str) -> Vec<(String, String)> {
    let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex()[..16].to_string();
    let pair = |line: &str| {
        let (key, value) = match line.strip_prefix("# ") {
            Some(setting) => setting.split_once('='),
            None => line.split_once(':').filter(|_| !line.starts_with([' ', '#', '-', '{', '"'])),
        }?;
        Some((key.trim().to_string(), value.trim().chars().take(80).collect()))
    };
    let mut list: Vec<(String, String)> = text.lines().filter_map(pair).take(200).collect();
    list.push(("the text (hash)".into(), hash(text)));
    list
}

/// Prepares the connections between ranks that training communicates over.
pub(crate) fn connect<'a>(
    session: &'a mut Session,
    config: &'a RunConfig,
    device: Device,
) -> Result<lockstep_train::Connect<'a>, Failure> {
    let abort = lockstep_comm::Abort::default();
    let deadline = Duration::from_secs_f64(config.plan.collective_timeout);
    let nccl = match device {
        Device::Cpu => None,
        Device::Cuda(gpu) => {
            let nccl = Nccl::open(&gpu::search()).map_err(|e| -> Failure { Box::new(e) })?;
            Some(NcclSpec { nccl, gpu, deadline, abort: abort.clone() })
        }
    };
    let raise = abort.clone();
    session.on_abort(Box::new(move |why| raise.raise(why)));
    Ok(Box::new(move |memory| {
        let (world, secret, ip) = (session.world().clone(), session.secret().clone(), session.local_ip());
        // A loopback address is reachable from this host only.
        let bind: IpAddr = if ip.is_ipv4() { ip } else { IpAddr::from([0u16; 8]) };
        let carrier = match config.plan.carrier {
            CarrierName::Auto => CarrierChoice::Auto,
            CarrierName::Shm => CarrierChoice::Shm,
            CarrierName::Tcp => CarrierChoice::Tcp,
        };
        let mut exchange = |mine: &[u8]| {
            session.exchange("where ranks are", mine).map_err(|e| CommError::Aborted { why: e.to_string() })
        };
        let mut connected = |regions, purpose: &str| {
            let spec = ConnectSpec {
                rank: Rank(world.rank),
                world: world.world_size,
                host: None,
                regions,
                bind: SocketAddr::new(bind, 0),
                advertise: Some(ip),
                session: &secret,
                run_id: &format!("restart {}, {purpose}", world.restart),
                deadline,
                abort: abort.clone(),
                carrier,
                spin: None,
            };
            lockstep_comm::connect(&spec, &mut exchange)
        };
        let comms = Comms::connect(|purpose| match purpose {
            CommUse::Lane(lane) => connected(vec![Arc::clone(memory)], &format!("{lane} lane")),
            CommUse::BetweenSteps => connected(Vec::new(), "between steps"),
        })?;
        Ok(Connection { comms, nccl })
    }))
}

/// Ends this rank with an error: notifies the other ranks, and prints the error unless another rank has.
pub(crate) fn fail(session: Session, fault: &dyn Fault) -> ExitCode {
    let class = fault.class();
    let consequence = matches!(class, FaultClass::PeerFailed | FaultClass::Desync);
    let reason = if consequence { session.aborted_within(NEWS) } else { session.aborted() };
    if let Some(error) = reason {
        return ExitCode::from(report_abort(&error, session.world()));
    }
    session.fail(&fault.to_string(), class.exit_code());
    report::failure(fault)
}

/// Prints why the ranks cannot continue, unless another rank prints it. Returns the exit code.
pub(crate) fn report_abort(error: &LaunchError, world: &World) -> u8 {
    let mut note = ErrorNote { error: error.to_string(), hint: error.hint(), cause_code: None };
    let printed_elsewhere = match error {
        LaunchError::Aborted(abort) => {
            note.cause_code = Some(abort.exit_code());
            let here = |by: &Member| by.host == lockstep_launch::host_name();
            match &abort.by {
                // The error is about this process.
                Some(by) if here(by) && by.pid == std::process::id() => false,
                // A rank that fails on this host prints its own error.
                Some(by) if here(by) && abort.kind == AbortKind::Failed => true,
                _ => world.local_rank > 0,
            }
        }
        // Every rank finds this out, and local rank 0 prints it.
        LaunchError::Disagree { .. } => world.local_rank > 0,
        _ => false,
    };
    if variable(names::ERROR_FILE).is_some() || !printed_elsewhere {
        Reporter::of_this_process().error(&note);
    }
    // A rank that was asked to stop notifies the others, and all exit with the same code.
    if note.cause_code == Some(STOPPED) { STOPPED } else { error.class().exit_code() }
}
