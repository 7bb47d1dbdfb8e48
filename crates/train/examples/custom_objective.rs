//! A custom objective: dynamic fine-tuning, L = Σ −sg(p)·log p / N, where sg stops the gradient.
//! Tokens that the model finds unlikely have less influence than in plain fine-tuning.
//!
//!     cargo run --release -p lockstep-train --example custom_objective
//!
//! An objective computes one coefficient per token, ∂L/∂log p. Here that is −p/N, which needs the head's outputs,
//! so the coefficients are not known ahead. Ranks, memory, checkpoints and logs work as with any other objective.

use std::error::Error;

use lockstep_core::Rank;
use lockstep_data::Batch;
use lockstep_device::Device;
use lockstep_observe::PlainLines;
use lockstep_train::{Coefficients, Metrics, Objective, Outputs, StepCounts, prepare_for, train_with};

#[derive(Default)]
struct Dft {
    supervised: f64,
    /// Σ p·log p and Σ log p over this rank's supervised tokens.
    sums: [f64; 2],
}

impl Objective for Dft {
    fn begin(&mut self, counts: &StepCounts) {
        *self = Dft { supervised: counts.supervised as f64, sums: [0.0; 2] };
    }

    fn coefficients(
        &mut self,
        _: usize,
        batch: &Batch,
        outputs: Option<Outputs<'_>>,
        out: &mut Coefficients<'_>,
    ) {
        let log_probs = outputs.expect("coefficients are not known ahead").log_probs();
        for ((out, log_prob), weight) in out.log_probs().iter_mut().zip(log_probs).zip(&batch.weights) {
            *out = -weight * log_prob.exp() / self.supervised as f32;
        }
    }

    fn outputs(&mut self, batch: &Batch, outputs: Outputs<'_>) {
        for (log_prob, weight) in outputs.log_probs().iter().zip(&batch.weights) {
            let (log_prob, weight) = (f64::from(*log_prob), f64::from(*weight));
            self.sums[0] += weight * log_prob.exp() * log_prob;
            self.sums[1] += weight * log_prob;
        }
    }

    fn sums(&self) -> Vec<f64> {
        self.sums.to_vec()
    }

    fn metrics(&self, sums: &[f64], _: &[f64]) -> Metrics {
        // This loss rises at first, because p does. The plain loss, in metrics.jsonl and TensorBoard, falls.
        Metrics { loss: -sums[0] / self.supervised, others: vec![("nll".into(), -sums[1] / self.supervised)] }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let rows: String = (0..64).map(|i| format!("{{\"text\": \"{} and {} follow\"}}\n", i, i + 1)).collect();
    std::fs::write(folder.path().join("data.jsonl"), rows)?;
    let text = "model: tiny\nmax_length: 32\nmax_steps: 10\nlearning_rate: 1e-3\n";
    let settings = [
        format!("train_files={}", folder.path().join("data.jsonl").display()),
        format!("output_dir={}", folder.path().join("out").display()),
    ];
    let source = lockstep_config::Source { name: "custom_objective", text };
    let config = lockstep_config::load(Some(source), &settings)?;

    let mut objective = Dft::default();
    let prepared = prepare_for(&config, Rank(0), Device::Cpu, &objective)?;
    let mut progress = PlainLines::new(std::io::stdout());
    let outcome = train_with(&config, text, prepared, None, &mut objective, &mut progress)?;
    assert_eq!(outcome.steps, 10);
    Ok(())
}
