//! Which node of a job this host is, as the scheduler of the cluster says it. A launcher on every node then needs no
//! flags for it.
//!
//! | scheduler | variables |
//! |---|---|
//! | Kubeflow | `PET_NNODES`, `PET_NODE_RANK`, `PET_NPROC_PER_NODE`, `PET_MASTER_ADDR`, `PET_MASTER_PORT` |
//! | SkyPilot | `SKYPILOT_NUM_NODES`, `SKYPILOT_NODE_RANK`, `SKYPILOT_NODE_IPS`, `SKYPILOT_NUM_GPUS_PER_NODE` |
//! | Slurm, in a step of one task on each node | `SLURM_STEP_NUM_NODES`, `SLURM_NODEID`, `SLURM_STEP_NODELIST` |
//! | Kubernetes, in an Indexed Job | `JOB_COMPLETION_INDEX` |

use crate::error::LaunchError;
use crate::host_list::expand_host_list;
use crate::names::*;
use crate::world::{conflict, read_number, read_port};

/// A value and the variable that it was read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FromVariable<T> {
    pub value: T,
    pub name: &'static str,
}

/// What schedulers say about this node. Each part is `None` if no scheduler says it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterNode {
    pub nodes: Option<FromVariable<u32>>,
    pub node: Option<FromVariable<u32>>,
    /// The number of ranks to start on each node, or `gpu`, `cpu` or `auto`.
    pub nproc: Option<FromVariable<String>>,
    /// The host of node 0.
    pub master_addr: Option<String>,
    pub master_port: Option<u16>,
}

/// The ports that Slurm jobs use, each its own as far as possible. Below those that connections use.
const SLURM_PORTS: std::ops::Range<u64> = 20_000..30_000;

impl ClusterNode {
    /// Reads the variables through `get`. Two schedulers that contradict each other are an error.
    pub fn read(get: &dyn Fn(&str) -> Option<String>) -> Result<ClusterNode, LaunchError> {
        let get = |name: &'static str| get(name).filter(|value| !value.is_empty());
        let mut all = ClusterNode::default();
        for one in [kubeflow(&get)?, skypilot(&get)?, slurm(&get)?, kubernetes(&get)?] {
            all.add(one)?;
        }
        if let (Some(nodes), Some(node)) = (&all.nodes, &all.node)
            && node.value >= nodes.value
        {
            return Err(conflict(format!(
                "{} is {}, but {} is {} and nodes count from 0",
                node.name, node.value, nodes.name, nodes.value
            )));
        }
        Ok(all)
    }

    fn add(&mut self, other: ClusterNode) -> Result<(), LaunchError> {
        merge(&mut self.nodes, other.nodes)?;
        merge(&mut self.node, other.node)?;
        self.nproc = self.nproc.take().or(other.nproc);
        self.master_addr = self.master_addr.take().or(other.master_addr);
        self.master_port = self.master_port.or(other.master_port);
        Ok(())
    }
}

fn merge(mine: &mut Option<FromVariable<u32>>, other: Option<FromVariable<u32>>) -> Result<(), LaunchError> {
    match (&mine, other) {
        (Some(mine), Some(other)) if mine.value != other.value => {
            Err(conflict(format!("{} is {}, but {} is {}", mine.name, mine.value, other.name, other.value)))
        }
        (None, other) => {
            *mine = other;
            Ok(())
        }
        _ => Ok(()),
    }
}

type Get<'a> = &'a dyn Fn(&'static str) -> Option<String>;

fn number(name: &'static str, get: Get<'_>) -> Result<Option<FromVariable<u32>>, LaunchError> {
    Ok(read_number(name, get(name))?.map(|value| FromVariable { value, name }))
}

/// torchrun reads its flags from these variables, so schedulers for PyTorch set them.
fn kubeflow(get: Get<'_>) -> Result<ClusterNode, LaunchError> {
    Ok(ClusterNode {
        nodes: number(PET_NNODES, get)?,
        node: number(PET_NODE_RANK, get)?,
        nproc: get(PET_NPROC_PER_NODE).map(|value| FromVariable { value, name: PET_NPROC_PER_NODE }),
        master_addr: get(PET_MASTER_ADDR),
        master_port: read_port(PET_MASTER_PORT, get)?,
    })
}

fn skypilot(get: Get<'_>) -> Result<ClusterNode, LaunchError> {
    let gpus = number(SKYPILOT_NUM_GPUS_PER_NODE, get)?.filter(|gpus| gpus.value > 0);
    Ok(ClusterNode {
        nodes: number(SKYPILOT_NUM_NODES, get)?,
        node: number(SKYPILOT_NODE_RANK, get)?,
        nproc: gpus.map(|gpus| FromVariable { value: gpus.value.to_string(), name: gpus.name }),
        master_addr: get(SKYPILOT_NODE_IPS)
            .and_then(|list| list.lines().next().map(|ip| ip.trim().to_owned())),
        master_port: None,
    })
}

/// Only in a step of srun: a batch script runs on the first node alone, whatever the job has.
fn slurm(get: Get<'_>) -> Result<ClusterNode, LaunchError> {
    if !is_slurm_step(get) {
        return Ok(ClusterNode::default());
    }
    let nodes = match number(SLURM_STEP_NUM_NODES, get)? {
        None => number(SLURM_NNODES, get)?,
        some => some,
    };
    Ok(ClusterNode {
        nodes,
        node: number(SLURM_NODEID, get)?,
        nproc: None,
        master_addr: slurm_first_host(get)?,
        master_port: slurm_port(get)?,
    })
}

/// An Indexed Job numbers its pods. It does not say how many there are.
fn kubernetes(get: Get<'_>) -> Result<ClusterNode, LaunchError> {
    Ok(ClusterNode { node: number(JOB_COMPLETION_INDEX, get)?, ..ClusterNode::default() })
}

/// Whether srun started this process. sbatch sets some of the same variables for its script.
pub(crate) fn is_slurm_step(get: Get<'_>) -> bool {
    let step = get(SLURM_STEP_ID).or_else(|| get(SLURM_STEPID));
    // The script of sbatch and a shell of salloc are steps with these ids.
    let is_step = |id: String| id.parse::<u32>().is_ok_and(|id| id < 0xffff_fff0);
    step.map_or_else(|| get(SLURM_STEP_NUM_TASKS).is_some(), is_step)
}

/// The first host of a step, which runs its rank 0.
pub(crate) fn slurm_first_host(get: Get<'_>) -> Result<Option<String>, LaunchError> {
    let lists = [SLURM_STEP_NODELIST, SLURM_JOB_NODELIST, SLURM_NODELIST];
    let Some((name, value)) = lists.into_iter().find_map(|name| Some((name, get(name)?))) else {
        return Ok(None);
    };
    match expand_host_list(&value) {
        Some(hosts) => Ok(hosts.into_iter().next()),
        None => {
            let want = "expected a list of hosts such as node[01-04]";
            Err(LaunchError::Variable { name, value, want })
        }
    }
}

/// A port for the rendezvous that every task derives from the job's number, so that two jobs of a node do not meet.
pub(crate) fn slurm_port(get: Get<'_>) -> Result<Option<u16>, LaunchError> {
    let job = read_number(SLURM_JOB_ID, get(SLURM_JOB_ID))?;
    let ports = SLURM_PORTS.end - SLURM_PORTS.start;
    Ok(job.map(|job| (SLURM_PORTS.start + u64::from(job) % ports) as u16))
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn read(text: &str) -> Result<ClusterNode, LaunchError> {
        ClusterNode::read(&|name| {
            text.split_whitespace().find_map(|pair| {
                pair.split_once('=')
                    .filter(|(key, _)| *key == name)
                    .map(|(_, value)| value.replace('/', "\n"))
            })
        })
    }

    /// The node, the nodes, node 0 and its port.
    fn facts(text: &str) -> (Option<u32>, Option<u32>, Option<String>, Option<u16>) {
        let found = read(text).unwrap();
        let value = |given: Option<FromVariable<u32>>| given.map(|given| given.value);
        (value(found.node), value(found.nodes), found.master_addr, found.master_port)
    }

    #[test]
    fn every_scheduler_numbers_nodes_in_its_own_way() {
        let second = |host: &str, port| (Some(1), Some(4), Some(host.to_owned()), port);
        let kubeflow = "PET_NNODES=4 PET_NODE_RANK=1 PET_MASTER_ADDR=job-0.job PET_MASTER_PORT=29400";
        assert_eq!(facts(kubeflow), second("job-0.job", Some(29400)));
        let skypilot = "SKYPILOT_NUM_NODES=4 SKYPILOT_NODE_RANK=1 SKYPILOT_NODE_IPS=10.0.0.4/10.0.0.5";
        assert_eq!(facts(skypilot), second("10.0.0.4", None));
        let slurm = "SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=4 SLURM_NNODES=8 SLURM_NODEID=1 SLURM_JOB_ID=123456 \
                     SLURM_STEP_NODELIST=n[2-5]";
        assert_eq!(facts(slurm), second("n2", Some(23456)));
        assert_eq!(facts("JOB_COMPLETION_INDEX=3"), (Some(3), None, None, None));
        assert_eq!(facts(""), (None, None, None, None));
    }

    #[test]
    fn kubeflow_names_nodes_as_if_they_were_ranks() {
        let world = |text: &str| {
            let get = |name: &str| {
                text.split_whitespace().find_map(|pair| {
                    pair.split_once('=').filter(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
                })
            };
            crate::World::read(&get).unwrap().map(|world| world.rank)
        };
        let node = "RANK=1 WORLD_SIZE=4 PET_NODE_RANK=1 PET_NNODES=4";
        assert_eq!(world(node), None);
        assert_eq!(world(&format!("{node} LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a")), Some(1));
    }

    #[test]
    fn ranks_of_a_node() {
        let nproc = |text| read(text).unwrap().nproc.map(|given| given.value);
        assert_eq!(nproc("PET_NPROC_PER_NODE=gpu SKYPILOT_NUM_GPUS_PER_NODE=8").as_deref(), Some("gpu"));
        assert_eq!(nproc("SKYPILOT_NUM_GPUS_PER_NODE=8").as_deref(), Some("8"));
        assert_eq!(nproc("SKYPILOT_NUM_GPUS_PER_NODE=0"), None);
    }

    #[test]
    fn a_batch_script_is_no_step() {
        let job = "SLURM_JOB_ID=7 SLURM_NNODES=4 SLURM_NODEID=0 SLURM_JOB_NODELIST=n[1-4] SLURM_PROCID=0";
        assert_eq!(facts(job), (None, None, None, None));
        assert_eq!(facts(&format!("{job} SLURM_STEP_ID=4294967291")), (None, None, None, None));
        assert_eq!(facts(&format!("{job} SLURM_STEP_ID=0")).0, Some(0));
    }

    #[test]
    fn contradictions_name_both_variables() {
        let error = |text| read(text).unwrap_err().to_string();
        assert_snapshot!(error("PET_NODE_RANK=1 JOB_COMPLETION_INDEX=2"), @"environment variables contradict each other: PET_NODE_RANK is 1, but JOB_COMPLETION_INDEX is 2");
        assert_snapshot!(error("SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=2"), @"environment variables contradict each other: SKYPILOT_NODE_RANK is 2, but SKYPILOT_NUM_NODES is 2 and nodes count from 0");
        assert_snapshot!(error("SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-"), @"environment variable SLURM_STEP_NODELIST is `n[1-`: expected a list of hosts such as node[01-04]");
        assert_snapshot!(error("PET_NODE_RANK=first"), @"environment variable PET_NODE_RANK is `first`: expected a whole number, 0 or greater");
        assert_snapshot!(error("PET_MASTER_PORT=0"), @"environment variable PET_MASTER_PORT is `0`: expected a port from 1 to 65535");
    }
}
