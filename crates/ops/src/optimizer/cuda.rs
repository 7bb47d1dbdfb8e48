use lockstep_core::DType;
use lockstep_device::cuda::{CudaQueue, Kernel, Launch, Source};

use super::Flat;
use crate::packs::{pack_elems, views_fit};

/// The kernel of a source that updates a range, and its launch: `packs` reads 16 bytes at a time where every range
/// starts at a multiple of 16 bytes, `elements` one element.
pub(crate) fn kernel<const S: usize>(
    cuda: &CudaQueue,
    source: &'static Source,
    [elements, packs]: [&'static str; 2],
    range: &Flat<S>,
) -> (Option<&'static Kernel>, Launch) {
    let Flat { master, working, grad, states } = *range;
    let len = master.len();
    let real = working.map_or(DType::F32, |working| working.dtype());
    if views_fit(&[master, working.unwrap_or(master), grad]) && views_fit(&states) {
        (cuda.kernel(source, real, packs), Launch::each(len.div_ceil(pack_elems(DType::F32))))
    } else {
        (cuda.kernel(source, real, elements), Launch::each(len))
    }
}
