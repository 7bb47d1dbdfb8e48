//! What checks are written with: operands in the device's memory, comparisons, and a report for each call.

use std::cell::{Cell, RefCell};

use lockstep_core::DType;
use lockstep_core::rng::{Purpose, Stream};
use lockstep_device::cuda::GpuError;
use lockstep_device::{Memory, Queue, View};

use super::Check;
use crate::Mat;
pub(crate) use crate::operands::{Framed, Operands};

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
    /// Whether outputs are compared with references. A GPU for tests computes none.
    pub(super) compares: bool,
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
        Bench { queue, memory, seed, largest, compares: true, cases: 0.into(), each: RefCell::new(each) }
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
            compares: self.compares,
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
    compares: bool,
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
    /// A view's values, once all that was issued is done.
    pub(crate) fn values(&self, view: View) -> Vec<f64> {
        self.filled(self.queue.synchronize());
        match view.dtype() {
            DType::F64 => {
                let mut out = vec![0f64; view.len()];
                self.filled(view.read(&mut out));
                out
            }
            DType::U32 => {
                let mut out = vec![0u32; view.len()];
                self.filled(view.read(&mut out));
                out.into_iter().map(f64::from).collect()
            }
            _ => {
                let mut out = vec![0f32; view.len()];
                self.filled(view.read_f32(&mut out));
                out.into_iter().map(f64::from).collect()
            }
        }
    }

    /// The rows of a matrix, one after the other; notes margins that were written to.
    pub(crate) fn framed_values(&self, framed: &Framed) -> Vec<f64> {
        let (inside, outside) = framed.inside(self.values(framed.whole));
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
        if !self.compares {
            return;
        }
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

impl Operands for Case<'_> {
    fn take(&self, len: usize, dtype: DType) -> View<'_> {
        let at = self.used.get();
        self.used.set((at + len * dtype.size()).next_multiple_of(256));
        self.memory.view(at, len, dtype)
    }

    fn filled(&self, outcome: Result<(), GpuError>) {
        if let Err(cause) = outcome {
            self.failure.borrow_mut().get_or_insert(cause);
        }
    }

    fn stream(&self, purpose: Purpose) -> Stream {
        self.draws.set(self.draws.get() + 1);
        Stream::new(self.seed, purpose, self.draws.get(), 0)
    }
}
