//! Quantised weights: every weight must have the bits of the reference.

use lockstep_core::DType;
use lockstep_device::Pool;
use lockstep_device::cuda::GpuError;

use super::harness::{Harness, Operands};
use crate::nf4::{self, Nf4, RANGE_ELEMS, Scales};

pub(super) fn run(harness: &Harness) -> Result<(), GpuError> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for elems in [1, 1003, 65_536 + 7, 1 << 20] {
            if harness.includes(elems) {
                for is_double in [false, true] {
                    for (first, offset) in [(0, 0), (0, 1), (RANGE_ELEMS, 0)] {
                        if first < elems {
                            dequantise(harness, dtype, elems, is_double, [first, offset])?;
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// Elements from `first` to the end, written to memory that starts `offset` elements after an aligned address.
fn dequantise(
    harness: &Harness,
    dtype: DType,
    elems: usize,
    is_double: bool,
    [first, offset]: [usize; 2],
) -> Result<(), GpuError> {
    let scales = if is_double { "8-bit" } else { "f32" };
    let name = format!("nf4 to {dtype}, {scales} scales, {elems} elements from {first} at offset {offset}");
    harness.case(name, 0.0, |case| {
        let quantised = nf4::quantise(&Pool::new(1), &case.normal_values(elems));
        let outer = quantised.quantise_scales();
        let (scales, values) = if is_double {
            let scale = |block| nf4::reference::scale(&outer.codes, &outer.absmax, outer.offset, block);
            let codes = case.input_raw(&outer.codes, DType::U8);
            let absmax = case.input(&outer.absmax, DType::F32);
            let values: Vec<f32> = (0..quantised.scales.len()).map(scale).collect();
            (Scales::Double { codes, absmax, offset: outer.offset }, values)
        } else {
            (Scales::F32(case.input(&quantised.scales, DType::F32)), quantised.scales.clone())
        };
        let codes = case.input_raw(&quantised.codes, DType::U8);
        let len = elems - first;
        let out = case.output(len + offset, dtype).slice(offset, len);
        nf4::dequantise(case.queue, out, &Nf4 { elems, codes, scales }, first);
        let got = case.values(out);
        // Rounded to the storage type on the host.
        let want = case.input(&nf4::reference::dequantise(&quantised.codes, &values, elems)[first..], dtype);
        case.compare("weights", len, got, || case.values(want));
    })
}
