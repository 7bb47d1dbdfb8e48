//! Bytes per second of AdamW, SGD and Lion on this machine's cores, next to those of a copy. A good update on the host
//! is limited by memory bandwidth.
//!
//!     cargo run --release -p lockstep-ops --example adamw_speed -- [threads] [millions of parameters]
#![allow(clippy::print_stdout)]

use std::time::Instant;

use lockstep_core::rounding::RoundingBits;
use lockstep_core::{Bytes, DType};
use lockstep_device::{InstructionSet, Isa, Memory, Pool, Queue, View};
use lockstep_ops::adamw::{self, Hyperparams, ParamRange};
use lockstep_ops::nf4::{self, Nf4, Scales};
use lockstep_ops::optimizer::{Params, RangeRounding, State};
use lockstep_ops::{lion, reduce, sgd};

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>().expect("a number"));
    let (threads, millions) = (args.next().unwrap_or(2), args.next().unwrap_or(64));
    for isa in Isa::all().filter(|isa| isa.set() != InstructionSet::Baseline) {
        measure(isa, threads, millions << 20);
    }
}

fn measure(isa: Isa, threads: usize, elems: usize) {
    let queue = Queue::cpu_with(threads, isa);
    let Queue::Cpu(cpu) = &queue else { unreachable!() };
    let memory = Memory::allocate(Bytes(20 * elems as u64), &cpu.pool).expect("memory for the states");
    let view = |i: usize, dtype| memory.view(4 * i * elems, elems, dtype);
    let [master, grad, m, v] = [0, 1, 2, 3].map(|i| view(i, DType::F32));
    let values: Vec<f32> = (0..elems).map(|i| ((i * 7919) % 1013) as f32 / 1013.0 - 0.5).collect();
    for state in [master, grad, m] {
        state.write_host(&values);
    }
    v.zero_host();
    println!("{isa}, {threads} threads, {elems} parameters");
    // Bytes read and written, including the read of a cache line before it is overwritten.
    report("copy", 12 * elems, || reduce::copy(&queue, view(4, DType::F32), grad));
    report("sum of squares", 4 * elems, || {
        let leaves = memory.view(16 * elems, elems / 256, DType::F64);
        reduce::squared_sum_leaves(&queue, leaves, grad);
    });
    report("addition", 12 * elems, || reduce::add(&queue, view(4, DType::F32), grad));
    let params = Hyperparams::at(10, 1e-3, (0.9, 0.95), 1e-8, 0.5);
    let update = |working: Option<View>| {
        let range = ParamRange {
            params: Params::Master { master, working },
            grad,
            m: m.into(),
            v: v.into(),
            rounding: None,
            weight_decay: 0.1,
        };
        adamw::update(&queue, range, &params, None);
    };
    report("update, f32 alone", 28 * elems, || update(None));
    for dtype in [DType::BF16, DType::F16] {
        report(&format!("update, {dtype} copy"), 32 * elems, || update(Some(view(4, dtype))));
    }
    measure_narrow(&queue, &memory, elems);
    let params = Params::Master { master, working: None };
    let plain = sgd::ParamRange { params, grad, momentum: None, rounding: None, weight_decay: 0.1 };
    let rates = sgd::Hyperparams { lr: 1e-3, momentum: 0.0, nesterov: false, clip: 0.5 };
    report("sgd", 12 * elems, || sgd::update(&queue, plain, &rates, None));
    let (range, rates) = (
        sgd::ParamRange { momentum: Some(m.into()), ..plain },
        sgd::Hyperparams { momentum: 0.9, nesterov: true, ..rates },
    );
    report("sgd with momentum", 20 * elems, || sgd::update(&queue, range, &rates, None));
    let range = lion::ParamRange { params, grad, m: m.into(), rounding: None, weight_decay: 0.1 };
    let rates = lion::Hyperparams::new(1e-3, (0.9, 0.99), 0.5);
    report("lion", 20 * elems, || lion::update(&queue, range, &rates, None));
}

/// AdamW with narrow parameters and states, in the same memory.
fn measure_narrow(queue: &Queue, memory: &Memory, elems: usize) {
    let narrow = |i: usize, dtype| memory.view(2 * i * elems, elems, dtype);
    let [weight, grad] = [0, 1].map(|i| narrow(i, DType::BF16));
    let split = Params::Split { weight, remainder: narrow(2, DType::I16) };
    let [m, v] = [3, 4].map(|i| narrow(i, DType::BF16).into());
    let wide = |i: usize| memory.view(4 * i * elems, elems, DType::F32).into();
    let blockwise = |i: usize| State::Blockwise {
        codes: narrow(i, DType::U8),
        absmax: memory.view(2 * i * elems + elems, elems / 256, DType::F32),
    };
    for i in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] {
        narrow(i, DType::BF16).zero_host();
    }
    let rounding = Some(RangeRounding { bits: RoundingBits::new(1, 1, "weight"), first_elem: 0 });
    let rates = Hyperparams::at(10, 1e-3, (0.9, 0.95), 1e-8, 0.5);
    let cases = [
        ("split, f32 states", split, [wide(3), wide(4)], 26),
        ("split, bf16 states", split, [m, v], 18),
        ("split, 8-bit states", split, [blockwise(3), blockwise(4)], 14),
        ("bf16, no master", Params::Stochastic { weight }, [m, v], 14),
    ];
    for (name, params, [m, v], bytes) in cases {
        let range = ParamRange { params, grad, m, v, rounding, weight_decay: 0.1 };
        report(name, bytes * elems, || adamw::update(queue, range, &rates, None));
    }
    let quantised = nf4::quantise(&Pool::new(2), &vec![0.5; elems]);
    narrow(1, DType::U8).first(elems / 2).write_host(&quantised.codes);
    let scales = memory.view(4 * elems, quantised.scales.len(), DType::F32);
    scales.write_host(&quantised.scales);
    let from = Nf4 { elems, codes: narrow(1, DType::U8).first(elems / 2), scales: Scales::F32(scales) };
    report("nf4 to bf16", elems * 9 / 2, || nf4::dequantise(queue, weight, &from, 0));
}

fn report(name: &str, bytes: usize, run: impl Fn()) {
    run();
    let mut times: Vec<f64> = (0..9)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
    println!("    {name:<20} median {:6.1} best {:6.1} GB/s", rate(times[4]), rate(times[0]));
}
