//! Rates of the memory-bound operations on a GPU: all but matmul and attention.
//!
//!     cargo run --release -p lockstep-ops --example kernel_speed [tokens] [width]
//!
//! Bytes are those that must be read and written once; rereads from a cache do not count. A rate near the memory's own
//! means that a faster kernel would not help.
#![allow(clippy::print_stdout)]

use std::cell::Cell;
use std::path::PathBuf;

use lockstep_core::rounding::RoundingBits;
use lockstep_core::{Bytes, DType};
use lockstep_device::cuda::{CudaQueue, Event, Gpu, GpuError, LibrarySearch};
use lockstep_device::{Memory, Queue, View};
use lockstep_ops::dropout::{Mask, Site};
use lockstep_ops::nf4::{self, Nf4, Scales};
use lockstep_ops::optimizer::{Params, RangeRounding, State};
use lockstep_ops::{Mat, adamw, bias, cross_entropy, dropout, embedding, reduce, rmsnorm, rope, swiglu};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let roots = |name| std::env::var_os(name).map(PathBuf::from).into_iter().collect::<Vec<_>>();
    let search = LibrarySearch::around(&roots("CUDA_HOME"), &roots("VIRTUAL_ENV"));
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|number| number.parse().ok()).collect();
    let gpu = Gpu::open(0, &search, None)?;
    let bench = Bench {
        gpu,
        queue: Queue::Cuda(CudaQueue::new(gpu, 1)?),
        memory: Memory::allocate_on(gpu, Bytes(6 << 30))?,
        used: Cell::new(0),
    };
    let tokens = numbers.first().copied().unwrap_or(32_768);
    let width = numbers.get(1).copied().unwrap_or(1024);
    println!("{}, {tokens} tokens, width {width}", gpu.name);
    for dtype in [DType::BF16, DType::F32] {
        bench.activations(dtype, tokens, width)?;
        bench.ends(dtype, tokens, width)?;
    }
    Ok(bench.states()?)
}

struct Bench {
    gpu: &'static Gpu,
    queue: Queue,
    memory: Memory,
    used: Cell<usize>,
}

impl Bench {
    fn take(&self, len: usize, dtype: DType) -> View<'_> {
        let view = self.memory.view(self.used.get(), len, dtype);
        self.used.set((self.used.get() + view.bytes()).next_multiple_of(256));
        view
    }

    /// Numbers between −1 and 1.
    fn fill(&self, rows: usize, cols: usize, dtype: DType) -> Mat<'_> {
        let view = self.take(rows * cols, dtype);
        let values: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919) % 1013) as f32 / 506.5 - 1.0).collect();
        view.write_f32(&values).expect("the GPU works");
        Mat::dense(view, rows, cols)
    }

    fn indices(&self, len: usize, bound: usize) -> View<'_> {
        let view = self.take(len, DType::U32);
        view.write(&(0..len).map(|i| (i * 7919 % bound) as u32).collect::<Vec<_>>()).expect("the GPU works");
        view
    }

    /// Prints the rate of a call that moves this many bytes, from the best of several runs.
    fn time(&self, name: &str, bytes: usize, call: impl Fn(&Queue)) -> Result<(), GpuError> {
        let cuda = self.queue.cuda().expect("a GPU's queue");
        let (start, end) = (Event::timed(self.gpu)?, Event::timed(self.gpu)?);
        let mut best = f32::INFINITY;
        for _ in 0..10 {
            cuda.record(&start);
            call(&self.queue);
            cuda.record(&end);
            cuda.synchronize()?;
            best = best.min(end.milliseconds_since(&start)?);
        }
        println!("{name:<36} {:>9.1} µs {:>7.0} GB/s", best * 1e3, bytes as f64 / f64::from(best) / 1e6);
        Ok(())
    }

    fn activations(&self, dtype: DType, tokens: usize, width: usize) -> Result<(), GpuError> {
        self.used.set(0);
        let [x, y, dy] = [(); 3].map(|()| self.fill(tokens, width, dtype));
        let (w, dw) = (self.fill(1, width, dtype).view, self.fill(1, width, DType::F32).view);
        let rstd = self.fill(1, tokens, DType::F32).view;
        let scratch = self.take(rmsnorm::scratch_elems(tokens, width), DType::F32);
        let bytes = tokens * width * dtype.size();
        self.time(&format!("rmsnorm forward, {dtype}"), 2 * bytes, |queue| {
            rmsnorm::forward(queue, y, rstd, x, w, 1e-5);
        })?;
        for (how, add) in [("", false), (" added", true)] {
            let moved = (3 + usize::from(add)) * bytes;
            self.time(&format!("rmsnorm backward{how}, {dtype}"), moved, |queue| {
                let call =
                    rmsnorm::BackwardArgs { dx: y, add, recompute: false, dw, dy, x, rstd, w, scratch };
                rmsnorm::backward(queue, call);
            })?;
        }
        let (head, half) = (self.fill(1, 64, dtype).view, 32);
        let head_rstd = self.fill(tokens, width / 64, DType::F32).view;
        let head_dw = self.fill(1, 64, DType::F32).view;
        self.time(&format!("rmsnorm of heads forward, {dtype}"), 2 * bytes, |queue| {
            rmsnorm::forward(queue, y, head_rstd, x, head, 1e-5);
        })?;
        self.time(&format!("rmsnorm of heads backward, {dtype}"), 3 * bytes, |queue| {
            let (dw, rstd, w) = (head_dw, head_rstd, head);
            rmsnorm::backward(
                queue,
                rmsnorm::BackwardArgs { dx: y, add: false, recompute: false, dw, dy, x, rstd, w, scratch },
            );
        })?;
        let positions = self.indices(tokens, 2048);
        let [cos, sin] = [(); 2].map(|()| self.fill(2048, half, DType::F32).view);
        self.time(&format!("rope, {dtype}"), 2 * bytes, |queue| {
            rope::apply(queue, y, positions, rope::Table { cos, sin, half }, rope::Direction::Forward);
        })?;
        self.time(&format!("swiglu forward, {dtype}"), 3 * bytes, |queue| {
            swiglu::forward(queue, y, x, dy);
        })?;
        self.time(&format!("swiglu backward, {dtype}"), 5 * bytes, |queue| {
            swiglu::backward_in_place(queue, y, x, dy);
        })?;
        self.time(&format!("bias forward, {dtype}"), 2 * bytes, |queue| bias::forward(queue, y, w))?;
        self.time(&format!("bias backward, {dtype}"), bytes, |queue| bias::backward(queue, dw, dy, scratch))?;
        let bounds = self.take(17, DType::U32);
        bounds.write(&(0..17).map(|i| (i * tokens / 16) as u32).collect::<Vec<_>>()).expect("the GPU works");
        let samples = self.indices(16, 16);
        let mask = Mask { rate: 0.1, seed: 1, step: 2, layer: 3, site: Site::MlpOut, samples };
        self.time(&format!("dropout forward, {dtype}"), 3 * bytes, |queue| {
            dropout::forward(queue, y, x, bounds, Some(&mask));
        })
    }

    fn ends(&self, dtype: DType, tokens: usize, width: usize) -> Result<(), GpuError> {
        const VOCAB: usize = 32_000;
        self.used.set(0);
        let (x, table) = (self.fill(tokens, width, dtype), self.fill(VOCAB, width, dtype));
        let (dtable, ids) = (self.fill(VOCAB, width, DType::F32), self.indices(tokens, VOCAB));
        let scratch = self.take(2 * tokens, DType::U32);
        let bytes = tokens * width * dtype.size();
        self.time(&format!("embedding forward, {dtype}"), 2 * bytes, |queue| {
            embedding::forward(queue, x, table, ids);
        })?;
        let touched = tokens.min(VOCAB) * width * 8;
        self.time(&format!("embedding backward, {dtype}"), bytes + touched, |queue| {
            embedding::backward(queue, dtable, x, ids, scratch);
        })?;
        // Half of the tokens are the same one.
        let common = self.take(tokens, DType::U32);
        common
            .write(&(0..tokens).map(|i| (i % 2 * i % VOCAB) as u32).collect::<Vec<_>>())
            .expect("the GPU works");
        self.time(&format!("embedding backward, one token, {dtype}"), bytes + touched / 2, |queue| {
            embedding::backward(queue, dtable, x, common, scratch);
        })?;
        self.used.set(0);
        let rows = tokens.min(8192);
        let (logits, targets) = (self.fill(rows, VOCAB, DType::F32), self.indices(rows, VOCAB));
        let [logp, c] = [(); 2].map(|()| self.fill(1, rows, DType::F32).view);
        self.time("cross-entropy forward", rows * VOCAB * 4, |queue| {
            cross_entropy::forward(queue, logp, logits, targets, 1.0);
        })?;
        self.time(&format!("cross-entropy both, {dtype}"), rows * VOCAB * (4 + dtype.size()), |queue| {
            cross_entropy::forward_backward(queue, logp, logits, targets, c, 1.0, dtype);
        })
    }

    fn states(&self) -> Result<(), GpuError> {
        const LEN: usize = 64 << 20;
        self.used.set(0);
        let [master, grad, m, v] = [(); 4].map(|()| self.fill(1, LEN, DType::F32).view);
        let working = Some(self.take(LEN, DType::BF16));
        let range = adamw::ParamRange {
            params: Params::Master { master, working },
            grad,
            m: m.into(),
            v: v.into(),
            rounding: None,
            weight_decay: 0.1,
        };
        let params = adamw::Hyperparams::at(3, 1e-3, (0.9, 0.95), 1e-8, 1.0);
        let decision = self.take(4, DType::F64);
        decision.write(&[1.0, 1.0, 1.0, 0f64]).expect("the GPU works");
        self.time("adamw, working copy in bf16", LEN * 30, |queue| {
            adamw::update(queue, range, &params, Some(decision));
        })?;
        self.narrow_states(LEN, decision)?;
        let leaves = self.take(LEN / 256, DType::F64);
        self.time("squares", LEN * 4, |queue| {
            reduce::squared_sum_leaves(queue, leaves, grad);
            reduce::sum_leaves(queue, decision.first(1), leaves);
            reduce::decide_step(queue, decision, Some(1.0), 1.0);
        })?;
        self.time("add", LEN * 12, |queue| reduce::add(queue, m, grad))
    }

    /// AdamW with narrow parameters and states, and NF4 weights.
    fn narrow_states(&self, len: usize, decision: View) -> Result<(), GpuError> {
        let [weight, grad, m, v] = [(); 4].map(|()| self.fill(1, len, DType::BF16).view);
        let [m_wide, v_wide] = [(); 2].map(|()| self.fill(1, len, DType::F32).view);
        let remainder = self.take(len, DType::I16);
        let [m_codes, v_codes] = [(); 2].map(|()| self.take(len, DType::U8));
        let [m_scales, v_scales] = [(); 2].map(|()| self.fill(1, len / 256, DType::F32).view);
        let split = Params::Split { weight, remainder };
        let rounding = Some(RangeRounding { bits: RoundingBits::new(1, 1, "weight"), first_elem: 0 });
        let blockwise = |codes, absmax| State::Blockwise { codes, absmax };
        let cases = [
            ("f32 states", split, [m_wide.into(), v_wide.into()], 26),
            ("bf16 states", split, [m.into(), v.into()], 18),
            ("8-bit states", split, [blockwise(m_codes, m_scales), blockwise(v_codes, v_scales)], 14),
            ("bf16 states, no master", Params::Stochastic { weight }, [m.into(), v.into()], 14),
        ];
        let rates = adamw::Hyperparams::at(3, 1e-3, (0.9, 0.95), 1e-8, 1.0);
        for (name, params, [m, v], bytes) in cases {
            let range = adamw::ParamRange { params, grad, m, v, rounding, weight_decay: 0.1 };
            self.time(&format!("adamw, {name}"), len * bytes, |queue| {
                adamw::update(queue, range, &rates, Some(decision));
            })?;
        }
        let scales = Scales::Double {
            codes: m_codes.first(len / nf4::BLOCK_ELEMS),
            absmax: m_scales.first(len / nf4::BLOCK_ELEMS / nf4::SCALES_PER_BLOCK),
            offset: 1.0,
        };
        let from = Nf4 { elems: len, codes: v_codes.first(len / 2), scales };
        self.time("nf4 to bf16", len * 5 / 2, |queue| nf4::dequantise(queue, weight, &from, 0))
    }
}
