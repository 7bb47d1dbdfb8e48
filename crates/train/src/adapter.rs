//! LoRA adapters of a run: what they are, where they start, and the folder they are saved to.

use std::fs::File;
use std::path::{Path, PathBuf};

use lockstep_ckpt::{
    AdapterConfig, AdapterFolder, Export, FolderKind, ModelFolder, TensorSpec, adapter_tensor_name,
};
use lockstep_config::{ModelSource, RunConfig};
use lockstep_core::{Bytes, closest};
use lockstep_engine::Engine;
use lockstep_plan::{ModelId, ParamState};
use lockstep_shape::{Head, Lora, ModelShape, Projection};

use crate::error::TrainError;
use crate::save::{CHUNK_ELEMS, all_tensors, chunks};
use crate::setup::model_folder;

/// The ends of the names of an adapter's tensors.
const LORA_A: &str = ".lora_A.weight";
const LORA_B: &str = ".lora_B.weight";

/// The adapters that a configuration asks for. `None`: the weights themselves are trained.
pub(crate) fn configured(config: &RunConfig, shape: &ModelShape) -> Result<Option<Lora>, TrainError> {
    let Some(lora) = &config.model.lora else { return Ok(None) };
    if let Some(path) = &lora.folder {
        return of_folder(&AdapterFolder::open(path)?, shape).map(Some);
    }
    let targets = Lora::targets_of(&lora.target_modules, shape.layers).map_err(|pattern| {
        let names = Projection::ALL.map(|of| of.module(0));
        let short = names.iter().filter_map(|name| name.rsplit('.').next());
        TrainError::LoraTarget { closest: closest(&pattern, short).map(str::to_owned), pattern }
    })?;
    let mut modules_to_save = lora.modules_to_save.clone();
    if shape.head == Head::Score && !modules_to_save.iter().any(|name| name == "score") {
        // A new head has no use for an adapter. PEFT trains it as a whole, too.
        modules_to_save.push("score".into());
    }
    let lora = Lora {
        rank: lora.r as usize,
        alpha: lora.alpha,
        dropout: lora.dropout,
        rank_stabilized: lora.use_rslora,
        targets,
        modules_to_save,
    };
    check_modules(&lora, shape)?;
    Ok(Some(lora))
}

/// Every module that is to be trained as a whole exists.
fn check_modules(lora: &Lora, shape: &ModelShape) -> Result<(), TrainError> {
    let units = lockstep_shape::units(shape, &Default::default(), false);
    let names: Vec<&str> = units.iter().flat_map(|unit| &unit.segments).map(|s| module_of(&s.name)).collect();
    for pattern in &lora.modules_to_save {
        if !names.iter().any(|name| lockstep_shape::target_matches(pattern, name)) {
            let closest = closest(pattern, names.iter().copied()).map(str::to_owned);
            return Err(TrainError::LoraTarget { pattern: pattern.clone(), closest });
        }
    }
    Ok(())
}

fn module_of(tensor: &str) -> &str {
    tensor.trim_end_matches(".weight").trim_end_matches(".bias")
}

/// The adapters of a folder. What is adapted follows from its tensors, so that patterns of any kind are understood.
pub(crate) fn of_folder(folder: &AdapterFolder, shape: &ModelShape) -> Result<Lora, TrainError> {
    let config = folder.config();
    let mut targets = vec![Vec::new(); shape.layers];
    let (mut modules_to_save, mut unknown) = (Vec::new(), Vec::new());
    for (name, _) in folder.tensors() {
        let Some(module) = name.strip_suffix(LORA_A).or_else(|| name.strip_suffix(LORA_B)) else {
            modules_to_save.push(module_of(name).to_owned());
            continue;
        };
        let all = (0..shape.layers).flat_map(|layer| Projection::ALL.map(|of| (layer, of)));
        match all.into_iter().find(|(layer, of)| of.module(*layer) == module) {
            Some((layer, of)) if !targets[layer].contains(&of) => targets[layer].push(of),
            Some(_) => {}
            None => unknown.push(name.to_owned()),
        }
    }
    if !unknown.is_empty() {
        return Err(TrainError::UnusedTensors { folder: folder.path().into(), names: unknown });
    }
    let in_order = |of: &Projection| Projection::ALL.iter().position(|other| other == of);
    targets.iter_mut().for_each(|layer| layer.sort_by_key(in_order));
    modules_to_save.dedup();
    let lora = Lora {
        rank: config.rank,
        alpha: config.alpha,
        dropout: config.dropout,
        rank_stabilized: config.rank_stabilized,
        targets,
        modules_to_save,
    };
    check_modules(&lora, shape)?;
    Ok(lora)
}

/// The folder of a model and that of its adapter. `path` may be the adapter itself, or the output folder of a run.
pub fn model_and_adapter(
    path: &Path,
    adapter: Option<&Path>,
) -> Result<(PathBuf, Option<PathBuf>), TrainError> {
    if let Some(missing) = [Some(path), adapter].into_iter().flatten().find(|path| !path.exists()) {
        return Err(TrainError::ModelMissing { path: missing.into() });
    }
    let (path, adapter) = (model_folder(path), adapter.map(model_folder));
    if adapter.is_some() || !AdapterFolder::is_one(&path) {
        return Ok((path, adapter));
    }
    match AdapterFolder::open(&path)?.config().base_model.clone() {
        Some(base) if Path::new(&base).is_dir() => Ok((base.into(), Some(path))),
        name => Err(TrainError::BaseModel { name }),
    }
}

/// Checks that every tensor of the adapters is in a folder, in its shape.
pub(crate) fn check(folder: &AdapterFolder, shape: &ModelShape) -> Result<(), TrainError> {
    let units = lockstep_shape::units(shape, &Default::default(), false);
    for segment in units.iter().flat_map(|unit| &unit.segments).filter(|segment| segment.is_trained()) {
        folder.read_f32(&segment.name, &segment.shape, 0..0, &mut [])?;
    }
    Ok(())
}

/// Loads the adapters of a folder into a model: the part of each tensor that this rank holds. Returns the bytes read.
pub(crate) fn load(engine: &mut Engine, model: ModelId, path: &Path) -> Result<Bytes, TrainError> {
    let folder = AdapterFolder::open(path)?;
    let stored: Vec<String> = folder.tensors().map(|(name, _)| name.to_owned()).collect();
    let mut values = vec![0f32; CHUNK_ELEMS];
    for (unit, segment) in all_tensors(engine, model) {
        if !stored.contains(&segment.name) {
            continue;
        }
        let written = engine.model(model).written_ranges(unit, &segment, ParamState::Working);
        for part in written.into_iter().flat_map(chunks) {
            let values = &mut values[..part.len()];
            folder.read_f32(&segment.name, &segment.shape, part.clone(), values)?;
            engine.model_mut(model).write(unit, &segment, ParamState::Working, part, values)?;
        }
    }
    Ok(folder.bytes_read())
}

/// `adapter_config.json` of a run's adapters.
pub(crate) fn config_text(lora: &Lora, shape: &ModelShape, source: &ModelSource) -> String {
    let is_uniform = lora.targets.windows(2).all(|pair| pair[0] == pair[1]);
    let short = |of: &Projection| of.module(0).rsplit('.').next().unwrap_or_default().to_owned();
    let target_modules = match (is_uniform, lora.targets.first()) {
        (true, Some(targets)) => targets.iter().map(short).collect(),
        _ => {
            let layers = lora.targets.iter().enumerate();
            layers.flat_map(|(layer, targets)| targets.iter().map(move |of| of.module(layer))).collect()
        }
    };
    AdapterConfig {
        rank: lora.rank,
        alpha: lora.alpha,
        dropout: lora.dropout,
        rank_stabilized: lora.rank_stabilized,
        target_modules,
        modules_to_save: lora.modules_to_save.clone(),
        base_model: match source {
            ModelSource::Folder(path) => Some(hub_name(path).unwrap_or_else(|| path.display().to_string())),
            _ => None,
        },
        is_classifier: shape.head == Head::Score,
    }
    .to_text()
}

/// The name of a model whose folder is a snapshot in the Hub's cache: `models--ORG--NAME/snapshots/COMMIT`.
fn hub_name(path: &Path) -> Option<String> {
    let snapshots = path.parent()?;
    let repository = snapshots.parent()?.file_name()?.to_str()?;
    let is_cached = snapshots.file_name()? == "snapshots";
    Some(repository.strip_prefix("models--").filter(|_| is_cached)?.replacen("--", "/", 1))
}

/// The tensors of an adapter's folder, with the names that the model gives them.
pub(crate) fn saved_tensors(engine: &Engine, model: ModelId) -> Vec<TensorSpec> {
    let trained = all_tensors(engine, model).into_iter().filter(|(_, segment)| segment.is_trained());
    trained.map(|(_, segment)| TensorSpec::new(adapter_tensor_name(&segment.name), segment.shape)).collect()
}

/// The files and tensors of an adapter's folder.
pub(crate) fn export<'a>(
    files: &'a [(String, Vec<u8>)],
    tensors: &'a [TensorSpec],
    dtype: lockstep_core::DType,
) -> Export<'a> {
    Export { kind: FolderKind::Adapter, files, tensors, dtype, shard_limit: Bytes(u64::MAX) }
}

/// A hash of a model folder's weights. Files are hashed at the same time.
pub(crate) fn base_hash(path: &Path) -> Result<String, TrainError> {
    let folder = ModelFolder::open(path)?;
    let files: Vec<PathBuf> = folder.weight_files().map(Path::to_path_buf).collect();
    let hash = |file: &PathBuf| {
        let cannot = |cause| TrainError::Input { path: file.clone(), cause };
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(File::open(file).map_err(cannot)?).map_err(cannot)?;
        Ok(hasher.finalize())
    };
    let hashes: Result<Vec<blake3::Hash>, TrainError> = std::thread::scope(|scope| {
        let started: Vec<_> = files.iter().map(|file| scope.spawn(|| hash(file))).collect();
        started.into_iter().map(|one| one.join().expect("hashing does not panic")).collect()
    });
    let mut all = blake3::Hasher::new();
    for one in hashes? {
        all.update(one.as_bytes());
    }
    Ok(all.finalize().to_hex()[..32].to_string())
}
