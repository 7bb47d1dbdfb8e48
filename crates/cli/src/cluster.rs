//! What the scheduler of a cluster says about this node (Slurm, Kubernetes, SkyPilot), for a launcher without flags for it.

use std::fmt;
use std::net::{TcpListener, ToSocketAddrs};

use lockstep_config::{LaunchSettings, NumProcesses};
use lockstep_core::{Fault, FaultClass};
use lockstep_launch::{ClusterNode, FromVariable, LaunchError, names};

use crate::args::{LaunchFlags, Nproc};
use crate::inputs::RunInputs;
use crate::launch;
use crate::ranks::variable;
use crate::report::Failure;

/// The user and the scheduler say different things.
#[derive(Debug)]
struct SchedulerDiffers {
    what: &'static str,
    asked: u32,
    by_scheduler: FromVariable<u32>,
}

impl fmt::Display for SchedulerDiffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SchedulerDiffers { what, asked, by_scheduler: FromVariable { value, name } } = self;
        write!(f, "`{what}` is {asked}, but the scheduler set {name} to {value}")
    }
}

impl std::error::Error for SchedulerDiffers {}

impl Fault for SchedulerDiffers {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        Some(format!(
            "Remove `{}`: the scheduler's value is then used. With --standalone, every node trains alone.",
            self.what
        ))
    }
}

/// Adds what the scheduler says to `inputs` and `flags`, where the user says nothing. `settings`: what flags,
/// configuration and other launchers' files say.
pub(crate) fn add(
    inputs: &mut RunInputs,
    flags: &mut LaunchFlags,
    settings: &LaunchSettings,
) -> Result<(), Failure> {
    if flags.standalone || settings.standalone {
        return Ok(());
    }
    let cluster = ClusterNode::read(&variable).map_err(|e: LaunchError| -> Failure { Box::new(e) })?;
    let nodes = agreed("--nnodes", settings.nodes, cluster.nodes)?;
    if nodes.unwrap_or(1) <= 1 {
        return Ok(());
    }
    if let (None, Some(nodes)) = (settings.nodes, nodes) {
        inputs.set(format!("nodes={nodes}"));
    }
    let set = || [names::GROUP_RANK, names::NODE_RANK].iter().find_map(|name| variable(name)?.parse().ok());
    let node = agreed("--node-rank", flags.node_rank.map(u32::from).or_else(set), cluster.node)?;
    flags.node_rank = node.and_then(|node| u16::try_from(node).ok());
    if variable(names::MASTER_ADDR).is_none() {
        flags.master_addr = flags.master_addr.take().or(cluster.master_addr);
    }
    if variable(names::MASTER_PORT).is_none() {
        flags.master_port = flags.master_port.or(cluster.master_port);
    }
    if let (None, Some(FromVariable { value, name })) = (settings.nproc_per_node, cluster.nproc) {
        let wrong = |_| LaunchError::Variable {
            name,
            value: value.clone(),
            want: "expected a number, gpu, cpu or auto",
        };
        let nproc: Nproc = value.parse().map_err(wrong).map_err(|e| -> Failure { Box::new(e) })?;
        launch::world_settings(None, Some(nproc))?.into_iter().for_each(|setting| inputs.set(setting));
    }
    Ok(())
}

/// What the user asks for, or else what the scheduler says.
fn agreed(
    what: &'static str,
    asked: Option<u32>,
    by_scheduler: Option<FromVariable<u32>>,
) -> Result<Option<u32>, Failure> {
    match (asked, by_scheduler) {
        (Some(asked), Some(by_scheduler)) if asked != by_scheduler.value => {
            Err(Box::new(SchedulerDiffers { what, asked, by_scheduler }))
        }
        (Some(asked), _) => Ok(Some(asked)),
        (None, by_scheduler) => Ok(by_scheduler.map(|given| given.value)),
    }
}

/// Which of two nodes this is, by whether node 0's address is its own: torchrun's `--rdzv-endpoint` leaves that open.
pub(crate) fn one_of_two(master_addr: &str) -> Option<u32> {
    let addresses: Vec<_> = (master_addr, 0).to_socket_addrs().ok()?.collect();
    let is_own = addresses.iter().any(|address| TcpListener::bind(address).is_ok());
    (!addresses.is_empty()).then_some(u32::from(!is_own))
}

/// Whether the settings ask for several ranks on each node.
pub(crate) fn starts_several(settings: &LaunchSettings) -> bool {
    match settings.nproc_per_node {
        Some(NumProcesses::Count(count)) => count > 1,
        Some(NumProcesses::PerGpu) => true,
        None => false,
    }
}
