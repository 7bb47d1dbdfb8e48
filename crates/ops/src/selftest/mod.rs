//! Checks every operation on this device against its f64 reference, on random inputs.
//!
//! Shapes are odd and typical: strided rows, widths that are not multiples of a vector, zero rows, one row, thousands.
//! Outputs and scratch start as NaN, so that unwritten elements are noticed; padding between rows must not change;
//! every call runs twice and must give the same bits. The checks also run on a CPU queue, which tests the checks
//! themselves.

mod activations;
mod attention;
mod harness;
mod matmul;
mod optimizer;
mod quantised;
mod updates;
mod vocab;

use lockstep_core::{Bytes, DType};
use lockstep_device::cuda::GpuError;
use lockstep_device::{Memory, MemoryError, Queue};

use harness::Harness;

/// The result of one check.
#[derive(Clone, Debug)]
pub struct Check {
    /// Operation, storage type and shape.
    pub name: String,
    /// ‖out − reference‖ / ‖reference‖ of the worst output; or, if larger, the same for its worst row, divided by 4, or
    /// the error of its worst element relative to its row's magnitude, divided by 16: roundings affect a row or an
    /// element more than the whole.
    pub error: f64,
    pub tolerance: f64,
    /// What failed: the part that is off, elements not written or written outside, bits that differ between two runs.
    pub note: Option<String>,
}

impl Check {
    pub fn passed(&self) -> bool {
        // NaN does not pass.
        self.error <= self.tolerance && self.note.is_none()
    }
}

/// The memory for operands.
const MEMORY: Bytes = Bytes(256 << 20);

/// Which checks are run.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// The maximum number of elements of an operand.
    pub largest: usize,
    /// Only checks whose name contains this.
    pub only: &'a str,
}

impl Selection<'_> {
    pub const ALL: Selection<'static> = Selection { largest: usize::MAX, only: "" };
}

/// Runs checks on a queue and its device's memory. Returns an error if the device stops working; wrong results are
/// reported to `each`.
pub fn run(
    selection: Selection,
    queue: &Queue,
    seed: u64,
    each: &mut dyn FnMut(Check),
) -> Result<(), MemoryError> {
    let memory = match queue {
        Queue::Cpu(cpu) => Memory::allocate(MEMORY, &cpu.pool)?,
        Queue::Cuda(cuda) => Memory::allocate_on(cuda.gpu, MEMORY)?,
    };
    all(&Harness::new(queue, &memory, seed, selection, each)).map_err(MemoryError::from)
}

fn all(harness: &Harness) -> Result<(), GpuError> {
    updates::run(harness)?;
    optimizer::run(harness)?;
    quantised::run(harness)?;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        activations::run(harness, dtype)?;
        vocab::run(harness, dtype)?;
        matmul::run(harness, dtype)?;
        attention::run(harness, dtype)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use lockstep_device::cuda::CudaQueue;
    use lockstep_device::cuda::fake::FakeGpu;

    use super::*;

    /// On fake GPUs, which compute nothing: their driver knows the parameters of each kernel, and launches must match
    /// them.
    #[test]
    fn launch_arguments_match_the_kernels() {
        const LARGEST: usize = 300_000;
        let mut launched = BTreeSet::new();
        for sm in [80, 90] {
            let (gpu, fake) = FakeGpu::make_with_sm(sm, None);
            let queue = Queue::Cuda(CudaQueue::new(gpu, 1).unwrap());
            let memory = Memory::allocate_on(gpu, MEMORY).unwrap();
            let (each, dtype) = (&mut |_| {}, DType::BF16);
            let selection = Selection { largest: LARGEST, ..Selection::ALL };
            let mut harness = Harness::new(&queue, &memory, 3, selection, each);
            harness.compares = false;
            updates::run(&harness).unwrap();
            optimizer::run(&harness).unwrap();
            quantised::run(&harness).unwrap();
            activations::run(&harness, dtype).unwrap();
            vocab::run(&harness, dtype).unwrap();
            matmul::run(&harness, dtype).unwrap();
            attention::run(&harness, dtype).unwrap();
            launched.extend(fake.launched());
        }
        let sources = crate::all_kernel_sources(80).into_iter().chain(crate::all_kernel_sources(90));
        let declared: BTreeSet<String> = sources.flat_map(|(source, _)| kernels(source.text)).collect();
        let missing: Vec<&String> = declared.difference(&launched).collect();
        assert!(missing.is_empty(), "kernels that were not launched: {missing:?}");
    }

    /// The names of a source's kernels.
    fn kernels(text: &str) -> Vec<String> {
        let name = |kernel: &str| {
            let bounded =
                kernel.trim_start().strip_prefix("__launch_bounds__").and_then(|r| r.split_once(')'));
            let name = bounded.map_or(kernel, |(_, rest)| rest).split('(').next();
            name.expect("a kernel has a name").trim().to_string()
        };
        text.split("__global__ void").skip(1).map(name).collect()
    }

    #[test]
    fn the_cpu_passes() {
        let (mut count, mut failed) = (0, Vec::new());
        run(Selection { largest: 40_000, ..Selection::ALL }, &Queue::cpu(2), 3, &mut |check| {
            count += 1;
            if !check.passed() {
                failed.push(check)
            }
        })
        .unwrap();
        assert!(count > 100 && failed.is_empty(), "of {count} checks: {failed:#?}");
    }
}
