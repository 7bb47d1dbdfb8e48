//! Does this device compute right? Every operation against its plain reference in f64, on fresh random inputs.
//!
//! Shapes are odd and typical: strided rows, widths that are no multiple of a vector, no rows, one row, thousands.
//! Outputs and scratch start as NaN, so that what was not written shows; margins between rows must stay as they
//! were; every call runs twice and must give the same bits. It runs on a CPU queue too, which tests the tests.

mod activations;
mod attention;
mod harness;
mod matmul;
mod optimizer;
mod vocab;

use lockstep_core::{Bytes, DType};
use lockstep_device::cuda::GpuError;
use lockstep_device::{Memory, MemoryError, Queue};

use harness::Harness;

/// The outcome of one call.
#[derive(Clone, Debug)]
pub struct Check {
    /// Operation, storage type and shape.
    pub name: String,
    /// ‖out − reference‖ / ‖reference‖, of the output that is worst; or, where that is larger, the same of its worst
    /// row, divided by 4, or its worst element's error relative to its row's size, divided by 16: what a few roundings
    /// leave of a whole is less than what they may do to a part.
    pub error: f64,
    pub tolerance: f64,
    /// What was wrong: the part that is off, elements not written or written outside, bits that differ between two
    /// runs.
    pub note: Option<String>,
}

impl Check {
    pub fn passed(&self) -> bool {
        // A NaN does not pass.
        self.error <= self.tolerance && self.note.is_none()
    }
}

/// What operands lie in.
const MEMORY: Bytes = Bytes(256 << 20);

/// Which checks are run.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// The most elements that an operand has.
    pub largest: usize,
    /// What the check's name contains.
    pub only: &'a str,
}

impl Selection<'_> {
    pub const ALL: Selection<'static> = Selection { largest: usize::MAX, only: "" };
}

/// Runs checks on a queue and its device's memory. An error is that of a device that stopped working; results that are
/// wrong are reported to `each`.
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
    optimizer::run(harness)?;
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

    /// On GPUs that compute nothing: their driver knows what each kernel declares, and launches are held to it.
    #[test]
    fn kernels_are_given_what_they_declare() {
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
            optimizer::run(&harness).unwrap();
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
