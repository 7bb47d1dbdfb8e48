//! The multiply-add peak of all threads at once, in GFLOP/s: what a training step's rate is a share of.
//!
//!     cargo run --release -p lockstep-device --example fma_peak -- [threads]
#![allow(clippy::print_stdout)]

use lockstep_device::{Isa, fma_peak_gflops};

fn main() {
    let threads: usize = std::env::args().nth(1).map_or(2, |t| t.parse().expect("a number of threads"));
    let isa = Isa::detect();
    // All at once: cores that share units or power do not each reach the peak of one.
    let peak: f64 = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(|| fma_peak_gflops(isa, 500))).collect();
        running.into_iter().map(|r| r.join().expect("a thread that only computes")).sum()
    });
    println!("{peak:.0}");
}
