//! The measured limits of a device, to which rates are compared.

use lockstep_core::DType;
use lockstep_device::{MemoryError, Queue};

use super::Measurement;
use super::matmul::{Layout, MatmulCase};
use super::operand::normals;
use super::runner::{Case, Runner, matmul_workspace_bytes};
use crate::reduce;

/// Bytes of the copy and sizes of the matmul: far beyond the caches, and at rates that larger ones hardly exceed.
const ON_GPU: (usize, usize) = (1 << 30, 8192);
const ON_CPU: (usize, usize) = (128 << 20, 1024);

/// The rates of a large copy and a large matmul.
#[derive(Clone, Copy, Debug)]
pub struct Roofline {
    /// Bytes read plus bytes written.
    pub bytes_per_second: f64,
    pub flops_per_second: f64,
}

impl Roofline {
    /// The rate relative to the limit that it is closer to.
    pub fn share(&self, rate: &Measurement) -> f64 {
        let memory = rate.bytes_per_second() / self.bytes_per_second;
        memory.max(rate.flops_per_second() / self.flops_per_second)
    }

    /// Whether that limit is the memory's.
    pub fn is_memory_bound(&self, rate: &Measurement) -> bool {
        rate.bytes_per_second() / self.bytes_per_second >= rate.flops_per_second() / self.flops_per_second
    }
}

pub(super) fn measure(queue: &Queue, dtype: DType) -> Result<Roofline, MemoryError> {
    let mut rates = Vec::new();
    let mut each = |rate| rates.push(rate);
    let runner = Runner::new(queue, matmul_workspace_bytes(queue), &mut each)?;
    let (copied, cube) = if runner.on_gpu() { ON_GPU } else { ON_CPU };
    let operands = [(); 2].map(|()| normals(copied / 4, DType::F32));
    runner.measure(Case::moves("copy", 0, 2 * copied), operands, |queue, [to, from]| {
        reduce::copy(queue, to, from);
    })?;
    MatmulCase::plain(Layout::Nt, [cube; 3], dtype).measure(&runner, "matmul", 0)?;
    drop(runner);
    // Take the best of several calls, since this is a limit.
    let [copy, product] = [&rates[0], &rates[1]].map(|rate| (rate, rate.spread[0]));
    Ok(Roofline { bytes_per_second: copy.0.bytes / copy.1, flops_per_second: product.0.flops / product.1 })
}
