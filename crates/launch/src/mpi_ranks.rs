//! Reads which rank this process is from what MPI launchers set: MPICH's and Open MPI's mpiexec, and Slurm's srun.

use crate::error::LaunchError;
use crate::names::*;
use crate::world::{check_rank, conflict, missing, read_number};

/// A process among those that an MPI launcher has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MpiRanks {
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) local_rank: u32,
    pub(crate) local_world_size: u32,
}

/// The variables of a launcher: rank, number of ranks, and the same on this host.
const LAUNCHERS: [[&str; 4]; 4] = [
    [OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE],
    [PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS],
    [PMI_RANK, PMI_SIZE, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE],
    [PMIX_RANK, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE],
];

impl MpiRanks {
    /// `None` if no variable names a rank.
    pub(crate) fn read(
        get: &dyn Fn(&'static str) -> Option<String>,
    ) -> Result<Option<MpiRanks>, LaunchError> {
        let is_set = |name: &&'static str| get(name).is_some();
        let complete = LAUNCHERS.iter().find(|names| names.iter().all(is_set));
        let Some(names @ [of_rank, of_size, of_local_rank, of_local_size]) = complete.copied() else {
            return incomplete(get);
        };
        let number = |name: &'static str, value: Option<String>| {
            read_number(name, value)?.ok_or_else(|| missing(name, format!("{of_rank} is set")))
        };
        let (rank, world_size) = (number(of_rank, get(of_rank))?, number(of_size, get(of_size))?);
        check_rank(rank, world_size, [of_rank, of_size])?;
        let local_rank = number(of_local_rank, get(of_local_rank))?;
        let local_world_size = match of_local_size {
            SLURM_STEP_TASKS_PER_NODE => {
                tasks_per_node(of_local_size, get(of_local_size).unwrap_or_default())?
            }
            _ => number(of_local_size, get(of_local_size))?,
        };
        let ranks = MpiRanks { rank, world_size, local_rank, local_world_size };
        if world_size > 1 {
            check_positions(ranks, names)?;
        }
        Ok(Some(ranks))
    }
}

/// Checks that every host has the same number of ranks, one after the other.
pub(crate) fn check_positions(ranks: MpiRanks, names: [&'static str; 4]) -> Result<(), LaunchError> {
    let MpiRanks { rank, world_size, local_rank, local_world_size } = ranks;
    let [of_rank, of_size, of_local_rank, of_local_size] = names;
    if local_world_size == 0 || !world_size.is_multiple_of(local_world_size) {
        return Err(conflict(format!(
            "{of_size} is {world_size}, which is not a multiple of {of_local_size} {local_world_size}; every host \
             must have the same number of ranks"
        )));
    }
    if rank % local_world_size != local_rank {
        return Err(conflict(format!(
            "{of_rank} is {rank} and {of_local_rank} {local_rank} of {local_world_size}; the ranks of a host must \
             follow each other (mpiexec -ppn {local_world_size}, srun --distribution=block)"
        )));
    }
    Ok(())
}

/// No launcher has set all its variables. A rank that does not know the others must not train alone.
fn incomplete(get: &dyn Fn(&'static str) -> Option<String>) -> Result<Option<MpiRanks>, LaunchError> {
    let Some([of_rank, of_size, of_local_rank, of_local_size]) =
        LAUNCHERS.iter().copied().find(|[rank, ..]| get(rank).is_some())
    else {
        return Ok(None);
    };
    if let Some(1) = read_number(of_size, get(of_size))? {
        return Ok(None);
    }
    let absent = [of_size, of_local_rank, of_local_size].into_iter().find(|name| get(name).is_none());
    let because = format!("{of_rank} is {}", get(of_rank).unwrap_or_default().escape_debug());
    Err(missing(absent.unwrap_or(of_size), because))
}

/// Slurm's number of tasks on each host, such as `4(x2)` or `4,4`, if it is the same on all.
pub(crate) fn tasks_per_node(name: &'static str, text: String) -> Result<u32, LaunchError> {
    let count = |part: &str| part.split('(').next().and_then(|number| number.trim().parse::<u32>().ok());
    let counts: Option<Vec<u32>> = text.split(',').map(count).collect();
    match counts.as_deref() {
        Some([first, rest @ ..]) if rest.iter().all(|one| one == first) => Ok(*first),
        _ => {
            let want = "expected the same number of ranks on every host";
            Err(LaunchError::Variable { name, value: text, want })
        }
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use crate::error::LaunchError;
    use crate::world::{StartedBy, World};

    fn read(text: &str) -> Result<Option<World>, LaunchError> {
        World::read(&|name| {
            text.split_whitespace().find_map(|pair| {
                pair.split_once('=').filter(|(key, _)| *key == name).map(|(_, value)| value.to_string())
            })
        })
    }

    fn error(text: &str) -> String {
        read(text).unwrap_err().to_string()
    }

    #[test]
    fn every_launcher_names_the_rank_in_its_own_way() {
        for text in [
            "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4",
            "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 \
             OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=5",
            "PMIX_RANK=5 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=4(x2)",
            "PMI_RANK=5 PMI_SIZE=8 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=4,4",
        ] {
            let world = read(text).unwrap().unwrap();
            assert_eq!((world.rank, world.world_size, world.local_rank, world.node), (5, 8, 1, 1), "{text}");
            assert!(
                world.started_by == StartedBy::Mpi && world.nodes() == 2 && world.master_addr.is_empty(),
                "{text}"
            );
            let here = read(&format!("{text} MASTER_ADDR=alpha MASTER_PORT=77")).unwrap().unwrap();
            assert_eq!((&*here.master_addr, here.port), ("alpha", 77));
        }
        let here = read("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2").unwrap().unwrap();
        assert_eq!(here.master_addr, "127.0.0.1");
    }

    #[test]
    fn the_variables_of_torchrun_come_first_and_one_rank_is_no_world() {
        let both = read("RANK=0 WORLD_SIZE=2 PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4");
        let world = both.unwrap().unwrap();
        assert_eq!((world.rank, world.world_size, world.started_by), (0, 2, StartedBy::Launcher));
        assert_eq!(read("PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1").unwrap(), None);
        assert_eq!(read("PMIX_RANK=0 SLURM_STEP_NUM_TASKS=1").unwrap(), None);
        assert_eq!(read("SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1").unwrap(), None);
    }

    #[test]
    fn errors_name_the_variables_of_the_launcher() {
        assert_snapshot!(error("PMIX_RANK=1"), @"environment variable SLURM_STEP_NUM_TASKS is not set, but PMIX_RANK is 1");
        assert_snapshot!(error("PMI_RANK=1 PMI_SIZE=2"), @"environment variable MPI_LOCALRANKID is not set, but PMI_RANK is 1");
        assert_snapshot!(error("PMI_RANK=2 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2"), @"environment variables contradict each other: PMI_RANK is 2, but PMI_SIZE is 2 and ranks count from 0");
        assert_snapshot!(error("PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2"), @"environment variables contradict each other: PMI_RANK is 1 and MPI_LOCALRANKID 0 of 2; the ranks of a host must follow each other (mpiexec -ppn 2, srun --distribution=block)");
        assert_snapshot!(error("PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=3"), @"environment variables contradict each other: PMI_SIZE is 4, which is not a multiple of MPI_LOCALNRANKS 3; every host must have the same number of ranks");
        assert_snapshot!(error("PMIX_RANK=1 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=3,1"), @"environment variable SLURM_STEP_TASKS_PER_NODE is `3,1`: expected the same number of ranks on every host");
        assert_snapshot!(error("PMI_RANK=x PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2"), @"environment variable PMI_RANK is `x`: expected a whole number, 0 or greater");
    }
}
