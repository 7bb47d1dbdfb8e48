use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, Source};

use super::{Range, Rates};
use crate::optimizer::cuda::kernel;

pub(crate) static SOURCE: Source = Source {
    name: "adamw",
    text: concat!(include_str!("../optimizer/update.cu"), include_str!("kernels.cu")),
    numbers: &[],
};

pub(super) fn update(cuda: &CudaQueue, range: Range, rates: &Rates, verdict: Option<View>) {
    let Range { master, working, grad, m, v, weight_decay } = range;
    let (kernel, launch) = kernel(cuda, &SOURCE, ["update", "update_packs"], &range.flat());
    let args = args![
        master,
        working,
        grad,
        m,
        v,
        master.len() as u64,
        verdict,
        rates.clip,
        1.0 - rates.lr * weight_decay,
        rates.lr / rates.correction1,
        rates.beta1,
        rates.beta2,
        rates.complement1,
        rates.complement2,
        rates.eps,
        rates.correction2_sqrt,
    ];
    // SAFETY: the kernel's parameters; a thread reads and writes its own elements of ranges of one length, and reads
    // the four numbers of the verdict.
    unsafe { cuda.launch(kernel, launch, args) };
}
