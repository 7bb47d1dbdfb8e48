use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource};

use super::{Hyperparams, ParamRange};
use crate::optimizer::cuda::kernel;

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "lion",
    text: concat!(include_str!("../optimizer/update.cu"), include_str!("kernels.cu")),
    defines: &[],
};

pub(super) fn update(cuda: &CudaQueue, range: ParamRange, params: &Hyperparams, decision: Option<View>) {
    let ParamRange { master, working, grad, m, weight_decay } = range;
    let (kernel, launch) = kernel(cuda, &SOURCE, ["update", "update_vec"], &range.flat());
    let args = args![
        master,
        working,
        grad,
        m,
        master.len() as u64,
        decision,
        params.clip,
        params.decay_factor(weight_decay),
        params.lr,
        params.beta1,
        params.beta2,
        params.one_minus_beta1,
        params.one_minus_beta2,
    ];
    // SAFETY: these are the kernel's parameters; a thread reads and writes its own elements of ranges of one length,
    // and reads the four numbers of the decision.
    unsafe { cuda.launch(kernel, launch, args) };
}
