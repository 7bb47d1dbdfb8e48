use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, Source};

use super::{Range, Rates};
use crate::optimizer::cuda::kernel;

pub(crate) static SOURCE: Source = Source {
    name: "lion",
    text: concat!(include_str!("../optimizer/update.cu"), include_str!("kernels.cu")),
    numbers: &[],
};

pub(super) fn update(cuda: &CudaQueue, range: Range, rates: &Rates, verdict: Option<View>) {
    let Range { master, working, grad, m, weight_decay } = range;
    let (kernel, launch) = kernel(cuda, &SOURCE, ["update", "update_packs"], &range.flat());
    let args = args![
        master,
        working,
        grad,
        m,
        master.len() as u64,
        verdict,
        rates.clip,
        rates.keep(weight_decay),
        rates.lr,
        rates.beta1,
        rates.beta2,
        rates.complement1,
        rates.complement2,
    ];
    // SAFETY: the kernel's parameters; a thread reads and writes its own elements of ranges of one length, and reads
    // the four numbers of the verdict.
    unsafe { cuda.launch(kernel, launch, args) };
}
