//! Buffers: the bytes that operations read and write, before they have an address.

use std::fmt;

use lockstep_core::{Bytes, DType};

use crate::schedule::ModelId;

/// A buffer's place in the plan's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// Where a buffer lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    Device,
    Host,
    Nvme,
}

impl Tier {
    pub const COUNT: usize = 3;
}

/// Which state of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// The copy forward and backward use.
    Working,
    /// The f32 copy the optimizer updates, where `Working` is narrower or on another device.
    Master,
    /// A state of the optimizer: which of [`crate::OptimizerSpec::states`].
    Optimizer(u8),
    Grad,
}

/// Which of the micro-batches in flight a buffer belongs to. Micro-batches run one after the other, so there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Flight(pub u8);

impl Flight {
    pub const ONLY: Flight = Flight(0);
}

/// What a buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum What {
    /// A resident state of a unit, whole or a shard.
    State {
        model: ModelId,
        unit: u32,
        state: State,
    },
    /// A unit's parameters gathered whole.
    Whole {
        model: ModelId,
        unit: u32,
    },
    /// A unit's whole gradient, on its way to the owners or to the host: of one micro-batch, or of those
    /// summed so far.
    GradWhole {
        model: ModelId,
        unit: u32,
    },
    /// Partial sums of the ranks' contributions, a chunk each.
    Staging,
    /// A shard of parameters on its way between the host and the device. Two, in turn.
    ParamStaging {
        turn: u32,
    },
    /// A piece of a later micro-batch's gradient on the host, until it is added to those before it. Two, in
    /// turn.
    GradStaging {
        turn: u32,
    },
    /// A piece of a unit's share on the host during an update: its states if their home is a disk (in the order
    /// of [`crate::PlanInput::optimizer_states`]), then room for the updated parameters in the storage type if
    /// their home is not the host. Two, in turn.
    HostStaging {
        turn: u32,
    },
    /// The residual stream before unit `index`.
    Stream {
        model: ModelId,
        index: u32,
        flight: Flight,
    },
    GradStream {
        model: ModelId,
        flight: Flight,
    },
    /// What forward keeps for backward, and what recomputation makes for it.
    Saved {
        model: ModelId,
        unit: u32,
        flight: Flight,
    },
    Rebuilt {
        model: ModelId,
        unit: u32,
        flight: Flight,
    },
    /// Slots that live within one operation, and the kernels' workspace.
    Scratch,
    /// Tokens, targets, positions and document bounds of a micro-batch.
    Inputs {
        flight: Flight,
    },
    /// What the head says of every token, and the objective's coefficients for it: channel after channel.
    Outputs {
        flight: Flight,
    },
    Coefficients {
        flight: Flight,
    },
    /// Angles of the rotary embedding.
    Tables {
        model: ModelId,
    },
    /// Sums of squares of blocks of gradients: the leaves of the norm's tree, where the norm is found.
    NormLeaves {
        model: ModelId,
    },
    /// The same of units whose gradients stay on the device, where others leave it.
    StayingLeaves {
        model: ModelId,
    },
    /// Of a device with memory of its own: the sum of squares, the norm, the factor of gradients and whether the
    /// step is skipped, in f64; and on the host, what crosses over ([`crate::PlanInput::port_elems`]).
    Verdict,
    Port,
    /// Keys and values of running documents.
    KvCache {
        model: ModelId,
    },
}

impl What {
    /// Residents live from one step to the next; everything else is packed by lifetime.
    pub fn is_resident(&self) -> bool {
        matches!(self, What::State { .. } | What::Tables { .. } | What::Verdict | What::Port)
    }
}

/// A buffer and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    pub what: What,
    pub tier: Tier,
    pub elems: usize,
    pub dtype: DType,
}

impl Buffer {
    pub fn bytes(&self) -> Bytes {
        Bytes((self.elems * self.dtype.size()) as u64)
    }
}

/// How an operation touches a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Writes without reading: a new lifetime begins.
    Define,
    Read,
    Update,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Nvme => "nvme",
        })
    }
}
