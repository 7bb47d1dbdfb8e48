//! Operations on flat ranges: updates, sums, norms.

use lockstep_core::{ALIGN_ELEMS, DType};
use lockstep_device::cuda::GpuError;

use super::bench::{Bench, Operands, tolerance};
use crate::adamw::{self, Range, Rates};
use crate::reduce;

pub(super) fn run(bench: &Bench) -> Result<(), GpuError> {
    for working in [None, Some(DType::BF16), Some(DType::F16)] {
        for (len, offset) in [(0, 0), (1, 0), (1003, 0), (1003, 1), (1 << 20, 0)] {
            for verdict in [None, Some(0.0), Some(1.0)] {
                // The CPU is told before the update.
                if bench.takes(len) && (verdict.is_none() || bench.queue.cuda().is_some()) {
                    update(bench, working, [len, offset], verdict)?;
                }
            }
        }
    }
    for leaves in [0, 1, 5, 4096, 4097, 20_000] {
        if bench.takes(leaves) {
            sums(bench, leaves)?;
        }
    }
    for (sum, max_norm) in [(16.0, Some(1.0)), (16.0, None), (0.01, Some(1.0)), (f64::INFINITY, Some(1.0))] {
        judged(bench, sum, max_norm)?;
    }
    for (len, offset) in [(0, 0), (1, 0), (1003, 1), (1 << 20, 0)] {
        if bench.takes(len) {
            ranges(bench, len, offset)?;
        }
    }
    Ok(())
}

/// Three steps, with the gradients' factor in the rates or in a verdict (`Some(skip)`).
fn update(
    bench: &Bench,
    working: Option<DType>,
    [len, offset]: [usize; 2],
    verdict: Option<f64>,
) -> Result<(), GpuError> {
    let with = adamw::reference::Settings { lr: 1e-2, betas: (0.9, 0.99), eps: 1e-8, weight_decay: 0.1 };
    let copy = working.map_or("none".into(), |dtype| dtype.to_string());
    let how = match verdict {
        None => "",
        Some(0.0) => ", by verdict",
        Some(_) => ", skipped",
    };
    let name = format!("adamw{how}, working {copy}, {len} from {offset}");
    bench.case(name, working.map_or(1e-5, tolerance), |case| {
        let part = |values: Vec<f32>, dtype| case.input(&values, dtype).slice(offset, len);
        let numbers =
            |size: f32| case.normal_values(len + offset).iter().map(|x| size * x).collect::<Vec<f32>>();
        // Parameters as small as their updates, so that an error in an update cannot hide.
        let (p, zeros) = (numbers(0.02), vec![0.0; len + offset]);
        let range = Range {
            master: part(p.clone(), DType::F32),
            working: working.map(|dtype| part(p.clone(), dtype)),
            grad: part(numbers(2.0), DType::F32),
            m: part(zeros.clone(), DType::F32),
            v: part(zeros, DType::F32),
            weight_decay: with.weight_decay as f32,
        };
        let factor = 0.25f32;
        let judged = verdict.map(|skip| {
            let view = case.output(4, DType::F64);
            case.filled(view.write(&[f64::NAN, f64::NAN, f64::from(factor), skip]));
            view
        });
        let mut p = case.values(range.master);
        let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
        let grad: Vec<f64> = case.values(range.grad).iter().map(|g| g * f64::from(factor)).collect();
        for t in 1..=3 {
            let clip = if verdict.is_some() { f32::NAN } else { factor };
            let rates = Rates::at(t, with.lr, with.betas, with.eps, clip);
            adamw::update(case.queue, range, &rates, judged);
            if verdict != Some(1.0) {
                adamw::reference::update(&mut p, &mut m, &mut v, &grad, t as i32, &with);
            }
        }
        case.compare("m", len, case.values(range.m), || m);
        case.compare("v", len, case.values(range.v), || v);
        case.compare("parameters", len, case.values(range.master), || p.clone());
        if let Some(working) = range.working {
            case.compare("working copy", len, case.values(working), || p);
        }
    })
}

fn sums(bench: &Bench, leaves: usize) -> Result<(), GpuError> {
    bench.case(format!("squares, {leaves} leaves"), 1e-13, |case| {
        let x = case.normals(leaves * ALIGN_ELEMS, DType::F32);
        let (out, sum) = (case.output(leaves, DType::F64), case.output(1, DType::F64));
        reduce::square_leaves(case.queue, out, x);
        let got = case.values(out);
        let want = reduce::reference::square_sums(&case.values(x), ALIGN_ELEMS);
        case.compare("leaves", 1, got, || want.clone());
        reduce::sum_leaves(case.queue, sum, out);
        case.compare("sum", 1, case.values(sum), || vec![want.iter().sum()]);
    })
}

fn judged(bench: &Bench, sum: f64, max_norm: Option<f64>) -> Result<(), GpuError> {
    const LOSS_SCALE: f64 = 8.0;
    bench.case(format!("verdict on {sum}, clipped to {max_norm:?}"), 1e-7, |case| {
        let verdict = case.output(4, DType::F64);
        case.filled(verdict.write(&[sum * LOSS_SCALE * LOSS_SCALE]));
        reduce::judge(case.queue, verdict, max_norm, LOSS_SCALE);
        let got = case.values(verdict);
        let skip = f64::from(u8::from(!sum.is_finite()));
        case.compare("skip", 1, vec![got[3]], || vec![skip]);
        if sum.is_finite() {
            let norm = sum.sqrt();
            let clip = max_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0));
            case.compare("norm and factor", 1, got[1..3].to_vec(), || vec![norm, clip / LOSS_SCALE]);
        }
    })
}

fn ranges(bench: &Bench, len: usize, offset: usize) -> Result<(), GpuError> {
    bench.case(format!("add, copy and zero, {len} from {offset}"), 1e-7, |case| {
        let [sum, x] = [(); 2].map(|()| case.normals(len + offset, DType::F32).slice(offset, len));
        let (sums, xs) = (case.values(sum), case.values(x));
        reduce::add(case.queue, sum, x);
        case.compare("sum", len, case.values(sum), || sums.iter().zip(&xs).map(|(sum, x)| sum + x).collect());
        let copy = case.output(len + offset, DType::F32).slice(offset, len);
        reduce::copy(case.queue, copy, x);
        case.compare("copy", len, case.values(copy), || xs);
        let indices = case.indices(len, 1000);
        let (from, to) = (case.input_u32(&indices), case.output(len, DType::U32));
        reduce::copy(case.queue, to, from);
        case.compare("indices", len, case.values(to), || indices.into_iter().map(f64::from).collect());
        reduce::zero(case.queue, x);
        case.compare("zero", len, case.values(x), || vec![0.0; len]);
    })
}
