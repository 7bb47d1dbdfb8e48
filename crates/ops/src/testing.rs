//! Utilities for the operations' tests: memory, finite differences, tolerances.

use std::cell::{Cell, OnceCell};

use lockstep_core::rng::{Purpose, RngStream};
use lockstep_core::{Bytes, DType};
use lockstep_device::cuda::GpuError;
use lockstep_device::{Isa, Memory, Pool, Queue, View};
use proptest::prelude::*;

use crate::errors::Errors;
pub(crate) use crate::operands::{Operands, PaddedMat};

/// The size of a block of the arena. It is small because allocation touches every page; a block is larger if a single
/// operand needs it.
const BLOCK: usize = 4 << 20;

/// Memory that grows block by block as a test allocates operands.
pub(crate) struct TestArena {
    block: Block,
    draws: Cell<u32>,
    seed: u64,
}

/// A block of memory, and the next one once it is full.
struct Block {
    memory: Memory,
    used: Cell<usize>,
    next: OnceCell<Box<Block>>,
}

impl Block {
    fn of(bytes: usize) -> Block {
        let memory = Memory::allocate(Bytes(bytes as u64), &Pool::new(1)).unwrap();
        Block { memory, used: 0.into(), next: OnceCell::new() }
    }

    fn allocate(&self, len: usize, dtype: DType) -> View<'_> {
        let (at, bytes) = (self.used.get(), len * dtype.size());
        if at + bytes > self.memory.bytes().0 as usize {
            return self.next.get_or_init(|| Box::new(Block::of(bytes.max(BLOCK)))).allocate(len, dtype);
        }
        self.used.set((at + bytes).next_multiple_of(64));
        self.memory.view(at, len, dtype)
    }
}

impl TestArena {
    pub(crate) fn new(seed: u64) -> TestArena {
        TestArena { block: Block::of(BLOCK), draws: 0.into(), seed }
    }
}

impl Operands for TestArena {
    fn allocate(&self, len: usize, dtype: DType) -> View<'_> {
        self.block.allocate(len, dtype)
    }

    fn check_device(&self, outcome: Result<(), GpuError>) {
        outcome.unwrap();
    }

    fn stream(&self, purpose: Purpose) -> RngStream {
        self.draws.set(self.draws.get() + 1);
        RngStream::new(self.seed, purpose, self.draws.get(), 0)
    }
}

impl PaddedMat<'_> {
    /// The rows, contiguous, after checking that the padding is unchanged.
    #[track_caller]
    pub(crate) fn values(&self) -> Vec<f64> {
        let (inside, outside) = self.split(values(self.whole));
        assert_eq!(outside, 0, "elements written outside the matrix");
        inside
    }

    #[track_caller]
    pub(crate) fn bits(&self) -> Vec<u32> {
        self.values().into_iter().map(|value| (value as f32).to_bits()).collect()
    }
}

/// The message of a call that must panic.
pub(crate) fn panic_message(call: impl FnOnce()) -> String {
    let call = std::panic::AssertUnwindSafe(call);
    let cause = std::panic::catch_unwind(call).expect_err("the call must panic");
    cause
        .downcast::<String>()
        .map_or_else(|cause| (*cause.downcast::<&str>().unwrap()).into(), |message| *message)
}

/// A view's values as f64.
pub(crate) fn values(view: View) -> Vec<f64> {
    let mut out = vec![0f32; view.len()];
    view.read_f32(&mut out).unwrap();
    out.into_iter().map(f64::from).collect()
}

pub(crate) fn bits(view: View) -> Vec<u32> {
    let mut out = vec![0f32; view.len()];
    view.read_f32(&mut out).unwrap();
    out.into_iter().map(f32::to_bits).collect()
}

/// Panics unless the tensor with rows of `cols` elements, each row and each element are within the tolerance.
#[track_caller]
pub(crate) fn assert_close(got: View, want: &[f64], cols: usize, tolerance: f64) {
    assert_near(&values(got), want, cols, 0.0, tolerance);
}

/// As [`assert_close`], for results whose terms may cancel: errors are measured against `scale`, a norm of the whole
/// tensor, where the result is smaller; rows are measured against their share of it.
#[track_caller]
pub(crate) fn assert_near(got: &[f64], want: &[f64], cols: usize, scale: f64, tolerance: f64) {
    assert_within(&Errors::of(got, want, cols, scale), tolerance);
}

#[track_caller]
pub(crate) fn assert_within(errors: &Errors, tolerance: f64) {
    if let Some(failure) = errors.failure(tolerance) {
        panic!("{failure}, with a tolerance of {tolerance:.1e}: {errors:?}");
    }
}

pub(crate) fn norm(x: &[f64]) -> f64 {
    dot(x, x).sqrt()
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// ∂L/∂x by central differences.
pub(crate) fn finite_differences(x: &[f64], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let here = x[i];
            x[i] = here + STEP;
            let above = loss(&x);
            x[i] = here - STEP;
            let below = loss(&x);
            x[i] = here;
            (above - below) / (2.0 * STEP)
        })
        .collect()
}

/// The permitted error of a whole tensor: a few roundings to the dtype. `errors` derives the allowances of rows and
/// elements from it.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 3e-6,
        DType::BF16 => 8e-3,
        DType::F16 => 1e-3,
        other => panic!("{other}"),
    }
}

/// A queue for every instruction set of this machine, and queues of one and three threads. None uses AMX: its bf16
/// matmuls have bits of their own, and tests of their own.
pub(crate) fn queues() -> Vec<Queue> {
    let mut all: Vec<Queue> = Isa::all().map(|isa| Queue::cpu_with(2, isa)).collect();
    all.push(Queue::cpu_with(1, Isa::detect()));
    all.push(Queue::cpu_with(3, Isa::detect()));
    all
}

/// One of many queues: any instruction set, on one to three threads.
pub(crate) fn queue(pick: usize) -> Queue {
    let sets: Vec<Isa> = Isa::all().collect();
    Queue::cpu_with(pick % 3 + 1, sets[pick / 3 % sets.len()])
}

/// Storage types, most often f32.
pub(crate) fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![3 => Just(DType::F32), 1 => Just(DType::BF16), 1 => Just(DType::F16)]
}

/// Checks that all queues give the same bits as the first.
pub(crate) struct SameBits(Option<Vec<Vec<u32>>>);

impl SameBits {
    pub(crate) fn new() -> SameBits {
        SameBits(None)
    }

    #[track_caller]
    pub(crate) fn check(&mut self, queue: &Queue, results: Vec<Vec<u32>>) {
        let first = self.0.get_or_insert_with(|| results.clone());
        assert!(*first == results, "bits differ on {queue:?}");
    }
}
