//! Settings of other launchers, from their files and command lines, for this launcher.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use lockstep_config::{DeviceKind, LaunchSettings, NumProcesses};
use lockstep_launch::names;

use crate::args::{self, LaunchFlags, Nproc};
use crate::inputs::RunInputs;
use crate::launch::{self, FlagError};
use crate::ranks::variable;
use crate::report::Failure;

/// Reads what a run is configured by. `world`: settings that flags of this command stand for. If the number of ranks is
/// left to the launcher, as with `--nproc_per_node gpu`, it is counted here.
pub(crate) fn read(words: &[String], world: &[String]) -> Result<(RunInputs, LaunchSettings), Failure> {
    let mut inputs = RunInputs::read(words, world)?;
    let launch = inputs.launch();
    if launch.nproc_per_node == Some(NumProcesses::PerGpu) {
        launch::world_settings(None, Some(Nproc::Auto))?.into_iter().for_each(|setting| inputs.set(setting));
    }
    Ok((inputs, launch))
}

/// The flags of this command, and for those that are not given the settings of another launcher.
pub(crate) fn filled(flags: &LaunchFlags, settings: &LaunchSettings) -> Result<LaunchFlags, Failure> {
    let failed = |error: FlagError| -> Failure { Box::new(error) };
    let unsupported = [
        ("hostfile", &settings.hostfile, "Run the same command on every node with its own --node-rank."),
        ("exclude", &settings.exclude, "Set CUDA_VISIBLE_DEVICES to the GPUs to use."),
    ];
    for (name, value, instead) in unsupported {
        if let Some(value) = value {
            return Err(failed(FlagError::Unsupported { name, value: value.clone(), instead }));
        }
    }
    let mut filled = flags.clone();
    filled.node_rank = flags.node_rank.or(settings.node_rank.and_then(|rank| u16::try_from(rank).ok()));
    // On a single node any free port will do.
    if !flags.standalone && !settings.standalone {
        let endpoint = flags.rdzv_endpoint.as_ref();
        let given = flags.master_addr.clone().or_else(|| Some(endpoint?.host.clone()));
        filled.master_addr = given.or_else(|| settings.master_addr.clone());
        filled.master_port =
            flags.master_port.or(endpoint.and_then(|endpoint| endpoint.port)).or(settings.master_port);
    }
    if flags.max_restarts == 0 {
        filled.max_restarts = settings.max_restarts.unwrap_or(0);
    }
    if let (None, Some(text)) = (flags.tee, &settings.tee) {
        let instead = "Write 0 (none), 1 (stdout), 2 (stderr) or 3 (both).";
        let wrong = |_| FlagError::Unsupported { name: "tee", value: text.clone(), instead };
        filled.tee = Some(args::tee(text).map_err(wrong).map_err(failed)?);
    }
    filled.log_dir = flags.log_dir.clone().or_else(|| settings.log_dir.as_ref().map(PathBuf::from));
    Ok(filled)
}

/// Uses the GPUs that another launcher's settings name.
pub(crate) fn use_gpus(settings: &LaunchSettings, device: DeviceKind) -> Result<(), Failure> {
    let failed = |error: FlagError| -> Failure { Box::new(error) };
    let wanted = match (&settings.gpu_ids, &settings.include) {
        (Some(ids), _) => ids.replace(' ', ""),
        (None, Some(include)) => local_gpus(include).map_err(failed)?,
        (None, None) => return Ok(()),
    };
    match variable(names::CUDA_VISIBLE_DEVICES) {
        _ if device == DeviceKind::Cpu => Ok(()),
        Some(visible) if visible == wanted => Ok(()),
        Some(visible) => Err(failed(FlagError::OtherGpus { wanted, visible })),
        None => use_variables(vec![(names::CUDA_VISIBLE_DEVICES.into(), wanted)]),
    }
}

/// The GPUs of DeepSpeed's `--include localhost:0,1`.
fn local_gpus(include: &str) -> Result<String, FlagError> {
    let instead = "Write localhost:0,1 for GPUs of this node. On several nodes, run the same command on every node with \
                   its own --node-rank.";
    let unsupported = || FlagError::Unsupported { name: "include", value: include.to_owned(), instead };
    let gpus = include.strip_prefix("localhost:").filter(|gpus| !gpus.contains(['@', ':']));
    gpus.map(str::to_owned).ok_or_else(unsupported)
}

/// Sets environment variables. A process cannot safely change its own, so this program replaces itself with a new start
/// of the same command, unless all of them are set already.
pub(crate) fn use_variables(mut wanted: Vec<(String, String)>) -> Result<(), Failure> {
    wanted.retain(|(name, value)| variable(name).as_ref() != Some(value));
    if wanted.is_empty() {
        return Ok(());
    }
    let failed = |cause| -> Failure { Box::new(FlagError::Program { cause }) };
    let program = std::env::current_exe().map_err(failed)?;
    Err(failed(Command::new(program).args(std::env::args_os().skip(1)).envs(wanted).exec()))
}
