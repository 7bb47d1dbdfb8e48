use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, Launch, Source};

use super::{Table, Turn};
use crate::Mat;
use crate::packs::{pack_elems, rows_fit, views_fit};

pub(crate) static SOURCE: Source = Source { name: "rope", text: include_str!("kernels.cu"), numbers: &[] };

pub(super) fn apply(cuda: &CudaQueue, x: Mat, positions: View, table: Table, turn: Turn) {
    let Table { cos, sin, half } = table;
    let (dtype, heads) = (x.view.dtype(), x.cols / (2 * half));
    let pack = pack_elems(dtype);
    let packs = half.is_multiple_of(pack) && rows_fit(&[x], pack) && views_fit(&[cos, sin]);
    let items = x.rows * heads * (if packs { half / pack } else { half });
    let sign = if turn == Turn::Forward { 1f32 } else { -1.0 };
    let kernel = cuda.kernel(&SOURCE, dtype, if packs { "turn_packs" } else { "turn" });
    let args = args![x.view, x.stride, positions, cos, sin, table.positions(), items, heads, half, sign];
    // SAFETY: the kernel's parameters; a thread reads and writes its own pairs of x, and stops at a position that the
    // table does not have.
    unsafe { cuda.launch(kernel, Launch::each(items), args) };
}
