//! Operations on flat ranges: optimizer updates, sums, norms.

use lockstep_core::{ALIGN_ELEMS, DType};
use lockstep_device::cuda::GpuError;
use lockstep_device::{Queue, View};

use super::harness::{Harness, Operands, tolerance};
use crate::optimizer::FlatRange;
use crate::{adamw, lion, reduce, sgd};

pub(super) fn run(harness: &Harness) -> Result<(), GpuError> {
    optimizers(|optimizer| {
        for working in [None, Some(DType::BF16), Some(DType::F16)] {
            for (len, offset) in [(0, 0), (1, 0), (1003, 0), (1003, 1), (1 << 20, 0)] {
                for decision in [None, Some(0.0), Some(1.0)] {
                    // On the CPU the clip factor is known before the update.
                    if harness.includes(len) && (decision.is_none() || harness.queue.cuda().is_some()) {
                        update(harness, optimizer, working, [len, offset], decision)?;
                    }
                }
            }
        }
        Ok(())
    })?;
    for leaves in [0, 1, 5, 4096, 4097, 20_000] {
        if harness.includes(leaves) {
            sums(harness, leaves)?;
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

/// The clip factor in every check of an optimizer.
const FACTOR: f32 = 0.25;

/// An optimizer under test. States are those of [`FlatRange`]; an optimizer may ignore some of them.
struct Optimizer<'a> {
    name: &'a str,
    /// A state before the first step, from the element's gradient and a random normal.
    start: fn(f32, f32) -> f32,
    /// Step `t` of the operation, with the clip factor in the hyperparameters or in a step decision.
    update: Update<'a>,
    /// The same by the reference: parameters, states, gradients, step.
    reference: Reference<'a>,
}

type Update<'a> = &'a dyn Fn(&Queue, &FlatRange<2>, u64, f32, Option<View>);
type Reference<'a> = &'a dyn Fn(&mut [f64], &mut [Vec<f64>; 2], &[f64], u64);

fn optimizers(run: impl Fn(&Optimizer) -> Result<(), GpuError>) -> Result<(), GpuError> {
    let with = adamw::reference::Settings { lr: 1e-2, betas: (0.9, 0.99), eps: 1e-8, weight_decay: 0.1 };
    run(&Optimizer {
        name: "adamw",
        start: |_, _| 0.0,
        update: &|queue, flat, t, clip, decision| {
            let FlatRange { master, working, grad, states: [m, v] } = *flat;
            let range =
                adamw::ParamRange { master, working, grad, m, v, weight_decay: with.weight_decay as f32 };
            let rates = adamw::Hyperparams::at(t, with.lr, with.betas, with.eps, clip);
            adamw::update(queue, range, &rates, decision);
        },
        reference: &|p, [m, v], g, t| adamw::reference::update(p, m, v, g, t as i32, &with),
    })?;
    for (name, momentum, nesterov) in
        [("sgd", 0.0, false), ("sgd with momentum", 0.9, false), ("sgd with Nesterov momentum", 0.9, true)]
    {
        let with = sgd::reference::Settings { lr: 1e-2, momentum, nesterov, weight_decay: 0.1 };
        run(&Optimizer {
            name,
            start: |_, x| x,
            update: &|queue, flat, _, clip, decision| {
                let FlatRange { master, working, grad, states: [buffer, _] } = *flat;
                let momentum = (with.momentum != 0.0).then_some(buffer);
                let range = sgd::ParamRange {
                    master,
                    working,
                    grad,
                    momentum,
                    weight_decay: with.weight_decay as f32,
                };
                let (lr, momentum) = (with.lr as f32, with.momentum as f32);
                sgd::update(queue, range, &sgd::Hyperparams { lr, momentum, nesterov, clip }, decision);
            },
            reference: &|p, [buffer, _], g, _| sgd::reference::update(p, buffer, g, &with),
        })?;
    }
    let with = lion::reference::Settings { lr: 1e-2, betas: (0.92, 0.99), weight_decay: 0.1 };
    run(&Optimizer {
        name: "lion",
        // Rounding decides the sign of a value near zero. With these betas the sign changes where gradients are -11.5,
        // -10.2 and -9.2 times the average in the three steps; here they are whole multiples of it.
        start: |g, x| if x.abs() < 0.1 { 0.0 } else { FACTOR * g / (10.0 * x).round() },
        update: &|queue, flat, _, clip, decision| {
            let FlatRange { master, working, grad, states: [m, _] } = *flat;
            let range = lion::ParamRange { master, working, grad, m, weight_decay: with.weight_decay as f32 };
            lion::update(queue, range, &lion::Hyperparams::new(with.lr, with.betas, clip), decision);
        },
        reference: &|p, [m, _], g, _| lion::reference::update(p, m, g, &with),
    })
}

/// Three steps, with the clip factor in the hyperparameters or in a step decision (`Some(skip)`).
fn update(
    harness: &Harness,
    optimizer: &Optimizer,
    working: Option<DType>,
    [len, offset]: [usize; 2],
    decision: Option<f64>,
) -> Result<(), GpuError> {
    let copy = working.map_or("none".into(), |dtype| dtype.to_string());
    let how = match decision {
        None => "",
        Some(0.0) => ", clip from the step decision",
        Some(_) => ", skipped",
    };
    let name = format!("{}{how}, working copy {copy}, {len} elements at offset {offset}", optimizer.name);
    harness.case(name, working.map_or(1e-5, tolerance), |case| {
        let part = |values: &[f32], dtype| case.input(values, dtype).slice(offset, len);
        let numbers =
            |size: f32| case.normal_values(len + offset).iter().map(|x| size * x).collect::<Vec<f32>>();
        // Parameters are as small as their updates, so that they cannot hide an error in an update.
        let (p, g) = (numbers(0.02), numbers(2.0));
        let states = [(); 2].map(|()| {
            let start: Vec<f32> = g.iter().zip(numbers(1.0)).map(|(g, x)| (optimizer.start)(*g, x)).collect();
            part(&start, DType::F32)
        });
        let range = FlatRange {
            master: part(&p, DType::F32),
            working: working.map(|dtype| part(&p, dtype)),
            grad: part(&g, DType::F32),
            states,
        };
        let decision_view = decision.map(|skip| {
            let view = case.output(4, DType::F64);
            case.check_device(view.write(&[f64::NAN, f64::NAN, f64::from(FACTOR), skip]));
            view
        });
        let (mut p, mut states) = (case.values(range.master), range.states.map(|state| case.values(state)));
        let grad: Vec<f64> = case.values(range.grad).iter().map(|g| g * f64::from(FACTOR)).collect();
        for t in 1..=3 {
            let clip = if decision.is_some() { f32::NAN } else { FACTOR };
            (optimizer.update)(case.queue, &range, t, clip, decision_view);
            if decision != Some(1.0) {
                (optimizer.reference)(&mut p, &mut states, &grad, t);
            }
        }
        let [first, second] = states;
        case.compare("first state", len, case.values(range.states[0]), || first);
        case.compare("second state", len, case.values(range.states[1]), || second);
        case.compare("parameters", len, case.values(range.master), || p.clone());
        if let Some(working) = range.working {
            case.compare("working copy", len, case.values(working), || p);
        }
    })
}

fn sums(harness: &Harness, leaves: usize) -> Result<(), GpuError> {
    harness.case(format!("squared norm, {leaves} blocks"), 1e-13, |case| {
        let x = case.normals(leaves * ALIGN_ELEMS, DType::F32);
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
        case.compare("copy", len, case.values(copy), || xs);
        let indices = case.indices(len, 1000);
        let (from, to) = (case.input_u32(&indices), case.output(len, DType::U32));
        reduce::copy(case.queue, to, from);
        case.compare("indices", len, case.values(to), || indices.into_iter().map(f64::from).collect());
        reduce::zero(case.queue, x);
        case.compare("zero", len, case.values(x), || vec![0.0; len]);
    })
}
