use lockstep_core::DType;
use lockstep_device::View;
use lockstep_device::cuda::{CudaQueue, Kernel, KernelSource, KernelVariant, Launch};

use super::{FlatRange, ParamFormat, StateFormat, UpdateFormat};
use crate::quant::dynamic_map::BLOCK_ELEMS;
use crate::vectors::{vector_elems, views_aligned};

/// Numbers of the formats, for all sources of update kernels.
pub(crate) const DEFINES: &[(&str, u32)] = &[
    ("PARAMS_MASTER", 1),
    ("PARAMS_SPLIT", 2),
    ("PARAMS_STOCHASTIC", 3),
    ("STATES_F32", 1),
    ("STATES_BF16", 2),
    ("STATES_BLOCKWISE", 3),
    ("GRADS_F32", 1),
    ("GRADS_BF16", 2),
    ("BLOCK_ELEMS", BLOCK_ELEMS as u32),
];

fn number_of(name: &str) -> u32 {
    DEFINES.iter().find(|(define, _)| *define == name).expect("the format has a number").1
}

/// What update kernels are compiled for.
pub(crate) fn variant(format: UpdateFormat) -> KernelVariant {
    let (real, params) = match format.params {
        ParamFormat::Master { working } => (working, "PARAMS_MASTER"),
        ParamFormat::Split => (DType::BF16, "PARAMS_SPLIT"),
        ParamFormat::Stochastic => (DType::BF16, "PARAMS_STOCHASTIC"),
    };
    let states = match format.states {
        StateFormat::F32 => "STATES_F32",
        StateFormat::Bf16 => "STATES_BF16",
        StateFormat::Blockwise => "STATES_BLOCKWISE",
    };
    let grads = if format.grads == DType::BF16 { "GRADS_BF16" } else { "GRADS_F32" };
    KernelVariant::of(real)
        .with("PARAMS", number_of(params))
        .with("STATES", number_of(states))
        .with("GRADS", number_of(grads))
}

/// The kernel that updates a range, and its launch. `vectorized` is the kernel for ranges that all start at a multiple
/// of 16 bytes; `elements` loads and stores one element at a time.
pub(crate) fn kernel<const S: usize>(
    cuda: &CudaQueue,
    source: &'static KernelSource,
    [elements, vectorized]: [&'static str; 2],
    range: &FlatRange<S>,
) -> (Option<&'static Kernel>, Launch) {
    let (len, format) = (range.len(), range.format());
    let is_aligned = views_aligned(&[range.grad]) && range.outputs().all(|view| views_aligned(&[view]));
    let chunk = if is_aligned { vector_elems(DType::F32) } else { 1 };
    // A warp updates a block of codes.
    let per_thread = if format.states == StateFormat::Blockwise { BLOCK_ELEMS / 32 } else { chunk };
    let name = if is_aligned { vectorized } else { elements };
    (cuda.kernel_variant(source, variant(format), name), Launch::each(len.div_ceil(per_thread)))
}

/// The arguments of a range that are not its parameters or gradients.
impl<'m, const S: usize> FlatRange<'m, S> {
    /// The numbers or codes of a state, and the scales of codes.
    pub(crate) fn state_args(&self, state: usize) -> (View<'m>, Option<View<'m>>) {
        self.states[state].views()
    }

    /// Parameters, and working copy or remainders.
    pub(crate) fn param_args(&self) -> (View<'m>, Option<View<'m>>) {
        (self.params.main(), self.params.rest())
    }

    /// The index of the first element in its tensor.
    pub(crate) fn first_arg(&self) -> u32 {
        self.rounding.map_or(0, |rounding| rounding.first_elem as u32)
    }

    /// The key of the parameters (slot 0) or of a state.
    pub(crate) fn key_arg(&self, slot: usize) -> u64 {
        self.rounding.map_or(0, |rounding| {
            let [low, high] = rounding.bits.key(slot).0;
            u64::from(high) << 32 | u64::from(low)
        })
    }
}
