//! The CPU version for channels besides the log-probability. One pass over a row computes the sums that all channels
//! need; another writes the gradient.
//!
//! With d = (logit − largest) / temperature, S = Σ eᵈ and W = Σ d·eᵈ: log p = d − ln S, H = ln S − W/S, and log p + H = d − W/S.

use lockstep_device::{CpuQueue, View};

use super::Channels;
use super::cpu::ROWS_PER_ITEM;
use crate::Mat;
use crate::math::{LANES, exp, fold, max};

pub(super) fn run(
    cpu: &CpuQueue,
    out: Channels,
    logits: Mat,
    targets: View,
    c: Option<Channels>,
    inverse_temperature: f32,
) {
    cpu.pool.run(logits.rows.div_ceil(ROWS_PER_ITEM), &|item, _| {
        for row in item * ROWS_PER_ITEM..((item + 1) * ROWS_PER_ITEM).min(logits.rows) {
            let read = |view: Option<View>| match view {
                // SAFETY: coefficients are only read.
                Some(view) => unsafe { view.as_slice::<f32>()[row] },
                None => 0.0,
            };
            let c = c.map(|c| [read(Some(c.log_prob)), read(c.entropy), read(c.mean_log_prob)]);
            // SAFETY: items write disjoint rows of the logits; targets are read.
            let (row_logits, target) = unsafe {
                (
                    logits.view.slice(row * logits.stride, logits.cols).as_mut::<f32>(),
                    targets.as_slice::<u32>()[row] as usize,
                )
            };
            let results = cpu.isa.run(
                #[inline(always)]
                || run_row(row_logits, target, c, inverse_temperature),
            );
            for (view, value) in out.views().into_iter().zip(results).filter(|(view, _)| !view.is_empty()) {
                // SAFETY: items write disjoint elements of the outputs.
                unsafe { view.slice(row, 1).as_mut::<f32>()[0] = value };
            }
        }
    });
}

/// The channels of a row. With coefficients, its logits are replaced by their gradient.
#[inline(always)]
fn run_row(logits: &mut [f32], target: usize, c: Option<[f32; 3]>, inverse_temperature: f32) -> [f32; 3] {
    let vocab = logits.len() as f32;
    let sums = Sums::of(logits, inverse_temperature);
    let (log_sum, mean) = (sums.exps.ln(), sums.weighted / sums.exps);
    let log_prob = (logits[target] - sums.largest) * inverse_temperature - log_sum;
    if let Some(c) = c {
        let [c, c_entropy, c_mean] = c.map(|c| c * inverse_temperature);
        let (scale, even, pull) = (1.0 / sums.exps, c_mean / vocab, c + c_mean);
        for z in logits.iter_mut() {
            let d = (*z - sums.largest) * inverse_temperature;
            let e = exp(d);
            let slope = (-(e * scale)).mul_add(c_entropy.mul_add(d - mean, pull), even);
            // A masked token has probability zero, so its gradient is zero even if d is infinite.
            *z = if e == 0.0 { even } else { slope };
        }
        logits[target] += c;
    }
    [log_prob, log_sum - mean, sums.distances / vocab - log_sum]
}

/// Sums over a row, of the distances d of its logits from the largest, divided by the temperature.
struct Sums {
    largest: f32,
    /// Σ eᵈ, in the same order as without channels.
    exps: f32,
    /// Σ d·eᵈ.
    weighted: f32,
    /// Σ d.
    distances: f32,
}

impl Sums {
    #[inline(always)]
    fn of(logits: &[f32], inverse_temperature: f32) -> Sums {
        let largest = max(logits);
        let mut lanes = [[0f32; LANES]; 3];
        let (whole, tail) = logits.as_chunks::<LANES>();
        for chunk in whole {
            add(&mut lanes, chunk, largest, inverse_temperature);
        }
        add(&mut lanes, tail, largest, inverse_temperature);
        let [exps, weighted, distances] = lanes.map(fold);
        Sums { largest, exps, weighted, distances }
    }
}

/// Adds up to one vector of logits to the lanes of the three sums.
#[inline(always)]
fn add(
    [exps, weighted, distances]: &mut [[f32; LANES]; 3],
    chunk: &[f32],
    largest: f32,
    inverse_temperature: f32,
) {
    for (((exps, weighted), distances), z) in exps.iter_mut().zip(weighted).zip(distances).zip(chunk) {
        let d = (z - largest) * inverse_temperature;
        let e = exp(d);
        *exps += e;
        *weighted = e.mul_add(if e == 0.0 { 0.0 } else { d }, *weighted);
        *distances += d;
    }
}
