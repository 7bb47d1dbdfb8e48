use lockstep_core::DType;
use lockstep_device::cuda::{CudaQueue, Kernel, KernelSource, Launch};

use super::FlatRange;
use crate::vectors::{vector_elems, views_aligned};

/// The kernel that updates a range, and its launch. `vectorized` is the kernel for ranges that all start at a multiple
/// of 16 bytes; `elements` processes one element at a time.
pub(crate) fn kernel<const S: usize>(
    cuda: &CudaQueue,
    source: &'static KernelSource,
    [elements, vectorized]: [&'static str; 2],
    range: &FlatRange<S>,
) -> (Option<&'static Kernel>, Launch) {
    let FlatRange { master, working, grad, states } = *range;
    let len = master.len();
    let real = working.map_or(DType::F32, |working| working.dtype());
    if views_aligned(&[master, working.unwrap_or(master), grad]) && views_aligned(&states) {
        (cuda.kernel(source, real, vectorized), Launch::each(len.div_ceil(vector_elems(DType::F32))))
    } else {
        (cuda.kernel(source, real, elements), Launch::each(len))
    }
}
