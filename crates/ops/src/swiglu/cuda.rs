use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, Launch, Source};

use crate::packs::{pack_elems, views_fit};

pub(crate) static SOURCE: Source = Source { name: "swiglu", text: include_str!("kernels.cu") };

pub(super) fn forward(cuda: &CudaQueue, y: View, g: View, u: View) {
    let packs = views_fit(&[y, g, u]);
    let kernel = cuda.kernel(&SOURCE, y.dtype(), if packs { "forward_packs" } else { "forward" });
    // SAFETY: the kernel's parameters; it writes y and reads g and u, of one length.
    unsafe { cuda.launch(kernel, launch(y, packs), args![y, g, u, y.len() as u64]) };
}

pub(super) fn backward_in_place(cuda: &CudaQueue, g: View, u: View, dy: View) {
    let packs = views_fit(&[g, u, dy]);
    let kernel = cuda.kernel(&SOURCE, dy.dtype(), if packs { "backward_packs" } else { "backward" });
    // SAFETY: the kernel's parameters; a thread reads and writes its own elements of g and u, and reads dy.
    unsafe { cuda.launch(kernel, launch(dy, packs), args![g, u, dy, dy.len() as u64]) };
}

fn launch(of: View, packs: bool) -> Launch {
    Launch::each(if packs { of.len().div_ceil(pack_elems(of.dtype())) } else { of.len() })
}
