//! Operands for tests and the selftest: random inputs, unwritten outputs, matrices with padding.

use lockstep_core::DType;
use lockstep_core::rng::{Purpose, RngStream};
use lockstep_device::View;
use lockstep_device::cuda::GpuError;

use crate::Mat;

/// The value of the padding between the rows of a [`PaddedMat`]. Exact in every storage type.
const PADDING: f32 = 77.0;

/// Random normals repeat after this many. It is a prime, so that rows still differ.
const PERIOD: usize = 65_537;

/// A source of memory and random streams.
pub(crate) trait Operands {
    /// Memory with unspecified contents.
    fn allocate(&self, len: usize, dtype: DType) -> View<'_>;

    /// A random stream that was not used before.
    fn stream(&self, purpose: Purpose) -> RngStream;

    /// Handles the result of a device call: a GPU may have failed.
    fn check_device(&self, outcome: Result<(), GpuError>);

    /// An output or scratch buffer. Floats are NaN until they are written.
    fn output(&self, len: usize, dtype: DType) -> View<'_> {
        let view = self.allocate(len, dtype);
        self.check_device(match dtype {
            DType::U32 => view.write(&vec![u32::MAX; len]),
            DType::F64 => view.write(&vec![f64::NAN; len]),
            DType::I16 => view.write(&vec![i16::MIN; len]),
            DType::U8 => view.write(&vec![u8::MAX; len]),
            _ => view.write_f32(&vec![f32::NAN; len]),
        });
        view
    }

    fn input(&self, values: &[f32], dtype: DType) -> View<'_> {
        let view = self.allocate(values.len(), dtype);
        self.check_device(view.write_f32(values));
        view
    }

    /// Master parameters, rounded to weights of the storage type.
    fn weights(&self, masters: &[f32], dtype: DType) -> View<'_> {
        let view = self.allocate(masters.len(), dtype);
        self.check_device(view.write_weights(masters));
        view
    }

    /// Values of a type without conversions, such as codes.
    fn input_raw<T: Copy>(&self, values: &[T], dtype: DType) -> View<'_> {
        let view = self.allocate(values.len(), dtype);
        self.check_device(view.write(values));
        view
    }

    fn input_u32(&self, values: &[u32]) -> View<'_> {
        let view = self.allocate(values.len(), DType::U32);
        self.check_device(view.write(values));
        view
    }

    /// Random standard normals, in the storage type.
    fn normals(&self, len: usize, dtype: DType) -> View<'_> {
        self.input(&self.normal_values(len), dtype)
    }

    fn normal_values(&self, len: usize) -> Vec<f32> {
        let stream = self.stream(Purpose::Init);
        let pairs = len.min(PERIOD).div_ceil(2) as u32;
        let fresh: Vec<f32> = (0..pairs).flat_map(|i| stream.normal_pair(i)).take(len).collect();
        (0..len).map(|i| fresh[i % PERIOD]).collect()
    }

    /// Random integers below `bound`.
    fn indices(&self, len: usize, bound: usize) -> Vec<u32> {
        let stream = self.stream(Purpose::Sampling);
        (0..len as u32).map(|i| stream.below(i, bound as u64) as u32).collect()
    }

    /// A matrix of the given rows, with `pad` elements of padding before and after each.
    fn padded(&self, values: &[f32], cols: usize, pad: usize, dtype: DType) -> PaddedMat<'_> {
        let (rows, stride) = (values.len() / cols, cols + 2 * pad);
        let mut all = vec![PADDING; pad + rows * stride];
        for (row, values) in values.chunks_exact(cols).enumerate() {
            all[pad + row * stride..][..cols].copy_from_slice(values);
        }
        let whole = self.input(&all, dtype);
        PaddedMat { mat: Mat::strided(whole.slice(pad, rows * stride), rows, cols, stride), whole, pad }
    }

    /// A padded matrix to be written: NaN inside the padding.
    fn padded_output(&self, rows: usize, cols: usize, pad: usize, dtype: DType) -> PaddedMat<'_> {
        self.padded(&vec![f32::NAN; rows * cols], cols, pad, dtype)
    }

    fn padded_normals(&self, rows: usize, cols: usize, pad: usize, dtype: DType) -> PaddedMat<'_> {
        self.padded(&self.normal_values(rows * cols), cols, pad, dtype)
    }
}

/// A strided matrix with padding that an operation must not change.
#[derive(Clone, Copy)]
pub(crate) struct PaddedMat<'m> {
    pub(crate) mat: Mat<'m>,
    pub(crate) whole: View<'m>,
    pad: usize,
}

impl PaddedMat<'_> {
    /// Splits the values of the whole view: the matrix's rows, contiguous, and how many elements of padding were
    /// changed.
    pub(crate) fn split(&self, whole: Vec<f64>) -> (Vec<f64>, usize) {
        let Mat { rows, cols, stride, .. } = self.mat;
        let mut inside = Vec::with_capacity(rows * cols);
        let mut outside = 0;
        for (i, value) in whole.into_iter().enumerate() {
            if i >= self.pad && (i - self.pad) % stride < cols {
                inside.push(value);
            } else {
                outside += usize::from(value != f64::from(PADDING));
            }
        }
        (inside, outside)
    }
}
