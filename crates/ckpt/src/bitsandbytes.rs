//! Weights in 4 bits as bitsandbytes stores them: NF4 codes, with five more tensors beside each weight's own.
//!
//! Only one variant is read: blocks of 64 elements with 8-bit scales, in groups of 256 (double quantisation). Others are
//! refused with an error that names them.

use std::ops::Range;

use lockstep_core::{DType, NF4_BLOCK_ELEMS, NF4_SCALES_PER_BLOCK};
use serde::Deserialize;

use crate::{CkptError, ModelFolder, SafetensorsFile, TensorInfo};

/// The ends of the names of the tensors beside a weight's codes.
const STATE: &str = ".quant_state.bitsandbytes__nf4";
const SCALE_CODES: &str = ".absmax";
const TABLE: &str = ".nested_absmax";
const SCALE_VALUES: &str = ".nested_quant_map";
const VALUES: &str = ".quant_map";

/// The state of the other 4-bit format.
const FP4_STATE: &str = ".quant_state.bitsandbytes__fp4";

/// The most bytes of a state's JSON.
const STATE_CAP: usize = 1 << 16;

/// A weight in 4 bits in a model folder.
#[derive(Clone, Copy, Debug)]
pub struct StoredNf4<'f> {
    folder: &'f ModelFolder,
    name: &'f str,
    elems: usize,
    /// The type that the weight had, to which it is dequantised.
    pub dtype: DType,
    /// The mean of its scales.
    pub offset: f32,
}

/// The JSON text in a weight's state.
#[derive(Deserialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    dtype: String,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_dtype: Option<String>,
    nested_offset: Option<f32>,
}

impl ModelFolder {
    /// The weight of this name if the folder has it in 4 bits. It must have `expected_shape`.
    pub fn stored_nf4<'f>(
        &'f self,
        name: &'f str,
        expected_shape: &[usize],
    ) -> Result<Option<StoredNf4<'f>>, CkptError> {
        let Some((file, codes)) = self.tensor(name) else { return Ok(None) };
        let fault = |why: String| CkptError::Quantised { file: file.path().into(), tensor: name.into(), why };
        if self.tensor(&format!("{name}{FP4_STATE}")).is_some() {
            return Err(fault("it is fp4, not nf4".into()));
        }
        let Some((file_of_state, info)) = self.tensor(&format!("{name}{STATE}")) else {
            return match codes.dtype_name.as_str() {
                "U8" | "I8" => {
                    Err(fault("it is quantised, but not as 4-bit weights of bitsandbytes are".into()))
                }
                _ => Ok(None),
            };
        };
        if info.dtype_name != "U8" || info.elems() > STATE_CAP {
            return Err(fault(format!("its state is {} numbers of type {}", info.elems(), info.dtype_name)));
        }
        let mut text = vec![0; info.elems()];
        file_of_state.read_into(&info.name, 0..text.len(), &mut text)?;
        let state: State =
            serde_json::from_slice(&text).map_err(|e| fault(format!("its state is not valid: {e}")))?;
        if state.shape != expected_shape {
            let (expected, found) = (expected_shape.into(), state.shape);
            return Err(CkptError::Shape { file: file.path().into(), tensor: name.into(), expected, found });
        }
        let dtype = [DType::F32, DType::BF16, DType::F16].into_iter().find(|d| d.hf_name() == state.dtype);
        let dtype = dtype.ok_or_else(|| fault(format!("its type is {}", state.dtype)))?;
        if (state.quant_type.as_str(), state.blocksize) != ("nf4", NF4_BLOCK_ELEMS) {
            let (kind, block) = (state.quant_type, state.blocksize);
            return Err(fault(format!("it is {kind} in blocks of {block}, not nf4 in blocks of 64")));
        }
        let nested = (state.nested_blocksize, state.nested_dtype.as_deref(), state.nested_offset);
        let (Some(NF4_SCALES_PER_BLOCK), Some("float32"), Some(offset)) = nested else {
            return Err(fault("its scales are not quantised in groups of 256 (double quantisation)".into()));
        };
        let elems = expected_shape.iter().product();
        let stored = StoredNf4 { folder: self, name, elems, dtype, offset };
        for (end, dtype, len) in stored.parts() {
            let (_, info) = stored.find(end)?;
            if (info.dtype_name.as_str(), info.elems()) != (dtype.safetensors_name(), len) {
                let found = format!("{} elements of {}", info.elems(), info.dtype_name);
                let part = format!("`{name}{end}`");
                return Err(fault(format!("{part} has {found}, not {len} of {}", dtype.safetensors_name())));
            }
        }
        Ok(Some(stored))
    }

    /// The names of all tensors that make up a weight in 4 bits.
    pub fn nf4_names(name: &str) -> impl Iterator<Item = String> {
        ["", STATE, SCALE_CODES, TABLE, SCALE_VALUES, VALUES].map(|end| format!("{name}{end}")).into_iter()
    }

    /// The type of the weights that are not quantised. `None`: it is not a type of weights.
    pub fn weights_dtype(&self) -> Option<DType> {
        let is_part = |name: &str| name.contains(".weight.");
        self.tensors().filter(|tensor| !is_part(&tensor.name)).find_map(|tensor| tensor.dtype)
    }
}

impl<'f> StoredNf4<'f> {
    /// The parts of the weight: the end of the name, type and number of elements.
    fn parts(&self) -> [(&'static str, DType, usize); 5] {
        let blocks = self.elems.div_ceil(NF4_BLOCK_ELEMS);
        [
            ("", DType::U8, self.elems.div_ceil(2)),
            (SCALE_CODES, DType::U8, blocks),
            (TABLE, DType::F32, blocks.div_ceil(NF4_SCALES_PER_BLOCK)),
            (SCALE_VALUES, DType::F32, 256),
            (VALUES, DType::F32, 16),
        ]
    }

    fn find(&self, end: &str) -> Result<(&'f SafetensorsFile, &'f TensorInfo), CkptError> {
        let name = format!("{}{end}", self.name);
        self.folder.tensor(&name).ok_or_else(|| {
            let names = self.folder.tensors().map(|tensor| tensor.name.as_str());
            CkptError::no_tensor(self.folder.path().into(), &name, names)
        })
    }

    fn bytes(&self, end: &str, part: Range<usize>) -> Result<Vec<u8>, CkptError> {
        let (file, info) = self.find(end)?;
        let mut bytes = vec![0; part.len()];
        file.read_into(&info.name, part, &mut bytes)?;
        Ok(bytes)
    }

    fn floats(&self, end: &str) -> Result<Vec<f32>, CkptError> {
        let (file, info) = self.find(end)?;
        let mut values = vec![0f32; info.elems()];
        file.read_f32(&info.name, 0..values.len(), &mut values)?;
        Ok(values)
    }

    /// Bytes of codes, each of which is two elements, the first in the high half.
    pub fn codes(&self, part: Range<usize>) -> Result<Vec<u8>, CkptError> {
        self.bytes("", part)
    }

    /// The 8-bit scale of every block.
    pub fn scale_codes(&self) -> Result<Vec<u8>, CkptError> {
        self.bytes(SCALE_CODES, 0..self.elems.div_ceil(NF4_BLOCK_ELEMS))
    }

    /// The scale of every group of scales.
    pub fn table(&self) -> Result<Vec<f32>, CkptError> {
        self.floats(TABLE)
    }

    /// Checks that codes stand for these values, and scale codes for those.
    pub fn check_values(&self, values: &[f32], scale_values: &[f32]) -> Result<(), CkptError> {
        for (end, expected) in [(VALUES, values), (SCALE_VALUES, scale_values)] {
            if self.floats(end)? != expected {
                let (file, _) = self.find(end)?;
                let why = format!("`{}{end}` has other values than those of bitsandbytes", self.name);
                return Err(CkptError::Quantised { file: file.path().into(), tensor: self.name.into(), why });
            }
        }
        Ok(())
    }
}
