//! The reference model of preference optimization and reinforcement learning: how it follows the policy, and its
//! log-probabilities of a data set, computed once and cached with the data.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lockstep_ckpt::ModelFolder;
use lockstep_config::{AlgorithmConfig, DpoConfig, RunConfig, SyncRefModel};
use lockstep_core::Rank;
use lockstep_data::{Batch, Dataset};
use lockstep_engine::Engine;
use lockstep_plan::{ModelId, ParamState};

use crate::algorithms::dpo::document_log_probs;
use crate::error::TrainError;
use crate::models::{RunModel, RunModels, reference};
use crate::objective::micro_batch;
use crate::save::{self, all_tensors, chunks};

/// How the reference model of the configured algorithm follows the policy. `None`: it never changes.
pub(crate) fn reference_sync(config: &RunConfig) -> Option<SyncRefModel> {
    match &config.algorithm {
        AlgorithmConfig::Dpo(dpo) => dpo.sync_ref_model,
        AlgorithmConfig::Grpo(grpo) => grpo.sync_ref_model,
        AlgorithmConfig::Rloo(rloo) => rloo.sync_ref_model,
        _ => None,
    }
}

/// Moves the reference model towards the policy every few steps: π_ref ← α·π + (1 − α)·π_ref.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReferenceSync {
    pub(crate) policy: ModelId,
    pub(crate) reference: ModelId,
    pub(crate) sync: SyncRefModel,
}

impl ReferenceSync {
    /// Updates the reference if it is due after `step` completed steps. A collective call.
    pub(crate) fn after_step(&self, engine: &mut Engine, step: u64) -> Result<(), TrainError> {
        if !step.is_multiple_of(self.sync.steps) {
            return Ok(());
        }
        let alpha = self.sync.mixup_alpha as f32;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for (unit, segment) in all_tensors(engine, self.policy) {
            for part in chunks(0..segment.elems()) {
                for (model, values) in [(self.policy, &mut ours), (self.reference, &mut theirs)] {
                    values.resize(part.len(), 0.0);
                    let working = ParamState::Working;
                    let found =
                        engine.model(model).read_whole(unit, &segment, working, part.clone(), values)?;
                    assert!(found, "both models have {}", segment.name);
                }
                for (theirs, ours) in theirs.iter_mut().zip(&ours) {
                    *theirs = alpha * ours + (1.0 - alpha) * *theirs;
                }
                engine.model_mut(self.reference).write(unit, &segment, ParamState::Working, part, &theirs)?;
            }
        }
        Ok(())
    }
}

/// Scores every document of a data set with the reference model, or finds the result of an earlier run in the
/// data's cache. Uses the policy's memory: its weights are overwritten. A collective call.
pub(crate) fn precompute(
    config: &RunConfig,
    dpo: &DpoConfig,
    engine: &mut Engine,
    models: &RunModels,
    dataset: &Dataset,
    note: &mut dyn FnMut(&str),
) -> Result<Arc<Vec<f64>>, TrainError> {
    let model = reference(config, models.policy())?;
    let cache = cache_path(config, dpo, engine, &model, dataset)?;
    // All ranks use the file or none does: they may not see the same folder.
    let found = read_cache(&cache, dataset.num_docs());
    let all_found = engine.all_gather_bytes("cached log-probabilities", &[u8::from(found.is_some())])?;
    if let Some(found) = found.filter(|_| all_found.iter().all(|found| found == &[1])) {
        note("the reference's log-probabilities were found in the cache");
        return Ok(Arc::new(found));
    }
    if let Some(path) = &model.folder {
        save::check_weights(&ModelFolder::open(path)?, &model.shape)?;
    }
    // In the policy's memory, whose adapters, if it has some, are new and change nothing.
    RunModel { shares_weights_of: None, ..model }.load(engine, ModelId::FIRST, config.batch.seed)?;
    let sums = score_documents(config, dpo, engine, dataset)?;
    if engine.rank() == Rank(0) {
        // Without the file, the next run computes it again.
        let _ = write_cache(&cache, &sums);
    }
    note(&format!("the reference scored {} pairs", dataset.num_pairs()));
    Ok(Arc::new(sums))
}

/// The log-probability of every document's completion by the model in the policy's memory.
fn score_documents(
    config: &RunConfig,
    dpo: &DpoConfig,
    engine: &mut Engine,
    dataset: &Dataset,
) -> Result<Vec<f64>, TrainError> {
    let rows = config.batch.per_device_train_batch_size as usize;
    let world = config.plan.world_size() as usize;
    let all: Vec<u32> = (0..dataset.num_rows() as u32).collect();
    let mut batch = Batch::default();
    let mut mine: Vec<f64> = Vec::new();
    for round in 0..all.len().div_ceil(rows * world) {
        let own = all.chunks(rows).nth(round * world + engine.rank().0 as usize).unwrap_or(&[]);
        batch.fill(dataset, own)?;
        engine.model_mut(ModelId::FIRST).score(micro_batch(&batch), &mut |outputs| {
            let scored = document_log_probs(&batch, outputs.log_probs(), dpo.ld_alpha);
            mine.extend(scored.into_iter().flat_map(|(doc, sum)| [f64::from(doc), sum]));
        })?;
    }
    let mut sums = vec![0.0; dataset.num_docs()];
    for pair in
        engine.all_gather_f64("the reference's log-probabilities", &mine)?.iter().flat_map(|n| n.chunks(2))
    {
        sums[pair[0] as usize] = pair[1];
    }
    Ok(sums)
}

/// The file of cached log-probabilities, named by everything they depend on.
fn cache_path(
    config: &RunConfig,
    dpo: &DpoConfig,
    engine: &Engine,
    model: &RunModel,
    dataset: &Dataset,
) -> Result<PathBuf, TrainError> {
    let mut key = blake3::Hasher::new();
    let text = format!(
        "1 {} {:?} {:?} {:?} {}",
        dataset.fingerprint(),
        model.shape,
        dpo.ld_alpha,
        engine.plan().input.storage,
        config.batch.seed,
    );
    key.update(text.as_bytes());
    if let Some(path) = &model.folder {
        // The weights by their content: a folder may be overwritten.
        for file in ModelFolder::open(path)?.weight_files() {
            let cannot = |cause| TrainError::Input { path: file.to_path_buf(), cause };
            key.update_reader(File::open(file).map_err(cannot)?).map_err(cannot)?;
        }
    }
    let name = format!("ref-{}", &key.finalize().to_hex()[..16]);
    Ok(dataset.path().with_extension(name))
}

/// The cached numbers, if the file is complete.
fn read_cache(path: &Path, num_docs: usize) -> Option<Vec<f64>> {
    let bytes = std::fs::read(path).ok()?;
    let (numbers, hash) = bytes.split_at_checked(num_docs * 8)?;
    let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    (hash == blake3::hash(numbers).as_bytes()).then(|| numbers.chunks_exact(8).map(number).collect())
}

fn write_cache(path: &Path, sums: &[f64]) -> std::io::Result<()> {
    let mut bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    let hash = blake3::hash(&bytes);
    bytes.extend(hash.as_bytes());
    let partial = path.with_extension(format!("partial-{}", std::process::id()));
    std::fs::write(&partial, bytes)?;
    std::fs::rename(partial, path)
}
