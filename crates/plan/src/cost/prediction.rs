//! The predicted time of a whole plan.

use lockstep_core::Bytes;

use crate::cost::cluster::Cluster;
use crate::cost::operation::{CopyLink, OpDemand, demand};
use crate::cost::rates::Rates;
use crate::cost::simulate::{OpTime, Simulation, Straggler, simulate};
use crate::input::ModelPlan;
use crate::lane::Lane;
use crate::run_plan::{Phase, PhaseKind, PlanData};

/// The predicted time of one phase.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseTime {
    pub name: String,
    pub kind: PhaseKind,
    pub simulation: Simulation,
    /// How much shorter a step would be if collectives took no time.
    pub exposed_comm_seconds: f64,
    /// Bytes that a rank sends to others.
    pub sent_bytes: f64,
    /// Floating-point operations of a rank.
    pub flops: f64,
}

/// The predicted time of an optimizer step: all train phases, one after the other. Scoring and generation are in
/// `phases`, but how often a run needs them depends on its algorithm.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    pub step_seconds: f64,
    pub exposed_comm_seconds: f64,
    /// Per lane, in [`Lane::ALL`]'s order.
    pub busy_seconds: [f64; Lane::COUNT],
    /// Bytes that a rank sends to others in a step.
    pub sent: Bytes,
    /// Of all ranks together, at the bounds of a micro-batch.
    pub tokens_per_s: f64,
    /// Model FLOP/s as a share of the peak; what is recomputed does not count.
    pub mfu: f64,
    pub phases: Vec<PhaseTime>,
}

/// Predicts the time of a plan.
pub fn predict(
    plan: &PlanData,
    rates: &Rates,
    cluster: &Cluster,
    straggler: Option<Straggler>,
) -> Prediction {
    let phases: Vec<PhaseTime> =
        plan.phases.iter().map(|phase| phase_time(plan, phase, rates, cluster, straggler)).collect();
    let trained = || phases.iter().filter(|phase| phase.kind == PhaseKind::Train);
    let sum = |of: fn(&PhaseTime) -> f64| trained().map(of).sum::<f64>();
    let step_seconds = sum(|phase| phase.simulation.step_seconds);
    let busy = |lane: usize| trained().map(|phase| phase.simulation.busy_seconds[lane]).sum();
    let policy = plan.input.models.iter().find(|model| model.trains());
    let tokens = policy.map_or(0, |model| model.bounds.tokens) as f64
        * f64::from(plan.input.num_micro_batches)
        * f64::from(plan.input.mesh.world_size());
    let tokens_per_s = if step_seconds > 0.0 { tokens / step_seconds } else { 0.0 };
    let per_rank = tokens_per_s / f64::from(plan.input.mesh.world_size());
    let mfu = policy.map_or(0.0, |model| per_rank * model_flops_per_token(model) / rates.peak_flops_per_s);
    Prediction {
        step_seconds,
        exposed_comm_seconds: sum(|phase| phase.exposed_comm_seconds),
        busy_seconds: std::array::from_fn(busy),
        sent: Bytes(sum(|phase| phase.sent_bytes) as u64),
        tokens_per_s,
        mfu,
        phases,
    }
}

/// Floating-point operations per token that a model's training needs: 6 for every parameter that a token is multiplied
/// with (all but the embedding table, unless the head uses it too), and 6·L·T·d for causal attention.
pub fn model_flops_per_token(model: &ModelPlan) -> f64 {
    let embedding = model.units[model.embed() as usize].params();
    let params = model.params() - if model.shape.head_is_tied() { 0 } else { embedding };
    let attention = model.shape.layers * model.bounds.max_doc * model.shape.dim;
    6.0 * (params as f64 + attention as f64)
}

fn phase_time(
    plan: &PlanData,
    phase: &Phase,
    rates: &Rates,
    cluster: &Cluster,
    straggler: Option<Straggler>,
) -> PhaseTime {
    let demands: Vec<OpDemand> = phase.schedule.ops.iter().map(|op| demand(plan, phase, op)).collect();
    let times: Vec<OpTime> = demands.iter().map(|demand| op_time(demand, plan, rates, cluster)).collect();
    let silent: Vec<OpTime> = times
        .iter()
        .map(|time| if time.is_collective { OpTime { seconds: 0.0, ..*time } } else { *time })
        .collect();
    let run = |times: &[OpTime]| simulate(&phase.schedule, times, rates.lanes_share_cores, straggler);
    let simulation = run(&times);
    let exposed = match times.iter().any(|time| time.is_collective) {
        true => simulation.step_seconds - run(&silent).step_seconds,
        false => 0.0,
    };
    let sent = |demand: &OpDemand| match demand {
        OpDemand::Collective { collective, axes, bytes, .. } => {
            collective.sent_bytes(*bytes, plan.input.mesh.size_of(axes))
        }
        _ => 0.0,
    };
    let flops = |demand: &OpDemand| match demand {
        OpDemand::Device(work) => work.flops(),
        _ => 0.0,
    };
    PhaseTime {
        name: phase.name.clone(),
        kind: phase.kind,
        simulation,
        exposed_comm_seconds: exposed.max(0.0),
        sent_bytes: demands.iter().map(sent).sum(),
        flops: demands.iter().map(flops).sum(),
    }
}

/// How long a demand takes.
fn op_time(demand: &OpDemand, plan: &PlanData, rates: &Rates, cluster: &Cluster) -> OpTime {
    let alone = |seconds: f64| OpTime { seconds, is_collective: false };
    match demand {
        OpDemand::Nothing => alone(0.0),
        OpDemand::Device(work) => alone(rates.seconds(work)),
        OpDemand::Host { bytes } => alone(bytes / rates.host_update_bytes_per_s),
        OpDemand::Copy { link, bytes } => alone(
            bytes
                / match link {
                    CopyLink::Host => rates.host_link_bytes_per_s,
                    CopyLink::NvmeRead => rates.nvme_read_bytes_per_s,
                    CopyLink::NvmeWrite => rates.nvme_write_bytes_per_s,
                    // A copy reads and writes.
                    CopyLink::Memory => rates.memory_bytes_per_s / 2.0,
                },
        ),
        OpDemand::Collective { collective, axes, bytes, local } => {
            let group = cluster.group(&plan.input.mesh, axes);
            let seconds = collective.seconds(*bytes, group, cluster) + rates.seconds(local);
            OpTime { seconds, is_collective: true }
        }
    }
}
