//! Instruction sets, chosen at run time.
//!
//! A kernel is ordinary Rust marked `#[inline(always)]`. [`Isa::run`] calls it from inside a function that is compiled
//! for the instruction set, so the compiler vectorizes its loops for that set. All sets execute the same sequence of
//! multiply-adds per element, so results do not depend on the set. The one exception is matmul of bf16 matrices on
//! machines with AMX ([`Amx`](crate::Amx)): tiles add in a different, but also fixed, order.

use std::fmt;

/// A set of vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// x86-64 with AVX-512 F, BW, DQ, VL.
    Avx512,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// The set that the compile target guarantees: NEON on aarch64, SSE2 on x86-64.
    Baseline,
}

/// An instruction set that this machine has. Only detection creates one, so an `Isa` proves that its instructions may
/// run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(InstructionSet);

impl Isa {
    /// The best set this machine has.
    pub fn detect() -> Isa {
        Isa::all().next().unwrap_or(Isa(InstructionSet::Baseline))
    }

    /// Every set this machine has, best first.
    pub fn all() -> impl Iterator<Item = Isa> {
        [InstructionSet::Avx512, InstructionSet::Avx2, InstructionSet::Baseline]
            .into_iter()
            .filter(|set| available(*set))
            .map(Isa)
    }

    pub fn set(self) -> InstructionSet {
        self.0
    }

    /// Runs `kernel` compiled for this set. Mark the closure and everything it calls `#[inline(always)]`: a body that
    /// is not inlined is compiled for the baseline, where a fused multiply-add is a function call.
    #[inline(always)]
    pub fn run<R>(self, kernel: impl FnOnce() -> R) -> R {
        match self.0 {
            // SAFETY: an `Isa` only exists for a set that was detected.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unsafe { run_avx512(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => unsafe { run_avx2(kernel) },
            _ => kernel(),
        }
    }
}

fn available(set: InstructionSet) -> bool {
    match set {
        InstructionSet::Baseline => true,
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && available(InstructionSet::Avx2)
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
        }
        #[cfg(not(target_arch = "x86_64"))]
        _ => false,
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn run_avx512<R>(kernel: impl FnOnce() -> R) -> R {
    kernel()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<R>(kernel: impl FnOnce() -> R) -> R {
    kernel()
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            InstructionSet::Avx512 => "AVX-512",
            InstructionSet::Avx2 => "AVX2",
            InstructionSet::Baseline if cfg!(target_arch = "aarch64") => "NEON",
            InstructionSet::Baseline => "baseline",
        })
    }
}

/// The current multiply-add rate of one thread in GFLOP/s, the peak that benchmarks are compared with. Takes about
/// `millis` milliseconds and returns the best of several bursts.
pub fn fma_peak_gflops(isa: Isa, millis: u64) -> f64 {
    const ROUNDS: usize = 100_000;
    let deadline = std::time::Instant::now() + std::time::Duration::from_millis(millis);
    let mut best = 0f64;
    while std::time::Instant::now() < deadline {
        let (factor, addend) = std::hint::black_box((0.999f32, 0.001f32));
        let start = std::time::Instant::now();
        let lanes = match isa.0 {
            // SAFETY: an `Isa` only exists for a set that was detected.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unsafe { burst_avx512(ROUNDS, factor, addend) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => unsafe { burst_avx2(ROUNDS, factor, addend) },
            _ => burst_portable(ROUNDS, factor, addend),
        };
        let seconds = start.elapsed().as_secs_f64();
        best = best.max((2 * lanes * CHAINS * ROUNDS) as f64 / seconds / 1e9);
    }
    best
}

/// Independent chains of multiply-adds: enough to fill two units with a latency of four cycles.
const CHAINS: usize = 12;

/// Returns the number of lanes of a vector.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn burst_avx512(rounds: usize, factor: f32, addend: f32) -> usize {
    use std::arch::x86_64::*;
    let (factor, addend) = (_mm512_set1_ps(factor), _mm512_set1_ps(addend));
    let mut chains = [_mm512_setzero_ps(); CHAINS];
    for _ in 0..rounds {
        for chain in &mut chains {
            *chain = _mm512_fmadd_ps(*chain, factor, addend);
        }
    }
    std::hint::black_box(chains);
    16
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn burst_avx2(rounds: usize, factor: f32, addend: f32) -> usize {
    use std::arch::x86_64::*;
    let (factor, addend) = (_mm256_set1_ps(factor), _mm256_set1_ps(addend));
    let mut chains = [_mm256_setzero_ps(); CHAINS];
    for _ in 0..rounds {
        for chain in &mut chains {
            *chain = _mm256_fmadd_ps(*chain, factor, addend);
        }
    }
    std::hint::black_box(chains);
    8
}

fn burst_portable(rounds: usize, factor: f32, addend: f32) -> usize {
    let mut chains = [[0f32; 4]; CHAINS];
    for _ in 0..rounds {
        for lane in chains.iter_mut().flatten() {
            *lane = lane.mul_add(factor, addend);
        }
    }
    std::hint::black_box(chains);
    4
}
