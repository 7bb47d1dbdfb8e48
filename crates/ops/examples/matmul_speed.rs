//! Rates of the matmul shapes of a training step, relative to the multiply-add peak, on every instruction set of this
//! machine in f32; or in bf16, with vectors and with AMX if there is any.
//!
//!     cargo run --release -p lockstep-ops --example matmul_speed -- [threads] [bf16]
#![allow(clippy::print_stdout)]

use std::time::Instant;

use lockstep_core::{Bytes, DType};
use lockstep_device::{InstructionSet, Isa, Memory, Queue, fma_peak_gflops};
use lockstep_ops::Mat;
use lockstep_ops::matmul::{self, Accumulate};

fn main() {
    let threads: usize = std::env::args().nth(1).map_or(2, |t| t.parse().expect("a number of threads"));
    if std::env::args().nth(2).is_some_and(|dtype| dtype == "bf16") {
        measure(&Queue::cpu_with(threads, Isa::detect()), DType::BF16);
        return measure(&Queue::cpu(threads), DType::BF16);
    }
    for isa in Isa::all().filter(|isa| isa.set() != InstructionSet::Baseline) {
        measure(&Queue::cpu_with(threads, isa), DType::F32);
    }
}

fn measure(queue: &Queue, dtype: DType) {
    let Queue::Cpu(cpu) = queue else { unreachable!() };
    let (isa, threads) = (cpu.isa, cpu.pool.num_threads());
    let memory = Memory::allocate(Bytes(512 << 20), &cpu.pool).expect("512 MiB");
    // Measure all threads at the same time: cores that share execution units or power do not each reach the peak alone.
    let peaks: Vec<f64> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(|| fma_peak_gflops(isa, 500))).collect();
        running.into_iter().map(|r| r.join().expect("a thread that only computes")).collect()
    });
    let peak: f64 = peaks.iter().sum();
    let tiles = if cpu.amx.is_some() { " and AMX" } else { "" };
    println!("{isa}{tiles}, {dtype}, {threads} threads, peak of vectors in f32 {peak:.0} GFLOP/s");
    let mut at = 0;
    let mut matrix = |rows: usize, cols: usize, dtype: DType| {
        let view = memory.view(at, rows * cols, dtype);
        at = (at + view.bytes()).next_multiple_of(4096);
        let values: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919) % 1013) as f32 / 1013.0 - 0.5).collect();
        view.write_f32(&values).expect("the CPU's memory");
        Mat::dense(view, rows, cols)
    };
    let scratch = matrix(1, matmul::scratch_bytes(threads).0 as usize / 4, DType::F32).view;
    for (tokens, input, output) in [
        (2048, 288, 288),
        (2048, 288, 768),
        (2048, 768, 288),
        (1024, 288, 4096),
        (1024, 768, 768),
        (1024, 768, 2048),
        (1024, 2048, 768),
        (1024, 768, 4096),
    ] {
        let (x, w, y) =
            (matrix(tokens, input, dtype), matrix(output, input, dtype), matrix(tokens, output, dtype));
        let dw = matrix(output, input, DType::F32);
        for form in ["nt", "nn", "tn"] {
            let run = || match form {
                "nt" => matmul::nt(queue, y, x, w, Accumulate::Overwrite, scratch),
                "nn" => matmul::nn(queue, x, y, w, Accumulate::Overwrite, scratch),
                _ => matmul::tn(queue, dw, y, x, Accumulate::Add, scratch),
            };
            run();
            let mut times: Vec<f64> = (0..60)
                .map(|_| {
                    let start = Instant::now();
                    run();
                    start.elapsed().as_secs_f64()
                })
                .collect();
            times.sort_by(f64::total_cmp);
            let rate = |s: f64| 2.0 * (tokens * input * output) as f64 / s / 1e9;
            println!(
                "{form} {tokens:5} x {input:4} -> {output:4}: median {:6.1} best {:6.1} GFLOP/s = {:3.0} % of peak",
                rate(times[30]),
                rate(times[0]),
                100.0 * rate(times[0]) / peak
            );
        }
    }
}
