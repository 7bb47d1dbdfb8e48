use lockstep_core::DType;
use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, Launch, Source};

use super::{Range, Rates};
use crate::packs::{pack_elems, views_fit};

pub(crate) static SOURCE: Source = Source { name: "adamw", text: include_str!("kernels.cu"), numbers: &[] };

pub(super) fn update(cuda: &CudaQueue, range: Range, rates: &Rates, verdict: Option<View>) {
    let Range { master, working, grad, m, v, weight_decay } = range;
    let len = master.len();
    let real = working.map_or(DType::F32, |working| working.dtype());
    let packs = views_fit(&[master, working.unwrap_or(master), grad, m, v]);
    let kernel = cuda.kernel(&SOURCE, real, if packs { "update_packs" } else { "update" });
    let threads = if packs { len.div_ceil(pack_elems(DType::F32)) } else { len };
    let args = args![
        master,
        working,
        grad,
        m,
        v,
        len as u64,
        verdict,
        1.0 - rates.lr * weight_decay,
        rates.lr / rates.correction1,
        rates.beta1,
        rates.beta2,
        rates.complement1,
        rates.complement2,
        rates.eps,
        rates.correction2_sqrt,
        rates.clip,
    ];
    // SAFETY: the kernel's parameters; a thread reads and writes its own elements of ranges of one length, and reads
    // the four numbers of the verdict.
    unsafe { cuda.launch(kernel, Launch::each(threads), args) };
}
