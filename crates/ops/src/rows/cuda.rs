use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource, Launch};

use super::RowMap;
use crate::Mat;
use crate::vectors::{rows_aligned, vector_elems};

pub(crate) static SOURCE: KernelSource =
    KernelSource { name: "rows", text: include_str!("kernels.cu"), defines: &[] };

pub(super) fn expand_first(cuda: &CudaQueue, y: Mat, x: Mat, map: &RowMap) {
    let (name, items) = kernel_for(&y, &x, ["expand_first", "expand_first_vec"]);
    let kernel = cuda.kernel(&SOURCE, y.view.dtype(), name);
    let RowMap { source, offsets, entries } = *map;
    let args = args![y.view, y.stride, x.view, x.stride, source, offsets, entries, items, y.cols];
    // SAFETY: these are the kernel's parameters; a thread writes its own elements of y. The engine has checked that the
    // map's indices are inside the matrices.
    unsafe { cuda.launch(kernel, Launch::each(items), args) };
}

pub(super) fn combine(cuda: &CudaQueue, y: Mat, x: Mat, map: &RowMap, only_first: bool) {
    let (name, items) = kernel_for(&y, &x, ["combine", "combine_vec"]);
    let kernel = cuda.kernel(&SOURCE, y.view.dtype(), name);
    let only_first = u32::from(only_first);
    let args = args![y.view, y.stride, x.view, x.stride, map.offsets, map.entries, items, y.cols, only_first];
    // SAFETY: as above.
    unsafe { cuda.launch(kernel, Launch::each(items), args) };
}

/// The plain kernel or the one with vectors, and its number of threads.
fn kernel_for(y: &Mat, x: &Mat, [plain, vectorized]: [&'static str; 2]) -> (&'static str, usize) {
    let pack = vector_elems(y.view.dtype());
    match rows_aligned(&[*y, *x], pack) {
        true => (vectorized, y.rows * (y.cols / pack)),
        false => (plain, y.rows * y.cols),
    }
}
