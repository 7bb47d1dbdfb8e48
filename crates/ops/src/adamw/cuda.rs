use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource};

use super::{Hyperparams, ParamRange};
use crate::optimizer::cuda::kernel;

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "adamw",
    text: concat!(include_str!("../optimizer/update.cu"), include_str!("kernels.cu")),
    defines: &[],
};

pub(super) fn update(cuda: &CudaQueue, range: ParamRange, params: &Hyperparams, decision: Option<View>) {
    let ParamRange { master, working, grad, m, v, weight_decay } = range;
    let (kernel, launch) = kernel(cuda, &SOURCE, ["update", "update_vec"], &range.flat());
    let args = args![
        master,
        working,
        grad,
        m,
        v,
        master.len() as u64,
        decision,
        params.clip,
        1.0 - params.lr * weight_decay,
        params.lr / params.bias_correction1,
        params.beta1,
        params.beta2,
        params.one_minus_beta1,
        params.one_minus_beta2,
        params.eps,
        params.bias_correction2_sqrt,
    ];
    // SAFETY: these are the kernel's parameters; a thread reads and writes its own elements of ranges of one length,
    // and reads the four numbers of the decision.
    unsafe { cuda.launch(kernel, launch, args) };
}
