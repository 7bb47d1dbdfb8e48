use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource, Launch};

use crate::Mat;
use crate::vectors::{rows_aligned, vector_elems};

pub(crate) static SOURCE: KernelSource =
    KernelSource { name: "scale", text: include_str!("kernels.cu"), defines: &[] };

pub(super) fn in_place(cuda: &CudaQueue, x: Mat, factor: f32) {
    let dtype = x.view.dtype();
    let pack = vector_elems(dtype);
    let vectorized = rows_aligned(&[x], pack);
    let items = x.rows * if vectorized { x.cols / pack } else { x.cols };
    let kernel = cuda.kernel(&SOURCE, dtype, if vectorized { "in_place_vec" } else { "in_place" });
    // SAFETY: these are the kernel's parameters; a thread reads and writes its own elements of x.
    unsafe { cuda.launch(kernel, Launch::each(items), args![x.view, x.stride, items, x.cols, factor]) };
}
