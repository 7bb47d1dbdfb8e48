//! Operands of the measured calls.

use lockstep_core::DType;
use lockstep_core::rng::{Purpose, RngStream};
use lockstep_device::cuda::GpuError;
use lockstep_device::{Queue, View};

use crate::reduce;

/// Random normals repeat after this many.
const PERIOD: usize = 61 << 12;

/// A range of memory and its initial contents.
pub(super) struct Operand {
    pub(super) len: usize,
    pub(super) dtype: DType,
    fill: Fill,
}

enum Fill {
    Normals,
    Zero,
    Numbers(Vec<u32>),
    Doubles(Vec<f64>),
}

/// Standard normals.
pub(super) fn normals(len: usize, dtype: DType) -> Operand {
    Operand { len, dtype, fill: Fill::Normals }
}

pub(super) fn zeros(len: usize, dtype: DType) -> Operand {
    Operand { len, dtype, fill: Fill::Zero }
}

pub(super) fn numbers(values: impl IntoIterator<Item = u32>) -> Operand {
    let values: Vec<u32> = values.into_iter().collect();
    Operand { len: values.len(), dtype: DType::U32, fill: Fill::Numbers(values) }
}

/// Random integers below `bound`.
pub(super) fn below(len: usize, bound: usize) -> Operand {
    let stream = RngStream::new(1, Purpose::Sampling, 0, 0);
    numbers((0..len as u32).map(|i| stream.below(i, bound as u64) as u32))
}

/// The bounds of documents of the same length.
pub(super) fn bounds(docs: usize, length: usize) -> Operand {
    numbers((0..=docs).map(|doc| (doc * length) as u32))
}

pub(super) fn doubles(values: &[f64]) -> Operand {
    Operand { len: values.len(), dtype: DType::F64, fill: Fill::Doubles(values.to_vec()) }
}

/// Normals to fill operands from.
pub(super) fn period() -> Vec<f32> {
    let stream = RngStream::new(1, Purpose::Init, 0, 0);
    (0..PERIOD as u32 / 2).flat_map(|i| stream.normal_pair(i)).collect()
}

impl Operand {
    /// Bytes, rounded up for the alignment of the next operand.
    pub(super) fn aligned_bytes(&self) -> usize {
        (self.len * self.dtype.size()).next_multiple_of(256)
    }

    /// Fills the `number`th operand of a call; each starts at another offset in the period.
    pub(super) fn fill(
        &self,
        queue: &Queue,
        view: View,
        period: &[f32],
        number: usize,
    ) -> Result<(), GpuError> {
        match &self.fill {
            Fill::Zero => reduce::zero(queue, view),
            Fill::Numbers(values) => view.write(values)?,
            Fill::Doubles(values) => view.write(values)?,
            Fill::Normals => {
                let first = self.len.min(period.len());
                let skip = (number * 7919) % period.len();
                let values: Vec<f32> = period.iter().cycle().skip(skip).take(first).copied().collect();
                view.write_f32(&values)?;
                let mut filled = first;
                while filled < self.len {
                    let more = filled.min(self.len - filled);
                    reduce::copy(queue, view.slice(filled, more), view.first(more));
                    filled += more;
                }
            }
        }
        Ok(())
    }
}
