//! Operations on flat ranges: sums, norms, copies.

use lockstep_core::{ALIGN_ELEMS, DType};
use lockstep_device::cuda::GpuError;

use super::harness::{Harness, Operands};
use crate::reduce;

pub(super) fn run(harness: &Harness) -> Result<(), GpuError> {
    for leaves in [0, 1, 5, 4096, 4097, 20_000] {
        if harness.includes(leaves) {
            sums(harness, leaves, DType::F32)?;
            sums(harness, leaves, DType::BF16)?;
        }
    }
    for (sum, max_norm) in [(16.0, Some(1.0)), (16.0, None), (0.01, Some(1.0)), (f64::INFINITY, Some(1.0))] {
        step_decision(harness, sum, max_norm)?;
    }
    for (len, offset) in [(0, 0), (1, 0), (1003, 1), (1 << 20, 0)] {
        if harness.includes(len) {
            ranges(harness, len, offset)?;
        }
    }
    Ok(())
}

fn sums(harness: &Harness, leaves: usize, dtype: DType) -> Result<(), GpuError> {
    harness.case(format!("squared norm, {leaves} blocks of {dtype}"), 1e-13, |case| {
        let x = case.normals(leaves * ALIGN_ELEMS, dtype);
        let (out, sum) = (case.output(leaves, DType::F64), case.output(1, DType::F64));
        reduce::squared_sum_leaves(case.queue, out, x);
        let got = case.values(out);
        let want = reduce::reference::square_sums(&case.values(x), ALIGN_ELEMS);
        case.compare("leaves", 1, got, || want.clone());
        reduce::sum_leaves(case.queue, sum, out);
        case.compare("sum", 1, case.values(sum), || vec![want.iter().sum()]);
    })
}

fn step_decision(harness: &Harness, sum: f64, max_norm: Option<f64>) -> Result<(), GpuError> {
    const LOSS_SCALE: f64 = 8.0;
    harness.case(format!("step decision, squared norm {sum}, max norm {max_norm:?}"), 1e-7, |case| {
        let decision = case.output(4, DType::F64);
        case.check_device(decision.write(&[sum * LOSS_SCALE * LOSS_SCALE]));
        reduce::decide_step(case.queue, decision, max_norm, LOSS_SCALE);
        let got = case.values(decision);
        let skip = f64::from(u8::from(!sum.is_finite()));
        case.compare("skip", 1, vec![got[3]], || vec![skip]);
        if sum.is_finite() {
            let norm = sum.sqrt();
            let clip = max_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0));
            case.compare("norm and factor", 1, got[1..3].to_vec(), || vec![norm, clip / LOSS_SCALE]);
        }
    })
}

fn ranges(harness: &Harness, len: usize, offset: usize) -> Result<(), GpuError> {
    harness.case(format!("add, copy and zero, {len} elements at offset {offset}"), 1e-7, |case| {
        let [sum, x] = [(); 2].map(|()| case.normals(len + offset, DType::F32).slice(offset, len));
        let (sums, xs) = (case.values(sum), case.values(x));
        reduce::add(case.queue, sum, x);
        case.compare("sum", len, case.values(sum), || sums.iter().zip(&xs).map(|(sum, x)| sum + x).collect());
        let copy = case.output(len + offset, DType::F32).slice(offset, len);
        reduce::copy(case.queue, copy, x);
        case.compare("copy", len, case.values(copy), || xs.clone());
        let rounded = case.output(len + offset, DType::BF16).slice(offset, len);
        reduce::copy(case.queue, rounded, x);
        let nearest = |x: &f64| f64::from(half::bf16::from_f32(*x as f32).to_f32());
        case.compare("rounded copy", len, case.values(rounded), || xs.iter().map(nearest).collect());
        let indices = case.indices(len, 1000);
        let (from, to) = (case.input_u32(&indices), case.output(len, DType::U32));
        reduce::copy(case.queue, to, from);
        case.compare("indices", len, case.values(to), || indices.into_iter().map(f64::from).collect());
        reduce::zero(case.queue, x);
        case.compare("zero", len, case.values(x), || vec![0.0; len]);
    })
}
