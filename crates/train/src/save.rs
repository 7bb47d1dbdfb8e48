//! Loads weights, saves and loads checkpoints, and exports model folders.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use lockstep_ckpt::{
    Checkpoint, CheckpointWriter, CkptError, DEFAULT_SHARD_BYTES, DataCursor, Export, FolderKind, Meta,
    ModelFolder, PieceSpec, TensorBox, TensorPart, TensorSpec, export_folder, model_tensor_name,
};
use lockstep_core::{DType, Rank, Step};
use lockstep_data::Tokenizer;
use lockstep_engine::{Engine, EngineError};
use lockstep_plan::{ModelId, ModelRole, ParamState};
use lockstep_shape::{Freeze, Head, ModelShape, Segment};
use serde_json::{Map, Value};

use crate::adapter;
use crate::error::TrainError;
use crate::numerics::NumericsFingerprint;
use crate::position::Position;
use crate::quantise::{self, TensorReader};
use crate::scaler::ScaleState;

/// The model that model folders hold.
const POLICY: ModelId = ModelId::FIRST;

/// A state of a model that checkpoints contain.
#[derive(Clone, Debug)]
struct SavedState {
    model: ModelId,
    state: ParamState,
    /// The first part of its tensors' names in a checkpoint: `model`, `exp_avg`, `value.model`, …
    prefix: String,
}

/// The states that a checkpoint contains: the parameters and optimizer states of every trained model, and the
/// parameters of a reference model that follows the policy.
fn states(engine: &Engine, syncs_reference: bool) -> Vec<SavedState> {
    let models = engine.plan().input.models.iter().enumerate();
    let saved =
        models.filter(|(_, model)| model.trains() || syncs_reference && model.role == ModelRole::Reference);
    let states = saved.flat_map(|(i, model)| {
        let owner = match model.role {
            ModelRole::Policy => String::new(),
            other => format!("{}.", format!("{other:?}").to_lowercase()),
        };
        let optimizer = model.trains().then_some(model.optimizer);
        let own = optimizer.into_iter().flat_map(|spec| {
            let names: Vec<&'static str> = spec.states.iter().map(|state| state.name).collect();
            names.into_iter().zip(spec.states().collect::<Vec<_>>())
        });
        let all: Vec<_> = std::iter::once(("model", ParamState::Working)).chain(own).collect();
        let model = ModelId(i as u8);
        all.into_iter().map(move |(name, state)| SavedState {
            model,
            state,
            prefix: format!("{owner}{name}"),
        })
    });
    states.collect()
}

/// Whether checkpoints contain the parameters of a model.
pub(crate) fn is_saved(engine: &Engine, model: ModelId, syncs_reference: bool) -> bool {
    states(engine, syncs_reference).iter().any(|saved| saved.model == model)
}

/// Elements to copy at a time between files and the engine.
pub(crate) const CHUNK_ELEMS: usize = 1 << 20;

/// The weight of a scalar head. A language model's folder does not have it: a reward or value model that starts from
/// one gets a new head.
const SCORE_WEIGHT: &str = "score.weight";

/// Whether a folder has a tensor of the model. Only the weight of a new scalar head and adapters may be absent.
fn is_stored(folder: &ModelFolder, segment: &Segment) -> bool {
    let is_new = segment.name == SCORE_WEIGHT && !folder.tensors().any(|tensor| tensor.name == SCORE_WEIGHT);
    !is_new && !segment.is_adapter()
}

/// Checks the headers of a model folder's weights: every tensor exists in its shape, and there are no others.
pub(crate) fn check_weights(folder: &ModelFolder, shape: &ModelShape) -> Result<(), TrainError> {
    let units = lockstep_shape::units(shape, &Freeze::Nothing, false);
    let segments: Vec<_> = units.iter().flat_map(|unit| &unit.segments).collect();
    let mut names: Vec<String> = segments.iter().map(|s| s.name.clone()).collect();
    if shape.tied || shape.head == Head::Score {
        names.push("lm_head.weight".into());
    }
    let mut stored: Vec<&Segment> = Vec::new();
    for segment in segments.into_iter().filter(|segment| is_stored(folder, segment)) {
        match folder.stored_nf4(&segment.name, &segment.shape)? {
            Some(_) => names.extend(ModelFolder::nf4_names(&segment.name)),
            None => stored.push(segment),
        }
    }
    let unused: Vec<String> = folder
        .unused(names.iter().map(String::as_str))
        .into_iter()
        .filter(|name| !name.ends_with("rotary_emb.inv_freq"))
        .collect();
    if !unused.is_empty() {
        return Err(TrainError::UnusedTensors { folder: folder.path().to_path_buf(), names: unused });
    }
    for segment in stored {
        folder.read_f32(&segment.name, &segment.shape, 0..0, &mut [])?;
    }
    Ok(())
}

/// Loads the weights of a folder that was checked: the part of each tensor that this rank holds. Adapters, and a scalar
/// head that the folder does not have, are initialised from the seed.
pub(crate) fn load_weights(
    engine: &mut Engine,
    model: ModelId,
    folder: &ModelFolder,
    seed: u64,
) -> Result<(), TrainError> {
    let mut values = vec![0f32; CHUNK_ELEMS];
    for (unit, segment) in all_tensors(engine, model) {
        if !is_stored(folder, &segment) {
            engine.model_mut(model).initialise_tensor(unit, &segment, seed)?;
            continue;
        }
        if segment.quantised {
            quantise::load(engine, model, folder, (unit, &segment))?;
            continue;
        }
        let reader = TensorReader::open(folder, &segment.name, &segment.shape)?;
        let written = engine.model(model).written_ranges(unit, &segment, ParamState::Working);
        for part in written.into_iter().flat_map(chunks) {
            let values = &mut values[..part.len()];
            reader.read(part.clone(), values)?;
            engine.model_mut(model).write(unit, &segment, ParamState::Working, part, values)?;
        }
    }
    Ok(())
}

/// Saves a checkpoint: every rank writes the state it owns, and rank 0 writes `files` and the manifest.
pub(crate) fn save_checkpoint(
    engine: &Engine,
    root: &Path,
    position: &Position,
    identity: &RunIdentity,
    files: &[(String, Vec<u8>)],
) -> Result<PathBuf, TrainError> {
    let (step, rank) = (Step(position.step), engine.rank());
    let begun = if rank == Rank(0) { Some(CheckpointWriter::begin(root, step)?) } else { None };
    engine.barrier("the start of a checkpoint")?;
    let mut writer = begun.unwrap_or_else(|| CheckpointWriter::join(root, step));
    for saved in states(engine, identity.syncs_reference) {
        let pieces = owned_pieces(engine, &saved);
        if !pieces.is_empty() {
            let specs: Vec<PieceSpec> = pieces.iter().map(|p| p.spec.clone()).collect();
            let file = format!("{}-rank-{}.safetensors", saved.prefix, rank.0);
            writer.write_pieces(&file, &specs, DType::F32, &mut |i, range, out| {
                let OwnedPiece { unit, segment, start, .. } = &pieces[i];
                read_state(engine, &saved, *unit, segment, start + range.start..start + range.end, out)
            })?;
        }
    }
    if rank != Rank(0) {
        engine.all_gather_bytes("a checkpoint", writer.share()?.as_bytes())?;
        engine.barrier("the end of a checkpoint")?;
        return Ok(root.join(format!("step-{step}")));
    }
    for share in engine.all_gather_bytes("a checkpoint", &[])?.into_iter().skip(1) {
        writer.add_share(&String::from_utf8_lossy(&share))?;
    }
    for (name, content) in identity.model_files.iter().chain(files) {
        writer.write_file(name, content)?;
    }
    let mut counters = position.counters();
    counters.extend(identity.switches.map(|(name, on)| (name.to_string(), on.into())));
    let meta = Meta {
        step: Step(position.step),
        world: engine.plan().input.mesh.world_size(),
        counters,
        reals: position.reals(),
        data: DataCursor { next_step: position.step, ..identity.data.clone() },
        config_hash: identity.config_hash.clone(),
        tokenizer_hash: identity.tokenizer_hash.clone(),
        run_config: identity.run_config.clone(),
        numbers: identity.numerics.record(),
        settings: identity.settings.clone(),
    };
    let path = writer.finish(meta)?;
    engine.barrier("the end of a checkpoint")?;
    Ok(path)
}

/// A piece of a tensor that this rank writes.
struct OwnedPiece {
    spec: PieceSpec,
    unit: usize,
    segment: lockstep_shape::Segment,
    /// The flat index of its first element in the tensor.
    start: usize,
}

fn owned_pieces(engine: &Engine, saved: &SavedState) -> Vec<OwnedPiece> {
    let mut pieces = Vec::new();
    let model = engine.model(saved.model);
    for (unit, segment) in all_tensors(engine, saved.model) {
        if !is_in_checkpoint(engine, saved, &segment) {
            continue;
        }
        let truth = model.authoritative_state(unit, &segment, saved.state);
        let Some(own) = model.owned(unit, &segment, truth).filter(|_| model.is_writer(truth)) else {
            continue;
        };
        let mut start = own.start;
        for part in TensorBox::of_range(&segment.shape, own) {
            let (elems, shape) = (part.elems(), segment.shape.clone());
            let spec = PieceSpec { name: format!("{}/{}", saved.prefix, segment.name), shape, part };
            pieces.push(OwnedPiece { spec, unit, segment: segment.clone(), start });
            start += elems;
        }
    }
    pieces
}

/// Whether checkpoints contain a state of a tensor. A run that trains adapters does not save the weights it started from:
/// checkpoints have their hash ([`BASE_HASH`]).
fn is_in_checkpoint(engine: &Engine, saved: &SavedState, segment: &Segment) -> bool {
    let has_adapters = engine.model(saved.model).plan().shape.lora.is_some();
    segment.is_trained() || saved.state == ParamState::Working && !has_adapters
}

/// The key of the hash of the weights that adapters belong to, among the settings in a checkpoint.
pub(crate) const BASE_HASH: &str = "base_model_hash";

/// What identifies a run: a resumed run must have the same data and tokenizer.
#[derive(Clone, Debug)]
pub(crate) struct RunIdentity {
    pub(crate) data: DataCursor,
    /// Further settings that determine the order of the data.
    pub(crate) switches: [(&'static str, bool); 2],
    pub(crate) config_hash: String,
    pub(crate) tokenizer_hash: String,
    pub(crate) run_config: String,
    /// A resumed run may have a different fingerprint; differences are reported.
    pub(crate) numerics: NumericsFingerprint,
    pub(crate) settings: BTreeMap<String, String>,
    /// The files of a model folder besides its weights, so that a checkpoint can be exported.
    pub(crate) model_files: Vec<(String, Vec<u8>)>,
    /// Whether the reference model follows the policy, so that checkpoints contain it.
    pub(crate) syncs_reference: bool,
}

/// Loads a checkpoint into the engine. A rank reads the part of each tensor that it holds.
pub(crate) fn load_checkpoint(
    engine: &mut Engine,
    checkpoint: &Checkpoint,
    identity: &RunIdentity,
    scale: Option<ScaleState>,
) -> Result<Position, TrainError> {
    let meta = checkpoint.meta();
    let (then, now) = (&meta.data, &identity.data);
    let differs = |what: &'static str, then: String, now: String| TrainError::ResumeMismatch {
        path: checkpoint.path().to_path_buf(),
        what,
        then,
        now,
    };
    for (what, then, now) in [
        ("rows per step", then.rows_per_step, now.rows_per_step),
        ("dataset rows", then.num_rows, now.num_rows),
        ("data_seed", then.seed, now.seed),
    ] {
        if then != now {
            return Err(differs(what, then.to_string(), now.to_string()));
        }
    }
    for (what, then, now) in [
        ("tokenizer hash", &meta.tokenizer_hash, &identity.tokenizer_hash),
        ("dataset hash", &then.fingerprint, &now.fingerprint),
    ] {
        if then != now {
            let brief = |hash: &str| hash.chars().take(12).collect();
            return Err(differs(what, brief(then), brief(now)));
        }
    }
    if let (Some(then), Some(now)) = (meta.settings.get(BASE_HASH), identity.settings.get(BASE_HASH))
        && then != now
    {
        return Err(differs("base model hash", then.clone(), now.clone()));
    }
    for (what, now) in identity.switches {
        let then = checkpoint.counter(what)? != 0;
        if then != now {
            return Err(differs(what, then.to_string(), now.to_string()));
        }
    }
    let position = Position::of(checkpoint, scale)?;
    let saved = states(engine, identity.syncs_reference);
    let known = |name: &str| {
        let (prefix, name) = name.split_once('/').unwrap_or(("model", name));
        saved.iter().any(|one| one.prefix == prefix && engine.model(one.model).find_tensor(name).is_some())
    };
    check_optimizer(engine, checkpoint, &saved)?;
    let unused: Vec<String> =
        checkpoint.tensors().map(|(name, _)| name).filter(|name| !known(name)).map(str::to_string).collect();
    if !unused.is_empty() {
        return Err(TrainError::UnusedTensors { folder: checkpoint.path().to_path_buf(), names: unused });
    }
    let mut wanted = Vec::new();
    let mut targets = Vec::new();
    for one in &saved {
        let SavedState { model, state, prefix } = one;
        for (unit, segment) in all_tensors(engine, *model) {
            if !is_in_checkpoint(engine, one, &segment) {
                continue;
            }
            let mut held = engine.model(*model).written_ranges(unit, &segment, *state);
            if held.is_empty() {
                // Request an empty range anyway, so that every rank rejects a checkpoint without this tensor.
                held.push(0..0);
            }
            for elems in held {
                let (name, shape) = (format!("{prefix}/{}", segment.name), segment.shape.clone());
                wanted.push(TensorPart { name, shape, elems });
                targets.push((*model, unit, segment.clone(), *state));
            }
        }
    }
    checkpoint.read_parts(&wanted, |index, range, values| -> Result<(), TrainError> {
        let (model, unit, segment, state) = &targets[index];
        Ok(engine.model_mut(*model).write(*unit, segment, *state, range, values)?)
    })?;
    Ok(position)
}

/// Checks that a checkpoint's states are those of this run's optimizer. All state names must match: two optimizers may
/// use the same name for different states.
fn check_optimizer(engine: &Engine, checkpoint: &Checkpoint, saved: &[SavedState]) -> Result<(), TrainError> {
    let prefixes = checkpoint.tensors().filter_map(|(name, _)| Some(name.split_once('/')?.0));
    let then: BTreeSet<&str> = prefixes.collect();
    let now: BTreeSet<&str> = saved.iter().map(|saved| saved.prefix.as_str()).collect();
    if then == now {
        return Ok(());
    }
    let words = |all: &BTreeSet<&str>| {
        let states: Vec<&str> = all.iter().copied().filter(|name| *name != "model").collect();
        if states.is_empty() { "none".into() } else { states.join(" and ") }
    };
    Err(TrainError::OtherOptimizer {
        checkpoint: checkpoint.path().to_path_buf(),
        then: words(&then),
        optimizer: engine.model(POLICY).plan().optimizer.name,
        now: words(&now),
    })
}

/// The files of a model folder besides its weights: `config.json`, `generation_config.json` and the tokenizer files. A
/// model that was loaded from a folder keeps that folder's first two (`folder_texts`), which may contain keys that
/// Lockstep does not use.
pub(crate) fn model_files(
    shape: &ModelShape,
    folder_texts: &[Option<String>; 2],
    tokenizer: &Tokenizer,
    dtype: DType,
) -> Vec<(String, Vec<u8>)> {
    let config = config_text(shape, folder_texts[0].as_deref(), dtype, pad_id(tokenizer));
    let generation_config = folder_texts[1].clone().unwrap_or_else(|| shape.generation_config_text());
    let mut files = vec![("config.json".to_string(), config.into_bytes())];
    if !generation_config.is_empty() {
        files.push(("generation_config.json".into(), generation_config.into_bytes()));
    }
    files.extend(tokenizer.files().iter().cloned());
    files
}

/// Checks before training that the files of [`model_files`] can be written to a model folder.
pub(crate) fn check_writable(tokenizer: &Tokenizer) -> Result<(), TrainError> {
    let others = tokenizer.files().iter().map(|(name, _)| name.as_str());
    Ok(lockstep_ckpt::check_model_files(["config.json", "generation_config.json"].into_iter().chain(others))?)
}

/// Exports a model folder that transformers can load, or an adapter folder that PEFT can load, with `files` besides the weights. A collective call.
pub(crate) fn export(engine: &Engine, files: &[(String, Vec<u8>)], dir: &Path) -> Result<(), TrainError> {
    let dtype = engine.working_dtype();
    let is_adapter = engine.model(POLICY).plan().shape.lora.is_some();
    let tensors: Vec<TensorSpec> = match is_adapter {
        true => adapter::saved_tensors(engine, POLICY),
        false => {
            all_tensors(engine, POLICY).into_iter().map(|(_, s)| TensorSpec::new(s.name, s.shape)).collect()
        }
    };
    let export = match is_adapter {
        // Adapters are small, and PEFT's are f32 as well.
        true => adapter::export(files, &tensors, DType::F32),
        false => {
            let kind = FolderKind::Model;
            Export { kind, files, tensors: &tensors, dtype, shard_limit: DEFAULT_SHARD_BYTES }
        }
    };
    if engine.rank() != Rank(0) {
        return serve_reads(engine);
    }
    export_folder(dir, &export, &mut |name, part, out| {
        let name = if is_adapter { model_tensor_name(name) } else { name };
        let (unit, segment) = engine.model(POLICY).find_tensor(name).expect("the names come from the engine");
        request_part(engine, Some((name, &part))).map_err(|e| source_failed(name, e))?;
        let read = engine.model(POLICY).read_whole(unit, segment, ParamState::Working, part, out);
        read.map(drop).map_err(|e| source_failed(name, e))
    })?;
    Ok(request_part(engine, None)?)
}

/// Rank 0 announces which part of which tensor it reads next; the others send what they hold of it. `None` ends the
/// export.
fn request_part(engine: &Engine, part: Option<(&str, &Range<usize>)>) -> Result<(), EngineError> {
    let text = part.map_or(String::new(), |(name, range)| format!("{} {} {name}", range.start, range.end));
    engine.all_gather_bytes("the export", text.as_bytes()).map(drop)
}

/// The other ranks' side of [`request_part`].
fn serve_reads(engine: &Engine) -> Result<(), TrainError> {
    let mut values = Vec::new();
    loop {
        let wanted = engine.all_gather_bytes("the export", &[])?.swap_remove(0);
        let wanted = String::from_utf8_lossy(&wanted).into_owned();
        let mut words = wanted.splitn(3, ' ');
        let mut number = || words.next().and_then(|w| w.parse::<usize>().ok());
        let (Some(start), Some(end)) = (number(), number()) else { return Ok(()) };
        let name = words.next().expect("rank 0 names the tensor");
        let (unit, segment) = engine.model(POLICY).find_tensor(name).expect("the names come from the engine");
        values.resize(end - start, 0.0);
        engine.model(POLICY).read_whole(unit, segment, ParamState::Working, start..end, &mut values)?;
    }
}

fn source_failed(name: &str, error: EngineError) -> CkptError {
    CkptError::Source { tensor: name.to_string(), source: Box::new(error) }
}

/// The id of the tokenizer's pad token. `None` if there is none, or if it is the end token: transformers reads the reward
/// of a sequence at the last token that is not padding, and would not see the end.
fn pad_id(tokenizer: &Tokenizer) -> Option<u32> {
    let (_, text) = tokenizer.special_tokens().iter().find(|(name, _)| name == "pad_token")?;
    match tokenizer.encode_plain(text).ok()?[..] {
        [id] if Some(id) != tokenizer.eos_id() => Some(id),
        _ => None,
    }
}

/// The folder's `config.json` with the new dtype and missing keys filled in, or one generated from the shape.
fn config_text(shape: &ModelShape, folder: Option<&str>, dtype: DType, pad: Option<u32>) -> String {
    let generated = shape.to_hf_text(dtype);
    let parsed = |text: &str| serde_json::from_str::<Map<String, Value>>(text).ok();
    let Some(generated) = parsed(&generated) else { return generated };
    let mut config = folder.and_then(parsed).unwrap_or_else(|| generated.clone());
    // It refers to Python code that is not exported.
    config.remove("auto_map");
    // Exported weights are not quantised.
    config.remove("quantization_config");
    if shape.head == Head::Score {
        // The folder may be a language model's.
        config.remove("num_labels");
        for key in ["architectures", "id2label", "label2id"] {
            config.insert(key.into(), generated[key].clone());
        }
        config.insert("pad_token_id".into(), pad.into());
    }
    let dtypes = ["dtype", "torch_dtype"];
    let has_dtype = dtypes.iter().any(|key| config.contains_key(*key));
    for (key, value) in generated {
        let changed = match config.get(&key) {
            Some(_) if dtypes.contains(&key.as_str()) => true,
            None => dtypes.contains(&key.as_str()) && !has_dtype,
            Some(old) => old.is_null(),
        };
        if changed {
            config.insert(key, value);
        }
    }
    format!("{:#}\n", Value::Object(config))
}

pub(crate) fn all_tensors(engine: &Engine, model: ModelId) -> Vec<(usize, lockstep_shape::Segment)> {
    let units = engine.model(model).units().iter().enumerate();
    units.flat_map(|(u, unit)| unit.segments.iter().map(move |s| (u, s.clone()))).collect()
}

fn read_state(
    engine: &Engine,
    saved: &SavedState,
    unit: usize,
    segment: &lockstep_shape::Segment,
    part: Range<usize>,
    out: &mut [f32],
) -> Result<(), CkptError> {
    let read = engine
        .model(saved.model)
        .read(unit, segment, saved.state, part, out)
        .map_err(|e| source_failed(&segment.name, e))?;
    assert!(read, "{} has no such state", segment.name);
    Ok(())
}

pub(crate) fn chunks(elems: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    elems.clone().step_by(CHUNK_ELEMS).map(move |start| start..(start + CHUNK_ELEMS).min(elems.end))
}

#[cfg(test)]
mod tests;
