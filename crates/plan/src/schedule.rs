//! The step as data: a list of operations on four lanes.

use std::fmt;

use lockstep_core::Axis;

use crate::axes::Axes;
use crate::buffer::{Access, BufferId};

/// Which model of the run: its place among [`crate::PlanInput::models`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelId(pub u8);

impl ModelId {
    /// The only model of a run that has one.
    pub const FIRST: ModelId = ModelId(0);
}

/// An operation's place in its schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u32);

/// A bucket's place in the schedule's table of spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpanId(pub u32);

/// A range of one unit's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanPart {
    pub unit: u32,
    pub start: usize,
    pub end: usize,
}

/// What moves together in one collective or copy: several units, or part of one.
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

/// A lane runs its operations in order; lanes run side by side. A stream on a GPU, a thread on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    Compute,
    Comm,
    Copy,
    /// Work done by the host's cores for another device: sums of spilled gradients, updates of offloaded states.
    Host,
}

impl Lane {
    pub const COUNT: usize = 4;
    pub const ALL: [Lane; Lane::COUNT] = [Lane::Compute, Lane::Comm, Lane::Copy, Lane::Host];
}

/// What a [`OpKind::Move`] moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// A rank's share of a unit's parameters.
    Params,
    /// A rank's share of a unit's gradient.
    Grad,
    /// All states that an update needs, of elements `span` of the share.
    OptimizerStates,
    /// Sums of squares of the gradients that stay on the device.
    Squares,
}

/// One end of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Where the state lives from step to step.
    Resident,
    /// A buffer of the step.
    Buffer(BufferId),
}

/// Where a sum over ranks ends up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceInto {
    /// Where backward wrote the gradient.
    Place,
    /// The accumulator that the optimizer reads. `fresh`: it is overwritten, not added to.
    Accumulator { fresh: bool },
}

/// What an operation does. Operands that its kind does not fix are named in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// A unit's parameters, whole, to a buffer that lives until `Release`: from all ranks along `axes`, or, where
    /// there are none, from their home. `from`: this rank's share.
    Gather {
        span: SpanId,
        from: End,
        axes: Axes,
    },
    Release(SpanId),
    /// A micro-batch's tokens, targets and positions, from the caller to the device.
    Feed {
        micro: u32,
    },
    Forward {
        unit: u32,
        micro: u32,
    },
    HeadForward {
        micro: u32,
    },
    /// From the head's outputs, or from the batch alone, to one coefficient per token and channel.
    Objective {
        micro: u32,
    },
    HeadBackward {
        micro: u32,
        fresh: bool,
    },
    /// Head forward and backward in one pass, for objectives whose coefficients need no outputs.
    HeadStep {
        micro: u32,
        fresh: bool,
    },
    Recompute {
        unit: u32,
        micro: u32,
    },
    /// `fresh`: the gradient is overwritten, not added to.
    Backward {
        unit: u32,
        micro: u32,
        fresh: bool,
    },
    /// Sums gradients over the ranks along `axis`. A gradient that is sharded over the axis reaches its owner's slice
    /// alone, any other every rank. `scratch`: room for partial sums; `None` in a world of one.
    Reduce {
        span: SpanId,
        micro: u32,
        axis: Axis,
        into: ReduceInto,
        scratch: Option<BufferId>,
    },
    /// Copies between memories. Of gradients, states and updated parameters, spans count from the start of a rank's
    /// share; a rank with a shorter share copies what it has.
    Move {
        what: Moved,
        from: End,
        to: End,
        span: SpanId,
    },
    /// Adds a micro-batch's gradient, moved to a buffer of the host, to those before it.
    Add {
        span: SpanId,
        micro: u32,
        from: BufferId,
    },
    /// Sums of squares of some units' gradients, block by block, to `leaves`.
    Squares {
        span: SpanId,
        leaves: BufferId,
    },
    /// The global gradient norm, the clip factor and whether the step is skipped. Ranks along `axes` hold different
    /// gradients and exchange their subtrees first.
    ClipNorm {
        axes: Axes,
    },
    /// The optimizer's step on elements `[start, end)` of a rank's share of a unit, counted from the start of
    /// the share; on a rank with a shorter share, on those that it has. `staging`: where states on a disk were moved
    /// to, and where updated parameters go whose home is elsewhere.
    Update {
        unit: u32,
        start: usize,
        end: usize,
        staging: Option<BufferId>,
    },
    /// Updated shards to every rank's resident whole copy (parameters whole, optimizer sharded).
    Publish {
        span: SpanId,
        axes: Axes,
    },
    /// New tokens of running documents through all units, with the cache; repeated until all documents end.
    Generate,
}

/// Something that must be finished first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    This(OpId),
    /// The operation of the previous run of the same schedule.
    Previous(OpId),
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Op {
    pub kind: OpKind,
    pub model: ModelId,
    pub lane: Lane,
    /// Operations of other lanes; order within the lane is implied.
    pub waits: Vec<Wait>,
    pub accesses: Vec<(BufferId, Access)>,
}

/// One phase's operations, in the order they are issued.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    pub ops: Vec<Op>,
    pub spans: Vec<Span>,
    /// `Some`: when these are over the caller goes on, and may run the schedule again while the others finish:
    /// updates on the host, parameters on their way to all ranks. `None`: the caller waits for all.
    pub returns_after: Option<Vec<OpId>>,
}

impl Schedule {
    /// The operations of as many runs as can overlap, one run after the other, numbered through.
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

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Lane::Compute => "compute",
            Lane::Comm => "comm",
            Lane::Copy => "copy",
            Lane::Host => "host",
        })
    }
}
