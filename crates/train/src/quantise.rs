//! Weights in 4 bits: quantised while a model is loaded, or read as bitsandbytes has stored them.

use std::ops::Range;

use lockstep_ckpt::{CkptError, ModelFolder, StoredNf4};
use lockstep_engine::Engine;
use lockstep_ops::nf4::{self, QuantisedScales};
use lockstep_ops::quant::dynamic_map;
use lockstep_plan::ModelId;
use lockstep_shape::Segment;

use crate::error::TrainError;
use crate::save::{CHUNK_ELEMS, chunks};

/// Loads a tensor that the plan has in 4 bits: the part that this rank holds. Codes that a folder has are taken as they
/// are; other weights are quantised from the type they are stored in.
pub(crate) fn load(
    engine: &mut Engine,
    model: ModelId,
    folder: &ModelFolder,
    (unit, segment): (usize, &Segment),
) -> Result<(), TrainError> {
    if let Some(stored) = folder.stored_nf4(&segment.name, &segment.shape)? {
        for codes in chunks(engine.model(model).owned_codes(unit, segment)) {
            let bytes = stored.codes(codes.clone())?;
            engine.model_mut(model).write_codes(unit, segment, codes.start, &bytes)?;
        }
        return Ok(engine.model_mut(model).write_scales(unit, segment, &scales(&stored)?)?);
    }
    let mut quantiser = engine.model_mut(model).quantiser(unit, segment);
    let mut values = vec![0f32; CHUNK_ELEMS.min(segment.elems())];
    for part in chunks(0..segment.elems()) {
        let values = &mut values[..part.len()];
        folder.read_f32(&segment.name, &segment.shape, part, values)?;
        quantiser.push(values)?;
    }
    Ok(quantiser.finish()?)
}

/// All scales of a stored weight. Codes must stand for the values that kernels know.
fn scales(stored: &StoredNf4) -> Result<QuantisedScales, CkptError> {
    stored.check_values(&nf4::VALUES, &dynamic_map::SIGNED.values)?;
    let (codes, absmax) = (stored.scale_codes()?, stored.table()?);
    Ok(QuantisedScales { codes, absmax, offset: stored.offset })
}

/// Reads a tensor of a folder as f32, whether it is stored in 4 bits or not.
pub(crate) struct TensorReader<'f> {
    folder: &'f ModelFolder,
    name: &'f str,
    shape: &'f [usize],
    nf4: Option<(StoredNf4<'f>, QuantisedScales)>,
}

impl<'f> TensorReader<'f> {
    pub(crate) fn open(
        folder: &'f ModelFolder,
        name: &'f str,
        shape: &'f [usize],
    ) -> Result<TensorReader<'f>, CkptError> {
        let stored = folder.stored_nf4(name, shape)?;
        let nf4 = stored.map(|stored| Ok::<_, CkptError>((stored, scales(&stored)?))).transpose()?;
        Ok(TensorReader { folder, name, shape, nf4 })
    }

    pub(crate) fn is_of(&self, name: &str) -> bool {
        self.name == name
    }

    /// Reads a flat range.
    pub(crate) fn read(&self, part: Range<usize>, out: &mut [f32]) -> Result<(), CkptError> {
        let Some((stored, scales)) = &self.nf4 else {
            return self.folder.read_f32(self.name, self.shape, part, out);
        };
        let first = part.start / 2 * 2;
        let codes = stored.codes(first / 2..part.end.div_ceil(2))?;
        let mut values = vec![0f32; part.end - first];
        nf4::dequantise_on_host(stored.dtype, &codes, scales, first, &mut values);
        out.copy_from_slice(&values[part.start - first..]);
        Ok(())
    }
}
