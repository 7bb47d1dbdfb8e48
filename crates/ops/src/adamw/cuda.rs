use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource};

use super::{Hyperparams, ParamRange};
use crate::optimizer::cuda::{DEFINES, kernel};

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "adamw",
    text: concat!(
        include_str!("../quant/dynamic_map.cu"),
        include_str!("../optimizer/update.cu"),
        include_str!("kernels.cu")
    ),
    defines: DEFINES,
};

pub(super) fn update(cuda: &CudaQueue, range: ParamRange, params: &Hyperparams, decision: Option<View>) {
    let (flat, weight_decay) = (range.flat(), range.weight_decay);
    let (kernel, launch) = kernel(cuda, &SOURCE, ["update", "update_vec"], &flat);
    let ((p, rest), (m, m_absmax), (v, v_absmax)) =
        (flat.param_args(), flat.state_args(0), flat.state_args(1));
    let args = args![
        p,
        rest,
        flat.grad,
        m,
        m_absmax,
        v,
        v_absmax,
        flat.len() as u64,
        flat.first_arg(),
        flat.key_arg(0),
        flat.key_arg(1),
        flat.key_arg(2),
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
    // SAFETY: these are the kernel's parameters; a thread reads and writes its own elements of ranges of one length and
    // the scale of their block, and reads the four numbers of the decision.
    unsafe { cuda.launch(kernel, launch, args) };
}
