//! Reads which rank this process is from Slurm alone, where srun has started one task for each rank without MPI.

use crate::cluster_node::is_slurm_step;
use crate::error::LaunchError;
use crate::mpi_ranks::{MpiRanks, check_positions, tasks_per_node};
use crate::names::*;
use crate::world::{check_rank, missing, read_number};

/// The tasks of a step. `None` if there is one, or no Slurm.
///
/// Without the step's own variables those of the job count: a process that trained alone beside its likes would be worse
/// than one that waits for ranks in vain.
pub(crate) fn read(get: &dyn Fn(&'static str) -> Option<String>) -> Result<Option<MpiRanks>, LaunchError> {
    let Some(rank) = read_number(SLURM_PROCID, get(SLURM_PROCID))? else { return Ok(None) };
    if !is_slurm_step(get) && (get(SLURM_STEP_ID).is_some() || get(SLURM_STEPID).is_some()) {
        return Ok(None);
    }
    let first = |names: &[&'static str]| names.iter().copied().find(|name| get(name).is_some());
    let Some(of_size) = first(&[SLURM_STEP_NUM_TASKS, SLURM_NTASKS]) else { return Ok(None) };
    let world_size = read_number(of_size, get(of_size))?.unwrap_or(1);
    if world_size <= 1 {
        return Ok(None);
    }
    check_rank(rank, world_size, [SLURM_PROCID, of_size])?;
    let of_local_size = first(&[SLURM_STEP_TASKS_PER_NODE, SLURM_TASKS_PER_NODE, SLURM_NTASKS_PER_NODE])
        .ok_or_else(|| missing(SLURM_STEP_TASKS_PER_NODE, format!("{of_size} is {world_size}")))?;
    let local_world_size = tasks_per_node(of_local_size, get(of_local_size).unwrap_or_default())?;
    let local_rank = match read_number(SLURM_LOCALID, get(SLURM_LOCALID))? {
        Some(local_rank) => local_rank,
        None => return Err(missing(SLURM_LOCALID, format!("{SLURM_PROCID} is {rank}"))),
    };
    let ranks = MpiRanks { rank, world_size, local_rank, local_world_size };
    check_positions(ranks, [SLURM_PROCID, of_size, SLURM_LOCALID, of_local_size])?;
    Ok(Some(ranks))
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

    const JOB: &str = "SLURM_JOB_ID=41 SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_JOB_NODELIST=gpu[07-08]";

    #[test]
    fn a_task_is_a_rank() {
        for text in [
            "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_TASKS_PER_NODE=4(x2)",
            "SLURM_STEPID=2 SLURM_NTASKS=8 SLURM_NTASKS_PER_NODE=4",
        ] {
            let world = read(&format!("{JOB} {text}")).unwrap().unwrap();
            assert_eq!((world.rank, world.world_size, world.local_rank, world.node), (5, 8, 1, 1), "{text}");
            assert_eq!((&*world.master_addr, world.port), ("gpu07", 20041), "{text}");
            assert_eq!(world.started_by, StartedBy::Slurm);
        }
        let text = format!("{JOB} SLURM_STEP_ID=0 SLURM_NTASKS=8 SLURM_TASKS_PER_NODE=8 MASTER_PORT=77");
        let error = read(&text).unwrap_err().to_string();
        assert_snapshot!(error, @"environment variables contradict each other: SLURM_PROCID is 5 and SLURM_LOCALID 1 of 8; the ranks of a host must follow each other (mpiexec -ppn 8, srun --distribution=block)");
        let one_host = "SLURM_PROCID=5 SLURM_LOCALID=5 SLURM_STEP_ID=0 SLURM_NTASKS=8 SLURM_TASKS_PER_NODE=8";
        assert_eq!(read(one_host).unwrap().unwrap().master_addr, "127.0.0.1");
    }

    #[test]
    fn what_is_not_a_task() {
        for text in [
            "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=8",
            "SLURM_STEP_ID=4294967291 SLURM_NTASKS=8 SLURM_NTASKS_PER_NODE=4",
            "",
        ] {
            assert_eq!(read(&format!("{JOB} {text}")).unwrap(), None, "{text}");
        }
        let job = format!("{JOB} SLURM_NTASKS=8 SLURM_NTASKS_PER_NODE=4");
        assert_eq!(read(&job).unwrap().unwrap().started_by, StartedBy::SlurmJob);
        let both = format!("{job} RANK=0 WORLD_SIZE=2");
        assert_eq!(read(&both).unwrap().unwrap().started_by, StartedBy::Launcher);
    }

    #[test]
    fn errors_name_the_variables() {
        let error = |text: &str| read(&format!("{JOB} SLURM_STEP_ID=0 {text}")).unwrap_err().to_string();
        assert_snapshot!(error("SLURM_NTASKS=8"), @"environment variable SLURM_STEP_TASKS_PER_NODE is not set, but SLURM_NTASKS is 8");
        assert_snapshot!(error("SLURM_NTASKS=8 SLURM_TASKS_PER_NODE=5,3"), @"environment variable SLURM_TASKS_PER_NODE is `5,3`: expected the same number of ranks on every host");
        assert_snapshot!(error("SLURM_NTASKS=4 SLURM_TASKS_PER_NODE=2(x2)"), @"environment variables contradict each other: SLURM_PROCID is 5, but SLURM_NTASKS is 4 and ranks count from 0");
    }
}
