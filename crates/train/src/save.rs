//! Weights in, checkpoints in and out, the model folder out.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use lockstep_ckpt::{
    Checkpoint, CheckpointWriter, CkptError, DEFAULT_SHARD_BYTES, DataCursor, Export, Meta, ModelFolder,
    TensorSpec, export_folder,
};
use lockstep_config::Resume;
use lockstep_core::{DType, Step};
use lockstep_data::Tokenizer;
use lockstep_engine::Engine;
use lockstep_plan::State;
use lockstep_shape::ModelShape;
use serde_json::{Map, Value};

use crate::error::TrainError;

/// The states a checkpoint holds, by the names it holds them under.
const STATES: [(&str, State); 3] =
    [("model", State::Working), ("exp_avg", State::ExpAvg), ("exp_avg_sq", State::ExpAvgSq)];

/// Elements moved at a time between files and the engine.
const PART: usize = 1 << 20;

/// Where a run stands: what a checkpoint says beside its tensors.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Position {
    pub(crate) step: u64,
    pub(crate) updates: u64,
    pub(crate) tokens_total: u64,
}

/// Checks a model folder's weights by their headers: every tensor is there in its shape, and nothing else.
pub(crate) fn check_weights(folder: &ModelFolder, shape: &ModelShape) -> Result<(), TrainError> {
    let units = lockstep_shape::units(shape, false, None, false);
    let segments: Vec<_> = units.iter().flat_map(|unit| &unit.segments).collect();
    let mut names: Vec<&str> = segments.iter().map(|s| s.name.as_str()).collect();
    if shape.tied {
        names.push("lm_head.weight");
    }
    let unused: Vec<String> =
        folder.unused(names).into_iter().filter(|name| !name.ends_with("rotary_emb.inv_freq")).collect();
    if !unused.is_empty() {
        return Err(TrainError::UnusedTensors { folder: folder.path().to_path_buf(), names: unused });
    }
    for segment in segments {
        folder.read_f32(&segment.name, &segment.shape, 0..0, &mut [])?;
    }
    Ok(())
}

/// Loads the weights of a folder that was checked.
pub(crate) fn load_weights(engine: &mut Engine, folder: &ModelFolder) -> Result<(), TrainError> {
    let mut values = vec![0f32; PART];
    for (unit, segment) in all_tensors(engine) {
        for part in parts(segment.elems()) {
            let values = &mut values[..part.len()];
            folder.read_f32(&segment.name, &segment.shape, part.clone(), values)?;
            engine.write(unit, &segment, State::Working, part, values);
        }
    }
    Ok(())
}

/// Writes a checkpoint of the run as it stands.
pub(crate) fn save_checkpoint(
    engine: &Engine,
    root: &Path,
    position: &Position,
    identity: &Identity,
) -> Result<PathBuf, TrainError> {
    let mut writer = CheckpointWriter::begin(root, Step(position.step))?;
    for (prefix, state) in STATES {
        let specs: Vec<TensorSpec> = all_tensors(engine)
            .into_iter()
            .filter(|(_, s)| state == State::Working || s.trainable)
            .map(|(_, s)| TensorSpec::new(format!("{prefix}/{}", s.name), s.shape))
            .collect();
        let mut read = reader(engine, prefix, state);
        writer.write_shard(&format!("{prefix}-rank-0.safetensors"), &specs, DType::F32, &mut read)?;
    }
    let mut counters = BTreeMap::from([
        ("updates".to_string(), position.updates),
        ("tokens_total".to_string(), position.tokens_total),
    ]);
    counters.extend(identity.switches.map(|(name, on)| (name.to_string(), on.into())));
    let meta = Meta {
        step: Step(position.step),
        world: 1,
        counters,
        reals: BTreeMap::new(),
        data: DataCursor { next_step: position.step, ..identity.data.clone() },
        config_hash: identity.config_hash.clone(),
        tokenizer_hash: identity.tokenizer_hash.clone(),
        run_config: identity.run_config.clone(),
    };
    Ok(writer.finish(meta)?)
}

/// What must be the same when a run goes on.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) data: DataCursor,
    /// Keys beside the cursor that decide the order of the data.
    pub(crate) switches: [(&'static str, bool); 2],
    pub(crate) config_hash: String,
    pub(crate) tokenizer_hash: String,
    pub(crate) run_config: String,
}

/// Finds the checkpoint to go on from. Damaged ones are passed over and told through `note`.
pub(crate) fn find_checkpoint(
    resume: &Resume,
    root: &Path,
    note: &mut dyn FnMut(&str),
) -> Result<Option<Checkpoint>, TrainError> {
    let root = match resume {
        Resume::No => return Ok(None),
        Resume::Latest => root.to_path_buf(),
        Resume::Path(path) if path.file_name().is_some_and(|n| n == "latest") => {
            path.parent().unwrap_or(path).to_path_buf()
        }
        Resume::Path(path) if !path.exists() => {
            return Err(TrainError::NothingToResume { dir: path.clone() });
        }
        Resume::Path(path) => return Ok(Some(Checkpoint::open_verified(path)?)),
    };
    let (found, skipped) = lockstep_ckpt::open_latest(&root)?;
    for damaged in &skipped {
        note(&format!("checkpoint passed over: {}", damaged.why));
    }
    match (found, skipped.first()) {
        (Some(checkpoint), _) => Ok(Some(checkpoint)),
        (None, Some(damaged)) => Err(TrainError::AllDamaged { dir: root, why: damaged.why.to_string() }),
        (None, None) => Err(TrainError::NothingToResume { dir: root }),
    }
}

/// Brings an engine to where a checkpoint was made.
pub(crate) fn load_checkpoint(
    engine: &mut Engine,
    checkpoint: &Checkpoint,
    identity: &Identity,
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
        ("rows in the data set", then.num_rows, now.num_rows),
        ("data_seed", then.seed, now.seed),
    ] {
        if then != now {
            return Err(differs(what, then.to_string(), now.to_string()));
        }
    }
    for (what, then, now) in [
        ("tokenizer hash", &meta.tokenizer_hash, &identity.tokenizer_hash),
        ("data set hash", &then.fingerprint, &now.fingerprint),
    ] {
        if then != now {
            let brief = |hash: &str| hash.chars().take(12).collect();
            return Err(differs(what, brief(then), brief(now)));
        }
    }
    for (what, now) in identity.switches {
        let then = checkpoint.counter(what)? != 0;
        if then != now {
            return Err(differs(what, then.to_string(), now.to_string()));
        }
    }
    let tensors = all_tensors(engine);
    let known = |name: &str| {
        let name = name.split_once('/').map_or(name, |(_, name)| name);
        engine.find_tensor(name).is_some()
    };
    let unused: Vec<String> =
        checkpoint.tensors().map(|(name, _)| name).filter(|name| !known(name)).map(str::to_string).collect();
    if !unused.is_empty() {
        return Err(TrainError::UnusedTensors { folder: checkpoint.path().to_path_buf(), names: unused });
    }
    let mut values = vec![0f32; PART];
    for (prefix, state) in STATES {
        for (unit, segment) in &tensors {
            if state != State::Working && !segment.trainable {
                continue;
            }
            let name = format!("{prefix}/{}", segment.name);
            for part in parts(segment.elems()) {
                let values = &mut values[..part.len()];
                checkpoint.read_f32(&name, &segment.shape, part.clone(), values)?;
                engine.write(*unit, segment, state, part, values);
            }
        }
    }
    Ok(Position {
        step: checkpoint.step().0,
        updates: checkpoint.counter("updates")?,
        tokens_total: checkpoint.counter("tokens_total")?,
    })
}

/// Writes a folder that transformers loads. A model that came from a folder keeps that folder's
/// `config.json` and `generation_config.json`, `folder_texts`: they say more than this program reads.
pub(crate) fn export(
    engine: &Engine,
    shape: &ModelShape,
    folder_texts: &[Option<String>; 2],
    tokenizer: &Tokenizer,
    dir: &Path,
) -> Result<(), TrainError> {
    let dtype = engine.working_dtype();
    let tensors: Vec<TensorSpec> =
        all_tensors(engine).into_iter().map(|(_, s)| TensorSpec::new(s.name, s.shape)).collect();
    let generation_config = folder_texts[1].clone().unwrap_or_else(|| shape.generation_config_text());
    let export = Export {
        config_json: &config_text(shape, folder_texts[0].as_deref(), dtype),
        generation_config: &generation_config,
        extra_files: tokenizer.files(),
        tensors: &tensors,
        dtype,
        shard_limit: DEFAULT_SHARD_BYTES,
    };
    Ok(export_folder(dir, &export, &mut reader(engine, "", State::Working))?)
}

/// The folder's `config.json` with what has changed, or one made from the shape.
fn config_text(shape: &ModelShape, folder: Option<&str>, dtype: DType) -> String {
    let made = shape.to_hf_text(dtype);
    let parsed = |text: &str| serde_json::from_str::<Map<String, Value>>(text).ok();
    let (Some(mut config), Some(made)) = (folder.and_then(parsed), parsed(&made)) else { return made };
    // No code comes from files, and none goes along.
    config.remove("auto_map");
    let dtypes = ["dtype", "torch_dtype"];
    let has_dtype = dtypes.iter().any(|key| config.contains_key(*key));
    for (key, value) in made {
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

fn all_tensors(engine: &Engine) -> Vec<(usize, lockstep_shape::Segment)> {
    let units = engine.units().iter().enumerate();
    units.flat_map(|(u, unit)| unit.segments.iter().map(move |s| (u, s.clone()))).collect()
}

/// Reads tensors named `prefix/name` (or plain names for an empty prefix) out of the engine.
fn reader<'e>(
    engine: &'e Engine,
    prefix: &'e str,
    state: State,
) -> impl FnMut(&str, Range<usize>, &mut [f32]) -> Result<(), CkptError> + 'e {
    move |name, part, out| {
        let name = name.strip_prefix(prefix).map_or(name, |n| n.trim_start_matches('/'));
        let (unit, segment) = engine.find_tensor(name).expect("the names come from the engine");
        assert!(engine.read(unit, segment, state, part, out), "{name} has no such state");
        Ok(())
    }
}

fn parts(elems: usize) -> impl Iterator<Item = Range<usize>> {
    (0..elems).step_by(PART).map(move |start| start..(start + PART).min(elems))
}
