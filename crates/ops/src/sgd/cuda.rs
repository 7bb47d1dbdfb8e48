use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource};

use super::{Hyperparams, ParamRange};
use crate::optimizer::State;
use crate::optimizer::cuda::{DEFINES, kernel};

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "sgd",
    text: concat!(
        include_str!("../quant/dynamic_map.cu"),
        include_str!("../optimizer/update.cu"),
        include_str!("kernels.cu")
    ),
    defines: DEFINES,
};

pub(super) fn update(cuda: &CudaQueue, range: ParamRange, params: &Hyperparams, decision: Option<View>) {
    match range.momentum {
        None => update_plain(cuda, range, params, decision),
        Some(momentum) => update_momentum(cuda, range, momentum, params, decision),
    }
}

fn update_plain(cuda: &CudaQueue, range: ParamRange, params: &Hyperparams, decision: Option<View>) {
    let flat = range.flat([]);
    let (kernel, launch) = kernel(cuda, &SOURCE, ["update", "update_vec"], &flat);
    let (p, rest) = flat.param_args();
    let args = args![
        p,
        rest,
        flat.grad,
        flat.len() as u64,
        flat.first_arg(),
        flat.key_arg(0),
        decision,
        params.clip,
        params.lr,
        range.weight_decay,
    ];
    // SAFETY: these are the kernel's parameters; a thread reads and writes its own elements of ranges of one length, and
    // reads the four numbers of the decision.
    unsafe { cuda.launch(kernel, launch, args) };
}

fn update_momentum(
    cuda: &CudaQueue,
    range: ParamRange,
    momentum: State,
    params: &Hyperparams,
    decision: Option<View>,
) {
    let flat = range.flat([momentum]);
    let (kernel, launch) = kernel(cuda, &SOURCE, ["update_momentum", "update_momentum_vec"], &flat);
    let ((p, rest), (b, b_absmax)) = (flat.param_args(), flat.state_args(0));
    let args = args![
        p,
        rest,
        flat.grad,
        b,
        b_absmax,
        flat.len() as u64,
        flat.first_arg(),
        flat.key_arg(0),
        flat.key_arg(1),
        decision,
        params.clip,
        params.lr,
        range.weight_decay,
        params.momentum,
        u32::from(params.nesterov),
    ];
    // SAFETY: as above; and the scale of a block of codes belongs to the threads that update it.
    unsafe { cuda.launch(kernel, launch, args) };
}
