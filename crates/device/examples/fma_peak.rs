//! The peak multiply-add rate of all threads together, in GFLOP/s. A training step's rate is compared with it.
//!
//!     cargo run --release -p lockstep-device --example fma_peak -- [threads]
#![allow(clippy::print_stdout)]

use lockstep_device::{Isa, fma_peak_gflops};

fn main() {
    let threads: usize = std::env::args().nth(1).map_or(2, |t| t.parse().expect("a number of threads"));
    let isa = Isa::detect();
    // Measure all threads at the same time: cores that share execution units or power do not each reach the peak alone.
    let peak: f64 = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(|| fma_peak_gflops(isa, 500))).collect();
        running.into_iter().map(|r| r.join().expect("a thread that only computes")).sum()
    });
    println!("{peak:.0}");
}
