//! What checks are written with: operands in the device's memory, comparisons, and a report for each call.

use std::cell::{Cell, RefCell};

use lockstep_core::DType;
use lockstep_core::rng::{Purpose, Stream};
use lockstep_device::cuda::GpuError;
use lockstep_device::{Memory, Queue, View};

use super::Check;
use crate::Mat;

/// What lies between the rows of a [`Framed`] matrix. Exact in every storage type.
const MARGIN: f32 = 77.0;

/// After so many normals they come again: a prime, so that rows differ all the same.
const PERIOD: usize = 65_537;

/// Rounding to the storage type, with room for a few of them.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        other => panic!("{other} is not a float storage type"),
    }
}

/// A queue to check and where to report to.
pub(crate) struct Bench<'a> {
    pub(crate) queue: &'a Queue,
    memory: &'a Memory,
    seed: u64,
    /// The most elements that an operand has: others are left out.
    largest: usize,
    cases: Cell<u32>,
    each: RefCell<&'a mut dyn FnMut(Check)>,
}

impl<'a> Bench<'a> {
    pub(crate) fn new(
        queue: &'a Queue,
        memory: &'a Memory,
        seed: u64,
        largest: usize,
        each: &'a mut dyn FnMut(Check),
    ) -> Bench<'a> {
        Bench { queue, memory, seed, largest, cases: 0.into(), each: RefCell::new(each) }
    }

    /// Whether operands of so many elements are checked.
    pub(crate) fn takes(&self, elems: usize) -> bool {
        elems <= self.largest
    }

    /// Runs `call` twice on the same inputs and reports one check. The call makes its operands by the case's
    /// methods, runs operations on `case.queue` and compares what they wrote ([`Case::compare`]).
    pub(crate) fn case(
        &self,
        name: impl Into<String>,
        tolerance: f64,
        call: impl Fn(&Case),
    ) -> Result<(), GpuError> {
        let number = self.cases.get();
        self.cases.set(number + 1);
        let mut case = Case {
            queue: self.queue,
            memory: self.memory,
            // Every case has numbers of its own.
            seed: self.seed.wrapping_add(u64::from(number) << 32),
            again: false,
            used: 0.into(),
            draws: 0.into(),
            compared: 0.into(),
            bits: RefCell::default(),
            error: 0.0.into(),
            note: RefCell::default(),
            failure: RefCell::default(),
        };
        for again in [false, true] {
            (case.again, case.used, case.draws, case.compared) = (again, 0.into(), 0.into(), 0.into());
            call(&case);
            if let Some(cause) = case.failure.take() {
                return Err(cause);
            }
        }
        let (error, note) = (case.error.get(), case.note.take());
        (self.each.borrow_mut())(Check { name: name.into(), error, tolerance, note });
        Ok(())
    }
}

/// One call under test.
pub(crate) struct Case<'a> {
    pub(crate) queue: &'a Queue,
    memory: &'a Memory,
    seed: u64,
    /// The second run, which must give the first one's bits.
    again: bool,
    used: Cell<usize>,
    draws: Cell<u32>,
    compared: Cell<usize>,
    bits: RefCell<Vec<Vec<u64>>>,
    error: Cell<f64>,
    note: RefCell<Option<String>>,
    failure: RefCell<Option<GpuError>>,
}

impl<'a> Case<'a> {
    /// Room that holds anything.
    pub(crate) fn take(&self, len: usize, dtype: DType) -> View<'a> {
        let at = self.used.get();
        self.used.set((at + len * dtype.size()).next_multiple_of(256));
        self.memory.view(at, len, dtype)
    }

    /// An output, or scratch: every float is NaN until it is written.
    pub(crate) fn output(&self, len: usize, dtype: DType) -> View<'a> {
        let view = self.take(len, dtype);
        match dtype {
            DType::U32 => view.write(&vec![u32::MAX; len]),
            DType::F64 => view.write(&vec![f64::NAN; len]),
            _ => view.write_f32(&vec![f32::NAN; len]),
        }
        view
    }

    pub(crate) fn input(&self, values: &[f32], dtype: DType) -> View<'a> {
        let view = self.take(values.len(), dtype);
        view.write_f32(values);
        view
    }

    pub(crate) fn input_u32(&self, values: &[u32]) -> View<'a> {
        let view = self.take(values.len(), DType::U32);
        view.write(values);
        view
    }

    /// Fresh standard normals, in the storage type.
    pub(crate) fn normals(&self, len: usize, dtype: DType) -> View<'a> {
        self.input(&self.normal_values(len), dtype)
    }

    pub(crate) fn normal_values(&self, len: usize) -> Vec<f32> {
        let stream = Stream::new(self.seed, Purpose::Init, self.draws.get(), 0);
        self.draws.set(self.draws.get() + 1);
        let fresh: Vec<f32> =
            (0..len.min(PERIOD).div_ceil(2) as u32).flat_map(|i| stream.normal_pair(i)).take(len).collect();
        (0..len).map(|i| fresh[i % PERIOD]).collect()
    }

    /// Fresh integers below `bound`.
    pub(crate) fn indices(&self, len: usize, bound: usize) -> Vec<u32> {
        let stream = Stream::new(self.seed, Purpose::Sampling, self.draws.get(), 0);
        self.draws.set(self.draws.get() + 1);
        (0..len as u32).map(|i| stream.below(i, bound as u64) as u32).collect()
    }

    /// A matrix of the given rows, `pad` foreign elements before and after each.
    pub(crate) fn framed(&self, values: &[f32], cols: usize, pad: usize, dtype: DType) -> Framed<'a> {
        let (rows, stride) = (values.len() / cols, cols + 2 * pad);
        let mut all = vec![MARGIN; pad + rows * stride];
        for (row, values) in values.chunks_exact(cols).enumerate() {
            all[pad + row * stride..][..cols].copy_from_slice(values);
        }
        let whole = self.input(&all, dtype);
        Framed { mat: Mat::strided(whole.slice(pad, rows * stride), rows, cols, stride), whole, pad }
    }

    /// The same, to be written: NaN between the margins.
    pub(crate) fn framed_output(&self, rows: usize, cols: usize, pad: usize, dtype: DType) -> Framed<'a> {
        self.framed(&vec![f32::NAN; rows * cols], cols, pad, dtype)
    }

    pub(crate) fn framed_normals(&self, rows: usize, cols: usize, pad: usize, dtype: DType) -> Framed<'a> {
        self.framed(&self.normal_values(rows * cols), cols, pad, dtype)
    }

    /// A view's values, once all that was issued is done.
    pub(crate) fn values(&self, view: View) -> Vec<f64> {
        if let Err(cause) = self.queue.synchronize() {
            self.failure.borrow_mut().get_or_insert(cause);
        }
        match view.dtype() {
            DType::F64 => {
                let mut out = vec![0f64; view.len()];
                view.read(&mut out);
                out
            }
            DType::U32 => {
                let mut out = vec![0u32; view.len()];
                view.read(&mut out);
                out.into_iter().map(f64::from).collect()
            }
            _ => {
                let mut out = vec![0f32; view.len()];
                view.read_f32(&mut out);
                out.into_iter().map(f64::from).collect()
            }
        }
    }

    /// The rows of a matrix, one after the other; notes margins that were written to.
    pub(crate) fn framed_values(&self, framed: &Framed) -> Vec<f64> {
        let Mat { rows, cols, stride, .. } = framed.mat;
        let mut inside = Vec::with_capacity(rows * cols);
        let mut outside = 0;
        for (i, value) in self.values(framed.whole).into_iter().enumerate() {
            if i >= framed.pad && (i - framed.pad) % stride < cols {
                inside.push(value);
            } else {
                outside += usize::from(value != f64::from(MARGIN));
            }
        }
        if outside > 0 {
            self.add_note(format!("{outside} elements written outside a matrix"));
        }
        inside
    }

    /// The rows of any matrix.
    pub(crate) fn mat_values(&self, mat: &Mat) -> Vec<f64> {
        let all = self.values(mat.view);
        (0..mat.rows).flat_map(|row| all[row * mat.stride..][..mat.cols].to_vec()).collect()
    }

    /// Judges an output by its reference, which is computed once. Where terms may cancel, `scale` is a size that
    /// errors may be measured against.
    pub(crate) fn compare_at(&self, what: &str, scale: f64, got: Vec<f64>, want: impl FnOnce() -> Vec<f64>) {
        let bits: Vec<u64> = got.iter().map(|value| value.to_bits()).collect();
        let i = self.compared.get();
        self.compared.set(i + 1);
        if self.again {
            if self.bits.borrow()[i] != bits {
                self.add_note(format!("{what}: two runs differ"));
            }
            return;
        }
        self.bits.borrow_mut().push(bits);
        let want = want();
        assert_eq!(got.len(), want.len(), "{what}: a reference of the same shape");
        let broken = got.iter().filter(|value| value.is_nan()).count();
        if broken > 0 {
            self.add_note(format!("{what}: {broken} of {} elements not written, or NaN", got.len()));
        }
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let difference = norm(&mut got.iter().zip(&want).map(|(got, want)| got - want));
        let size = norm(&mut want.iter().copied()).max(scale).max(1e-30);
        let error = if difference == 0.0 { 0.0 } else { difference / size };
        // A NaN is worse than any number.
        if error.is_nan() || error > self.error.get() {
            self.error.set(error);
        }
    }

    /// As [`Case::compare_at`], against the reference's own size.
    pub(crate) fn compare(&self, what: &str, got: Vec<f64>, want: impl FnOnce() -> Vec<f64>) {
        self.compare_at(what, 0.0, got, want);
    }

    /// Keeps the first thing that was wrong.
    pub(crate) fn add_note(&self, note: String) {
        self.note.borrow_mut().get_or_insert(note);
    }
}

/// A strided matrix with margins that an operation must leave alone.
#[derive(Clone, Copy)]
pub(crate) struct Framed<'a> {
    pub(crate) mat: Mat<'a>,
    whole: View<'a>,
    pad: usize,
}
