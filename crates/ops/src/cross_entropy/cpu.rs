use lockstep_device::{CpuQueue, View};

use crate::Mat;
use crate::math::{LANES, exp, fold, max};

/// Rows of a pool item: few, because rows of logits are long.
pub(super) const ROWS_PER_ITEM: usize = 4;

pub(super) fn run(
    cpu: &CpuQueue,
    logp: View,
    logits: Mat,
    targets: View,
    coefficients: Option<View>,
    inverse_temperature: f32,
) {
    cpu.pool.run(logits.rows.div_ceil(ROWS_PER_ITEM), &|item, _| {
        for row in item * ROWS_PER_ITEM..((item + 1) * ROWS_PER_ITEM).min(logits.rows) {
            // SAFETY: items write disjoint rows of the logits and elements of logp; the rest is read.
            let (row_logits, out, target) = unsafe {
                (
                    logits.view.slice(row * logits.stride, logits.cols).as_mut::<f32>(),
                    &mut logp.slice(row, 1).as_mut::<f32>()[0],
                    targets.as_slice::<u32>()[row] as usize,
                )
            };
            match coefficients {
                None => {
                    *out = cpu.isa.run(
                        #[inline(always)]
                        || log_prob(row_logits, target, inverse_temperature),
                    )
                }
                Some(c) => {
                    // SAFETY: coefficients are only read.
                    let c = unsafe { c.as_slice::<f32>()[row] };
                    *out = cpu.isa.run(
                        #[inline(always)]
                        || gradient(row_logits, target, c, inverse_temperature),
                    );
                }
            }
        }
    });
}

#[inline(always)]
fn log_prob(logits: &[f32], target: usize, inverse_temperature: f32) -> f32 {
    let largest = max(logits);
    let mut lanes = [0f32; LANES];
    let (whole, tail) = logits.as_chunks::<LANES>();
    for chunk in whole {
        for (sum, value) in lanes.iter_mut().zip(chunk) {
            *sum += exp((value - largest) * inverse_temperature);
        }
    }
    for (sum, value) in lanes.iter_mut().zip(tail) {
        *sum += exp((value - largest) * inverse_temperature);
    }
    (logits[target] - largest) * inverse_temperature - fold(lanes).ln()
}

/// The same sum in the same order, with the exponentials stored in the place of the logits.
#[inline(always)]
fn gradient(logits: &mut [f32], target: usize, c: f32, inverse_temperature: f32) -> f32 {
    let at_target = logits[target];
    let largest = max(logits);
    let mut lanes = [0f32; LANES];
    let (whole, tail) = logits.as_chunks_mut::<LANES>();
    for chunk in whole {
        for (sum, value) in lanes.iter_mut().zip(chunk) {
            *value = exp((*value - largest) * inverse_temperature);
            *sum += *value;
        }
    }
    for (sum, value) in lanes.iter_mut().zip(tail) {
        *value = exp((*value - largest) * inverse_temperature);
        *sum += *value;
    }
    let sum = fold(lanes);
    let c = c * inverse_temperature;
    let scale = -c / sum;
    for value in logits.iter_mut() {
        *value *= scale;
    }
    logits[target] += c;
    (at_target - largest) * inverse_temperature - sum.ln()
}
