use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource, Launch};

use super::{BLOCK_ELEMS, Nf4, SCALES_PER_BLOCK, Scales, VALUES};
use crate::vectors::views_aligned;

/// Elements that a thread writes: those of four bytes of codes.
const PER_THREAD: usize = 8;

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "nf4",
    text: concat!(include_str!("../quant/dynamic_map.cu"), include_str!("kernels.cu")),
    defines: &[
        ("NF4_BLOCK", BLOCK_ELEMS as u32),
        ("SCALES_PER_BLOCK", SCALES_PER_BLOCK as u32),
        ("PER_THREAD", PER_THREAD as u32),
        // The bits of the values, except for that of code 7, which is zero.
        ("VALUE_0", VALUES[0].to_bits()),
        ("VALUE_1", VALUES[1].to_bits()),
        ("VALUE_2", VALUES[2].to_bits()),
        ("VALUE_3", VALUES[3].to_bits()),
        ("VALUE_4", VALUES[4].to_bits()),
        ("VALUE_5", VALUES[5].to_bits()),
        ("VALUE_6", VALUES[6].to_bits()),
        ("VALUE_8", VALUES[8].to_bits()),
        ("VALUE_9", VALUES[9].to_bits()),
        ("VALUE_10", VALUES[10].to_bits()),
        ("VALUE_11", VALUES[11].to_bits()),
        ("VALUE_12", VALUES[12].to_bits()),
        ("VALUE_13", VALUES[13].to_bits()),
        ("VALUE_14", VALUES[14].to_bits()),
        ("VALUE_15", VALUES[15].to_bits()),
    ],
};

pub(super) fn dequantise(cuda: &CudaQueue, out: View, from: &Nf4, first: usize) {
    let (scales, scale_codes, absmax, offset) = match from.scales {
        Scales::F32(scales) => (Some(scales), None, None, 0.0),
        Scales::Double { codes, absmax, offset } => (None, Some(codes), Some(absmax), offset),
    };
    // A range starts on a multiple of 256 elements: 128 bytes of codes.
    let codes = from.codes.slice(first / 2, out.len().div_ceil(2));
    let name = if views_aligned(&[out, codes]) { "dequantise_vec" } else { "dequantise" };
    let kernel = cuda.kernel(&SOURCE, out.dtype(), name);
    let launch = Launch::each(out.len().div_ceil(PER_THREAD));
    let first_block = (first / BLOCK_ELEMS) as u64;
    let args = args![out, codes, scales, scale_codes, absmax, offset, first_block, out.len() as u64];
    // SAFETY: these are the kernel's parameters; a thread writes its own elements, and reads their codes and the scale of
    // their block, which the caller has checked to be there.
    unsafe { cuda.launch(kernel, launch, args) };
}
