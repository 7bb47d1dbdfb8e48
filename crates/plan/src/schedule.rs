//! The step as data: a list of operations on four lanes.

use std::fmt;

use lockstep_core::Axis;

use crate::buffer::{Access, BufferId};

/// Which model an operation works on: 0 is the one being trained; PPO has four.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelId(pub u8);

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

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// All-gather of a span's parameters into a whole copy that lives until `Release`.
    Gather(SpanId),
    Release(SpanId),
    Forward {
        unit: u32,
        micro: u32,
    },
    HeadForward {
        micro: u32,
    },
    /// From the head's outputs, or from the batch alone, to one coefficient per token.
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
    /// Sum over the ranks of `axis`, then into the accumulator (`fresh`: overwriting it). Sharded
    /// gradients reach their owner's slice alone, whole ones every rank. On a mesh with two axes the
    /// first sums in place, where backward wrote, and only the second reaches the accumulator; which of
    /// them an operation is shows in its accesses: the first does not touch `State::Grad`, unless that
    /// is where backward wrote. Where gradients live on the host every sum stays in place.
    Reduce {
        span: SpanId,
        micro: u32,
        axis: Axis,
        fresh: bool,
    },
    /// Towards the one who computes: parameters before use, gradients that backward adds to, states from a
    /// disk before an update, parameters after an update on the host. Of gradients and around an update,
    /// spans count from the start of the share.
    Fetch(SpanId),
    /// Away from it: gradients to the host, states back to their disk, parameters after an update on the
    /// device.
    Spill(SpanId),
    /// Adds a micro-batch's gradient, spilled to the host, to those before it.
    Add {
        span: SpanId,
        micro: u32,
    },
    /// Sums of squares of the gradients this rank holds, block by block: of all units, or of the one whose
    /// gradient it reads.
    Squares,
    /// Brings the sums of squares of gradients that stay on the device to those of the others, on the host.
    JoinSquares,
    /// The global gradient norm, the clip factor and whether the step is skipped. Where gradients are
    /// sharded, ranks exchange their subtrees first.
    ClipNorm,
    /// The optimizer's step on elements `[start, end)` of a rank's share of a unit, counted from the start of
    /// the share; on a rank with a shorter share, on those that it has.
    Update {
        unit: u32,
        start: usize,
        end: usize,
    },
    /// Updated shards to every rank's resident whole copy (parameters whole, optimizer sharded).
    Publish(SpanId),
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
