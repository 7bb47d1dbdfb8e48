//! This process as one rank of several: finding the others, hearing of their failures, telling of its own.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use lockstep_comm::{CarrierChoice, CommError, ConnectSpec, Nccl, NcclSpec};
use lockstep_config::{CarrierName, Origin, Resume, RunConfig};
use lockstep_core::{Fault, FaultClass, Rank, failpoint};
use lockstep_device::Device;
use lockstep_launch::{
    AbortKind, ErrorNote, JoinOptions, LaunchError, Member, STOPPED, Session, Token, World, cores, names,
};

use crate::gpu;
use crate::report::{self, Failure};
use crate::voice::Voice;
use lockstep_engine::Comms;
use lockstep_train::Connection;

const VERSION: &str = env!("CARGO_PKG_VERSION");
const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
/// For a rank to end by itself when another has failed.
const LAST_MOMENT: Duration = Duration::from_millis(300);
/// What a rank runs into when another fails may come before the news of it.
const NEWS: Duration = Duration::from_millis(150);

/// The environment, as the libraries ask for it.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Ties this process to the launcher that started it, if one of ours did. `false`: it is gone.
pub(crate) fn launcher_is_there() -> bool {
    let pid = variable(names::LAUNCHER_PID).and_then(|pid| pid.parse().ok());
    pid.is_none_or(lockstep_launch::die_with)
}

/// Arms the failpoint that the environment has for this rank, the first time it starts.
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
        Some("It is for tests: unset it.".into())
    }
}

/// A configuration that the launcher's world contradicts.
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
        Some(format!("Remove `{}` from the configuration, or start as many as it says.", self.key))
    }
}

/// The world that the environment describes, if it describes one. `--local-rank` stands in for a variable
/// that is not set.
pub(crate) fn world(local_rank: Option<u32>) -> Result<Option<World>, LaunchError> {
    World::read(&|name| match (variable(name), local_rank) {
        (None, Some(rank)) if name == names::LOCAL_RANK => Some(rank.to_string()),
        (value, _) => value,
    })
}

/// The configuration as this rank has it: with the world it is in.
pub(crate) fn load(settings: &[String], world: &World) -> Result<(RunConfig, String), Failure> {
    let extra = [format!("nodes={}", world.nodes()), format!("nproc_per_node={}", world.local_world_size)];
    if variable(names::LAUNCHER_PID).is_none() {
        check_world(settings, world)?;
    }
    let (mut config, text) = report::load(settings, &extra)?;
    use_cores(&mut config, world);
    Ok((config, text))
}

/// Tells this launch from all others, its restarts included, where the launcher does.
pub(crate) fn launch_id() -> Option<String> {
    let torchrun = || variable(names::TORCHELASTIC_RUN_ID).filter(|id| id != "none");
    variable(names::LAUNCH_ID).or_else(torchrun).filter(|id| !id.is_empty())
}

/// What restarted ranks resume from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RestartPoint {
    /// As the configuration says: this launch has not come to its first step.
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
    // A launcher that gives its launches no names leaves us to take what there is for this one's.
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

/// What the file says of the world must fit a launcher that is not ours: ours was told by flags, which win.
fn check_world(settings: &[String], world: &World) -> Result<(), Failure> {
    // Where the file says nothing of the world but its product, it does not load without the launcher's word.
    let Ok((config, _)) = report::load(settings, &[]) else { return Ok(()) };
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

/// Gives this rank its share of the host's cores. Before any thread is started: threads inherit it.
fn use_cores(config: &mut RunConfig, world: &World) {
    if world.local_world_size == 1 {
        return;
    }
    let all = cores::available();
    config.plan.threads.get_or_insert(cores::threads(all.len(), world.local_world_size) as u32);
    if variable(names::PIN).as_deref() != Some("0")
        && let Some(share) = cores::share(&all, world.local_rank, world.local_world_size)
    {
        // Pinning makes a rank faster, and is no condition.
        let _ = cores::pin(share);
    }
}

/// Finds the other ranks and makes sure that all have the same configuration. From then on this process
/// ends when another rank fails, if it does not by itself.
pub(crate) fn world_of_ranks(world: &World, text: &str) -> Result<Session, LaunchError> {
    let timeout = variable(names::JOIN_TIMEOUT).and_then(|text| text.parse().ok());
    let options = JoinOptions {
        token: Token::read(&variable)?,
        version: VERSION.into(),
        timeout: timeout.map_or(JOIN_TIMEOUT, Duration::from_secs_f64),
        log: Box::new(|line| Voice::of_this_process().warn(line)),
    };
    let mut session = lockstep_launch::join(world, options)?;
    let (reason, place) = (session.abort_reason(), world.clone());
    session.on_abort(Box::new(move |_| {
        let end = move || {
            std::thread::sleep(LAST_MOMENT);
            if let Some(error) = reason.get() {
                let code = tell_abort(&error, &place);
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
            // All find out by themselves, at the same time.
            let _ = session.leave();
            Err(error)
        }
    }
}

/// The lines of a configuration as keys and values, so that a difference can be named; at the end all of
/// it as a hash. The text has no secrets in it.
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

/// Opens the way for training's own bytes, over what the session says of the other ranks.
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
        // On the loopback others of this host reach us there, and nobody else does.
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
        let lane = connected(vec![Arc::clone(memory)], "steps")?;
        let host = connected(Vec::new(), "between steps")?;
        Ok(Connection { comms: Comms { lane, host }, nccl })
    }))
}

/// Ends this rank's part with an error: tells the others, and people unless they have been told.
pub(crate) fn fail(session: Session, fault: &dyn Fault) -> ExitCode {
    let class = fault.class();
    let consequence = matches!(class, FaultClass::PeerFailed | FaultClass::Desync);
    let reason = if consequence { session.aborted_within(NEWS) } else { session.aborted() };
    if let Some(error) = reason {
        return ExitCode::from(tell_abort(&error, session.world()));
    }
    session.fail(&fault.to_string(), class.exit_code());
    report::failure(fault)
}

/// Tells why ranks could not go on together, where nobody else does; the code to end with.
pub(crate) fn tell_abort(error: &LaunchError, world: &World) -> u8 {
    let mut note = ErrorNote { error: error.to_string(), hint: error.hint(), cause_code: None };
    let told = match error {
        LaunchError::Aborted(abort) => {
            note.cause_code = Some(abort.exit_code());
            let here = |by: &Member| by.host == lockstep_launch::host_name();
            match &abort.by {
                // It is about this process.
                Some(by) if here(by) && by.pid == std::process::id() => false,
                // A rank that fails on this host has said so itself.
                Some(by) if here(by) && abort.kind == AbortKind::Failed => true,
                _ => world.local_rank > 0,
            }
        }
        // All ranks have found this out.
        LaunchError::Disagree { .. } => world.local_rank > 0,
        _ => false,
    };
    if variable(names::ERROR_FILE).is_some() || !told {
        Voice::of_this_process().error(&note);
    }
    // A rank that was asked to stop notifies the others, and all exit with the same code.
    if note.cause_code == Some(STOPPED) { STOPPED } else { error.class().exit_code() }
}
