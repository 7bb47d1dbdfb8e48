use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource};

use super::{Hyperparams, ParamRange};
use crate::optimizer::cuda::kernel;

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "sgd",
    text: concat!(include_str!("../optimizer/update.cu"), include_str!("kernels.cu")),
    defines: &[],
};

pub(super) fn update(cuda: &CudaQueue, range: ParamRange, params: &Hyperparams, decision: Option<View>) {
    let ParamRange { master, working, grad, momentum, weight_decay } = range;
    let len = master.len() as u64;
    let Hyperparams { lr, momentum: factor, nesterov, clip } = *params;
    match momentum {
        None => {
            let (kernel, launch) = kernel(cuda, &SOURCE, ["update", "update_vec"], &range.flat([]));
            let args = args![master, working, grad, len, decision, clip, lr, weight_decay];
            // SAFETY: these are the kernel's parameters; a thread reads and writes its own elements of ranges of one
            // length, and reads the four numbers of the decision.
            unsafe { cuda.launch(kernel, launch, args) };
        }
        Some(momentum) => {
            let names = ["update_momentum", "update_momentum_vec"];
            let (kernel, launch) = kernel(cuda, &SOURCE, names, &range.flat([momentum]));
            let nesterov = u32::from(nesterov);
            let args = args![
                master,
                working,
                grad,
                momentum,
                len,
                decision,
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
