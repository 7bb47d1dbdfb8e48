//! Tests of the cost model: counts by hand, properties of the simulator, choices, and printed tables.

mod choices;
mod collectives;
mod counts;
mod document;
mod memory;
mod simulator;

use lockstep_config::StrategyName;
use lockstep_core::{Bytes, DType};
use lockstep_shape::{Channels, Freeze, ModelShape, Recompute};

use crate::cost::{Cluster, Machine, PaperCluster, Workload};
use crate::run_plan::PlanData;
use crate::{
    BatchBounds, DeviceNeeds, ModelPlan, ModelRole, ModelSettings, OptimizerSpec, Placements, PlanInput,
};

fn workspace(_: &ModelShape, bounds: &BatchBounds) -> Bytes {
    Bytes(32 << 20).max(Bytes(bounds.tokens as u64 * 128))
}

/// A run of a named size on GPUs in bf16, with `rows` rows of `len` tokens.
fn workload(size: &str, rows: u32, len: usize) -> Workload<'static> {
    workload_of(&ModelShape::named(size, 32_000).unwrap(), rows, len)
}

/// A run of a model on GPUs in bf16, with `rows` rows of `len` tokens.
fn workload_of(shape: &ModelShape, rows: u32, len: usize) -> Workload<'static> {
    let bounds =
        BatchBounds { tokens: rows as usize * len, docs: rows as usize, max_doc: len, shares_rows: false };
    let settings = ModelSettings {
        placements: Placements::REPLICATED,
        bounds,
        head_chunk_tokens: 4096.min(bounds.tokens),
        recompute: Recompute::Selective.into(),
        channels: Channels::LOG_PROB,
        temperature: 1.0,
        optimizer: OptimizerSpec::ADAMW,
        freeze: Freeze::Nothing,
        decay_norms: false,
        scores: false,
        generation: None,
    };
    let needs = DeviceNeeds {
        workspace_bytes: workspace(shape, &bounds),
        overhead_bytes: Bytes(936 << 20),
        host_overhead_bytes: Some(Bytes(1 << 30)),
    };
    let model = ModelPlan::new(ModelRole::Policy, shape, settings);
    let input = PlanInput {
        prefetch: 1,
        ddp_bucket_bytes: Bytes(25 << 20),
        ..PlanInput::single_rank(vec![model], DType::BF16, needs)
    };
    Workload {
        input,
        strategy: StrategyName::Auto,
        rows,
        order: None,
        auto_rows: false,
        auto_recompute: false,
        auto_offload: false,
        workspace: &workspace,
    }
}

/// A cluster of GPUs by their data sheets.
fn machine(gpu: &str, nodes: u32, per_node: u32, network: &str) -> Machine {
    let cluster = PaperCluster::parse(nodes * per_node, gpu, network, Some(per_node)).unwrap();
    cluster.machine(DType::BF16, None)
}

/// One GPU.
fn single(gpu: &str) -> Machine {
    Machine { cluster: Cluster::SINGLE, ..machine(gpu, 1, 1, "100Gbps") }
}

/// The plan of a workload under a strategy.
fn plan_under(workload: &Workload<'_>, name: StrategyName, machine: &Machine) -> PlanData {
    workload.with_strategy(name, &machine.cluster).unwrap().lay_out(machine)
}
