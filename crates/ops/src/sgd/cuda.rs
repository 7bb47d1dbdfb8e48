use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, Source};

use super::{Range, Rates};
use crate::optimizer::cuda::kernel;

pub(crate) static SOURCE: Source = Source {
    name: "sgd",
    text: concat!(include_str!("../optimizer/update.cu"), include_str!("kernels.cu")),
    numbers: &[],
};

pub(super) fn update(cuda: &CudaQueue, range: Range, rates: &Rates, verdict: Option<View>) {
    let Range { master, working, grad, momentum, weight_decay } = range;
    let len = master.len() as u64;
    let Rates { lr, momentum: factor, nesterov, clip } = *rates;
    match momentum {
        None => {
            let (kernel, launch) = kernel(cuda, &SOURCE, ["update", "update_packs"], &range.flat([]));
            let args = args![master, working, grad, len, verdict, clip, lr, weight_decay];
            // SAFETY: the kernel's parameters; a thread reads and writes its own elements of ranges of one length, and
            // reads the four numbers of the verdict.
            unsafe { cuda.launch(kernel, launch, args) };
        }
        Some(momentum) => {
            let names = ["update_momentum", "update_momentum_packs"];
            let (kernel, launch) = kernel(cuda, &SOURCE, names, &range.flat([momentum]));
            let nesterov = u32::from(nesterov);
            let args = args![
                master,
                working,
                grad,
                momentum,
                len,
                verdict,
                clip,
                lr,
                weight_decay,
                factor,
                nesterov
            ];
            // SAFETY: as above.
            unsafe { cuda.launch(kernel, launch, args) };
        }
    }
}
