//! Rates of attention on a GPU, for shapes of training and decode.
//!
//!     cargo run --release -p lockstep-ops --example attention_speed
//!
//! Only scores of visible keys count as operations, and backward counts as two and a half times forward, so that rates
//! are comparable with published ones.
#![allow(clippy::print_stdout)]

use std::path::PathBuf;

use lockstep_core::{Bytes, DType};
use lockstep_device::cuda::{CudaQueue, Event, Gpu, GpuError, LibrarySearch};
use lockstep_device::{Memory, Queue, View};
use lockstep_ops::Mat;
use lockstep_ops::attention::{self, BackwardArgs, DecodeArgs, ForwardArgs, Heads, KvCache};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let roots = |name| std::env::var_os(name).map(PathBuf::from).into_iter().collect::<Vec<_>>();
    let search = LibrarySearch::around(&roots("CUDA_HOME"), &roots("VIRTUAL_ENV"));
    let gpu = Gpu::open(0, &search, None)?;
    let bench = Bench {
        gpu,
        queue: Queue::Cuda(CudaQueue::new(gpu, 1)?),
        memory: Memory::allocate_on(gpu, Bytes(4 << 30))?,
    };
    println!("{}", gpu.name);
    for (dtype, width, num_q, num_kv, docs, len, window) in [
        (DType::BF16, 64, 16, 16, 16, 2048, None),
        (DType::BF16, 64, 32, 4, 8, 2048, None),
        (DType::BF16, 128, 32, 32, 4, 2048, None),
        (DType::BF16, 128, 32, 8, 1, 8192, None),
        (DType::BF16, 128, 16, 16, 1, 8192, None),
        (DType::BF16, 128, 16, 16, 4, 2048, None),
        (DType::BF16, 64, 32, 32, 1, 8192, None),
        (DType::BF16, 64, 12, 12, 16, 1024, None),
        (DType::BF16, 64, 32, 8, 16, 512, None),
        (DType::BF16, 128, 32, 8, 1, 8192, Some(1024)),
        (DType::F16, 96, 16, 16, 2, 4096, None),
        (DType::BF16, 256, 8, 8, 1, 8192, None),
        (DType::F32, 64, 12, 12, 4, 1024, None),
        (DType::F32, 128, 16, 16, 2, 2048, None),
    ] {
        let heads = Heads { num_q, num_kv, width, scale: 1.0 / (width as f32).sqrt(), window };
        bench.train(dtype, heads, docs, len)?;
    }
    for (docs, past, new) in [(1, 4096, 1), (64, 2048, 1), (1, 0, 4096), (4, 1024, 512)] {
        for width in [64, 128] {
            let heads =
                Heads { num_q: 32, num_kv: 8, width, scale: 1.0 / (width as f32).sqrt(), window: None };
            bench.generate(heads, docs, past, new)?;
        }
    }
    Ok(())
}

struct Bench {
    gpu: &'static Gpu,
    queue: Queue,
    memory: Memory,
}

/// Allocates memory from its start on.
struct Places<'m> {
    memory: &'m Memory,
    at: usize,
}

impl<'m> Places<'m> {
    fn take(&mut self, len: usize, dtype: DType) -> View<'m> {
        let view = self.memory.view(self.at, len, dtype);
        self.at = (self.at + view.bytes()).next_multiple_of(256);
        view
    }

    /// Numbers between −1 and 1.
    fn fill(&mut self, rows: usize, cols: usize, dtype: DType) -> Mat<'m> {
        let view = self.take(rows * cols, dtype);
        let values: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919) % 1013) as f32 / 506.5 - 1.0).collect();
        view.write_f32(&values).expect("the GPU works");
        Mat::dense(view, rows, cols)
    }

    fn numbers(&mut self, values: Vec<u32>) -> View<'m> {
        let view = self.take(values.len(), DType::U32);
        view.write(&values).expect("the GPU works");
        view
    }
}

impl Bench {
    fn places(&self) -> Places<'_> {
        Places { memory: &self.memory, at: 0 }
    }

    /// Seconds of one call, averaged over twenty.
    fn time(&self, call: impl Fn()) -> Result<f64, GpuError> {
        const CALLS: usize = 20;
        let Queue::Cuda(cuda) = &self.queue else { unreachable!() };
        call();
        let (start, end) = (Event::timed(self.gpu)?, Event::timed(self.gpu)?);
        cuda.record(&start);
        (0..CALLS).for_each(|_| call());
        cuda.record(&end);
        cuda.synchronize()?;
        Ok(f64::from(end.milliseconds_since(&start)?) / 1e3 / CALLS as f64)
    }

    fn train(&self, dtype: DType, heads: Heads, docs: usize, len: usize) -> Result<(), GpuError> {
        let Heads { num_q, num_kv, width, window, .. } = heads;
        let (tokens, q_cols, kv_cols) = (docs * len, num_q * width, num_kv * width);
        let mut places = self.places();
        let [qkv, dqkv] = [(); 2].map(|()| places.fill(tokens, q_cols + 2 * kv_cols, dtype));
        let [out, dout] = [(); 2].map(|()| places.fill(tokens, q_cols, dtype));
        let scratch = attention::cuda_scratch_bytes(tokens, num_q, width).0 as usize / 4;
        let call = ForwardArgs {
            heads,
            out,
            lse: places.take(tokens * num_q, DType::F32),
            q: qkv.columns(0, q_cols),
            k: qkv.columns(q_cols, kv_cols),
            v: qkv.columns(q_cols + kv_cols, kv_cols),
            cu_seqlens: places.numbers((0..=docs).map(|doc| (doc * len) as u32).collect()),
            dropout: None,
            scratch: places.take(scratch, DType::F32),
        };
        let [dq, dk, dv] = [(0, q_cols), (q_cols, kv_cols), (q_cols + kv_cols, kv_cols)]
            .map(|(first, cols)| dqkv.columns(first, cols));
        let forward = self.time(|| attention::forward(&self.queue, call))?;
        let call = BackwardArgs { dq, dk, dv, dout, forward: call };
        let backward = self.time(|| attention::backward(&self.queue, call))?;
        let seen: usize = (0..len).map(|i| window.map_or(i + 1, |window| window.min(i + 1))).sum();
        let flops = (4 * docs * num_q * width * seen) as f64;
        println!(
            "{dtype} heads {num_q}/{num_kv}×{width}, {docs} of {len}, window {window:?}: forward {:.3} ms, {:.0} \
             TFLOP/s; backward {:.3} ms, {:.0} TFLOP/s",
            forward * 1e3,
            flops / forward / 1e12,
            backward * 1e3,
            2.5 * flops / backward / 1e12,
        );
        Ok(())
    }

    /// `new` tokens for each of `docs` documents that already have `past`.
    fn generate(&self, heads: Heads, docs: usize, past: usize, new: usize) -> Result<(), GpuError> {
        let Heads { num_q, num_kv, width, .. } = heads;
        let (tokens, q_cols, kv_cols) = (docs * new, num_q * width, num_kv * width);
        let mut places = self.places();
        let dtype = DType::BF16;
        let qkv = places.fill(tokens, q_cols + 2 * kv_cols, dtype);
        let page_tokens = attention::KV_PAGE_TOKENS;
        let pages = docs * (past + new).div_ceil(page_tokens);
        let elems = pages * attention::cuda_kv_page_elems(num_kv, width, page_tokens, dtype);
        let call = DecodeArgs {
            heads,
            out: places.fill(tokens, q_cols, dtype),
            q: qkv.columns(0, q_cols),
            k: qkv.columns(q_cols, kv_cols),
            v: qkv.columns(q_cols + kv_cols, kv_cols),
            cu_seqlens: places.numbers((0..=docs).map(|doc| (doc * new) as u32).collect()),
            positions: places.numbers((0..tokens).map(|t| (past + t % new) as u32).collect()),
            page_tables: places.numbers((0..pages as u32).collect()),
            cache: KvCache { view: places.take(elems, DType::F32), pages, page_tokens },
            scratch: View::empty(),
        };
        let seconds = self.time(|| attention::decode(&self.queue, call))?;
        println!(
            "decode, {dtype} heads {num_q}/{num_kv}×{width}, {docs} documents of {past} and {new} new: {:.3} ms, \
             cache read once at {:.0} GB/s",
            seconds * 1e3,
            4.0 * elems as f64 / seconds / 1e9,
        );
        Ok(())
    }
}
