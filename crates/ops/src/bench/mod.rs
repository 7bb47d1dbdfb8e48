//! Benchmarks of the operations that training consists of, on this device.
//!
//! They measure every operation of a training step at a model's shapes, and matmul and attention of any shape. Rates
//! are stated relative to the device's limits, which are measured in the same run: a large copy and a large matmul.
//! Operands are random and change from call to call, so that they are not in a cache. Bytes are those that must be read
//! and written once, and operations those that the result needs: extra work of a kernel lowers its rate.

mod activations;
mod attention;
mod matmul;
mod operand;
mod optimizer;
mod roofline;
mod runner;
mod timer;
mod vocab;

use lockstep_core::DType;
use lockstep_device::{MemoryError, Queue};

use runner::Runner;

pub use attention::{AttentionShape, DecodeShape};
pub use roofline::Roofline;

/// The measurement of one operation.
#[derive(Clone, Debug)]
pub struct Measurement {
    pub name: String,
    /// How often a step of the model runs it; 0 if it never does.
    pub calls_per_step: usize,
    /// The median time of a call.
    pub seconds: f64,
    /// The fastest and the slowest call.
    pub spread: [f64; 2],
    /// Bytes that must be read and written.
    pub bytes: f64,
    /// Floating-point operations.
    pub flops: f64,
}

impl Measurement {
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes / self.seconds
    }

    pub fn flops_per_second(&self) -> f64 {
        self.flops / self.seconds
    }

    pub fn seconds_per_step(&self) -> f64 {
        self.calls_per_step as f64 * self.seconds
    }
}

/// What backward recomputes instead of reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    Nothing,
    /// The outputs of norms and of SwiGLU.
    Cheap,
    /// Whole blocks.
    Blocks,
}

/// The step whose operations are measured: one micro-batch of a LLaMA, on one rank.
#[derive(Clone, Copy, Debug)]
pub struct StepShape {
    pub dtype: DType,
    pub tokens: usize,
    /// Documents, all of the same length.
    pub docs: usize,
    pub dim: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub vocab: usize,
    pub layers: usize,
    /// Tokens whose logits exist at the same time.
    pub head_chunk: usize,
    pub recompute: Recompute,
}

impl StepShape {
    fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of a block's weight matrices.
    fn block_elems(&self) -> usize {
        self.dim * (2 * self.q_width() + 2 * self.kv_width() + 3 * self.ffn)
    }

    /// The number of the head's chunks, and the tokens of the largest.
    fn chunks(&self) -> (usize, usize) {
        let chunk = self.head_chunk.clamp(1, self.tokens);
        (self.tokens.div_ceil(chunk), chunk)
    }

    /// How often a step runs an operation that every block runs once in forward.
    fn forward_times(&self) -> usize {
        self.layers * (1 + usize::from(self.recompute == Recompute::Blocks))
    }

    fn attention(&self) -> AttentionShape {
        AttentionShape {
            dtype: self.dtype,
            docs: self.docs,
            length: self.tokens / self.docs,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            window: None,
        }
    }
}

/// Measures every operation of a step, and some that other models' steps have. `each` is called with each measurement
/// as soon as it is known. The sum of their `seconds_per_step` is the time of the step.
pub fn step(queue: &Queue, step: &StepShape, each: &mut dyn FnMut(Measurement)) -> Result<(), MemoryError> {
    assert!(step.docs > 0 && step.tokens.is_multiple_of(step.docs), "documents must have the same length");
    let runner = Runner::new(queue, runner::workspace_bytes(queue, step), each)?;
    activations::run(&runner, step)?;
    matmul::of_step(&runner, step)?;
    attention::of_step(&runner, step)?;
    vocab::run(&runner, step)?;
    optimizer::run(&runner, step)
}

/// Measures a matmul of \[m, k\] and \[k, n\] in the three layouts of training.
pub fn matmul(
    queue: &Queue,
    dtype: DType,
    [m, n, k]: [usize; 3],
    each: &mut dyn FnMut(Measurement),
) -> Result<(), MemoryError> {
    let runner = Runner::new(queue, runner::matmul_workspace_bytes(queue), each)?;
    matmul::layouts(&runner, dtype, [m, n, k])
}

/// Measures attention forward and backward.
pub fn attention(
    queue: &Queue,
    shape: &AttentionShape,
    each: &mut dyn FnMut(Measurement),
) -> Result<(), MemoryError> {
    let workspace = attention::workspace_bytes(queue, shape);
    attention::train(&Runner::new(queue, workspace, each)?, shape, [0, 0])
}

/// Measures attention of new tokens over a KV cache.
pub fn decode(
    queue: &Queue,
    shape: &DecodeShape,
    each: &mut dyn FnMut(Measurement),
) -> Result<(), MemoryError> {
    let workspace = attention::decode_workspace_bytes(queue, shape);
    attention::decode(&Runner::new(queue, workspace, each)?, shape)
}

/// Measures the device's limits.
pub fn roofline(queue: &Queue, dtype: DType) -> Result<Roofline, MemoryError> {
    roofline::measure(queue, dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything runs, and every measurement is a number.
    #[test]
    fn everything_is_measured_on_the_cpu() {
        let queue = Queue::cpu(2);
        let shape = StepShape {
            dtype: DType::BF16,
            tokens: 96,
            docs: 2,
            dim: 64,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            ffn: 176,
            vocab: 300,
            layers: 2,
            head_chunk: 64,
            recompute: Recompute::Cheap,
        };
        let mut rates = Vec::new();
        let mut each = |rate: Measurement| rates.push(rate);
        step(&queue, &shape, &mut each).unwrap();
        matmul(&queue, DType::F32, [33, 65, 17], &mut each).unwrap();
        let cached = DecodeShape {
            dtype: DType::F32,
            docs: 3,
            past: 70,
            new: 1,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            window: None,
        };
        decode(&queue, &cached, &mut each).unwrap();
        assert!(rates.len() > 40, "{}", rates.len());
        for rate in &rates {
            let [fastest, slowest] = rate.spread;
            assert!(0.0 < fastest && fastest <= rate.seconds && rate.seconds <= slowest, "{rate:?}");
            assert!(rate.bytes + rate.flops > 0.0, "{rate:?}");
        }
        let mut names: Vec<&str> = rates.iter().map(|rate| rate.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), rates.len(), "names must be unique: {names:#?}");
    }

    /// The operations of the measured matmuls add up to those of a step.
    #[test]
    fn measurements_add_up_to_a_step() {
        let shape = StepShape {
            dtype: DType::F32,
            tokens: 32,
            docs: 1,
            dim: 32,
            heads: 2,
            kv_heads: 1,
            head_dim: 16,
            ffn: 48,
            vocab: 80,
            layers: 3,
            head_chunk: 16,
            recompute: Recompute::Nothing,
        };
        let mut flops = 0.0;
        step(&Queue::cpu(1), &shape, &mut |rate| {
            if rate.name.starts_with("matmul") {
                flops += rate.calls_per_step as f64 * rate.flops;
            }
        })
        .unwrap();
        let weights = shape.layers * shape.block_elems() + shape.vocab * shape.dim;
        assert_eq!(flops, (6 * shape.tokens * weights) as f64);
    }
}
