//! A run on more and more GPUs, on paper: 1, 2, 4, … up to a whole cluster.

use lockstep_config::StrategyName;
use lockstep_core::Bytes;

use crate::cost::strategies::{canonical, choose_strategy};
use crate::cost::workload::{Machine, Workload};

/// The run on one number of GPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalingRow {
    pub ranks: u32,
    pub nodes: u32,
    pub strategy: StrategyName,
    pub device: Bytes,
    pub fits: bool,
    pub step_seconds: f64,
    pub exposed_comm_seconds: f64,
    pub tokens_per_s: f64,
    pub mfu: f64,
    /// Tokens per second and GPU, compared with a single GPU that has the memory it needs.
    pub efficiency: f64,
}

/// A run on growing numbers of GPUs. Every GPU keeps its batch, so the global batch grows.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalingTable {
    pub rows: Vec<ScalingRow>,
    /// The first number of GPUs on which communication takes over: a step waits for it longer than for anything else.
    pub takes_over: Option<u32>,
}

/// Plans and simulates the run on 1, 2, 4, … ranks, up to all of the machine's. With `auto`, every number of ranks has
/// its own strategy.
pub fn scaling_table(workload: &Workload<'_>, machine: &Machine) -> ScalingTable {
    let mut rows: Vec<ScalingRow> = Vec::new();
    for ranks in rank_counts(machine.cluster.world_size(), machine.cluster.ranks_per_node) {
        let cluster = machine.cluster.with_ranks(ranks);
        let machine = Machine { cluster, ..*machine };
        let strategy = match canonical(workload.strategy) {
            StrategyName::Auto => choose_strategy(workload, &machine).strategy,
            named => named,
        };
        // Hybrid sharding needs several nodes; on one node its shards are zero3's.
        let variant = workload
            .with_strategy(strategy, &cluster)
            .or_else(|| workload.with_strategy(StrategyName::Zero3, &cluster));
        let Some(variant) = variant else { continue };
        let plan = variant.lay_out(&machine);
        let prediction = machine.predict(&plan);
        let per_rank = prediction.tokens_per_s / f64::from(ranks);
        let alone = rows.first().map_or(per_rank, |row| row.tokens_per_s / f64::from(row.ranks));
        rows.push(ScalingRow {
            ranks,
            nodes: cluster.nodes,
            strategy: variant.strategy,
            device: plan.device_bytes(),
            fits: machine.fits(&plan),
            step_seconds: prediction.step_seconds,
            exposed_comm_seconds: prediction.exposed_comm_seconds,
            tokens_per_s: prediction.tokens_per_s,
            mfu: prediction.mfu,
            efficiency: per_rank / alone,
        });
    }
    let waits = |row: &&ScalingRow| row.exposed_comm_seconds > row.step_seconds / 2.0;
    let takes_over = rows.iter().find(waits).map(|row| row.ranks);
    ScalingTable { rows, takes_over }
}

/// Powers of two that fill whole nodes, and the whole cluster.
fn rank_counts(world: u32, per_node: u32) -> Vec<u32> {
    let powers = std::iter::successors(Some(1u32), |n| n.checked_mul(2)).take_while(|n| *n < world);
    powers.filter(|n| *n <= per_node || n.is_multiple_of(per_node)).chain([world]).collect()
}
