//! The step as data: a list of operations on four lanes.

use std::fmt;

use lockstep_core::Axis;

use crate::axes::Axes;
use crate::buffer::{Access, BufferId};
use crate::lane::Lane;

/// The index of a model in [`crate::PlanInput::models`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelId(pub u8);

impl ModelId {
    /// The only model of a run that has one.
    pub const FIRST: ModelId = ModelId(0);
}

/// The index of an operation in its schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u32);

/// The index of a span in [`Schedule::spans`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpanId(pub u32);

/// Elements `[start, end)` of one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanPart {
    pub unit: u32,
    pub start: usize,
    pub end: usize,
}

/// The elements that one collective or copy moves: a bucket of several units, or part of one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    pub model: ModelId,
    pub parts: Vec<SpanPart>,
}

impl Span {
    pub fn elems(&self) -> usize {
        self.parts.iter().map(|p| p.end - p.start).sum()
    }
}

/// What an [`OpKind::Copy`] copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyPayload {
    /// This rank's shard of a unit's parameters.
    Params,
    /// This rank's shard of a unit's gradient.
    Grad,
    /// The same from a buffer that holds the shard alone, rounded.
    RoundedGrad,
    /// All states that an update of elements `span` of the shard needs.
    OptimizerStates,
    /// Sums of squares of the gradients that are on the device.
    NormLeaves,
}

/// The source or the destination of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyEnd {
    /// The buffer that holds the state between steps.
    Resident,
    /// A buffer that lives within the step.
    Buffer(BufferId),
}

/// Where the result of a reduction goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceInto {
    /// The buffer that backward wrote the gradient to.
    InPlace,
    /// The accumulator that the optimizer reads. `fresh`: it is overwritten, not added to.
    Accumulator { fresh: bool },
}

/// What an operation does, and the operands that its kind does not imply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Brings all of a unit's parameters to a buffer that lives until `Release`: an all-gather along `axes`, or, if
    /// `axes` is empty, a copy from where they live. `from` is this rank's shard.
    Gather {
        span: SpanId,
        from: CopyEnd,
        axes: Axes,
    },
    /// Frees gathered parameters.
    Release(SpanId),
    /// Writes the parameters of a unit that has some in 4 bits to the buffer that forward and backward read: these
    /// dequantised, the others copied.
    Dequantise {
        unit: u32,
    },
    /// Copies a micro-batch's tokens, targets and positions from the caller to the device.
    Feed {
        micro_batch: u32,
    },
    Forward {
        unit: u32,
        micro_batch: u32,
    },
    HeadForward {
        micro_batch: u32,
    },
    /// Computes one coefficient per token and channel, from the head's outputs or from the batch alone.
    Objective {
        micro_batch: u32,
    },
    HeadBackward {
        micro_batch: u32,
        fresh: bool,
    },
    /// The head's forward and backward in one pass, for objectives whose coefficients do not depend on its outputs.
    HeadStep {
        micro_batch: u32,
        fresh: bool,
    },
    /// Gives the head's outputs of the whole window to the caller, on a GPU through memory of the host.
    Deliver,
    /// Recomputes activations that forward did not save.
    Recompute {
        unit: u32,
        micro_batch: u32,
    },
    /// `fresh`: the gradient is overwritten, not added to.
    Backward {
        unit: u32,
        micro_batch: u32,
        fresh: bool,
    },
    /// Sums gradients over the ranks along `axis`: a reduce-scatter if the gradient is sharded over the axis, else an
    /// all-reduce. `scratch` holds partial sums; it is `None` if there is one rank.
    Reduce {
        span: SpanId,
        micro_batch: u32,
        axis: Axis,
        into: ReduceInto,
        scratch: Option<BufferId>,
    },
    /// Copies between memories. The spans of gradients, states and updated parameters count from the start of a
    /// rank's shard; a rank with a shorter shard copies the part it has.
    Copy {
        payload: CopyPayload,
        from: CopyEnd,
        to: CopyEnd,
        span: SpanId,
    },
    /// Rounds this rank's shard of a unit's gradient into a buffer that is then offloaded.
    Round {
        unit: u32,
        into: BufferId,
    },
    /// Adds a micro-batch's gradient, staged on the host, to the sum of the earlier ones.
    Add {
        span: SpanId,
        micro_batch: u32,
        from: BufferId,
    },
    /// Computes the sums of squares of some units' gradients, block by block, into `leaves`.
    Squares {
        span: SpanId,
        leaves: BufferId,
    },
    /// Computes the global gradient norm, the clip factor and whether the update is skipped. Ranks along `axes` hold
    /// different gradients and exchange their partial sums first.
    ClipNorm {
        axes: Axes,
    },
    /// Runs the optimizer on elements `[start, end)` of a rank's shard of a unit, counted from the start of the shard;
    /// a rank with a shorter shard updates the part it has. `staging` holds states fetched from NVMe, and updated
    /// parameters that live in another memory.
    Update {
        unit: u32,
        start: usize,
        end: usize,
        staging: Option<BufferId>,
    },
    /// All-gathers updated parameters into every rank's resident copy, where the optimizer is sharded and the
    /// parameters are not (ZeRO-1 and ZeRO-2).
    AllGatherUpdated {
        span: SpanId,
        axes: Axes,
    },
    /// Prefill and decode: runs new tokens through all units with the KV cache, until all sequences have ended.
    Generate,
}

/// An operation that must finish first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    SameRun(OpId),
    /// The operation of the previous run of the same schedule: the step before.
    PreviousRun(OpId),
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Op {
    pub kind: OpKind,
    pub model: ModelId,
    pub lane: Lane,
    /// Operations of other lanes; the order within a lane is implied.
    pub waits: Vec<Wait>,
    pub accesses: Vec<(BufferId, Access)>,
}

/// The operations of one phase, in the order they are issued.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    pub ops: Vec<Op>,
    pub spans: Vec<Span>,
    /// `Some`: the caller continues when these operations have finished, and may run the schedule again while the
    /// others finish (host updates, all-gathers of updated parameters). `None`: the caller waits for all of them.
    pub returns_after: Option<Vec<OpId>>,
}

impl Schedule {
    /// The operations of all runs that can overlap, one run after the other. Ids continue from run to run.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = (OpId, &Op)> {
        let runs = if self.returns_after.is_some() { 2 } else { 1 };
        let ops = std::iter::repeat_n(&self.ops, runs).flatten();
        ops.enumerate().map(|(i, op)| (OpId(i as u32), op))
    }

    pub fn span(&self, id: SpanId) -> &Span {
        &self.spans[id.0 as usize]
    }
}

impl fmt::Display for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}
