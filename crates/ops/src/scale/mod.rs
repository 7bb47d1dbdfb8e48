//! Multiplies a matrix by a number, in place: the scale of a low-rank adapter.

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_device::Queue;

use crate::Mat;

/// x\[T, D\] *= factor.
pub fn in_place(queue: &Queue, x: Mat, factor: f32) {
    match queue {
        Queue::Cpu(cpu) => cpu::in_place(cpu, x, factor),
        Queue::Cuda(cuda) => cuda::in_place(cuda, x, factor),
    }
}
