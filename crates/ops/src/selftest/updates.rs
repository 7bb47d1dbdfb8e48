//! Updates of all optimizers, in all formats of parameters, states and gradients.

use lockstep_core::DType;
use lockstep_core::rounding::{bf16_stochastic, split};
use lockstep_device::cuda::GpuError;
use lockstep_device::{Queue, View};

use super::harness::{Case, Harness, Operands, tolerance};
use crate::optimizer::operands::{param_values, params, raw, rounding, state, state_values};
use crate::optimizer::{FlatRange, ParamFormat, Params, State, StateFormat, UpdateFormat};
use crate::quant::dynamic_map::{BLOCK_ELEMS, SIGNED, UNSIGNED};
use crate::{adamw, lion, sgd};

pub(super) fn run(harness: &Harness) -> Result<(), GpuError> {
    const SIZES: [[usize; 2]; 5] = [[0, 0], [1, 0], [1003, 0], [1003, 1], [1 << 20, 0]];
    optimizers(|optimizer| {
        for working in [DType::F32, DType::BF16, DType::F16] {
            let format = UpdateFormat { params: ParamFormat::Master { working }, ..F32 };
            for size in SIZES {
                for decision in [None, Some(0.0), Some(1.0)] {
                    // On the CPU the clip factor is known before the update.
                    if harness.includes(size[0]) && (decision.is_none() || harness.queue.cuda().is_some()) {
                        update(harness, optimizer, format, size, decision)?;
                    }
                }
            }
        }
        for format in narrow_formats() {
            for size in SIZES {
                if harness.includes(size[0]) {
                    // Rounding decides the sign of Lion's update near zero, which many codes would reach.
                    if optimizer.name != "lion" || format.states != StateFormat::Blockwise {
                        update(harness, optimizer, format, size, None)?;
                    }
                    stored_bits(harness, optimizer, format, size)?;
                }
            }
        }
        Ok(())
    })
}

const F32: UpdateFormat = UpdateFormat {
    params: ParamFormat::Master { working: DType::F32 },
    states: StateFormat::F32,
    grads: DType::F32,
};

fn narrow_formats() -> [UpdateFormat; 7] {
    use ParamFormat::{Master, Split, Stochastic};
    use StateFormat::{Bf16, Blockwise, F32};
    [
        (Split, F32, DType::F32),
        (Split, F32, DType::BF16),
        (Split, Bf16, DType::F32),
        (Stochastic, Bf16, DType::BF16),
        (Split, Blockwise, DType::F32),
        (Stochastic, Blockwise, DType::BF16),
        (Master { working: DType::BF16 }, Blockwise, DType::F32),
    ]
    .map(|(params, states, grads)| UpdateFormat { params, states, grads })
}

/// As the names of checks have it.
fn name_of(format: UpdateFormat) -> String {
    let params = match format.params {
        ParamFormat::Master { working: DType::F32 } => "working copy none".to_string(),
        ParamFormat::Master { working } => format!("working copy {working}"),
        ParamFormat::Split => "weight and remainder".to_string(),
        ParamFormat::Stochastic => "stochastic weight".to_string(),
    };
    let states = match format.states {
        StateFormat::F32 => "",
        StateFormat::Bf16 => ", states bf16",
        StateFormat::Blockwise => ", states 8-bit",
    };
    let grads = if format.grads == DType::BF16 { ", gradients bf16" } else { "" };
    format!("{params}{states}{grads}")
}

/// The clip factor in every check of an optimizer.
const FACTOR: f32 = 0.25;

/// An optimizer under test. States are those of [`FlatRange`]; an optimizer may ignore some of them.
struct Optimizer<'a> {
    name: &'a str,
    /// The states that it has.
    num_states: usize,
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
        num_states: 2,
        start: |_, _| 0.0,
        update: &|queue, flat, t, clip, decision| {
            let FlatRange { params, grad, states: [m, v], rounding, .. } = *flat;
            let weight_decay = with.weight_decay as f32;
            let range = adamw::ParamRange { params, grad, m, v, rounding, weight_decay };
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
            num_states: usize::from(momentum != 0.0),
            start: |_, x| x,
            update: &|queue, flat, _, clip, decision| {
                let FlatRange { params, grad, states: [buffer, _], rounding, .. } = *flat;
                let momentum = (with.momentum != 0.0).then_some(buffer);
                let weight_decay = with.weight_decay as f32;
                let range = sgd::ParamRange { params, grad, momentum, rounding, weight_decay };
                let (lr, momentum) = (with.lr as f32, with.momentum as f32);
                sgd::update(queue, range, &sgd::Hyperparams { lr, momentum, nesterov, clip }, decision);
            },
            reference: &|p, [buffer, _], g, _| sgd::reference::update(p, buffer, g, &with),
        })?;
    }
    let with = lion::reference::Settings { lr: 1e-2, betas: (0.92, 0.99), weight_decay: 0.1 };
    run(&Optimizer {
        name: "lion",
        num_states: 1,
        // Rounding decides the sign of a value near zero. With these betas the sign changes where gradients are -11.5,
        // -10.2 and -9.2 times the average in the three steps; here they are whole multiples of it.
        start: |g, x| if x.abs() < 0.1 { 0.0 } else { FACTOR * g / (10.0 * x).round() },
        update: &|queue, flat, _, clip, decision| {
            let FlatRange { params, grad, states: [m, _], rounding, .. } = *flat;
            let weight_decay = with.weight_decay as f32;
            let range = lion::ParamRange { params, grad, m, rounding, weight_decay };
            lion::update(queue, range, &lion::Hyperparams::new(with.lr, with.betas, clip), decision);
        },
        reference: &|p, [m, _], g, _| lion::reference::update(p, m, g, &with),
    })
}

/// The index in its tensor of a range's first element.
const FIRST_ELEM: usize = 12_345;

/// Random parameters, gradients and states. Parameters are as small as their updates, so that they cannot hide an error
/// in an update.
fn operands<'c>(
    case: &'c Case,
    optimizer: &Optimizer,
    format: UpdateFormat,
    [len, offset]: [usize; 2],
) -> FlatRange<'c, 2> {
    let numbers = |size: f32| case.normal_values(len).iter().map(|x| size * x).collect::<Vec<f32>>();
    let (p, g) = (numbers(0.02), numbers(2.0));
    let maps = [&SIGNED, &UNSIGNED];
    let states = maps.map(|map| {
        let start: Vec<f32> = g.iter().zip(numbers(1.0)).map(|(g, x)| (optimizer.start)(*g, x)).collect();
        state(case, &start, format.states, map, offset)
    });
    let all: Vec<f32> = vec![0.0; offset].into_iter().chain(g).collect();
    FlatRange {
        params: params(case, &p, format.params, offset),
        grad: case.input(&all, format.grads).slice(offset, len),
        states,
        maps,
        rounding: None,
    }
}

/// Parameters and states as they are stored.
fn stored(case: &Case, range: &FlatRange<2>) -> (Vec<f64>, [Vec<f64>; 2]) {
    case.check_device(case.queue.synchronize());
    let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
    let [first, second] = [0, 1].map(|s| wide(state_values(case, range.states[s], range.maps[s])));
    (wide(param_values(case, range.params)), [first, second])
}

/// Three steps, with the clip factor in the hyperparameters or in a step decision (`Some(skip)`). Each is compared with a
/// step of the reference from what was stored before.
fn update(
    harness: &Harness,
    optimizer: &Optimizer,
    format: UpdateFormat,
    size: [usize; 2],
    decision: Option<f64>,
) -> Result<(), GpuError> {
    let how = match decision {
        None => "",
        Some(0.0) => ", clip from the step decision",
        Some(_) => ", skipped",
    };
    let ([len, offset], formats) = (size, name_of(format));
    let name = format!("{}{how}, {formats}, {len} elements at offset {offset}", optimizer.name);
    // The coarsest of the roundings.
    let allowed = match format {
        // A code is off by up to 3.5 % of its value, or a part of the block's largest value.
        UpdateFormat { states: StateFormat::Blockwise, .. } => 0.04,
        UpdateFormat { states: StateFormat::Bf16, .. } => tolerance(DType::BF16),
        UpdateFormat { params: ParamFormat::Stochastic, .. } => tolerance(DType::BF16),
        UpdateFormat { params: ParamFormat::Master { working }, .. } => tolerance(working),
        UpdateFormat { params: ParamFormat::Split, .. } => tolerance(DType::F32),
    };
    harness.case(name, allowed, |case| {
        let mut range = operands(case, optimizer, format, size);
        let decision_view = decision.map(|skip| {
            let view = case.output(4, DType::F64);
            case.check_device(view.write(&[f64::NAN, f64::NAN, f64::from(FACTOR), skip]));
            view
        });
        let grad: Vec<f64> = case.values(range.grad).iter().map(|g| g * f64::from(FACTOR)).collect();
        for t in 1..=3 {
            let (mut p, mut states) = stored(case, &range);
            let clip = if decision.is_some() { f32::NAN } else { FACTOR };
            range.rounding = rounding(t, FIRST_ELEM);
            (optimizer.update)(case.queue, &range, t, clip, decision_view);
            if decision != Some(1.0) {
                (optimizer.reference)(&mut p, &mut states, &grad, t);
            }
            let (got, [got_first, got_second]) = stored(case, &range);
            let [first, second] = states;
            case.compare("first state", len, got_first, || first);
            case.compare("second state", len, got_second, || second);
            case.compare("parameters", len, got, || p.clone());
            if let Params::Master { working: Some(working), .. } = range.params {
                case.compare("working copy", len, case.values(working), || p);
            }
        }
    })
}

/// One step: what is stored has the bits of the f32 path's results, rounded on the host.
fn stored_bits(
    harness: &Harness,
    optimizer: &Optimizer,
    format: UpdateFormat,
    size: [usize; 2],
) -> Result<(), GpuError> {
    let ([len, offset], formats) = (size, name_of(format));
    let name = format!("{}, {formats}, bits of {len} elements at offset {offset}", optimizer.name);
    harness.case(name, 0.0, |case| {
        let mut range = operands(case, optimizer, format, size);
        let grad = case.values(range.grad).into_iter().map(|g| g as f32).collect::<Vec<f32>>();
        let (p, states) = stored(case, &range);
        let narrow = |values: Vec<f64>| values.into_iter().map(|x| x as f32).collect::<Vec<f32>>();
        let mut exact = FlatRange {
            params: params(case, &narrow(p), F32.params, 0),
            grad: case.input(&grad, DType::F32),
            states: states.map(|values| state(case, &narrow(values), StateFormat::F32, &SIGNED, 0)),
            ..range
        };
        (range.rounding, exact.rounding) = (rounding(2, FIRST_ELEM), rounding(2, FIRST_ELEM));
        for range in [&range, &exact] {
            (optimizer.update)(case.queue, range, 2, FACTOR, None);
        }
        let (p, states) = stored(case, &exact);
        compare_params(case, range.params, narrow(p));
        for (s, values) in states.into_iter().enumerate().take(optimizer.num_states) {
            compare_state(case, &range, s, narrow(values));
        }
    })
}

fn numbers<T: Copy + Default>(case: &Case, view: View) -> Vec<f64>
where
    f64: From<T>,
{
    raw::<T>(case, view).into_iter().map(f64::from).collect()
}

fn compare_params(case: &Case, params: Params, want: Vec<f32>) {
    let len = want.len();
    match params {
        Params::Master { master, working } => {
            case.compare("parameters", len, case.values(master), || {
                want.iter().copied().map(f64::from).collect()
            });
            if let Some(working) = working {
                let weights = || want.iter().map(|p| f64::from(split(*p).0)).collect();
                case.compare("working copy", len, numbers::<u16>(case, working), weights);
            }
        }
        Params::Split { weight, remainder } => {
            let weights = || want.iter().map(|p| f64::from(split(*p).0)).collect();
            case.compare("weights", len, numbers::<u16>(case, weight), weights);
            let remainders = || want.iter().map(|p| f64::from(split(*p).1)).collect();
            case.compare("remainders", len, numbers::<i16>(case, remainder), remainders);
        }
        Params::Stochastic { weight } => {
            case.compare("weights", len, numbers::<u16>(case, weight), || stochastic(&want, 0));
        }
    }
}

/// bf16 values as their bits.
fn stochastic(values: &[f32], slot: usize) -> Vec<f64> {
    let key = rounding(2, FIRST_ELEM).expect("there is always one").bits.key(slot);
    let round = |(i, x): (usize, &f32)| f64::from(bf16_stochastic(*x, key.bits((FIRST_ELEM + i) as u32)));
    values.iter().enumerate().map(round).collect()
}

fn compare_state(case: &Case, range: &FlatRange<2>, s: usize, want: Vec<f32>) {
    let len = want.len();
    match range.states[s] {
        State::Float(view) if view.dtype() == DType::BF16 => {
            case.compare("bf16 state", len, numbers::<u16>(case, view), || stochastic(&want, s + 1));
        }
        State::Float(view) => {
            case.compare("state", len, case.values(view), || want.into_iter().map(f64::from).collect());
        }
        State::Blockwise { codes, absmax } => {
            let mut want_codes = vec![0; len];
            let blocks = want.chunks(BLOCK_ELEMS).zip(want_codes.chunks_mut(BLOCK_ELEMS));
            let scales: Vec<f64> =
                blocks.map(|(values, codes)| f64::from(range.maps[s].encode(values, codes))).collect();
            case.compare("scales", 1, case.values(absmax), || scales);
            let wide = || want_codes.into_iter().map(f64::from).collect();
            case.compare("codes", len, numbers::<u8>(case, codes), wide);
        }
    }
}
