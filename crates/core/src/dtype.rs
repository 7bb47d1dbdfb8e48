//! Element types of tensors, in memory and in files.

use std::fmt;

/// The element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    F32,
    BF16,
    F16,
    /// For sums of squares.
    F64,
    /// For token ids and document offsets.
    U32,
    /// For the remainders of master parameters ([`crate::rounding::split`]).
    I16,
    /// For codes of quantised values.
    U8,
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::BF16 | DType::F16 | DType::I16 => 2,
            DType::F32 | DType::U32 => 4,
            DType::F64 => 8,
        }
    }

    /// The name in safetensors headers.
    pub const fn safetensors_name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::BF16 => "BF16",
            DType::F16 => "F16",
            DType::F64 => "F64",
            DType::U32 => "U32",
            DType::I16 => "I16",
            DType::U8 => "U8",
        }
    }

    /// The name in `config.json`, under `dtype` or `torch_dtype`.
    pub const fn hf_name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::BF16 => "bfloat16",
            DType::F16 => "float16",
            DType::F64 => "float64",
            DType::U32 => "uint32",
            DType::I16 => "int16",
            DType::U8 => "uint8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::F64 => "f64",
            DType::U32 => "u32",
            DType::I16 => "i16",
            DType::U8 => "u8",
        })
    }
}
