//! Sampling from a categorical distribution on the host.

use lockstep_device::Isa;

use crate::math::{LANES, exp, map_lanes, max};

/// Weights whose sum is computed together.
const BLOCK: usize = 256;

/// The index at the point `at`, in [0, 1), of the cumulative distribution of softmax(logits · `inverse_temperature`).
/// `weights` is reused between calls. The result is the same on every instruction set.
pub fn pick(isa: Isa, logits: &[f32], inverse_temperature: f32, at: f64, weights: &mut Vec<f32>) -> usize {
    weights.resize(logits.len(), 0.0);
    isa.run(
        #[inline(always)]
        || {
            let largest = max(logits);
            map_lanes(weights, logits, |logit| exp((logit - largest) * inverse_temperature));
        },
    );
    let block_sum = |block: &[f32]| {
        isa.run(
            #[inline(always)]
            || sum(block),
        )
    };
    let total: f64 = weights.chunks(BLOCK).map(block_sum).sum();
    let mut left = at * total;
    for (i, block) in weights.chunks(BLOCK).enumerate() {
        let sum = block_sum(block);
        if left >= sum {
            left -= sum;
            continue;
        }
        for (j, weight) in block.iter().enumerate() {
            left -= f64::from(*weight);
            if left < 0.0 {
                return i * BLOCK + j;
            }
        }
        // The block's sum is rounded: go on with what is left of the next one.
        left = 0.0;
    }
    // Rounding can leave a small remainder: return the last index with a nonzero weight.
    weights.iter().rposition(|weight| *weight > 0.0).unwrap_or(0)
}

/// The sum in f64: lane i % 16 sums its elements in order, then the lanes are added in order.
#[inline(always)]
fn sum(block: &[f32]) -> f64 {
    let mut lanes = [0f64; LANES];
    let (whole, tail) = block.as_chunks::<LANES>();
    for weights in whole {
        lanes.iter_mut().zip(weights).for_each(|(lane, weight)| *lane += f64::from(*weight));
    }
    lanes.iter_mut().zip(tail).for_each(|(lane, weight)| *lane += f64::from(*weight));
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Operands, TestArena};

    /// The same with plain sums in f64.
    fn reference(logits: &[f32], inverse_temperature: f32, at: f64) -> (usize, f64) {
        let largest = logits.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
        let weight = |x: &f32| (f64::from(x - largest) * f64::from(inverse_temperature)).exp();
        let total: f64 = logits.iter().map(weight).sum();
        let mut sum = 0.0;
        for (i, logit) in logits.iter().enumerate() {
            sum += weight(logit) / total;
            if sum > at {
                return (i, (sum - at).min(at - (sum - weight(logit) / total)));
            }
        }
        (logits.len() - 1, 0.0)
    }

    proptest! {
        #[test]
        fn picks_match_the_reference(
            len in 1usize..3000, spread in 0.01f32..20.0, inverse in 0.3f32..2.0, at in 0.0f64..1.0, seed in any::<u64>(),
        ) {
            let arena = TestArena::new(seed);
            let logits: Vec<f32> = arena.normal_values(len).iter().map(|x| x * spread).collect();
            let (want, distance) = reference(&logits, inverse, at);
            let mut weights = Vec::new();
            for isa in Isa::all() {
                let found = pick(isa, &logits, inverse, at, &mut weights);
                // Within rounding of a bound, either side is right.
                prop_assert!(found == want || distance < 1e-5, "{found} for {want}, {distance:e} from the bound");
            }
        }
    }

    #[test]
    fn an_index_without_probability_is_never_picked() {
        let logits = [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY];
        for at in [0.0, 0.5, 1.0 - f64::EPSILON] {
            assert_eq!(pick(Isa::detect(), &logits, 1.0, at, &mut Vec::new()), 1);
        }
    }
}
