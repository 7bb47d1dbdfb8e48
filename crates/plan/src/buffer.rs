//! Buffers: the memory that operations read and write, named before it has an address.

use std::fmt;

use lockstep_core::{Bytes, DType};

use crate::schedule::ModelId;

/// The index of a buffer in [`crate::PlanData::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// The kind of memory a buffer lives in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemoryTier {
    Device,
    Host,
    Nvme,
}

impl MemoryTier {
    pub const COUNT: usize = 3;
}

/// One of the values kept for every parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ParamState {
    /// The copy that forward and backward read, in the storage type. Of parameters in 4 bits there is none.
    Working,
    /// 4-bit parameters: two codes per byte.
    Codes,
    /// 4-bit parameters: the 8-bit scale of each block.
    ScaleCodes,
    /// 4-bit parameters: for each tensor, the scales of its scales, in f32.
    ScaleTable,
    /// The f32 parameter that the optimizer updates, where `Working` is narrower or in another memory: all of it, or the 16
    /// bits that a bf16 weight lacks ([`crate::PlanInput::master_dtype`]).
    Master,
    /// An optimizer state, as an index into [`crate::OptimizerSpec::states`].
    Optimizer(u8),
    /// The scales of an optimizer state that is stored in 8 bits, one for each block of 256 parameters.
    Scales(u8),
    Grad,
}

/// Which of the micro-batches in flight a buffer belongs to. Micro-batches run one after the other, so there is only
/// one today; pipeline parallelism would have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InFlight(pub u8);

impl InFlight {
    pub const ONLY: InFlight = InFlight(0);
}

/// What a buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BufferKind {
    /// A resident state of a unit's parameters: all of it, or this rank's shard.
    ParamState { model: ModelId, unit: u32, state: ParamState },
    /// A unit's parameters after an all-gather or after dequantisation.
    UnshardedParams { model: ModelId, unit: u32 },
    /// A state of a unit with 4-bit parameters after an all-gather, from which the unit is dequantised.
    GatheredState { model: ModelId, unit: u32, state: ParamState },
    /// A unit's gradient before it is reduced or offloaded: of one micro-batch, or of those summed so far.
    UnshardedGrad { model: ModelId, unit: u32 },
    /// This rank's shard of a unit's gradient, rounded, until it is offloaded.
    RoundedGrad { model: ModelId, unit: u32 },
    /// Partial sums of a reduction over ranks, one chunk each.
    ReduceScratch,
    /// A shard of parameters between the host and the device. Two buffers alternate, so that one is filled while the
    /// other is read; `turn` says which.
    ParamStaging { turn: u32 },
    /// A piece of a later micro-batch's gradient on the host, until it is added to the earlier ones. Two buffers
    /// alternate.
    GradStaging { turn: u32 },
    /// Staging on the host for the update of one piece of a shard. It holds the piece's states if they are on NVMe (in
    /// the order of [`crate::PlanInput::optimizer_states`]), then the updated parameters in the storage type if those
    /// do not live on the host. Two buffers alternate.
    HostStaging { turn: u32 },
    /// The residual stream before unit `index`.
    Residual { model: ModelId, index: u32, in_flight: InFlight },
    /// The gradient of the residual stream.
    ResidualGrad { model: ModelId, in_flight: InFlight },
    /// Activations that forward saves for backward.
    SavedActivations { model: ModelId, unit: u32, in_flight: InFlight },
    /// Activations that [`crate::OpKind::Recompute`] computes for backward.
    RecomputedActivations { model: ModelId, unit: u32, in_flight: InFlight },
    /// Slots that live within one operation, and the kernels' workspace.
    Scratch,
    /// Tokens, targets, positions and sequence bounds of a micro-batch.
    Inputs { in_flight: InFlight },
    /// The head's outputs for all micro-batches of the accumulation window, one number per token and channel, channel
    /// after channel.
    Outputs,
    /// The derivative of the loss with respect to each of the head's outputs, in the same layout.
    Coefficients,
    /// Cosines and sines of the rotary embedding.
    RopeTables { model: ModelId },
    /// Sums of squares of gradient blocks: the leaves of the gradient norm's summation tree, in the memory where the
    /// norm is computed.
    NormLeaves { model: ModelId },
    /// The leaves of units whose gradients are on the device, where other units' gradients are offloaded.
    DeviceNormLeaves { model: ModelId },
    /// On a device with its own memory: the sum of squares, the norm, the factor to multiply gradients by, and whether
    /// the update is skipped, in f64.
    UpdateDecision,
    /// Pinned host memory that inputs and outputs of a device with its own memory pass through
    /// ([`crate::PlanInput::io_staging_elems`]).
    IoStaging,
    /// Keys and values of the sequences being generated.
    KvCache { model: ModelId },
}

impl BufferKind {
    /// Residents live from one step to the next; all other buffers are packed by lifetime.
    pub fn is_resident(&self) -> bool {
        matches!(
            self,
            BufferKind::ParamState { .. }
                | BufferKind::RopeTables { .. }
                | BufferKind::UpdateDecision
                | BufferKind::IoStaging
        )
    }
}

/// A buffer: what it holds, where, and how large it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    pub kind: BufferKind,
    pub tier: MemoryTier,
    pub elems: usize,
    pub dtype: DType,
}

impl Buffer {
    pub fn bytes(&self) -> Bytes {
        Bytes((self.elems * self.dtype.size()) as u64)
    }
}

/// How an operation uses a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Writes without reading: a new lifetime begins.
    Define,
    Read,
    Update,
}

impl fmt::Display for MemoryTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            MemoryTier::Device => "device",
            MemoryTier::Host => "host",
            MemoryTier::Nvme => "nvme",
        })
    }
}
