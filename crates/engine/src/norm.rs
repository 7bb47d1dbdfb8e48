//! The global gradient norm and the clip factor, summed in the fixed order of `lockstep_core::sum`.

use lockstep_comm::CommError;
use lockstep_core::sum::{SumNode, fold_range, merge};
use lockstep_device::{Queue, View};
use lockstep_ops::reduce;
use lockstep_plan::{Axes, ParamState, Phase, RunPlan};

use crate::addresses::Address;
use crate::engine::Shared;
use crate::error::EngineError;
use crate::lanes::ScheduleRun;
use crate::prepared_phase::PreparedPhase;
use crate::task::Squares;

/// Space for the partial sums of the norm, allocated once so that a step does not allocate.
pub(crate) struct NormScratch {
    /// Partial sums of this step so far.
    nodes: Vec<SumNode>,
    bytes: Vec<u8>,
}

/// A range folds to at most two subtrees per level.
const NODES_PER_RANGE: usize = 128;

impl NormScratch {
    pub(crate) fn of(plan: &RunPlan, phases: &[PreparedPhase]) -> NormScratch {
        let ranges = phases.iter().map(|phase| phase.squares.len()).max().unwrap_or(0);
        // Ranks that hold different gradients exchange their partial sums.
        let num_shards =
            |phase: &Phase| plan.input.mesh.size_of(plan.input.sharded_over(phase.model, ParamState::Grad));
        let ranks = plan.phases.iter().map(num_shards).max().unwrap_or(1);
        let max_nodes = ranges * NODES_PER_RANGE;
        let nodes = Vec::with_capacity(max_nodes * ranks as usize);
        let bytes = Vec::with_capacity(if ranks > 1 { max_nodes * NODE_BYTES } else { 0 });
        NormScratch { nodes, bytes }
    }
}

impl Shared {
    /// The buffer with the norm, the clip factor and the skip flag, if the device computes them.
    pub(crate) fn update_decision(&self) -> Option<View<'_>> {
        let addresses = &self.prepared_phase().addresses;
        let leaves: Address = addresses.norm_leaves?;
        let on_gpu = leaves.view(&self.memories).on_gpu();
        addresses.update_decision.filter(|_| on_gpu).map(|address| address.view(&self.memories))
    }

    /// Waits for the device's update decision and copies it to the step state on the host.
    pub(crate) fn read_update_decision(&self, run: ScheduleRun, queue: &Queue) -> Result<(), EngineError> {
        let Some(decision) = self.update_decision() else { return Ok(()) };
        queue.synchronize()?;
        let mut numbers = [0f64; 4];
        decision.read(&mut numbers)?;
        let mut step = self.steps.of(run);
        (step.grad_norm, step.clip, step.skip) = (numbers[1], numbers[2] as f32, numbers[3] != 0.0);
        Ok(())
    }

    /// Computes the norm, the clip factor and whether the update is skipped from the blocks' sums of squares. The result
    /// is the same on every rank.
    pub(crate) fn clip_norm(
        &self,
        run: ScheduleRun,
        i: usize,
        axes: Axes,
        queue: &Queue,
    ) -> Result<(), EngineError> {
        match self.update_decision() {
            Some(decision) => self.clip_on_device(run, i, axes, decision, queue),
            None => self.clip_on_host(run, i, axes).map_err(|cause| self.comm_failed(i, cause)),
        }
    }

    /// Computes it on the device; the host reads it after the step.
    fn clip_on_device(
        &self,
        run: ScheduleRun,
        i: usize,
        axes: Axes,
        decision: View<'_>,
        queue: &Queue,
    ) -> Result<(), EngineError> {
        let leaves = self
            .prepared_phase()
            .addresses
            .norm_leaves
            .expect("a phase with a norm has leaves")
            .view(&self.memories);
        let own: usize = self.prepared_phase().squares.iter().map(|one| one.leaves.elems()).sum();
        reduce::sum_leaves(queue, decision.first(1), leaves.first(own));
        for axis in axes {
            let nccl = self.transport.nccl(self.lane_of(i));
            let (nccl, cuda) = nccl.zip(queue.cuda()).expect("ranks on GPUs have NCCL");
            let summed = nccl.of(self.transport.group(*axis)).all_reduce(cuda, &[decision.first(1)]);
            summed.map_err(|cause| self.comm_failed(i, cause))?;
        }
        let (max_norm, loss_scale) = {
            let step = self.steps.of(run);
            (step.updates.max_norm, step.loss_scale)
        };
        reduce::decide_step(queue, decision, max_norm, loss_scale);
        Ok(())
    }

    /// Folds leaves that the host can read as soon as they are computed: with offloaded gradients, mostly while backward
    /// runs.
    pub(crate) fn fold_squares(&self, one: &Squares) {
        let leaves = one.leaves.view(&self.memories);
        if !leaves.on_gpu() && one.joined.is_none() {
            let mut work = self.norm.lock().unwrap_or_else(|e| e.into_inner());
            fold(leaves, one, &mut work.nodes);
        }
    }

    fn clip_on_host(&self, run: ScheduleRun, i: usize, axes: Axes) -> Result<(), CommError> {
        let mut work = self.norm.lock().unwrap_or_else(|e| e.into_inner());
        let NormScratch { nodes, bytes } = &mut *work;
        for one in &self.prepared_phase().squares {
            one.joined.iter().for_each(|leaves| fold(leaves.view(&self.memories), one, nodes));
        }
        for axis in axes {
            bytes.clear();
            nodes.iter().for_each(|node| bytes.extend(to_bytes(node)));
            nodes.clear();
            self.transport.lane(self.lane_of(i)).all_gather_bytes(
                self.transport.group(*axis),
                i as u64,
                bytes,
                &mut |_, theirs| {
                    nodes.extend(theirs.chunks_exact(NODE_BYTES).map(from_bytes));
                },
            )?;
        }
        let mut step = self.steps.of(run);
        let norm = merge(nodes).sqrt() / step.loss_scale;
        nodes.clear();
        step.grad_norm = norm;
        step.skip = !norm.is_finite();
        // The clip factor also removes the loss scale; divided in f64, so that a power of two is exact.
        let clip = clip_factor(norm, step.updates.max_norm);
        step.clip = (f64::from(clip) / step.loss_scale) as f32;
        Ok(())
    }
}

fn fold(leaves: View<'_>, one: &Squares, nodes: &mut Vec<SumNode>) {
    lockstep_ops::host::with_slice(leaves, |leaves| fold_range(leaves, one.first_block, nodes));
}

/// Level, index and sum, eight bytes each, padded to a power of two so that an exchange in rounds never splits a node.
const NODE_BYTES: usize = 32;

fn to_bytes(node: &SumNode) -> [u8; NODE_BYTES] {
    let mut bytes = [0; NODE_BYTES];
    bytes[..8].copy_from_slice(&u64::from(node.level).to_le_bytes());
    bytes[8..16].copy_from_slice(&node.index.to_le_bytes());
    bytes[16..24].copy_from_slice(&node.sum.to_bits().to_le_bytes());
    bytes
}

fn from_bytes(bytes: &[u8]) -> SumNode {
    let word = |i: usize| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().expect("eight bytes"));
    SumNode { level: word(0) as u32, index: word(1), sum: f64::from_bits(word(2)) }
}

/// The factor that limits the gradient norm to `max_norm`, computed as PyTorch does.
fn clip_factor(norm: f64, max_norm: Option<f64>) -> f32 {
    match max_norm {
        Some(max) => (max / (norm + 1e-6)).min(1.0) as f32,
        None => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_only_shrinks() {
        assert_eq!(clip_factor(0.5, Some(1.0)), 1.0);
        assert!((clip_factor(4.0, Some(1.0)) - 0.25).abs() < 1e-6);
        assert_eq!(clip_factor(4.0, None), 1.0);
    }

    #[test]
    fn nodes_survive_serialisation() {
        let node = SumNode { level: 7, index: u64::MAX / 3, sum: -1.25e-300 };
        assert_eq!(from_bytes(&to_bytes(&node)), node);
    }
}
