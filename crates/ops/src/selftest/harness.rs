//! The harness of the checks: operands in device memory, comparisons, and a report for each call.

use std::cell::{Cell, RefCell};

use lockstep_core::DType;
use lockstep_core::rng::{Purpose, RngStream};
use lockstep_device::cuda::GpuError;
use lockstep_device::{Memory, Queue, View};

use super::{Check, Selection};
use crate::Mat;
use crate::errors::Errors;
pub(crate) use crate::operands::{Operands, PaddedMat};

/// The permitted error of a whole tensor: a few roundings to the storage type. `errors` derives the allowances of rows
/// and elements from it.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        other => panic!("{other} is not a float storage type"),
    }
}

/// A queue to check, and where to report results.
pub(crate) struct Harness<'a> {
    pub(crate) queue: &'a Queue,
    memory: &'a Memory,
    seed: u64,
    selection: Selection<'a>,
    /// Whether outputs are compared with references. Tests turn this off for a fake GPU, which computes nothing.
    pub(super) compares: bool,
    cases: Cell<u32>,
    each: RefCell<&'a mut dyn FnMut(Check)>,
}

impl<'a> Harness<'a> {
    pub(crate) fn new(
        queue: &'a Queue,
        memory: &'a Memory,
        seed: u64,
        selection: Selection<'a>,
        each: &'a mut dyn FnMut(Check),
    ) -> Harness<'a> {
        Harness { queue, memory, seed, selection, compares: true, cases: 0.into(), each: RefCell::new(each) }
    }

    /// Whether operands of this many elements are checked.
    pub(crate) fn includes(&self, elems: usize) -> bool {
        elems <= self.selection.largest
    }

    /// Runs `call` twice on the same inputs and reports one check. The call creates its operands with the case's
    /// methods, runs operations on `case.queue` and compares their outputs ([`Case::compare`]).
    pub(crate) fn case(
        &self,
        name: impl Into<String>,
        tolerance: f64,
        call: impl Fn(&Case),
    ) -> Result<(), GpuError> {
        let (name, number) = (name.into(), self.cases.get());
        self.cases.set(number + 1);
        if !name.contains(self.selection.only) {
            return Ok(());
        }
        let mut case = Case {
            queue: self.queue,
            memory: self.memory,
            // Every case has random numbers of its own.
            seed: self.seed.wrapping_add(u64::from(number) << 32),
            compares: self.compares,
            tolerance,
            is_repeat: false,
            used: 0.into(),
            draws: 0.into(),
            compared: 0.into(),
            bits: RefCell::default(),
            error: 0.0.into(),
            note: RefCell::default(),
            failure: RefCell::default(),
        };
        for is_repeat in [false, true] {
            (case.is_repeat, case.used, case.draws, case.compared) =
                (is_repeat, 0.into(), 0.into(), 0.into());
            call(&case);
            if let Some(cause) = case.failure.take() {
                return Err(cause);
            }
        }
        let (error, note) = (case.error.get(), case.note.take());
        (self.each.borrow_mut())(Check { name, error, tolerance, note });
        Ok(())
    }
}

/// One call under test.
pub(crate) struct Case<'a> {
    pub(crate) queue: &'a Queue,
    memory: &'a Memory,
    seed: u64,
    compares: bool,
    tolerance: f64,
    /// The second run, which must give the same bits as the first.
    is_repeat: bool,
    used: Cell<usize>,
    draws: Cell<u32>,
    compared: Cell<usize>,
    bits: RefCell<Vec<Vec<u64>>>,
    error: Cell<f64>,
    note: RefCell<Option<String>>,
    failure: RefCell<Option<GpuError>>,
}

impl<'a> Case<'a> {
    /// A view's values, after everything that was issued is done.
    pub(crate) fn values(&self, view: View) -> Vec<f64> {
        self.check_device(self.queue.synchronize());
        match view.dtype() {
            DType::F64 => {
                let mut out = vec![0f64; view.len()];
                self.check_device(view.read(&mut out));
                out
            }
            DType::U32 => {
                let mut out = vec![0u32; view.len()];
                self.check_device(view.read(&mut out));
                out.into_iter().map(f64::from).collect()
            }
            _ => {
                let mut out = vec![0f32; view.len()];
                self.check_device(view.read_f32(&mut out));
                out.into_iter().map(f64::from).collect()
            }
        }
    }

    /// The rows of a matrix, contiguous; reports changes of the padding.
    pub(crate) fn padded_values(&self, padded: &PaddedMat) -> Vec<f64> {
        let (inside, outside) = padded.split(self.values(padded.whole));
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

    /// Compares an output with rows of `cols` elements with its reference, which is computed only once.
    pub(crate) fn compare(&self, what: &str, cols: usize, got: Vec<f64>, want: impl FnOnce() -> Vec<f64>) {
        self.compare_at(what, cols, 0.0, got, want);
    }

    /// As [`Case::compare`]. Where terms may cancel, `scale` is a norm of the whole tensor to measure errors against.
    pub(crate) fn compare_at(
        &self,
        what: &str,
        cols: usize,
        scale: f64,
        got: Vec<f64>,
        want: impl FnOnce() -> Vec<f64>,
    ) {
        self.compare_with(what, got, want, |got, want| Errors::of(got, want, cols, scale));
    }

    /// As [`Case::compare_at`], with a norm of each row to measure its errors against.
    pub(crate) fn compare_rows(
        &self,
        what: &str,
        cols: usize,
        (scale, of_row): (f64, impl Fn(usize) -> f64),
        got: Vec<f64>,
        want: impl FnOnce() -> Vec<f64>,
    ) {
        self.compare_with(what, got, want, |got, want| Errors::of_rows(got, want, cols, scale, of_row));
    }

    fn compare_with(
        &self,
        what: &str,
        got: Vec<f64>,
        want: impl FnOnce() -> Vec<f64>,
        measure: impl FnOnce(&[f64], &[f64]) -> Errors,
    ) {
        if !self.compares {
            return;
        }
        let bits: Vec<u64> = got.iter().map(|value| value.to_bits()).collect();
        let i = self.compared.get();
        self.compared.set(i + 1);
        if self.is_repeat {
            if self.bits.borrow()[i] != bits {
                self.add_note(format!("{what}: two runs differ"));
            }
            return;
        }
        self.bits.borrow_mut().push(bits);
        let want = want();
        assert_eq!(got.len(), want.len(), "{what}: result and reference must have the same length");
        let broken = got.iter().filter(|value| value.is_nan()).count();
        if broken > 0 {
            self.add_note(format!("{what}: {broken} of {} elements not written, or NaN", got.len()));
        }
        let errors = measure(&got, &want);
        if let Some(failure) = errors.failure(self.tolerance) {
            self.add_note(format!("{what}: {failure}"));
        }
        // NaN is worse than any number.
        let error = errors.worst();
        if error.is_nan() || error > self.error.get() {
            self.error.set(error);
        }
    }

    /// Keeps only the first note.
    pub(crate) fn add_note(&self, note: String) {
        self.note.borrow_mut().get_or_insert(note);
    }
}

impl Operands for Case<'_> {
    fn allocate(&self, len: usize, dtype: DType) -> View<'_> {
        let at = self.used.get();
        self.used.set((at + len * dtype.size()).next_multiple_of(256));
        self.memory.view(at, len, dtype)
    }

    fn check_device(&self, outcome: Result<(), GpuError>) {
        if let Err(cause) = outcome {
            self.failure.borrow_mut().get_or_insert(cause);
        }
    }

    fn stream(&self, purpose: Purpose) -> RngStream {
        self.draws.set(self.draws.get() + 1);
        RngStream::new(self.seed, purpose, self.draws.get(), 0)
    }
}
