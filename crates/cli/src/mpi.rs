//! MPI between ranks: which library there is, whether a run uses it, and how ranks of several hosts find each other
//! through it.

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lockstep_comm::{Abort, Call, CommError, Group, Mpi, MpiSpec, MpiWorld};
use lockstep_config::{CarrierName, RunConfig};
use lockstep_core::{Axis, Fault, FaultClass, Mesh, Rank};
use lockstep_device::Device;
use lockstep_device::cuda::LibrarySearch;
use lockstep_launch::{LaunchError, MpiExec, Session, StartedBy, Token, World, host_name, names};

use crate::args::JOIN_TIMEOUT;
use crate::ranks::variable;
use crate::report::Failure;

/// Why MPI cannot be used as asked.
#[derive(Debug)]
pub(crate) enum MpiError {
    /// It moves host memory only.
    OnGpu,
    /// This rank or another cannot use it.
    Unusable { why: String },
    /// The library has no launcher beside it.
    NoMpiexec { library: PathBuf },
}

impl std::fmt::Display for MpiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MpiError::OnGpu => write!(f, "`carrier: mpi` is for ranks on CPUs, but these compute on GPUs"),
            MpiError::Unusable { why } => write!(f, "`carrier: mpi` cannot be used: {why}"),
            MpiError::NoMpiexec { library } => {
                write!(f, "there is no mpiexec beside {} and none in PATH", library.display())
            }
        }
    }
}

impl std::error::Error for MpiError {}

impl Fault for MpiError {
    fn class(&self) -> FaultClass {
        match self {
            MpiError::OnGpu => FaultClass::BadConfig,
            _ => FaultClass::Unavailable,
        }
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            MpiError::OnGpu => "Remove `carrier`: GPUs use NCCL.".into(),
            MpiError::Unusable { .. } => format!(
                "Install an MPI with the standard ABI of MPI 5 (MPICH 5, Open MPI 6, or the Python package `mpich`), set \
                 {} to the folder of libmpi_abi.so.1, and start ranks with its mpiexec. `carrier: auto` does without.",
                names::MPI_DIR
            ),
            MpiError::NoMpiexec { .. } => "Start the ranks with mpiexec or srun yourself.".into(),
        })
    }
}

/// Opens the MPI library.
pub(crate) fn open() -> Result<&'static Mpi, CommError> {
    Mpi::open(&search(&|name| std::env::var_os(name).filter(|value| !value.is_empty())))
}

/// The folders to search: the one that the user names, and no other; or those of the MPI and of the Python environment in
/// use, before the system's.
fn search(get: &dyn Fn(&str) -> Option<OsString>) -> LibrarySearch {
    if let Some(folder) = get(names::MPI_DIR) {
        return LibrarySearch::only(folder.into());
    }
    let mut folders = Vec::new();
    for root in ["MPI_HOME", "VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(get).map(PathBuf::from) {
        folders.extend(["lib", "lib64"].map(|sub| root.join(sub)));
    }
    let in_path = get("PATH").and_then(|path| in_path(&path));
    folders
        .extend(in_path.iter().filter_map(|mpiexec| mpiexec.parent()?.parent()).map(|root| root.join("lib")));
    folders.retain(|folder| folder.is_dir());
    LibrarySearch { folders, only_folders: false }
}

/// The first mpiexec in PATH.
fn in_path(path: &OsString) -> Option<PathBuf> {
    let absolute = std::env::split_paths(path).filter(|folder| folder.is_absolute());
    absolute.map(|folder| folder.join("mpiexec")).find(|program| program.is_file())
}

/// The mpiexec that belongs to the library, with the arguments that let this launcher see which rank failed first.
pub(crate) fn mpiexec(config: &RunConfig) -> Result<MpiExec, Failure> {
    let mpi = open().map_err(|e| unusable(reason(e)))?;
    let beside = |library: &Path| Some(library.parent()?.parent()?.join("bin").join("mpiexec"));
    let beside = beside(mpi.path()).filter(|program| program.is_file());
    let program = beside.or_else(|| in_path(&std::env::var_os("PATH")?));
    let program = program.ok_or_else(|| MpiError::NoMpiexec { library: mpi.path().into() });
    let mut args: Vec<OsString> = Vec::new();
    if mpi.version.starts_with("MPICH") {
        // Otherwise it kills all ranks at once, and which of them ended first is a matter of luck.
        args.push("-disable-auto-cleanup".into());
    }
    if config.plan.nodes > 1 {
        args.extend(["-ppn".into(), config.plan.nproc_per_node.to_string().into()]);
    }
    Ok(MpiExec { program: program.map_err(|e| -> Failure { Box::new(e) })?, args })
}

/// MPI that ranks have found each other through, before they know the configuration.
static STARTED: Mutex<Option<Arc<MpiWorld>>> = Mutex::new(None);

/// Lets ranks on several hosts find rank 0 through MPI, if nothing else says where it is. Returns the world with its
/// address, and the run's token.
pub(crate) fn rendezvous(world: &World) -> Result<(World, Option<Token>), LaunchError> {
    let token = Token::read(&variable)?;
    if !world.master_addr.is_empty() {
        return Ok((world.clone(), token));
    }
    let failed = |cause: CommError| LaunchError::NoMpiRendezvous { why: cause.to_string() };
    let mpi = match open() {
        Ok(mpi) => mpi,
        Err(cause) => {
            let slurm = World::read_slurm(&variable)?.filter(|world| !world.master_addr.is_empty());
            return slurm.map(|world| (world, token)).ok_or(failed(cause));
        }
    };
    let started = start(mpi, world, Abort::default()).map_err(failed)?;
    let mine = if world.rank == 0 { address(token.as_ref())? } else { String::new() };
    let found = from_rank_zero(&started, world, &mine).map_err(failed)?;
    *STARTED.lock().unwrap_or_else(PoisonError::into_inner) = Some(started);
    let mut lines = found.lines();
    let (Some(host), Some(port), Some(secret)) =
        (lines.next(), lines.next().and_then(|port| port.parse().ok()), lines.next())
    else {
        return Err(LaunchError::NoMpiRendezvous { why: "rank 0 sent no address".into() });
    };
    let token = Token::read(&|name| (name == names::TOKEN).then(|| secret.to_owned()))?;
    Ok((World { master_addr: host.to_owned(), port, ..world.clone() }, token))
}

/// Where rank 0, which is this process, will serve the rendezvous: host, port and token, in a line each.
fn address(token: Option<&Token>) -> Result<String, LaunchError> {
    let failed = |cause| LaunchError::System { what: "find a free port", cause };
    let port = TcpListener::bind(("0.0.0.0", 0)).and_then(|free| free.local_addr()).map_err(failed)?.port();
    let token = token.cloned().map_or_else(Token::random, Ok)?;
    let host = variable(names::PMI_HOSTNAME).filter(|host| !host.is_empty()).unwrap_or_else(host_name);
    Ok(format!("{host}\n{port}\n{}\n", token.variable().1))
}

fn from_rank_zero(started: &Arc<MpiWorld>, world: &World, mine: &str) -> Result<String, CommError> {
    let group = Group::along(&Mesh::on_one_node(1, world.world_size), Axis::World, Rank(world.rank));
    let mut first = Vec::new();
    let each = &mut |member: usize, bytes: &[u8]| {
        if member == 0 {
            first.extend_from_slice(bytes);
        }
    };
    started.comm(Vec::new())?.all_gather_bytes(&group, Call::HOST, mine.as_bytes(), each)?;
    Ok(String::from_utf8_lossy(&first).into_owned())
}

fn start(mpi: &'static Mpi, world: &World, abort: Abort) -> Result<Arc<MpiWorld>, CommError> {
    let deadline = Duration::from_secs_f64(JOIN_TIMEOUT);
    MpiWorld::start(MpiSpec { mpi, rank: Rank(world.rank), world: world.world_size, deadline, abort })
}

/// Whether the ranks communicate by MPI.
pub(crate) enum Choice {
    Mpi(Arc<MpiWorld>),
    /// With the reason, if MPI was an option.
    Other(Option<String>),
}

/// Decides whether the ranks communicate by MPI, and initialises it. All ranks decide alike: they exchange what they have
/// found.
pub(crate) fn choose(
    session: &mut Session,
    config: &RunConfig,
    device: Device,
    abort: &Abort,
) -> Result<Choice, Failure> {
    let before = STARTED.lock().unwrap_or_else(PoisonError::into_inner).take();
    let world = session.world().clone();
    let is_asked_for = config.plan.carrier == CarrierName::Mpi;
    match device {
        Device::Cuda(_) if is_asked_for => return Err(Box::new(MpiError::OnGpu)),
        Device::Cuda(_) => return Ok(Choice::Other(None)),
        Device::Cpu
            if is_asked_for
                || (config.plan.carrier == CarrierName::Auto && world.started_by == StartedBy::Mpi) => {}
        Device::Cpu => return Ok(Choice::Other(None)),
    }
    let found = open().map_err(reason);
    let mut why = differing(session, &found.as_ref().map(|mpi| mpi.version.clone()).map_err(Clone::clone))?;
    if let (None, Ok(mpi)) = (&why, found) {
        let started = match before {
            Some(started) => Ok(started),
            None => start(mpi, &world, abort.clone()).map_err(reason),
        };
        let version = started.as_ref().map(|_| mpi.version.clone()).map_err(Clone::clone);
        why = differing(session, &version)?;
        if let (None, Ok(started)) = (&why, started) {
            return Ok(Choice::Mpi(started));
        }
    }
    match why {
        Some(why) if is_asked_for => Err(unusable(why)),
        why => Ok(Choice::Other(why)),
    }
}

/// Why something of MPI is not there, without saying that it is about MPI.
fn reason(error: CommError) -> String {
    match error {
        CommError::Setup { what: "MPI", why } => why,
        other => other.to_string(),
    }
}

fn unusable(why: String) -> Failure {
    Box::new(MpiError::Unusable { why })
}

/// Exchanges what every rank has: the version of its library, or why it has none. Returns why they cannot use it.
fn differing(session: &mut Session, mine: &Result<String, String>) -> Result<Option<String>, Failure> {
    let message = match mine {
        Ok(version) => format!("1{version}"),
        Err(why) => format!("0{why}"),
    };
    let all = session.exchange("the MPI library", message.as_bytes());
    let all = all.map_err(|e| -> Failure { Box::new(e) })?;
    let texts: Vec<String> = all.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect();
    Ok(difference(&texts))
}

fn difference(all: &[String]) -> Option<String> {
    let first = all.first()?;
    let (rank, other) = all.iter().enumerate().find(|(_, text)| text.starts_with('0') || *text != first)?;
    let text = |message: &str| message.get(1..).unwrap_or_default().to_owned();
    Some(match other.strip_prefix('1') {
        None => format!("{}: {}", Rank(rank as u32), text(other)),
        Some(version) => format!("{} has {version}, but rank 0 has {}", Rank(rank as u32), text(first)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_folder_is_the_only_one() {
        let root = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        let (home, env) = (folder("home/lib"), folder("env/lib"));
        let bin = folder("mpi/bin");
        std::fs::write(bin.join("mpiexec"), "").unwrap();
        let in_use = folder("mpi/lib");
        let named = |with_own: bool| {
            move |root: PathBuf| {
                move |name: &str| -> Option<OsString> {
                    Some(match name {
                        names::MPI_DIR if with_own => "/somewhere".into(),
                        "MPI_HOME" => root.join("home").into(),
                        "VIRTUAL_ENV" => root.join("env").into(),
                        "PATH" => std::env::join_paths(["/nowhere".into(), root.join("mpi/bin")]).unwrap(),
                        _ => return None,
                    })
                }
            }
        };
        let own = search(&named(true)(root.path().into()));
        assert_eq!((own.folders, own.only_folders), (vec![PathBuf::from("/somewhere")], true));
        let all = search(&named(false)(root.path().into()));
        assert_eq!((all.folders, all.only_folders), (vec![home, env, in_use], false));
    }

    #[test]
    fn all_ranks_need_the_same_library() {
        let found = |all: &[&str]| difference(&all.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(found(&["1MPICH 5.0.2", "1MPICH 5.0.2"]), None);
        assert_eq!(found(&["1MPICH 5.0.2", "0it was not found"]).unwrap(), "rank 1: it was not found");
        assert_eq!(found(&["0it was not found", "1MPICH 5.0.2"]).unwrap(), "rank 0: it was not found");
        let other = found(&["1MPICH 5.0.2", "1MPICH 5.0.2", "1MPICH 5.1"]).unwrap();
        assert_eq!(other, "rank 2 has MPICH 5.1, but rank 0 has MPICH 5.0.2");
        // What no rank sends.
        assert_eq!(found(&["", ""]).as_deref(), None);
        assert!(found(&["", "ü"]).is_some());
    }
}
