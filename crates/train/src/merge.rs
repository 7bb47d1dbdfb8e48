//! Merges an adapter into the model it belongs to: W + scale · B·A for every adapted weight.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use lockstep_ckpt::{
    AdapterConfig, AdapterFolder, Checkpoint, CkptError, DEFAULT_SHARD_BYTES, Export, FolderKind,
    ModelFolder, TensorSpec, export_folder,
};
use lockstep_core::DType;
use lockstep_data::{Tokenizer, TokenizerSource};
use lockstep_shape::{Freeze, Head, ModelShape, units};

use crate::error::TrainError;
use crate::quantise::TensorReader;
use crate::save;

/// An adapter in memory: its configuration, and its tensors by the names that the model gives them.
pub(crate) struct LoadedAdapter {
    config: AdapterConfig,
    tensors: HashMap<String, (Vec<usize>, Vec<f32>)>,
}

impl LoadedAdapter {
    pub(crate) fn of_folder(path: &Path) -> Result<LoadedAdapter, TrainError> {
        let folder = AdapterFolder::open(path)?;
        let mut tensors = HashMap::new();
        for (name, info) in folder.tensors() {
            let mut values = vec![0f32; info.shape.iter().product()];
            folder.read_f32(name, &info.shape, 0..values.len(), &mut values)?;
            tensors.insert(name.to_owned(), (info.shape.clone(), values));
        }
        Ok(LoadedAdapter { config: folder.config().clone(), tensors })
    }

    /// The adapter in a checkpoint of a run that trains one.
    pub(crate) fn of_checkpoint(checkpoint: &Checkpoint, config: AdapterConfig) -> Result<Self, TrainError> {
        let mut tensors = HashMap::new();
        for (stored, shape) in checkpoint.tensors() {
            let Some(name) = stored.strip_prefix("model/") else { continue };
            let mut values = vec![0f32; shape.iter().product()];
            checkpoint.read_f32(stored, shape, 0..values.len(), &mut values)?;
            tensors.insert(name.to_owned(), (shape.to_vec(), values));
        }
        Ok(LoadedAdapter { config, tensors })
    }

    fn scale(&self) -> f32 {
        let rank = self.config.rank as f64;
        (self.config.alpha / if self.config.rank_stabilized { rank.sqrt() } else { rank }) as f32
    }

    /// Adds the update of a weight \[out, in\] to a flat range of it.
    fn add_to(&self, weight: &TensorSpec, part: Range<usize>, values: &mut [f32]) {
        let stem = weight.name.trim_end_matches(".weight");
        let matrix = |end: &str| self.tensors.get(&format!("{stem}{end}"));
        let (Some((a_shape, a)), Some((_, b))) = (matrix(".lora_A.weight"), matrix(".lora_B.weight")) else {
            return;
        };
        let (rank, cols) = (a_shape[0], a_shape[1]);
        for row in part.start / cols..part.end.div_ceil(cols) {
            let (start, end) = ((row * cols).max(part.start), ((row + 1) * cols).min(part.end));
            let out = &mut values[start - part.start..end - part.start];
            let columns = start - row * cols..end - row * cols;
            for k in 0..rank {
                let factor = self.scale() * b[row * rank + k];
                let a = &a[k * cols..][columns.clone()];
                out.iter_mut().zip(a).for_each(|(out, a)| *out += factor * a);
            }
        }
    }
}

/// Writes the model at `base` with the adapter merged into it. Without `dtype`, weights keep the type of the base.
pub(crate) fn merge(
    adapter: &LoadedAdapter,
    base: Option<&Path>,
    out: &Path,
    dtype: Option<DType>,
) -> Result<DType, TrainError> {
    let base: PathBuf = match (base, &adapter.config.base_model) {
        (Some(path), _) => path.into(),
        (None, Some(name)) if Path::new(name).is_dir() => name.into(),
        (None, name) => return Err(TrainError::BaseModel { name: name.clone() }),
    };
    let folder = ModelFolder::open(&base)?;
    let mut shape = crate::setup::folder_shape(&base)?;
    if adapter.config.is_classifier {
        shape.head = Head::Score;
    }
    save::check_weights(&folder, &shape)?;
    check_shapes(adapter, &shape, &base)?;
    let stored = folder.weights_dtype().unwrap_or(DType::F32);
    let dtype = dtype.unwrap_or(stored);
    let texts = [Some(folder.config_json().to_owned()), ModelFolder::read_generation_config(&base)?];
    let tokenizer = match base.join("tokenizer.json").exists() {
        true => Tokenizer::load(&TokenizerSource::File(base.clone()))?,
        false => Tokenizer::none(shape.vocab),
    };
    let files = save::model_files(&shape, &texts, &tokenizer, dtype);
    let tensors: Vec<TensorSpec> = units(&shape, &Freeze::All, false)
        .into_iter()
        .flat_map(|unit| unit.segments)
        .map(|segment| TensorSpec::new(segment.name, segment.shape))
        .collect();
    let specs: HashMap<&str, &TensorSpec> = tensors.iter().map(|spec| (spec.name.as_str(), spec)).collect();
    let (kind, shard_limit) = (FolderKind::Model, DEFAULT_SHARD_BYTES);
    let export = Export { kind, files: &files, tensors: &tensors, dtype, shard_limit };
    let mut reader: Option<TensorReader> = None;
    export_folder(out, &export, &mut |name, part, values| -> Result<(), CkptError> {
        if let Some((_, whole)) = adapter.tensors.get(name) {
            values.copy_from_slice(&whole[part]);
            return Ok(());
        }
        let same = reader.take().filter(|reader| reader.is_of(name));
        let opened = || TensorReader::open(&folder, &specs[name].name, &specs[name].shape);
        reader.insert(same.map_or_else(opened, Ok)?).read(part.clone(), values)?;
        adapter.add_to(specs[name], part, values);
        Ok(())
    })?;
    Ok(dtype)
}

/// Every tensor of the adapter belongs to the model, in the right shape.
fn check_shapes(adapter: &LoadedAdapter, shape: &ModelShape, base: &Path) -> Result<(), TrainError> {
    let units = units(shape, &Freeze::All, false);
    let find = |name: &str| units.iter().flat_map(|unit| &unit.segments).find(|s| s.name == name);
    let fits = |(name, (found, _)): (&String, &(Vec<usize>, Vec<f32>))| {
        let rank = adapter.config.rank;
        let part = [(".lora_A.weight", 1), (".lora_B.weight", 0)].into_iter().find_map(|(end, dim)| {
            let weight = find(&format!("{}.weight", name.strip_suffix(end)?))?;
            Some(if dim == 1 { vec![rank, weight.shape[1]] } else { vec![weight.shape[0], rank] })
        });
        part.or_else(|| find(name).map(|segment| segment.shape.clone())).as_ref() == Some(found)
    };
    let mut wrong: Vec<String> =
        adapter.tensors.iter().filter(|tensor| !fits(*tensor)).map(|(name, _)| name.clone()).collect();
    wrong.sort_unstable();
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(TrainError::OtherBase { base: base.into(), names: wrong }),
    }
}
