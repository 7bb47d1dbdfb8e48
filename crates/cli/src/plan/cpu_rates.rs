//! Measures how fast the CPU ranks of this machine compute.
//!
//! All ranks of the node are measured at once, each as a thread with a pool of its own, because they share memory
//! bandwidth and clock. The kernels are those of a training step at the shapes of a small model, in the type that the run
//! stores: element-wise kernels read fewer bytes per second of 16-bit values, and attention computes in f32 even where
//! matmuls of bf16 have instructions of their own. NVMe and the exchange between ranks are not measured.

use std::thread;

use lockstep_core::DType;
use lockstep_device::{MemoryError, Queue};
use lockstep_ops::bench::{self as ops_bench, Measurement, Recompute, StepShape};
use lockstep_plan::cost::{MatmulRates, Rates};

/// Small enough that both types together take about three seconds.
const TOKENS: usize = 512;
const DIM: usize = 384;
const FFN: usize = 1056;
const VOCAB: usize = 4096;

/// The rates of one rank with `num_threads` threads in a run that stores `storage`, while `num_ranks` such ranks work. Of
/// several ranks the mean.
pub(super) fn measure(num_threads: usize, num_ranks: usize, storage: DType) -> Result<Rates, MemoryError> {
    let ranks: Vec<Result<Rates, MemoryError>> = thread::scope(|scope| {
        let started: Vec<_> = (0..num_ranks).map(|_| scope.spawn(|| of_rank(num_threads, storage))).collect();
        started.into_iter().map(|rank| rank.join().expect("a measurement does not panic")).collect()
    });
    let ranks = ranks.into_iter().collect::<Result<Vec<Rates>, MemoryError>>()?;
    let mean = |of: fn(&Rates) -> f64| ranks.iter().map(of).sum::<f64>() / ranks.len() as f64;
    let memory = mean(|rates| rates.memory_bytes_per_s);
    Ok(Rates {
        matmul: MatmulRates {
            f32: mean(|rates| rates.matmul.f32),
            bf16: mean(|rates| rates.matmul.bf16),
            f16: mean(|rates| rates.matmul.f16),
        },
        attention_share: mean(|rates| rates.attention_share),
        memory_bytes_per_s: memory,
        // A copy reads and writes.
        host_link_bytes_per_s: memory / 2.0,
        host_update_bytes_per_s: mean(|rates| rates.host_update_bytes_per_s),
        ..Rates::generic_cpu(num_threads as u32)
    })
}

fn of_rank(num_threads: usize, storage: DType) -> Result<Rates, MemoryError> {
    let queue = Queue::cpu(num_threads);
    // A run in f32 also needs the rate of bf16, which a plan may suggest.
    let half_type = if storage == DType::F16 { DType::F16 } else { DType::BF16 };
    let single = KernelRates::measure(&queue, DType::F32)?;
    let half = KernelRates::measure(&queue, half_type)?;
    let stored = if storage == DType::F32 { &single } else { &half };
    Ok(Rates {
        matmul: MatmulRates { f32: single.matmul, bf16: half.matmul, f16: half.matmul },
        attention_share: stored.attention / stored.matmul,
        memory_bytes_per_s: stored.memory,
        host_update_bytes_per_s: stored.update,
        ..Rates::generic_cpu(num_threads as u32)
    })
}

/// FLOP/s of matmuls of the stored type and of attention, bytes per second of updates and of the other kernels.
struct KernelRates {
    matmul: f64,
    attention: f64,
    update: f64,
    memory: f64,
}

impl KernelRates {
    fn measure(queue: &Queue, dtype: DType) -> Result<KernelRates, MemoryError> {
        let shape = StepShape {
            dtype,
            tokens: TOKENS,
            docs: 2,
            dim: DIM,
            heads: 6,
            kv_heads: 6,
            head_dim: 64,
            ffn: FFN,
            vocab: VOCAB,
            layers: 6,
            head_chunk: TOKENS,
            recompute: Recompute::Nothing,
        };
        let mut all: Vec<Measurement> = Vec::new();
        ops_bench::step(queue, &shape, &mut |measured| all.push(measured))?;
        // Kernels count as often as the step runs them.
        let rate = |of: fn(&Measurement) -> f64, is_counted: &dyn Fn(&str) -> bool| {
            let counted = || all.iter().filter(|measured| is_counted(&measured.name));
            let amount: f64 = counted().map(|m| m.calls_per_step as f64 * of(m)).sum();
            amount / counted().map(Measurement::seconds_per_step).sum::<f64>()
        };
        let starts = |with: &'static str| move |name: &str| name.starts_with(with);
        let (matmul, attention, update) = (starts("matmul"), starts("attention"), starts("adamw"));
        // The logits' gradient is f32 in every run, and so are the matmuls that read it.
        let of_stored_type = |name: &str| {
            matmul(name)
                && (dtype == DType::F32 || !(name.starts_with("matmul head") && name.contains("gradient")))
        };
        Ok(KernelRates {
            matmul: rate(|m| m.flops, &of_stored_type),
            attention: rate(|m| m.flops, &attention),
            update: rate(|m| m.bytes, &update),
            memory: rate(|m| m.bytes, &|name| !matmul(name) && !attention(name) && !update(name)),
        })
    }
}
