use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource, Launch};

use super::{Direction, Table};
use crate::Mat;
use crate::vectors::{rows_aligned, vector_elems, views_aligned};

pub(crate) static SOURCE: KernelSource =
    KernelSource { name: "rope", text: include_str!("kernels.cu"), defines: &[] };

pub(super) fn apply(cuda: &CudaQueue, x: Mat, positions: View, table: Table, direction: Direction) {
    let Table { cos, sin, half } = table;
    let (dtype, heads) = (x.view.dtype(), x.cols / (2 * half));
    let pack = vector_elems(dtype);
    let vectorized = half.is_multiple_of(pack) && rows_aligned(&[x], pack) && views_aligned(&[cos, sin]);
    let items = x.rows * heads * (if vectorized { half / pack } else { half });
    let sign = if direction == Direction::Forward { 1f32 } else { -1.0 };
    let kernel = cuda.kernel(&SOURCE, dtype, if vectorized { "rotate_vec" } else { "rotate" });
    let args = args![x.view, x.stride, positions, cos, sin, table.positions(), items, heads, half, sign];
    // SAFETY: these are the kernel's parameters; a thread reads and writes its own pairs of x, and traps on a position
    // outside the table.
    unsafe { cuda.launch(kernel, Launch::each(items), args) };
}
