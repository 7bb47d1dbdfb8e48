//! Reads from the environment which rank this process is.
//!
//! torchrun, `torch.distributed.launch`, the DeepSpeed launcher, a shell loop and our own launcher all set the same
//! variables. Variables that a shell loop leaves out are derived if there is only one possible value. Contradictions
//! are errors that name the variables. Where none of them is set, those of MPI launchers are read ([`MpiRanks`]).

use crate::cluster_node::{is_slurm_step, slurm_first_host, slurm_port};
use crate::error::LaunchError;
use crate::mpi_ranks::MpiRanks;
use crate::names::*;
use crate::slurm_tasks;

/// The process that runs the rendezvous server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RendezvousHost {
    /// The lockstep launcher of node 0.
    Launcher,
    /// A thread of rank 0's process, if another launcher started the ranks.
    RankZero,
}

/// What has started the processes of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartedBy {
    /// A launcher that sets torchrun's variables: ours, torchrun, DeepSpeed's, a shell loop.
    Launcher,
    /// A launcher of MPI: mpiexec, or srun with PMI or PMIx.
    Mpi,
    /// srun, without MPI.
    Slurm,
    /// Slurm: perhaps srun, perhaps sbatch, which sets the same variables for its script.
    SlurmJob,
}

/// This process's position among the ranks of its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    pub rank: u32,
    pub world_size: u32,
    pub local_rank: u32,
    pub local_world_size: u32,
    pub node: u32,
    /// The host of the rendezvous. Empty if ranks of several hosts have to find it through MPI.
    pub master_addr: String,
    pub port: u16,
    pub server: RendezvousHost,
    /// How many times the ranks have been restarted.
    pub restart: u32,
    pub started_by: StartedBy,
}

/// An upper limit on the number of ranks, to catch typing errors.
const MAX_RANKS: u32 = 1 << 16;
/// The default port of the rendezvous of several nodes, the same as torchrun's.
pub const DEFAULT_PORT: u16 = 29500;
pub(crate) const LOOPBACK: &str = "127.0.0.1";

impl World {
    pub fn nodes(&self) -> u32 {
        self.world_size / self.local_world_size
    }

    /// Reads the variables through `get`. `None` if the environment names no rank, so that this process runs alone.
    pub fn read(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<World>, LaunchError> {
        let get = |name: &'static str| get(name).filter(|value| !value.is_empty());
        let number = |name: &'static str| read_number(name, get(name));
        // Kubeflow sets RANK and WORLD_SIZE for nodes, from which torchrun starts ranks.
        let is_node = get(PET_NODE_RANK).is_some() && get(LOCAL_RANK).is_none();
        let (rank, world_size) = match (number(RANK)?, number(WORLD_SIZE)?) {
            _ if is_node => return Ok(None),
            (None, None) => return read_scheduler(&get),
            (None, Some(1)) => (0, 1),
            (Some(rank), Some(size)) => (rank, size),
            (Some(rank), None) => return Err(missing(WORLD_SIZE, format!("{RANK} is {rank}"))),
            (None, Some(size)) => return Err(missing(RANK, format!("{WORLD_SIZE} is {size}"))),
        };
        check_rank(rank, world_size, [RANK, WORLD_SIZE])?;
        let addr = get(MASTER_ADDR);
        let here = addr.as_deref().is_none_or(is_loopback);
        let local_world_size = match number(LOCAL_WORLD_SIZE)? {
            Some(size) => size,
            None if here || world_size == 1 => world_size,
            None => {
                let because = format!(
                    "{WORLD_SIZE} is {world_size} and {MASTER_ADDR} is `{}`; set it to the number of ranks on each \
                     node",
                    addr.as_deref().unwrap_or_default().escape_debug()
                );
                return Err(missing(LOCAL_WORLD_SIZE, because));
            }
        };
        if local_world_size == 0 || !world_size.is_multiple_of(local_world_size) {
            return Err(conflict(format!(
                "{WORLD_SIZE} is {world_size}, which is not a multiple of {LOCAL_WORLD_SIZE} {local_world_size}; \
                 every node must have the same number of ranks"
            )));
        }
        let local_rank = number(LOCAL_RANK)?.unwrap_or(rank % local_world_size);
        let (name, node) = match (number(GROUP_RANK)?, number(NODE_RANK)?) {
            (Some(node), _) => (GROUP_RANK, node),
            (None, Some(node)) => (NODE_RANK, node),
            (None, None) => (GROUP_RANK, rank / local_world_size),
        };
        if local_rank >= local_world_size {
            return Err(conflict(format!(
                "{LOCAL_RANK} is {local_rank}, but {LOCAL_WORLD_SIZE} is {local_world_size} and local ranks count \
                 from 0"
            )));
        }
        if u64::from(node) * u64::from(local_world_size) + u64::from(local_rank) != u64::from(rank) {
            return Err(conflict(format!(
                "{RANK} is {rank}, but {name} {node}, {LOCAL_WORLD_SIZE} {local_world_size} and {LOCAL_RANK} \
                 {local_rank} imply rank {}",
                u64::from(node) * u64::from(local_world_size) + u64::from(local_rank)
            )));
        }
        let one_host = world_size == local_world_size;
        // On one host, use loopback: the host's name may resolve to any address.
        let master_addr = addr.filter(|_| !one_host).unwrap_or_else(|| LOOPBACK.into());
        Ok(Some(World {
            rank,
            world_size,
            local_rank,
            local_world_size,
            node,
            master_addr,
            port: port(&get)?,
            server: server(&get),
            restart: restart(&get)?,
            started_by: StartedBy::Launcher,
        }))
    }

    /// The world as Slurm alone describes it, where MPI has started the ranks but its library is missing.
    pub fn read_slurm(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<World>, LaunchError> {
        read_slurm(&|name: &'static str| get(name).filter(|value| !value.is_empty()))
    }

    /// The environment variables that describe this rank.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let mut list = vec![
            (RANK, self.rank.to_string()),
            (WORLD_SIZE, self.world_size.to_string()),
            (LOCAL_RANK, self.local_rank.to_string()),
            (LOCAL_WORLD_SIZE, self.local_world_size.to_string()),
            (GROUP_RANK, self.node.to_string()),
            (NODE_RANK, self.node.to_string()),
            (MASTER_ADDR, self.master_addr.clone()),
            (MASTER_PORT, self.port.to_string()),
            (PORT, self.port.to_string()),
            (RESTART, self.restart.to_string()),
        ];
        if self.server == RendezvousHost::Launcher {
            list.push((SERVER, "launcher".into()));
        }
        list
    }
}

/// The world of ranks that MPI or Slurm has started. `None` if it has started one, or none.
fn read_scheduler(get: &dyn Fn(&'static str) -> Option<String>) -> Result<Option<World>, LaunchError> {
    let by_mpi = MpiRanks::read(get)?.filter(|ranks| ranks.world_size > 1);
    match by_mpi {
        Some(ranks) => world_of(ranks, StartedBy::Mpi, get).map(Some),
        None => read_slurm(get),
    }
}

fn read_slurm(get: &dyn Fn(&'static str) -> Option<String>) -> Result<Option<World>, LaunchError> {
    let started_by = if is_slurm_step(get) { StartedBy::Slurm } else { StartedBy::SlurmJob };
    let tasks = slurm_tasks::read(get)?;
    tasks.map(|tasks| world_of(tasks, started_by, get)).transpose()
}

fn world_of(
    ranks: MpiRanks,
    started_by: StartedBy,
    get: &dyn Fn(&'static str) -> Option<String>,
) -> Result<World, LaunchError> {
    let MpiRanks { rank, world_size, local_rank, local_world_size } = ranks;
    let one_host = world_size == local_world_size;
    let first_host = match get(MASTER_ADDR) {
        None if started_by != StartedBy::Mpi => slurm_first_host(get)?,
        given => given,
    };
    let own_port = match (get(MASTER_PORT), started_by) {
        (None, StartedBy::Slurm | StartedBy::SlurmJob) => slurm_port(get)?,
        _ => None,
    };
    Ok(World {
        rank,
        world_size,
        local_rank,
        local_world_size,
        node: rank / local_world_size,
        // Empty: the ranks find rank 0 through MPI.
        master_addr: if one_host { LOOPBACK.into() } else { first_host.unwrap_or_default() },
        port: own_port.filter(|_| get(PORT).is_none()).map_or_else(|| port(get), Ok)?,
        server: server(get),
        restart: restart(get)?,
        started_by,
    })
}

fn server(get: &dyn Fn(&'static str) -> Option<String>) -> RendezvousHost {
    match get(SERVER).as_deref() {
        Some("launcher") => RendezvousHost::Launcher,
        _ => RendezvousHost::RankZero,
    }
}

fn restart(get: &dyn Fn(&'static str) -> Option<String>) -> Result<u32, LaunchError> {
    Ok(match read_number(RESTART, get(RESTART))? {
        Some(count) => count,
        None => read_number(TORCHELASTIC_RESTART_COUNT, get(TORCHELASTIC_RESTART_COUNT))?.unwrap_or(0),
    })
}

/// Checks a rank against the number of ranks, which the variables `names` hold.
pub(crate) fn check_rank(rank: u32, world_size: u32, names: [&'static str; 2]) -> Result<(), LaunchError> {
    let [of_rank, of_size] = names;
    if world_size == 0 || world_size > MAX_RANKS {
        let want = "expected a number of ranks from 1 to 65536";
        return Err(LaunchError::Variable { name: of_size, value: world_size.to_string(), want });
    }
    if rank >= world_size {
        return Err(conflict(format!(
            "{of_rank} is {rank}, but {of_size} is {world_size} and ranks count from 0"
        )));
    }
    Ok(())
}

fn port(get: &dyn Fn(&'static str) -> Option<String>) -> Result<u16, LaunchError> {
    if let Some(port) = read_port(PORT, get)? {
        return Ok(port);
    }
    let port = read_port(MASTER_PORT, get)?.unwrap_or(DEFAULT_PORT);
    let used_by_torchrun = get(TORCHELASTIC_USE_AGENT_STORE).is_some_and(|v| v.eq_ignore_ascii_case("true"));
    if !used_by_torchrun {
        return Ok(port);
    }
    let want = "torchrun uses this port, and there is no next higher one; set LOCKSTEP_PORT";
    port.checked_add(1).ok_or(LaunchError::Variable { name: MASTER_PORT, value: port.to_string(), want })
}

pub(crate) fn read_number(name: &'static str, value: Option<String>) -> Result<Option<u32>, LaunchError> {
    let Some(value) = value else { return Ok(None) };
    match value.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(LaunchError::Variable { name, value, want: "expected a whole number, 0 or greater" }),
    }
}

pub(crate) fn read_port(
    name: &'static str,
    get: &dyn Fn(&'static str) -> Option<String>,
) -> Result<Option<u16>, LaunchError> {
    let Some(value) = get(name) else { return Ok(None) };
    match value.parse::<u16>() {
        Ok(port) if port > 0 => Ok(Some(port)),
        _ => Err(LaunchError::Variable { name, value, want: "expected a port from 1 to 65535" }),
    }
}

pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

pub(crate) fn missing(name: &'static str, because: String) -> LaunchError {
    LaunchError::VariableMissing { name, because }
}

pub(crate) fn conflict(text: String) -> LaunchError {
    LaunchError::VariableConflict { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use insta::assert_snapshot;

    fn read(text: &str) -> Result<Option<World>, LaunchError> {
        let get = |name: &str| {
            text.split_whitespace().find_map(|pair| {
                pair.split_once('=').filter(|(key, _)| *key == name).map(|(_, value)| value.to_string())
            })
        };
        World::read(&get)
    }

    fn error(text: &str) -> String {
        read(text).unwrap_err().to_string()
    }

    #[test]
    fn no_rank_in_the_environment() {
        assert_eq!(read("").unwrap(), None);
        assert_eq!(read("LOCAL_RANK=0 MASTER_PORT=1").unwrap(), None);
        assert_eq!(read("WORLD_SIZE=1").unwrap().unwrap().world_size, 1);
    }

    #[test]
    fn variables_that_a_shell_loop_leaves_out_are_derived() {
        let world = read("RANK=1 WORLD_SIZE=2").unwrap().unwrap();
        assert_eq!((world.local_rank, world.local_world_size, world.node, world.nodes()), (1, 2, 0, 1));
        assert_eq!((world.master_addr.as_str(), world.port), ("127.0.0.1", 29500));
        assert_eq!(world.server, RendezvousHost::RankZero);
        let world = read("RANK=3 WORLD_SIZE=4 MASTER_ADDR=localhost MASTER_PORT=77").unwrap().unwrap();
        assert_eq!((world.local_rank, world.local_world_size, world.port), (3, 4, 77));
    }

    #[test]
    fn all_variables_of_torchrun_are_read() {
        let text = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=alpha \
                    MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2";
        let world = read(text).unwrap().unwrap();
        assert_eq!((world.node, world.nodes(), world.restart), (1, 2, 2));
        assert_eq!((world.master_addr.as_str(), world.port), ("alpha", 29501));
        assert_eq!(read(&format!("{text} LOCKSTEP_PORT=4000")).unwrap().unwrap().port, 4000);
    }

    /// torchrun sets MASTER_ADDR to the host's name, which may resolve to any address.
    #[test]
    fn ranks_on_one_host_use_loopback() {
        let world = read("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=some-host").unwrap().unwrap();
        assert_eq!(world.master_addr, "127.0.0.1");
    }

    #[test]
    fn variables_that_are_set_read_back() {
        let text = "RANK=6 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 MASTER_ADDR=alpha MASTER_PORT=500 LOCKSTEP_SERVER=launcher";
        let world = read(text).unwrap().unwrap();
        let list = world.variables();
        let get = |name: &str| list.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone());
        assert_eq!(World::read(&get).unwrap(), Some(world));
    }

    #[test]
    fn errors_name_the_variables() {
        assert_snapshot!(error("RANK=2 WORLD_SIZE=2"), @"environment variables contradict each other: RANK is 2, but WORLD_SIZE is 2 and ranks count from 0");
        assert_snapshot!(error("RANK=two WORLD_SIZE=2"), @"environment variable RANK is `two`: expected a whole number, 0 or greater");
        assert_snapshot!(error("RANK=-1 WORLD_SIZE=2"), @"environment variable RANK is `-1`: expected a whole number, 0 or greater");
        assert_snapshot!(error("RANK=0"), @"environment variable WORLD_SIZE is not set, but RANK is 0");
        assert_snapshot!(error("WORLD_SIZE=2"), @"environment variable RANK is not set, but WORLD_SIZE is 2");
        assert_snapshot!(error("RANK=0 WORLD_SIZE=0"), @"environment variable WORLD_SIZE is `0`: expected a number of ranks from 1 to 65536");
        assert_snapshot!(error("RANK=0 WORLD_SIZE=4 MASTER_ADDR=alpha"), @"environment variable LOCAL_WORLD_SIZE is not set, but WORLD_SIZE is 4 and MASTER_ADDR is `alpha`; set it to the number of ranks on each node");
        assert_snapshot!(error("RANK=0 WORLD_SIZE=3 LOCAL_WORLD_SIZE=2"), @"environment variables contradict each other: WORLD_SIZE is 3, which is not a multiple of LOCAL_WORLD_SIZE 2; every node must have the same number of ranks");
        assert_snapshot!(error("RANK=0 WORLD_SIZE=2 LOCAL_RANK=2"), @"environment variables contradict each other: LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2 and local ranks count from 0");
        assert_snapshot!(error("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0"), @"environment variables contradict each other: RANK is 1, but GROUP_RANK 0, LOCAL_WORLD_SIZE 2 and LOCAL_RANK 0 imply rank 0");
        assert_snapshot!(error("RANK=1 WORLD_SIZE=2 NODE_RANK=4294967295"), @"environment variables contradict each other: RANK is 1, but NODE_RANK 4294967295, LOCAL_WORLD_SIZE 2 and LOCAL_RANK 1 imply rank 8589934591");
        assert_snapshot!(error("RANK=0 WORLD_SIZE=2 MASTER_PORT=http"), @"environment variable MASTER_PORT is `http`: expected a port from 1 to 65535");
        assert_snapshot!(error("RANK=0 WORLD_SIZE=2 MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True"), @"environment variable MASTER_PORT is `65535`: torchrun uses this port, and there is no next higher one; set LOCKSTEP_PORT");
    }
}
