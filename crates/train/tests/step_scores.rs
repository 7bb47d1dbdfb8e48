//! An objective that uses the scores of the whole step before it computes a coefficient.

use std::path::Path;

use lockstep_core::Rank;
use lockstep_data::Batch;
use lockstep_device::Device;
use lockstep_observe::NoProgress;
use lockstep_plan::ModelId;
use lockstep_train::{Coefficients, Metrics, Objective, Outputs, StepCounts, prepare_for, train_with};

/// L = Σ −sg(p)·log p / N, with p from the head's outputs or from the scores. `centred`: subtracts the mean of p over
/// the whole step, which no single micro-batch knows.
#[derive(Default)]
struct Weighted {
    needs_scores: bool,
    centred: bool,
    supervised: f64,
    scores: Vec<Vec<f32>>,
    /// For each step, the number of micro-batches that were scored before the first coefficient.
    scored_first: Vec<usize>,
    mean: f64,
    sum: f64,
}

impl Weighted {
    fn coefficient(&self, weight: f32, log_prob: f32) -> f32 {
        (-f64::from(weight) * (f64::from(log_prob).exp() - self.mean) / self.supervised) as f32
    }
}

impl Objective for Weighted {
    fn scorers(&self) -> &[ModelId] {
        if self.needs_scores { &[ModelId::FIRST] } else { &[] }
    }

    fn exchanges_scores(&self) -> bool {
        true
    }

    fn begin(&mut self, counts: &StepCounts) {
        (self.supervised, self.sum, self.mean) = (counts.supervised as f64, 0.0, 0.0);
        self.scores.clear();
    }

    fn scored(&mut self, _: ModelId, index: usize, _: &Batch, outputs: Outputs<'_>) {
        assert_eq!(index, self.scores.len(), "micro-batches are scored in order");
        self.scores.push(outputs.log_probs().to_vec());
    }

    fn score_exchange(&self) -> Vec<f64> {
        let all = self.scores.iter().flatten();
        vec![all.clone().map(|l| f64::from(*l).exp()).sum(), all.count() as f64]
    }

    fn scores_done(&mut self, of_ranks: &[Vec<f64>], _: usize) {
        self.scored_first.push(self.scores.len());
        let total = |i: usize| of_ranks.iter().map(|numbers| numbers[i]).sum::<f64>();
        self.mean = if self.centred { total(0) / total(1) } else { 0.0 };
    }

    fn coefficients(
        &mut self,
        index: usize,
        batch: &Batch,
        outputs: Option<Outputs<'_>>,
        out: &mut Coefficients<'_>,
    ) {
        assert_eq!(outputs.is_none(), self.needs_scores, "scores replace outputs");
        let log_probs = outputs.as_ref().map_or_else(|| &self.scores[index][..], Outputs::log_probs);
        for ((out, log_prob), weight) in out.log_probs().iter_mut().zip(log_probs).zip(&batch.weights) {
            *out = self.coefficient(*weight, *log_prob);
        }
    }

    fn outputs(&mut self, batch: &Batch, outputs: Outputs<'_>) {
        let each = outputs.log_probs().iter().zip(&batch.weights);
        self.sum += each.map(|(l, w)| f64::from(*w) * f64::from(*l)).sum::<f64>();
    }

    fn sums(&self) -> Vec<f64> {
        vec![self.sum]
    }

    fn metrics(&self, sums: &[f64], _: &[f64]) -> Metrics {
        Metrics { loss: -sums[0] / self.supervised, others: vec![("mean".into(), self.mean)] }
    }
}

/// Trains three steps of two micro-batches each. Returns the losses and the final weights.
fn run(objective: &mut Weighted) -> (String, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let rows: String = (0..40).map(|i| format!("{{\"text\": \"{} and {} follow\"}}\n", i, i + 1)).collect();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("data.jsonl"), rows).unwrap();
    let text = "model: tiny\nmax_length: 32\nmax_steps: 3\nlearning_rate: 1e-3\nthreads: 1\n\
                per_device_train_batch_size: 3\ngradient_accumulation_steps: 2\n";
    let shown = |path: &Path| path.display().to_string();
    let settings =
        [format!("train_files={}", shown(&at("data.jsonl"))), format!("output_dir={}", shown(&at("out")))];
    let source = lockstep_config::Source { name: "step_scores", text };
    let config = lockstep_config::load(Some(source), &settings).unwrap();
    let prepared = prepare_for(&config, Rank(0), Device::Cpu, objective).unwrap();
    let outcome = train_with(&config, text, prepared, None, objective, &mut NoProgress).unwrap();
    assert_eq!(outcome.steps, 3);
    let metrics = std::fs::read_to_string(at("out/metrics.jsonl")).unwrap();
    let losses = metrics.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        format!("{} {}\n", line["loss"], line["grad_norm"])
    });
    (losses.collect(), std::fs::read(at("out/model/model.safetensors")).unwrap())
}

/// Scores are bit-identical to the outputs of training, so the coefficients and everything after them are too.
#[test]
fn scores_give_the_same_result_as_outputs() {
    let mut by_outputs = Weighted::default();
    let mut by_scores = Weighted { needs_scores: true, ..Weighted::default() };
    assert!(run(&mut by_outputs) == run(&mut by_scores), "the two differ");
    assert_eq!(
        by_scores.scored_first,
        [2, 2, 2],
        "both micro-batches of every step, before the first coefficient"
    );
    assert!(by_outputs.scored_first.is_empty());
}

/// A value that depends on the whole step can be part of every coefficient.
#[test]
fn a_mean_over_the_step_reaches_every_micro_batch() {
    let plain = run(&mut Weighted { needs_scores: true, ..Weighted::default() });
    let mut centred = Weighted { needs_scores: true, centred: true, ..Weighted::default() };
    let other = run(&mut centred);
    assert!(centred.mean > 0.0 && other.1 != plain.1);
}
