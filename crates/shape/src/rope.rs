//! Rotary embedding: the angle by which each pair of a head is rotated at a position.
//!
//! transformers computes frequencies in f32, partly from Python's f64 numbers. This code does the same steps in the same
//! types, so that angles agree at long positions. Frequencies that depend on the length of the sequence (`dynamic`,
//! `longrope`) are not supported: a document's result would depend on the other documents in its pack.

/// The base, and how frequencies are scaled for contexts longer than the original one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// How frequencies are scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// All frequencies are divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Low frequencies are divided by `factor`, high ones are unchanged, those between are interpolated.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_positions: usize,
    },
    Yarn(Yarn),
}

/// Frequencies with fewer than `beta_slow` rotations within the original context are divided by `factor`, those with more
/// than `beta_fast` rotations are unchanged, and those between are interpolated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    pub original_max_positions: usize,
    pub beta_fast: f64,
    pub beta_slow: f64,
    /// Whether the ends of the interpolated range are rounded to whole pairs.
    pub truncate: bool,
    /// Multiplies cosines and sines. If `None`, it is computed from the factor and `mscale`.
    pub attention_factor: Option<f64>,
    /// `mscale` and `mscale_all_dim`.
    pub mscale: Option<(f64, f64)>,
}

impl Rope {
    pub const fn plain(theta: f64) -> Rope {
        Rope { theta, scaling: RopeScaling::None }
    }

    /// The inverse frequencies, one per pair of a head.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f64> {
        let power = |pair: usize| (self.theta as f32).powf((2 * pair) as f32 / head_dim as f32);
        let ramp = match self.scaling {
            RopeScaling::Yarn(yarn) => yarn.ramp(self.theta, head_dim),
            _ => (0.0, 0.0),
        };
        let frequency = |pair: usize| match self.scaling {
            RopeScaling::None => 1.0 / power(pair),
            RopeScaling::Linear { factor } => 1.0 / power(pair) / factor as f32,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                let original = original_max_positions as f64;
                llama3(1.0 / power(pair), factor, low_freq_factor, high_freq_factor, original)
            }
            RopeScaling::Yarn(yarn) => yarn.frequency(pair, power(pair), ramp),
        };
        (0..head_dim / 2).map(|pair| f64::from(frequency(pair))).collect()
    }

    /// The factor of cosines and sines.
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn(yarn) => yarn.attention_factor(),
            _ => 1.0,
        }
    }
}

/// Scales one frequency by its wavelength: short ones are unchanged, long ones divided by `factor`, those between
/// interpolated.
fn llama3(frequency: f32, factor: f64, low: f64, high: f64, original: f64) -> f32 {
    let wavelength = std::f64::consts::TAU as f32 / frequency;
    let (longest, shortest) = ((original / low) as f32, (original / high) as f32);
    if wavelength > longest {
        return frequency / factor as f32;
    }
    if wavelength < shortest {
        return frequency;
    }
    let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
    (1.0 - smooth) * frequency / factor as f32 + smooth * frequency
}

impl Yarn {
    fn attention_factor(&self) -> f64 {
        let scale = |m: f64| if self.factor <= 1.0 { 1.0 } else { 0.1 * m * self.factor.ln() + 1.0 };
        match (self.attention_factor, self.mscale) {
            (Some(given), _) => given,
            (None, Some((numerator, denominator))) => scale(numerator) / scale(denominator),
            (None, None) => scale(1.0),
        }
    }

    fn frequency(&self, pair: usize, power: f32, (low, high): (f64, f64)) -> f32 {
        let stretched = 1.0 / (self.factor as f32 * power);
        let ramp = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let saved = 1.0 - ramp;
        stretched * (1.0 - saved) + 1.0 / power * saved
    }

    /// The first and last pair of the interpolated range.
    fn ramp(&self, theta: f64, head_dim: usize) -> (f64, f64) {
        let dim = head_dim as f64;
        // The pair with this many rotations within the original context.
        let pair = |rotations: f64| {
            let ratio = self.original_max_positions as f64 / (rotations * std::f64::consts::TAU);
            dim * ratio.ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        // An empty range would divide by zero.
        if low == high { (low, high + 0.001) } else { (low, high) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of transformers 5.22 for heads of 16 and theta 10000: frequencies of each kind, and the factor of
    /// cosines and sines.
    #[test]
    fn frequencies_match_transformers() {
        for (scaling, want, factor) in expected() {
            let rope = Rope { theta: 10_000.0, scaling };
            assert_eq!(rope.attention_factor() as f32, factor as f32, "{scaling:?}");
            for (got, want) in rope.inverse_frequencies(16).into_iter().zip(want) {
                let error = (got / want - 1.0).abs();
                assert!(error < 2e-7, "{scaling:?}: {got:e} not {want:e}");
            }
        }
    }

    const YARN: Yarn = Yarn {
        factor: 4.0,
        original_max_positions: 512,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor: None,
        mscale: None,
    };

    #[rustfmt::skip]
    fn expected() -> Vec<(RopeScaling, [f64; 8], f64)> {
        vec![
            (
                RopeScaling::None,
                [1.000000000e+00, 3.162277639e-01, 1.000000015e-01, 3.162277862e-02, 9.999999776e-03, 3.162277862e-03, 1.000000047e-03, 3.162277862e-04],
                1.0,
            ),
            (
                RopeScaling::Linear { factor: 3.0 },
                [3.333333433e-01, 1.054092571e-01, 3.333333507e-02, 1.054092590e-02, 3.333333181e-03, 1.054092660e-03, 3.333333589e-04, 1.054092645e-04],
                1.0,
            ),
            (
                RopeScaling::Llama3 {
                    factor: 8.0,
                    low_freq_factor: 1.0,
                    high_freq_factor: 4.0,
                    original_max_positions: 512,
                },
                [1.000000000e+00, 3.162277639e-01, 1.000000015e-01, 1.849667728e-02, 1.249999972e-03, 3.952847328e-04, 1.250000059e-04, 3.952847328e-05],
                1.0,
            ),
            (
                RopeScaling::Yarn(YARN),
                [1.000000000e+00, 2.569350600e-01, 6.250000000e-02, 1.383496542e-02, 2.499999944e-03, 7.905694656e-04, 2.500000119e-04, 7.905694656e-05],
                1.13862943649292,
            ),
            (
                RopeScaling::Yarn(Yarn { truncate: false, beta_fast: 16.0, beta_slow: 2.0, mscale: Some((1.5, 0.5)), ..YARN }),
                [1.000000000e+00, 3.162277639e-01, 7.566440105e-02, 1.079610921e-02, 2.499999944e-03, 7.905694656e-04, 2.500000119e-04, 7.905694656e-05],
                1.129643201828003,
            ),
            (
                RopeScaling::Yarn(Yarn { attention_factor: Some(0.75), ..YARN }),
                [1.000000000e+00, 2.569350600e-01, 6.250000000e-02, 1.383496542e-02, 2.499999944e-03, 7.905694656e-04, 2.500000119e-04, 7.905694656e-05],
                0.75,
            ),
        ]
    }
}
