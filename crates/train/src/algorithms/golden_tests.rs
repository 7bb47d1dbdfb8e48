//! Losses and gradients of every algorithm against TRL, on small models (goldens/algorithms/README.md).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lockstep_ckpt::SafetensorsFile;
use lockstep_config::{AlgorithmConfig, RunConfig};
use lockstep_core::{Bytes, Rank};
use lockstep_data::{Batch, Tokenizer};
use lockstep_device::Machine;
use lockstep_engine::{Engine, UpdateRule, UpdateSettings};
use lockstep_plan::{ModelId, ParamState};
use lockstep_testkit::golden_dir;
use serde_json::Value;

use super::advantages::{group_relative, leave_one_out};
use super::dpo::{Dpo, ReferenceLogProbs};
use super::policy_gradient::PolicyGradient;
use super::ppo::{PpoValue, estimate};
use crate::models::{ObjectiveNeeds, RunModels};
use crate::objective::{Metrics, Objective, StepCounts, train_step};
use crate::open::make_engine;
use crate::rollout::sequence::Sequence;
use crate::rollout::{Advantages, Rollout};
use crate::setup::plan_with;

const VOCAB: usize = 97;
const END: u64 = 2;

struct Golden {
    folder: PathBuf,
    case: Value,
}

impl Golden {
    fn all(algorithm: &str) -> Vec<Golden> {
        let root = golden_dir().join("algorithms").join(algorithm);
        let mut folders: Vec<PathBuf> =
            std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
        folders.sort();
        let open = |folder: PathBuf| {
            let text = std::fs::read_to_string(folder.join("case.json")).unwrap();
            Golden { case: serde_json::from_str(&text).unwrap(), folder }
        };
        folders.into_iter().map(open).collect()
    }

    fn name(&self) -> String {
        format!("{}/{}", self.case["algorithm"].as_str().unwrap(), self.case["case"].as_str().unwrap())
    }

    /// What must come out: our value, where TRL's depends on the split into micro-batches.
    fn expected(&self) -> (&Value, &'static str) {
        match self.case["expected"].get("ours") {
            Some(ours) => (ours, "ours."),
            None => (&self.case["expected"], ""),
        }
    }

    fn model(&self, role: &str) -> String {
        self.folder.join(self.case["models"][role].as_str().unwrap()).display().to_string()
    }

    fn rows_of_micro_batches(&self, rows: usize) -> Vec<Vec<usize>> {
        match self.case["inputs"].get("micro_batches") {
            Some(all) => serde_json::from_value(all.clone()).unwrap(),
            None => vec![(0..rows).collect()],
        }
    }

    /// The configuration: TRL's options by their names, and `more`.
    fn config(&self, micro_batches: &[Vec<usize>], more: &[String]) -> RunConfig {
        let algorithm = self.case["algorithm"].as_str().unwrap();
        let rows = micro_batches.iter().map(Vec::len).max().unwrap();
        let mut settings = vec![
            format!("algorithm={algorithm}"),
            "tokenizer=none".into(),
            "threads=1".into(),
            "optim=sgd".into(),
            "max_grad_norm=0".into(),
            format!("per_device_train_batch_size={rows}"),
            format!("gradient_accumulation_steps={}", micro_batches.len()),
        ];
        settings.extend(more.iter().cloned());
        let own = [
            "max_length",
            "stop_token",
            "gradient_accumulation_steps",
            "reward_weights",
            "steps_per_generation",
        ];
        for (key, value) in self.case["options"].as_object().unwrap() {
            if !own.contains(&key.as_str()) && !value.is_null() {
                settings.push(format!("{key}={value}"));
            }
        }
        lockstep_config::load(None, &settings).unwrap_or_else(|e| panic!("{}: {e}", self.name()))
    }

    fn tensor(&self, name: &str) -> Option<Vec<f32>> {
        let file = SafetensorsFile::open(&self.folder.join("tensors.safetensors")).ok()?;
        let info = file.tensor(name)?;
        let mut values = vec![0f32; info.elems()];
        file.read_f32(name, 0..values.len(), &mut values).unwrap();
        Some(values)
    }

    /// Compares a loss and all stored gradients of a model.
    fn check(&self, found: &Metrics, engine: &Engine) {
        self.check_with(found, engine, 0.0);
    }

    /// `constant`: what TRL's loss has besides, without a gradient.
    fn check_with(&self, found: &Metrics, engine: &Engine, constant: f64) {
        let (model, (expected, kind)) = (ModelId::FIRST, self.expected());
        let loss = expected["loss"].as_f64().unwrap() - constant;
        let single = self.case["precision"] == "float32";
        let tolerance = if single { 2e-5 } else { 1e-5 };
        assert!(
            (found.loss - loss).abs() <= tolerance * loss.abs().max(1.0),
            "{}: loss {} is not {loss}",
            self.name(),
            found.loss
        );
        let compared = self.check_gradients(engine, model, &format!("{kind}grad."));
        assert_eq!(compared > 0, self.folder.join("tensors.safetensors").exists(), "{}", self.name());
    }

    /// The number of gradients that were compared.
    fn check_gradients(&self, engine: &Engine, model: ModelId, prefix: &str) -> usize {
        let mut count = 0;
        for (u, unit) in engine.model(model).units().iter().enumerate() {
            for segment in &unit.segments {
                let Some(expected) = self.tensor(&format!("{prefix}{}", segment.name)) else { continue };
                let mut found = vec![0f32; segment.elems()];
                let read = engine.model(model).read(u, segment, ParamState::Grad, 0..found.len(), &mut found);
                assert!(read.unwrap());
                let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
                for (found, expected) in found.iter().zip(&expected) {
                    let apart = (found - expected).abs();
                    assert!(
                        apart <= 1e-4 * largest + 1e-9,
                        "{}: gradient of {}: {found} is not {expected} (largest {largest})",
                        self.name(),
                        segment.name
                    );
                }
                count += 1;
            }
        }
        count
    }
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn engine(config: &RunConfig) -> (RunModels, Engine) {
    let models = RunModels::of(config, &Tokenizer::none(VOCAB)).unwrap();
    let machine = Machine::cpu(1);
    let needs = ObjectiveNeeds::of_algorithm(config, &models);
    let plan = plan_with((config, Rank(0)), &models, Bytes::ZERO, machine.into(), &needs).unwrap();
    let mut engine = make_engine(config, plan, machine, None).unwrap();
    for id in models.ids() {
        models.load(&mut engine, id, 1).unwrap();
    }
    (models, engine)
}

const STILL: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 0.0,
    rule: UpdateRule::Sgd { momentum: 0.0, nesterov: false },
    weight_decay: 0.0,
    max_norm: None,
};

fn check_metrics(golden: &Golden, found: &Metrics, names: &[&str]) {
    let (expected, _) = golden.expected();
    for name in names {
        let Some(expected) = expected["metrics"][name].as_f64() else { continue };
        let value = found.others.iter().find(|(other, _)| other == name);
        let (_, value) = value.unwrap_or_else(|| panic!("{}: no metric {name}", golden.name()));
        let close = (value - expected).abs() <= 2e-5 * expected.abs().max(1.0);
        assert!(close, "{}: {name} {value} is not {expected}", golden.name());
    }
}

#[test]
fn dpo_matches_trl() {
    let mut compared = 0;
    for golden in Golden::all("dpo") {
        // TRL's `use_weighting` needs an output of the head that Lockstep does not have. Plain sigmoid with label smoothing
        // is refused. Truncation is tested with the data.
        let options = &golden.case["options"];
        let refused = options["loss_type"] == serde_json::json!(["sigmoid"])
            && options.get("label_smoothing").is_some();
        if options["use_weighting"] == true || refused || golden.name() == "dpo/truncated" {
            continue;
        }
        let pairs = golden.case["inputs"]["pairs"].as_array().unwrap();
        let micro_batches = golden.rows_of_micro_batches(pairs.len());
        let more = [
            format!("model_name_or_path={}", golden.model("policy")),
            format!("ref_model_name_or_path={}", golden.model("reference")),
            "max_length=64".into(),
        ];
        let config = golden.config(&micro_batches, &more);
        let AlgorithmConfig::Dpo(dpo) = &config.algorithm else { unreachable!() };
        let (models, mut engine) = engine(&config);
        let reference = models.id(lockstep_plan::ModelRole::Reference).unwrap();
        let mut objective = Dpo::new(dpo, ModelId::FIRST, ReferenceLogProbs::Model(reference));
        let mut counts = StepCounts { pairs: pairs.len() as u64, ..StepCounts::default() };
        let mut batches = Vec::new();
        for rows in &micro_batches {
            let mut batch = Batch::default();
            for row in rows {
                let pair = &pairs[*row];
                let prompt = ids(&pair["prompt_ids"]);
                counts.supervised_chosen += ids(&pair["chosen_ids"]).len() as u64;
                for (side, key) in ["chosen_ids", "rejected_ids"].into_iter().enumerate() {
                    let tokens = [prompt.clone(), ids(&pair[key])].concat();
                    batch.push_document(&tokens, prompt.len(), (2 * row + side) as u32);
                }
            }
            batches.push(batch);
        }
        let step = train_step(&mut engine, ModelId::FIRST, &mut objective, &batches, &counts, &STILL);
        let (_, metrics) = step.unwrap();
        golden.check(&metrics, &engine);
        let names =
            ["rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen"];
        check_metrics(&golden, &metrics, &names);
        compared += 1;
    }
    assert!(compared >= 50, "only {compared} cases");
}

/// The sequences of a case, with what TRL says about them.
fn sequences(golden: &Golden, config: &RunConfig) -> Vec<Sequence> {
    let inputs = &golden.case["inputs"];
    let prompts = inputs["prompt_ids"].as_array().unwrap();
    let completions = inputs["completion_ids"].as_array().unwrap();
    let group = completions.len() / prompts.len();
    let (expected, _) = golden.expected();
    let max = config.algorithm.sampling().unwrap().max_completion_length as usize;
    let sequence = |(i, completion): (usize, &Value)| {
        let prompt = ids(&prompts[i / group]);
        let completion = ids(completion);
        let ended = completion.last().is_some_and(|last| u64::from(*last) == END);
        let old = inputs.get("old_token_logps").or_else(|| expected.get("token_logps"));
        let rewards = inputs.get("rewards").map_or(&[][..], |r| r.as_array().unwrap());
        Sequence {
            prompt: (i / group) as u32,
            prompt_len: prompt.len() as u32,
            truncated: !ended || completion.len() > max,
            log_probs: old.map_or_else(Vec::new, |all| floats(&all[i])),
            reference: expected.get("ref_token_logps").map_or_else(Vec::new, |all| floats(&all[i])),
            tokens: [prompt, completion].concat(),
            rewards: rewards.iter().map(|function| function[i].as_f64().unwrap_or(f64::NAN)).collect(),
            ..Sequence::default()
        }
    };
    completions.iter().enumerate().map(sequence).collect()
}

/// The weighted sums of a case's rewards.
fn totals(golden: &Golden, sequences: &[Sequence]) -> Vec<Option<f64>> {
    let weights: Option<Vec<f64>> =
        golden.case["options"].get("reward_weights").map(|w| serde_json::from_value(w.clone()).unwrap());
    let total = |sequence: &Sequence| {
        let weights = weights.clone().unwrap_or_else(|| vec![1.0; sequence.rewards.len()]);
        let names = crate::rollout::statistics::RewardNames { names: vec![], weights };
        names.total(sequence)
    };
    sequences.iter().map(total).collect()
}

fn assert_close(golden: &Golden, what: &str, found: &[f64], expected: &Value) {
    let expected: Vec<f64> = serde_json::from_value(expected.clone()).unwrap();
    assert_eq!(found.len(), expected.len(), "{}: {what}", golden.name());
    for (found, expected) in found.iter().zip(&expected) {
        let close = (found - expected).abs() <= 2e-6 * expected.abs().max(1.0);
        assert!(close, "{}: {what} {found} is not {expected}", golden.name());
    }
}

/// Options of GRPO that are refused.
const ABSENT: [&str; 3] =
    ["multi_objective_aggregation", "off_policy_mask_threshold", "use_adaptive_entropy"];

fn is_absent(golden: &Golden) -> bool {
    ABSENT.iter().any(|option| golden.case["options"].get(option).is_some())
        || golden.name() == "grpo/luspo-token"
}

/// Compares the advantages of a case that has no sequences.
fn check_advantages(golden: &Golden) {
    let config = golden.config(
        &[vec![0; 12]],
        &["model=tiny".into(), "vocab_size=97".into(), "reward_funcs=exact_match".into()],
    );
    let AlgorithmConfig::Grpo(grpo) = &config.algorithm else { unreachable!() };
    let functions = golden.case["inputs"]["rewards"].as_array().unwrap();
    let sequence = |i: usize| Sequence {
        rewards: functions.iter().map(|function| function[i].as_f64().unwrap_or(f64::NAN)).collect(),
        ..Sequence::default()
    };
    let sequences: Vec<Sequence> = (0..functions[0].as_array().unwrap().len()).map(sequence).collect();
    let rewards = totals(golden, &sequences);
    let advantages = group_relative(&rewards, grpo.groups.num_generations as usize, grpo.scale_rewards);
    assert_close(golden, "advantages", &advantages, &golden.expected().0["advantages"]);
}

/// TRL's RLOO counts a masked completion as one with log-probability 0: a constant of the loss. Ours leaves it out.
fn masked_constant(golden: &Golden, config: &RunConfig, sequences: &[Sequence], advantages: &[f64]) -> f64 {
    let AlgorithmConfig::Rloo(rloo) = &config.algorithm else { return 0.0 };
    let truncated =
        (0..sequences.len()).filter(|i| sequences[*i].truncated && rloo.mask_truncated_completions);
    let loss = |i: usize| {
        let ratio = (-golden.case["inputs"]["old_logps"][i].as_f64().unwrap()).exp();
        let clipped = ratio.clamp(1.0 - rloo.epsilon, 1.0 + rloo.epsilon_high);
        -(ratio * advantages[i]).min(clipped * advantages[i])
    };
    truncated.map(loss).sum::<f64>() / sequences.len() as f64
}

/// Runs one step of GRPO or RLOO and compares it.
fn check_policy_gradient(golden: &Golden) {
    let inputs = &golden.case["inputs"];
    if inputs.get("completion_ids").is_none() {
        return check_advantages(golden);
    }
    let micro_batches = golden.rows_of_micro_batches(inputs["completion_ids"].as_array().unwrap().len());
    let off_policy = inputs.get("old_token_logps").or_else(|| inputs.get("old_logps")).is_some();
    let mut more = vec![
        format!("model_name_or_path={}", golden.model("policy")),
        "reward_funcs=exact_match".into(),
        format!("num_iterations={}", if off_policy { 2 } else { 1 }),
        "max_prompt_length=32".into(),
    ];
    let uses_reference =
        golden.case["options"]["beta"].as_f64().map_or(golden.case["algorithm"] == "rloo", |b| b != 0.0);
    if uses_reference {
        more.push(format!("ref_model_name_or_path={}", golden.model("reference")));
    }
    let config = golden.config(&micro_batches, &more);
    let mut sequences = sequences(golden, &config);
    let mut rewards = totals(golden, &sequences);
    let (expected, _) = golden.expected();
    let group = golden.case["options"]["num_generations"].as_u64().unwrap() as usize;
    let (advantages, mut objective) = match &config.algorithm {
        AlgorithmConfig::Grpo(grpo) => {
            (group_relative(&rewards, group, grpo.scale_rewards), PolicyGradient::grpo(&config, grpo))
        }
        AlgorithmConfig::Rloo(rloo) => {
            crate::rollout::rloo_rewards(rloo, &mut rewards, &sequences);
            (leave_one_out(&rewards, group, rloo.normalize_advantages), PolicyGradient::rloo(&config, rloo))
        }
        _ => unreachable!(),
    };
    if let Some(all) = expected.get("advantages") {
        assert_close(golden, "advantages", &advantages, all);
    }
    // RLOO's case has the sums of the old log-probabilities.
    for (i, sequence) in sequences.iter_mut().enumerate() {
        if let Some(old) = inputs.get("old_logps") {
            let sum: f64 = sequence.log_probs.iter().map(|log_prob| f64::from(*log_prob)).sum();
            sequence.log_probs[0] += (old[i].as_f64().unwrap() - sum) as f32;
        }
    }
    let (_, mut engine) = engine(&config);
    let masked = masked_constant(golden, &config, &sequences, &advantages);
    let rollout = Rollout { sequences, advantages: Advantages::Sequences(advantages), metrics: vec![] };
    let rows: Vec<u32> = micro_batches.iter().flatten().map(|row| *row as u32).collect();
    let mut batches = Vec::new();
    for rows in &micro_batches {
        let mut batch = Batch::default();
        for row in rows {
            let sequence = &rollout.sequences[*row];
            batch.push_document(&sequence.tokens, sequence.prompt_len as usize, *row as u32);
        }
        batches.push(batch);
    }
    objective.set_step(Arc::new(rollout), &rows);
    let counts = StepCounts::default();
    let step = train_step(&mut engine, ModelId::FIRST, &mut objective, &batches, &counts, &STILL);
    let (_, metrics) = step.unwrap();
    golden.check_with(&metrics, &engine, masked);
    let mut names = vec!["entropy"];
    if off_policy {
        names.extend([
            "clip_ratio/low_mean",
            "clip_ratio/high_mean",
            "clip_ratio/low_min",
            "clip_ratio/high_max",
        ]);
    }
    if golden.case["algorithm"] == "grpo" {
        names.push("kl");
    }
    check_metrics(golden, &metrics, &names);
}

#[test]
fn grpo_matches_trl() {
    let all: Vec<Golden> = Golden::all("grpo").into_iter().filter(|golden| !is_absent(golden)).collect();
    assert!(all.len() >= 45, "only {} cases", all.len());
    all.iter().for_each(check_policy_gradient);
}

#[test]
fn rloo_matches_trl() {
    let all = Golden::all("rloo");
    assert!(all.len() >= 10);
    all.iter().for_each(check_policy_gradient);
}

fn nested(value: &Value) -> Vec<Vec<f64>> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn ppo_matches_trl() {
    for golden in Golden::all("ppo") {
        // One rollout of all sequences; TRL's own accumulation takes steps of its own.
        let (expected, _) = golden.expected();
        if golden.name() == "ppo/accumulated" {
            continue;
        }
        let count = golden.case["inputs"]["completion_ids"].as_array().unwrap().len();
        let micro_batches = golden.rows_of_micro_batches(count);
        let more = [
            format!("model_name_or_path={}", golden.model("policy")),
            format!("ref_model_name_or_path={}", golden.model("reference")),
            format!("reward_model_path={}", golden.model("reward")),
            format!("value_model_path={}", golden.model("value")),
            "max_prompt_length=32".into(),
        ];
        let config = golden.config(&micro_batches, &more);
        let AlgorithmConfig::Ppo(ppo) = &config.algorithm else { unreachable!() };
        let mut sequences = sequences(&golden, &config);
        for (i, sequence) in sequences.iter_mut().enumerate() {
            sequence.values = floats(&expected["token_values"][i]);
            // The stored scores already have the penalty for a missing end token.
            let penalty = if sequence.truncated { ppo.missing_eos_penalty.unwrap_or(0.0) } else { 0.0 };
            sequence.rewards = vec![expected["scores"][i].as_f64().unwrap() + penalty];
        }
        let (advantages, _) = estimate(ppo, ppo.kl_coef, &sequences);
        let Advantages::Tokens { advantages: tokens, returns } = &advantages else { unreachable!() };
        for (found, all) in [(tokens, "advantages"), (returns, "returns")] {
            for (found, expected) in found.iter().zip(nested(&expected[all])) {
                assert_close(&golden, all, found, &serde_json::json!(expected));
            }
        }
        check_ppo_step(&golden, &config, Rollout { sequences, advantages, metrics: vec![] });
    }
}

/// The first step of PPO: gradients of both models.
fn check_ppo_step(golden: &Golden, config: &RunConfig, rollout: Rollout) {
    let AlgorithmConfig::Ppo(ppo) = &config.algorithm else { unreachable!() };
    let (models, mut engine) = engine(config);
    let value_id = models.id(lockstep_plan::ModelRole::Value).unwrap();
    let (mut batch, mut whole) = (Batch::default(), Batch::default());
    for (row, sequence) in rollout.sequences.iter().enumerate() {
        batch.push_document(&sequence.tokens, sequence.prompt_len as usize, row as u32);
        whole.push_sequence(&sequence.tokens, 0..sequence.tokens.len(), row as u32);
    }
    let (rows, rollout) = ((0..rollout.sequences.len() as u32).collect::<Vec<_>>(), Arc::new(rollout));
    let (mut policy, mut value) = (PolicyGradient::ppo(config, ppo), PpoValue::new(ppo));
    policy.set_step(Arc::clone(&rollout), &rows);
    value.set_step(rollout, &rows);
    let step = &golden.expected().0["steps"][0];
    let run = |engine: &mut Engine, model, objective: &mut dyn Objective, batch: Batch| {
        train_step(engine, model, objective, &[batch], &StepCounts::default(), &STILL).unwrap().1
    };
    let policy_metrics = run(&mut engine, ModelId::FIRST, &mut policy, batch);
    let compared = golden.check_gradients(&engine, ModelId::FIRST, "step0.policy.grad.");
    let value_metrics = run(&mut engine, value_id, &mut value, whole);
    let compared = compared + golden.check_gradients(&engine, value_id, "step0.value.grad.");
    assert!(compared >= 6, "{}: {compared} gradients", golden.name());
    let loss = policy_metrics.loss + value_metrics.loss;
    let expected = step["loss"].as_f64().unwrap();
    assert!(
        (loss - expected).abs() <= 1e-5 * expected.abs().max(1.0),
        "{}: {loss} is not {expected}",
        golden.name()
    );
}

#[test]
fn reward_models_match_trl() {
    for golden in Golden::all("reward") {
        let pairs = golden.case["inputs"]["pairs"].as_array().unwrap();
        let micro_batches = golden.rows_of_micro_batches(pairs.len());
        let more = [format!("model_name_or_path={}", golden.model("reward")), "max_length=64".into()];
        let config = golden.config(&micro_batches, &more);
        let AlgorithmConfig::Reward(reward) = &config.algorithm else { unreachable!() };
        let (_, mut engine) = engine(&config);
        let folder = tempfile::tempdir().unwrap();
        let data = pair_data(folder.path(), pairs, golden.case["inputs"].get("margins"), &config);
        let mut objective = super::reward::RewardModel::new(reward, Arc::clone(&data));
        let counts = StepCounts { pairs: pairs.len() as u64, ..StepCounts::default() };
        let batches: Vec<Batch> = micro_batches
            .iter()
            .map(|rows| {
                let mut batch = Batch::default();
                batch.fill(&data, &rows.iter().map(|row| *row as u32).collect::<Vec<_>>()).unwrap();
                batch
            })
            .collect();
        let step = train_step(&mut engine, ModelId::FIRST, &mut objective, &batches, &counts, &STILL);
        let (_, metrics) = step.unwrap();
        golden.check(&metrics, &engine);
        check_metrics(&golden, &metrics, &["accuracy", "margin", "min_reward", "mean_reward", "max_reward"]);
    }
}

/// The pairs of a case as a prepared data set.
fn pair_data(
    folder: &Path,
    pairs: &[Value],
    margins: Option<&Value>,
    config: &RunConfig,
) -> Arc<lockstep_data::Dataset> {
    let mut text = String::new();
    for (i, pair) in pairs.iter().enumerate() {
        let mut row = serde_json::json!({
            "chosen_ids": pair["chosen_ids"],
            "rejected_ids": pair["rejected_ids"],
        });
        if let Some(margins) = margins {
            row["margin"] = margins[i].clone();
        }
        text.push_str(&format!("{row}\n"));
    }
    let file = folder.join("pairs.jsonl");
    std::fs::write(&file, text).unwrap();
    let mut config = config.clone();
    config.data.train_files = vec![file];
    config.data.data_cache_dir = Some(folder.join("cache"));
    Arc::new(crate::data_spec::prepare_train(&config, &Tokenizer::none(VOCAB), None).unwrap())
}
