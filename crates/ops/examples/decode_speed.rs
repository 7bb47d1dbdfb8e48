//! The time of the matmuls of one decoded token for a 15m model, over all its layers' weights in turn, relative to
//! reading those weights and to the multiply-add peak.
//!
//!     cargo run --release -p lockstep-ops --example decode_speed -- [threads] [documents] [bf16]
#![allow(clippy::print_stdout)]

use std::time::Instant;

use lockstep_core::{Bytes, DType};
use lockstep_device::{Amx, Isa, Memory, Queue, fma_peak_gflops};
use lockstep_ops::Mat;
use lockstep_ops::matmul::{self, Accumulate};

fn main() {
    let mut args = std::env::args().skip(1).take(2).map(|arg| arg.parse().expect("a number"));
    let (threads, rows): (usize, usize) = (args.next().unwrap_or(2), args.next().unwrap_or(16));
    let dtype = if std::env::args().nth(3).is_some_and(|d| d == "bf16") { DType::BF16 } else { DType::F32 };
    let isa = Isa::detect();
    println!("vectors");
    measure(&Queue::cpu_with(threads, isa), rows, dtype);
    if dtype == DType::BF16 && Amx::detect().is_some() {
        println!("AMX");
        measure(&Queue::cpu(threads), rows, dtype);
    }
}

fn measure(queue: &Queue, rows: usize, dtype: DType) {
    let Queue::Cpu(cpu) = queue else { unreachable!() };
    let (isa, threads) = (cpu.isa, cpu.pool.num_threads());
    let memory = Memory::allocate(Bytes(128 << 20), &cpu.pool).expect("128 MiB");
    let mut at = 0;
    let mut matrix = |rows: usize, cols: usize, dtype: DType| {
        let view = memory.view(at, rows * cols, dtype);
        at = (at + view.bytes()).next_multiple_of(4096);
        let values: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919) % 1013) as f32 / 1013.0 - 0.5).collect();
        view.write_f32(&values).expect("the CPU's memory");
        Mat::dense(view, rows, cols)
    };
    let scratch = matrix(1, matmul::scratch_bytes(threads).0 as usize / 4, DType::F32).view;
    let shapes = [("qkv", 288, 864), ("o", 288, 288), ("gate up", 288, 1536), ("down", 768, 288)];
    let products: Vec<_> = (0..6)
        .flat_map(|_| shapes)
        .chain([("head", 288, 4096)])
        .map(|(name, input, output)| {
            (name, matrix(rows, input, dtype), matrix(output, input, dtype), matrix(rows, output, dtype))
        })
        .collect();
    let num_weights: usize = products.iter().map(|(_, _, w, _)| w.rows * w.cols).sum();
    let peak = fma_peak_gflops(isa, 300) * threads as f64;
    let mut steps = Vec::new();
    let mut each = vec![Vec::new(); products.len()];
    for _ in 0..200 {
        let start = Instant::now();
        let mut last = 0.0;
        for ((_, x, w, y), times) in products.iter().zip(&mut each) {
            matmul::nt(queue, *y, *x, *w, Accumulate::Overwrite, scratch);
            let now = start.elapsed().as_secs_f64();
            times.push(now - last);
            last = now;
        }
        steps.push(last);
    }
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let step = median(&mut steps);
    println!(
        "{rows} rows: {:.2} ms (best {:.2}); {:.1} GB/s of weights, {:.0} GFLOP/s of {peak:.0}",
        step * 1e3,
        steps[0] * 1e3,
        (num_weights * dtype.size()) as f64 / step / 1e9,
        (2 * rows * num_weights) as f64 / step / 1e9
    );
    for (idx, (name, _, w, _)) in
        products.iter().enumerate().skip(4).filter(|(idx, _)| *idx < 8 || *idx == 24)
    {
        let time = median(&mut each[idx]);
        let rate = (2 * rows * w.rows * w.cols) as f64 / time / 1e9;
        println!("{name:8} {:7.1} us {rate:6.0} GFLOP/s", time * 1e6);
    }
}
