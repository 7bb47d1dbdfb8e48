//! Starts a rank: sets up its environment, its output streams and its error file.

use std::fs::{DirBuilder, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::abort::Member;
use crate::error::LaunchError;
use crate::host::host_name;
use crate::names::{
    ERROR_FILE, JOIN_TIMEOUT, LAUNCH_ID, LAUNCHER_PID, MASTER_ADDR, PORT, RANK, RESTART, SERVER,
    TORCHELASTIC_USE_AGENT_STORE, WORLD_SIZE,
};
use crate::relay::{Pipe, Stream};
use crate::stop_policy::Exit;
use crate::supervise::{MpiExec, Supervisor, Tee};
use crate::token::{Token, nonce};
use crate::world::World;

const PREFIX: &str = "lockstep-launch-";

/// A folder that only this user can read, and that is removed when the launcher ends.
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn make(root: &Path) -> Result<Scratch, LaunchError> {
        sweep(root);
        let random: String = nonce()?[..8].iter().map(|b| format!("{b:02x}")).collect();
        let path = root.join(format!("{PREFIX}{}-{random}", std::process::id()));
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map_err(|cause| LaunchError::Scratch { path: path.clone(), cause })?;
        Ok(Scratch(path))
    }

    /// Identifies this launch; stays the same after a restart.
    fn launch_id(&self) -> String {
        self.0.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn error_file(&self, world: &World) -> PathBuf {
        self.0.join(format!("rank-{}-{}", world.rank, world.restart))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Removes the folders that killed launchers have left behind: those of this user whose launcher no longer runs.
fn sweep(root: &Path) {
    for entry in root.read_dir().into_iter().flatten().filter_map(Result::ok) {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// A rank, or mpiexec with all ranks, as a child process of this launcher.
pub(crate) struct RankProcess {
    pub(crate) member: Member,
    pub(crate) pipes: Vec<Pipe>,
    pub(crate) error_file: PathBuf,
    pub(crate) exit: Option<Exit>,
    /// The launcher asked it to end, or killed it.
    pub(crate) stopped: bool,
    child: Child,
}

impl RankProcess {
    pub(crate) fn start(
        job: &Supervisor,
        world: &World,
        token: Option<&Token>,
        scratch: &Scratch,
    ) -> Result<RankProcess, LaunchError> {
        let error_file = scratch.error_file(world);
        let shown = job.shown.as_ref().is_none_or(|list| list.contains(&world.local_rank));
        // Rank 0 inherits the terminal, so that its progress bar works.
        let direct = world.rank == 0 && shown && job.tee.is_none();
        let stdio = || if direct { Stdio::inherit() } else { Stdio::piped() };
        let mut command = match &job.mpiexec {
            None => {
                let mut command = Command::new(&job.program);
                command
                    .envs(job.variables.get(world.local_rank as usize).into_iter().flatten().cloned())
                    .envs(world.variables())
                    .env(LAUNCHER_PID, std::process::id().to_string());
                command
            }
            Some(mpiexec) => through_mpiexec(mpiexec, job, world),
        };
        command
            .args(&job.args)
            .envs(token.map(Token::variable))
            .env(LAUNCH_ID, scratch.launch_id())
            .env(ERROR_FILE, &error_file)
            .env(JOIN_TIMEOUT, job.join_timeout.as_secs_f64().to_string())
            .env_remove(TORCHELASTIC_USE_AGENT_STORE)
            .stdin(Stdio::null())
            .stdout(stdio())
            .stderr(stdio());
        let spawned = command.spawn();
        let program = || PathBuf::from(command.get_program());
        let mut child = spawned.map_err(|cause| LaunchError::Spawn { program: program(), cause })?;
        let member = Member {
            rank: world.rank,
            node: world.node,
            local_rank: world.local_rank,
            host: host_name(),
            pid: child.id(),
        };
        let mut pipes = Vec::new();
        let streams: [(Stream, Option<OwnedFd>); 2] = [
            (Stream::Out, child.stdout.take().map(Into::into)),
            (Stream::Err, child.stderr.take().map(Into::into)),
        ];
        let mut rank =
            RankProcess { member, pipes: Vec::new(), error_file, exit: None, stopped: false, child };
        for (stream, source) in streams {
            let Some(source) = source else { continue };
            let pipe = copy(job.tee.as_ref(), world.rank, stream).and_then(|copy| {
                Pipe::new(source, world.rank, stream, shown, copy)
                    .map_err(|cause| LaunchError::System { what: "read the output of a rank", cause })
            });
            match pipe {
                Ok(pipe) => pipes.push(pipe),
                Err(error) => {
                    rank.signal(Signal::KILL);
                    let _ = rank.child.wait();
                    return Err(error);
                }
            }
        }
        rank.pipes = pipes;
        Ok(rank)
    }

    /// How the process ended, if it has ended since the last call.
    pub(crate) fn reap(&mut self) -> Option<Exit> {
        use std::os::unix::process::ExitStatusExt as _;
        if self.exit.is_some() {
            return None;
        }
        let status = self.child.try_wait().ok()??;
        let exit = match (status.code(), status.signal()) {
            (Some(code), _) => Exit::Code(code),
            (None, signal) => Exit::Signal(signal.unwrap_or_default()),
        };
        self.exit = Some(exit);
        Some(exit)
    }

    /// Sends a signal, unless the process has ended: its PID may have been reused.
    pub(crate) fn signal(&mut self, signal: Signal) {
        if self.exit.is_none() {
            let _ = kill_process(Pid::from_child(&self.child), signal);
        }
    }
}

/// A command that starts all ranks, up to the arguments of their program. mpiexec tells each rank which one it is.
fn through_mpiexec(mpiexec: &MpiExec, job: &Supervisor, world: &World) -> Command {
    let mut command = Command::new(&mpiexec.program);
    command.args(["-n", &world.world_size.to_string()]).args(&mpiexec.args).arg(&job.program);
    let of_all = |name: &str| [MASTER_ADDR, PORT, SERVER, RESTART].contains(&name);
    command.envs(world.variables().into_iter().filter(|(name, _)| of_all(name)));
    for name in [RANK, WORLD_SIZE, LAUNCHER_PID] {
        command.env_remove(name);
    }
    command
}

fn copy(tee: Option<&Tee>, rank: u32, stream: Stream) -> Result<Option<File>, LaunchError> {
    let Some(tee) = tee else { return Ok(None) };
    let (wanted, name) = match stream {
        Stream::Out => (tee.stdout, "stdout"),
        Stream::Err => (tee.stderr, "stderr"),
    };
    if !wanted {
        return Ok(None);
    }
    let path = tee.dir.join(format!("rank-{rank}.{name}.log"));
    let failed = |cause| LaunchError::Scratch { path: path.clone(), cause };
    std::fs::create_dir_all(&tee.dir).map_err(failed)?;
    // A restart appends to the same file.
    OpenOptions::new().create(true).append(true).mode(0o644).open(&path).map(Some).map_err(failed)
}
