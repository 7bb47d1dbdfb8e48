//! The global gradient norm, in the fixed order of `lockstep_core::sum`.

use lockstep_comm::CommError;
use lockstep_core::sum::{SumNode, fold_range, merge};
use lockstep_device::{Queue, View};
use lockstep_ops::reduce;
use lockstep_plan::{Axes, ParamState, Phase, RunPlan};

use crate::addresses::Address;
use crate::engine::Shared;
use crate::error::EngineError;
use crate::lanes::ScheduleRun;
use crate::phases::PreparedPhase;
use crate::task::Squares;

/// Room for the subtrees of the norm, so that folding and exchanging them allocates nothing.
pub(crate) struct NormScratch {
    /// Of what has been squared in this step.
    nodes: Vec<SumNode>,
    bytes: Vec<u8>,
}

/// A range folds to at most two subtrees a level.
const NODES_PER_RANGE: usize = 128;

impl NormScratch {
    pub(crate) fn of(plan: &RunPlan, phases: &[PreparedPhase]) -> NormScratch {
        let ranges = phases.iter().map(|phase| phase.squares.len()).max().unwrap_or(0);
        // Ranks that hold different gradients exchange their subtrees.
        let apart =
            |phase: &Phase| plan.input.mesh.size_of(plan.input.sharded_over(phase.model, ParamState::Grad));
        let ranks = plan.phases.iter().map(apart).max().unwrap_or(1);
        let room = ranges * NODES_PER_RANGE;
        let nodes = Vec::with_capacity(room * ranks as usize);
        let bytes = Vec::with_capacity(if ranks > 1 { room * NODE_BYTES } else { 0 });
        NormScratch { nodes, bytes }
    }
}

impl Shared {
    /// Where the device keeps what it decided of this step's updates, if it is the device that does.
    pub(crate) fn update_decision(&self) -> Option<View<'_>> {
        let addresses = &self.prepared_phase().addresses;
        let leaves: Address = addresses.norm_leaves?;
        let judged = leaves.view(&self.memories).on_gpu();
        addresses.update_decision.filter(|_| judged).map(|address| address.view(&self.memories))
    }

    /// Waits for the verdict, and keeps it where the host looks.
    pub(crate) fn read_update_decision(&self, run: ScheduleRun, queue: &Queue) -> Result<(), EngineError> {
        let Some(verdict) = self.update_decision() else { return Ok(()) };
        queue.synchronize()?;
        let mut numbers = [0f64; 4];
        verdict.read(&mut numbers)?;
        let mut step = self.steps.of(run);
        (step.grad_norm, step.clip, step.skip) = (numbers[1], numbers[2] as f32, numbers[3] != 0.0);
        Ok(())
    }

    /// From the blocks' sums of squares to the norm, the clip factor and whether the step is skipped:
    /// the same on every rank.
    pub(crate) fn clip_norm(
        &self,
        run: ScheduleRun,
        i: usize,
        axes: Axes,
        queue: &Queue,
    ) -> Result<(), EngineError> {
        match self.update_decision() {
            Some(verdict) => self.clip_on_device(run, i, axes, verdict, queue),
            None => self.clip_on_host(run, i as u64, axes).map_err(|cause| self.comm_failed(i, cause)),
        }
    }

    /// All of it stays on the device; the host hears of it when the step is over.
    fn clip_on_device(
        &self,
        run: ScheduleRun,
        i: usize,
        axes: Axes,
        verdict: View<'_>,
        queue: &Queue,
    ) -> Result<(), EngineError> {
        let leaves = self
            .prepared_phase()
            .addresses
            .norm_leaves
            .expect("a phase with a norm has leaves")
            .view(&self.memories);
        let own: usize = self.prepared_phase().squares.iter().map(|one| one.leaves.elems()).sum();
        reduce::sum_leaves(queue, verdict.first(1), leaves.first(own));
        for axis in axes {
            let (nccl, cuda) = self.transport.nccl().zip(queue.cuda()).expect("ranks on GPUs have NCCL");
            let summed = nccl.of(self.transport.group(*axis)).all_reduce(cuda, &[verdict.first(1)]);
            summed.map_err(|cause| self.comm_failed(i, cause))?;
        }
        let (max_norm, loss_scale) = {
            let step = self.steps.of(run);
            (step.updates.max_norm, step.loss_scale)
        };
        reduce::decide_step(queue, verdict, max_norm, loss_scale);
        Ok(())
    }

    /// Leaves that the host can read are folded as soon as they are there: of gradients that arrive unit by
    /// unit, most while backward goes on.
    pub(crate) fn fold_squares(&self, one: &Squares) {
        let leaves = one.leaves.view(&self.memories);
        if !leaves.on_gpu() && one.joined.is_none() {
            let mut work = self.norm.lock().unwrap_or_else(|e| e.into_inner());
            fold(leaves, one, &mut work.nodes);
        }
    }

    fn clip_on_host(&self, run: ScheduleRun, tag: u64, axes: Axes) -> Result<(), CommError> {
        let mut work = self.norm.lock().unwrap_or_else(|e| e.into_inner());
        let NormScratch { nodes, bytes } = &mut *work;
        for one in &self.prepared_phase().squares {
            one.joined.iter().for_each(|leaves| fold(leaves.view(&self.memories), one, nodes));
        }
        for axis in axes {
            bytes.clear();
            nodes.iter().for_each(|node| bytes.extend(to_bytes(node)));
            nodes.clear();
            self.transport.lane().all_gather_bytes(
                self.transport.group(*axis),
                tag,
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
        // In one product with the clip factor; in f64, so that a power of two costs nothing.
        let clip = clip_factor(norm, step.updates.max_norm);
        step.clip = (f64::from(clip) / step.loss_scale) as f32;
        Ok(())
    }
}

fn fold(leaves: View<'_>, one: &Squares, nodes: &mut Vec<SumNode>) {
    lockstep_ops::host::with_slice(leaves, |leaves| fold_range(leaves, one.first_block, nodes));
}

/// Level, index and sum, eight bytes each, and eight more: a power of two, so that no node is cut where
/// an exchange goes in rounds.
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

/// What gradients are multiplied by so that their norm is at most `max_norm`, as torch computes it.
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
    fn nodes_survive_the_journey() {
        let node = SumNode { level: 7, index: u64::MAX / 3, sum: -1.25e-300 };
        assert_eq!(from_bytes(&to_bytes(&node)), node);
    }
}
