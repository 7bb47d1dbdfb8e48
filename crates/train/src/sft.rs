//! Supervised fine-tuning and causal language modelling:
//! L = Σ w·(−log p(target)) / N, with N the supervised tokens of the whole accumulation window.

use lockstep_data::Batch;
use lockstep_engine::{Driver, MicroBatch};

/// The objective of one step over its window of micro-batches.
#[derive(Debug)]
pub struct Sft<'a> {
    window: &'a [Batch],
    supervised: f64,
    weighted_log_probs: f64,
}

impl<'a> Sft<'a> {
    /// `supervised` is the window's count over all ranks.
    pub fn new(window: &'a [Batch], supervised: u64) -> Sft<'a> {
        Sft { window, supervised: supervised as f64, weighted_log_probs: 0.0 }
    }

    /// Σ w·log p over this rank's tokens, once every micro-batch has run.
    pub fn weighted_log_probs(&self) -> f64 {
        self.weighted_log_probs
    }
}

impl Driver for Sft<'_> {
    fn batch(&self, micro: u32) -> MicroBatch<'_> {
        let batch = &self.window[micro as usize];
        MicroBatch {
            tokens: &batch.tokens,
            targets: &batch.targets,
            positions: &batch.positions,
            cu_seqlens: &batch.cu_seqlens,
            samples: &batch.samples,
        }
    }

    fn coefficients(&mut self, micro: u32, _log_probs: Option<&[f32]>, out: &mut [f32]) {
        for (out, weight) in out.iter_mut().zip(&self.window[micro as usize].weights) {
            *out = (-f64::from(*weight) / self.supervised) as f32;
        }
    }

    fn outputs(&mut self, micro: u32, log_probs: &[f32]) {
        let weights = &self.window[micro as usize].weights;
        // In token order and f64: the reported loss does not depend on how the batch was cut.
        for (log_prob, weight) in log_probs.iter().zip(weights) {
            if *weight != 0.0 {
                self.weighted_log_probs += f64::from(*weight) * f64::from(*log_prob);
            }
        }
    }
}
