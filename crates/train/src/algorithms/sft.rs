//! Supervised fine-tuning and causal language modelling:
//! L = Σ w·(−log p(target)) / N, where N is the number of supervised tokens of the step over all ranks.

use lockstep_data::Batch;
use lockstep_engine::{Coefficients, Outputs};

use crate::objective::{Metrics, Objective, StepCounts};

/// Supervised fine-tuning and causal language modelling.
#[derive(Clone, Debug, Default)]
pub struct Sft {
    supervised: f64,
    /// Σ w·log p over this rank's tokens.
    weighted_log_probs: f64,
}

impl Objective for Sft {
    fn coefficients_ahead(&self) -> bool {
        true
    }

    fn begin(&mut self, counts: &StepCounts) {
        *self = Sft { supervised: counts.supervised as f64, weighted_log_probs: 0.0 };
    }

    fn coefficients(&mut self, _: usize, batch: &Batch, _: Option<Outputs<'_>>, out: &mut Coefficients<'_>) {
        for (out, weight) in out.log_probs().iter_mut().zip(&batch.weights) {
            *out = (-f64::from(*weight) / self.supervised) as f32;
        }
    }

    fn outputs(&mut self, batch: &Batch, outputs: Outputs<'_>) {
        add_weighted(&mut self.weighted_log_probs, batch, outputs.log_probs());
    }

    fn sums(&self) -> Vec<f64> {
        vec![self.weighted_log_probs]
    }

    fn metrics(&self, sums: &[f64], _: &[f64]) -> Metrics {
        Metrics { loss: -sums[0] / self.supervised, others: Vec::new() }
    }
}

/// Adds Σ w·log p of a batch, in token order and in f64, so that the loss does not depend on how rows are divided into
/// batches.
pub(crate) fn add_weighted(sum: &mut f64, batch: &Batch, log_probs: &[f32]) {
    for (log_prob, weight) in log_probs.iter().zip(&batch.weights) {
        if *weight != 0.0 {
            *sum += f64::from(*weight) * f64::from(*log_prob);
        }
    }
}
