//! If the loss is not finite but the gradients are, the step is applied and reported as applied.

use std::path::Path;

use lockstep_core::{Fault, Rank};
use lockstep_data::Batch;
use lockstep_device::Device;
use lockstep_observe::{EvalRecord, Progress, StepRecord};
use lockstep_train::{
    Coefficients, Metrics, Objective, Outputs, Sft, StepCounts, TrainError, TrainOutcome, prepare_for,
    train_with,
};

/// Plain fine-tuning that reports NaN as its loss at some steps, counted from 1.
struct NanLoss {
    sft: Sft,
    at: &'static [u64],
    step: u64,
}

impl Objective for NanLoss {
    fn coefficients_ahead(&self) -> bool {
        true
    }

    fn begin(&mut self, counts: &StepCounts) {
        self.step += 1;
        self.sft.begin(counts);
    }

    fn coefficients(
        &mut self,
        index: usize,
        batch: &Batch,
        outputs: Option<Outputs<'_>>,
        out: &mut Coefficients<'_>,
    ) {
        self.sft.coefficients(index, batch, outputs, out);
    }

    fn outputs(&mut self, batch: &Batch, outputs: Outputs<'_>) {
        self.sft.outputs(batch, outputs);
    }

    fn sums(&self) -> Vec<f64> {
        self.sft.sums()
    }

    fn metrics(&self, sums: &[f64], _: &[f64]) -> Metrics {
        let metrics = self.sft.metrics(sums, &[]);
        if self.at.contains(&self.step) { Metrics { loss: f64::NAN, ..metrics } } else { metrics }
    }
}

#[derive(Default)]
struct Notes(Vec<String>);

impl Progress for Notes {
    fn start(&mut self, _: u64, _: u64) {}
    fn step(&mut self, _: &StepRecord) {}
    fn evaluation(&mut self, _: &EvalRecord) {}
    fn note(&mut self, text: &str) {
        self.0.push(text.into());
    }
    fn finish(&mut self) {}
}

/// Trains six steps in `dir`, with NaN as the loss of the steps `at`.
fn run(dir: &Path, at: &'static [u64], settings: &[&str]) -> (Result<TrainOutcome, TrainError>, Vec<String>) {
    let rows: String = (0..16).map(|i| format!("{{\"text\": \"{i} and {} follow\"}}\n", i + 1)).collect();
    std::fs::write(dir.join("data.jsonl"), rows).unwrap();
    let text = "model: tiny\nmax_length: 32\nmax_steps: 6\nsave_steps: 1\nthreads: 1\nper_device_train_batch_size: 2\n";
    let mut all = vec![
        format!("train_files={}", dir.join("data.jsonl").display()),
        format!("output_dir={}", dir.join("out").display()),
    ];
    all.extend(settings.iter().map(|s| s.to_string()));
    let config = lockstep_config::load(Some(lockstep_config::Source { name: "test", text }), &all).unwrap();
    let mut objective = NanLoss { sft: Sft::default(), at, step: 0 };
    let prepared = prepare_for(&config, Rank(0), Device::Cpu, &objective).unwrap();
    let mut notes = Notes::default();
    let outcome = train_with(&config, text, prepared, None, &mut objective, &mut notes);
    (outcome, notes.0)
}

/// A file of the model folder or of a checkpoint.
fn file(dir: &Path, name: &str) -> Vec<u8> {
    std::fs::read(dir.join("out").join(name)).unwrap()
}

fn has_checkpoint(dir: &Path, step: u64) -> bool {
    dir.join(format!("out/checkpoints/step-{step}")).exists()
}

#[test]
fn the_step_is_applied_and_reported_as_applied() {
    let dirs = [0, 1].map(|_| tempfile::tempdir().unwrap());
    let [sound, bad] = dirs.each_ref().map(|dir| dir.path());
    run(sound, &[], &[]).0.unwrap();
    let (outcome, notes) = run(bad, &[2, 3, 5], &[]);
    outcome.unwrap();
    // Weights, moments, schedule and Adam's t are those of the run without NaN.
    assert_eq!(file(sound, "model/model.safetensors"), file(bad, "model/model.safetensors"));
    let last = "checkpoints/step-6/exp_avg-rank-0.safetensors";
    assert_eq!(file(sound, last), file(bad, last));
    let manifest = String::from_utf8(file(bad, "checkpoints/step-6/manifest.json")).unwrap();
    for counter in ["\"updates\": 6", "\"skipped\": 0", "\"skipped_in_a_row\": 0"] {
        assert!(manifest.contains(counter), "{counter} in {manifest}");
    }
    let applied_notes: Vec<&String> = notes.iter().filter(|note| note.contains("was applied")).collect();
    assert_eq!(applied_notes.len(), 3, "{notes:#?}");
    let text = "step 2 was applied: its loss is NaN, but its gradients were finite (norm ";
    assert!(applied_notes[0].starts_with(text), "{applied_notes:#?}");
    assert!(!notes.iter().any(|note| note.contains("skipped") || note.contains("went wrong")), "{notes:#?}");
    let metrics = String::from_utf8(file(bad, "metrics.jsonl")).unwrap();
    assert!(!metrics.contains("\"skipped\":true"), "{metrics}");
    // No checkpoint is saved after a step that is not finite.
    let made: Vec<u64> = (1..=6).filter(|step| has_checkpoint(bad, *step)).collect();
    assert_eq!(made, [1, 4, 6]);
}

#[test]
fn three_in_a_row_end_the_run_with_an_error_that_says_they_were_applied() {
    let dir = tempfile::tempdir().unwrap();
    let (outcome, _) = run(dir.path(), &[3, 4, 5], &[]);
    let error = outcome.unwrap_err();
    assert_eq!(error.class().exit_code(), 76);
    let text = error.to_string();
    assert!(text.starts_with("step 5: loss is NaN, gradient norm is "), "{text}");
    assert!(text.contains("; 3 steps in a row were not finite (dataset rows "), "{text}");
    let hint = error.hint().unwrap();
    assert!(
        hint.starts_with("3 of these steps were applied: the loss was not finite, but the gradients were."),
        "{hint}"
    );
    assert!(hint.ends_with("step-2 is intact."), "{hint}");
}

/// A NaN loss with finite gradients is not an overflow, so the loss scale does not change.
#[test]
fn the_fp16_loss_scaler_counts_the_step_as_applied() {
    let dirs = [0, 1].map(|_| tempfile::tempdir().unwrap());
    let [sound, bad] = dirs.each_ref().map(|dir| dir.path());
    let fp16 = ["fp16={enabled: true, initial_scale_power: 4, loss_scale_window: 3}"];
    run(sound, &[], &fp16).0.unwrap();
    let (outcome, notes) = run(bad, &[2, 4], &fp16);
    outcome.unwrap();
    assert!(!notes.iter().any(|note| note.contains("overflowed")), "{notes:#?}");
    let reals = |dir: &Path| {
        let manifest = String::from_utf8(file(dir, "checkpoints/step-6/manifest.json")).unwrap();
        let start = manifest.find("\"loss_scale\"").unwrap();
        manifest[start..start + 80].to_string()
    };
    assert_eq!(reals(sound), reals(bad));
    assert_eq!(file(sound, "model/model.safetensors"), file(bad, "model/model.safetensors"));
}
