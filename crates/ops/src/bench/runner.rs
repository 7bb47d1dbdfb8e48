//! Runs and times calls, with several sets of operands in device memory.

use std::cell::RefCell;

use lockstep_core::{Bytes, DType};
use lockstep_device::cuda::CublasLt;
use lockstep_device::{Device, Memory, MemoryError, Queue, View};

use super::operand::{self, Operand};
use super::timer::Timer;
use super::{Measurement, StepShape, attention};
use crate::{bias, embedding, matmul, rmsnorm};

/// A set of operands is no longer in a GPU's cache when this many times the cache's size has been used since.
const ROTATED_CACHES: u64 = 4;
/// The same for a CPU, whose last-level cache is shared.
const ROTATED_ON_CPU: Bytes = Bytes(64 << 20);
/// The maximum number of sets. Operands so small that this matters are in a GPU's cache in training as well.
const MAX_SETS: usize = 16;
const BALLAST: Bytes = Bytes(128 << 20);

/// What is known about a call besides its time.
pub(super) struct Case {
    pub(super) name: String,
    pub(super) calls_per_step: usize,
    pub(super) bytes: usize,
    pub(super) flops: f64,
}

impl Case {
    /// An operation that is limited by memory traffic.
    pub(super) fn moves(name: impl Into<String>, calls_per_step: usize, bytes: usize) -> Case {
        Case { name: name.into(), calls_per_step, bytes, flops: 0.0 }
    }
}

pub(super) struct Runner<'a> {
    queue: &'a Queue,
    timer: Timer,
    period: Vec<f32>,
    /// The memory of the operands. Replaced by a larger one if a case needs it.
    memory: RefCell<Memory>,
    workspace: Memory,
    ballast: Memory,
    each: RefCell<&'a mut dyn FnMut(Measurement)>,
}

impl<'a> Runner<'a> {
    /// Creates a runner with a workspace that all calls share.
    pub(super) fn new(
        queue: &'a Queue,
        workspace: Bytes,
        each: &'a mut dyn FnMut(Measurement),
    ) -> Result<Runner<'a>, MemoryError> {
        let take = |bytes| queue.device().allocate(bytes, queue.pool());
        let ballast = match queue.device() {
            Device::Cpu => Bytes::ZERO,
            Device::Cuda(_) => BALLAST,
        };
        Ok(Runner {
            queue,
            timer: Timer::new(queue)?,
            period: operand::period(),
            memory: RefCell::new(take(Bytes::ZERO)?),
            workspace: take(workspace.align_to(256))?,
            ballast: take(ballast)?,
            each: RefCell::new(each),
        })
    }

    pub(super) fn on_gpu(&self) -> bool {
        self.queue.cuda().is_some()
    }

    pub(super) fn workspace(&self) -> View<'_> {
        self.workspace.view(0, self.workspace.bytes().0 as usize / 4, DType::F32)
    }

    /// Measures one call. The call receives views of `operands`, in order.
    pub(super) fn measure<const N: usize>(
        &self,
        case: Case,
        operands: [Operand; N],
        call: impl Fn(&Queue, [View<'_>; N]),
    ) -> Result<(), MemoryError> {
        let set: usize = operands.iter().map(Operand::aligned_bytes).sum();
        let rotated = match self.queue.device() {
            Device::Cpu => ROTATED_ON_CPU.0,
            Device::Cuda(gpu) => ROTATED_CACHES * gpu.l2.0,
        };
        let sets = (rotated as usize).div_ceil(set.max(1)).clamp(1, MAX_SETS);
        self.grow(sets * set)?;
        let memory = self.memory.borrow();
        let (mut at, mut filled) = (0, Ok(()));
        let mut place = |set: usize, i: usize| {
            let operand = &operands[i];
            let view = memory.view(at, operand.len, operand.dtype);
            at += operand.aligned_bytes();
            let number = set * N + i;
            if filled.is_ok() {
                filled = operand.fill(self.queue, view, &self.period, number);
            }
            view
        };
        let sets: Vec<[View; N]> = (0..sets).map(|set| std::array::from_fn(|i| place(set, i))).collect();
        filled?;
        let call = |i: usize| call(self.queue, sets[i % sets.len()]);
        let seconds = self.timer.measure(self.queue, &self.ballast, &call)?;
        (self.each.borrow_mut())(Measurement {
            name: case.name,
            calls_per_step: case.calls_per_step,
            seconds: seconds[seconds.len() / 2],
            spread: [seconds[0], seconds[seconds.len() - 1]],
            bytes: case.bytes as f64,
            flops: case.flops,
        });
        Ok(())
    }

    /// Nothing runs between two cases, so the old memory can be freed first.
    fn grow(&self, bytes: usize) -> Result<(), MemoryError> {
        let bytes = Bytes(bytes as u64);
        let mut memory = self.memory.borrow_mut();
        if memory.bytes() < bytes {
            let take = |bytes| self.queue.device().allocate(bytes, self.queue.pool());
            *memory = take(Bytes::ZERO)?;
            *memory = take(bytes)?;
        }
        Ok(())
    }
}

/// The workspace of a matmul.
pub(super) fn matmul_workspace_bytes(queue: &Queue) -> Bytes {
    match queue {
        Queue::Cpu(_) => matmul::scratch_bytes(queue.num_threads()),
        Queue::Cuda(_) => CublasLt::WORKSPACE,
    }
}

/// The largest workspace that an operation of the step needs.
pub(super) fn workspace_bytes(queue: &Queue, step: &StepShape) -> Bytes {
    let rows =
        rmsnorm::scratch_elems(step.tokens, step.dim).max(bias::scratch_elems(step.tokens, step.q_width()));
    matmul_workspace_bytes(queue)
        .max(attention::workspace_bytes(queue, &step.attention()))
        .max(embedding::scratch_bytes(step.tokens))
        .max(Bytes(4 * rows as u64))
}
