//! NF4 and 8-bit Adam against bitsandbytes. `goldens/quant.py` describes how the goldens were made.

use std::path::Path;

use lockstep_core::{Bytes, DType};
use lockstep_device::{Isa, Memory, Pool, Queue, View};
use lockstep_ops::nf4::{self, Nf4, Scales};
use lockstep_ops::optimizer::{Params, State};
use lockstep_ops::quant::dynamic_map::{SIGNED, UNSIGNED};
use lockstep_ops::{adamw, nf4::Quantised};
use serde_json::Value;

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/quant.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(float).collect()
}

fn float(value: &Value) -> f32 {
    f32::from_bits(u32::try_from(value.as_u64().unwrap()).unwrap())
}

fn bytes(value: &Value) -> Vec<u8> {
    let text = value.as_str().unwrap().as_bytes();
    let digit = |c: u8| (c as char).to_digit(16).unwrap() as u8;
    text.chunks_exact(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

/// The inputs, as `numbers` of the script makes them.
fn numbers(mut seed: u32, count: usize) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        i64::from(seed >> 16)
    };
    let number = |i: usize| {
        let total: i64 = (0..4).map(|_| next()).sum();
        let size = (1 + i / 64 * 37 % 101) as f64 / 128.0;
        ((total - 2 * 65_535) as f64 / 65_536.0 * size) as f32
    };
    (0..count).map(number).collect()
}

fn memory() -> Memory {
    Memory::allocate(Bytes(1 << 20), &Pool::new(1)).unwrap()
}

/// Views at multiples of 64 KiB.
fn place<'m, T: Copy>(memory: &'m Memory, slot: usize, values: &[T], dtype: DType) -> View<'m> {
    let view = memory.view(slot << 16, values.len(), dtype);
    view.write(values).unwrap();
    view
}

#[test]
fn maps_have_the_bits_of_bitsandbytes() {
    let maps = &golden()["maps"];
    assert_eq!(floats(&maps["signed"]), SIGNED.values);
    assert_eq!(floats(&maps["unsigned"]), UNSIGNED.values);
    assert_eq!(floats(&maps["nf4"]), nf4::VALUES);
}

fn checksum(words: impl Iterator<Item = u64>) -> String {
    (1u64..).zip(words).fold(0u64, |sum, (i, word)| sum.wrapping_add(i.wrapping_mul(word))).to_string()
}

/// Dequantises on every instruction set and compares with the checksums of a case.
fn check_weights(want: &Value, codes: View, scales: Scales, elems: usize) {
    let memory = memory();
    let from = Nf4 { elems, codes, scales };
    for isa in Isa::all() {
        let queue = Queue::cpu_with(1, isa);
        let out = memory.view(0, elems, DType::F32);
        nf4::dequantise(&queue, out, &from, 0);
        let mut words = vec![0u32; elems];
        out.read(&mut words).unwrap();
        assert_eq!(checksum(words.into_iter().map(u64::from)), want["f32"].as_str().unwrap(), "f32, {isa}");
        let out = memory.view(1 << 19, elems, DType::BF16);
        nf4::dequantise(&queue, out, &from, 0);
        let mut words = vec![0u16; elems];
        out.read(&mut words).unwrap();
        assert_eq!(checksum(words.into_iter().map(u64::from)), want["bf16"].as_str().unwrap(), "bf16, {isa}");
    }
}

#[test]
fn nf4_has_the_codes_scales_and_weights_of_bitsandbytes() {
    let golden = golden();
    for case in golden["nf4"].as_array().unwrap() {
        let number = |key: &str| case[key].as_u64().unwrap() as usize;
        let elems = number("elems");
        let mut weights = numbers(number("seed") as u32, elems);
        if case["dtype"] == "bfloat16" {
            let round = |x: &f32| f32::from_bits(u32::from(half::bf16::from_f32(*x).to_bits()) << 16);
            weights = weights.iter().map(round).collect();
        }
        if elems > 3 * 64 {
            weights[64..128].fill(0.0);
        }
        let got: Quantised = nf4::quantise(&Pool::new(2), &weights);
        assert_eq!(got.codes, bytes(&case["codes"]), "codes of {elems} elements");
        assert_eq!(got.scales, floats(&case["scales"]), "scales of {elems} elements");
        let outer = got.quantise_scales();
        assert_eq!(outer.codes, bytes(&case["scale_codes"]), "codes of the scales of {elems} elements");
        // PyTorch sums the mean in another order.
        let offset = float(&case["offset"]);
        assert!((outer.offset - offset).abs() <= 2e-7 * offset, "{} instead of {offset}", outer.offset);
        let (memory, absmax) = (memory(), floats(&case["absmax"]));
        let codes = place(&memory, 0, &got.codes, DType::U8);
        check_weights(&case["plain"], codes, Scales::F32(place(&memory, 1, &got.scales, DType::F32)), elems);
        let scales = Scales::Double {
            codes: place(&memory, 2, &outer.codes, DType::U8),
            absmax: place(&memory, 3, &absmax, DType::F32),
            offset,
        };
        check_weights(&case["double"], codes, scales, elems);
    }
}

/// bitsandbytes rounds after other operations, so a number that lies between two codes may get the other one.
#[test]
fn adamw_with_8_bit_states_follows_bitsandbytes() {
    let golden = golden();
    let (settings, memory) = (&golden["adam"]["settings"], memory());
    let number = |key: &str| settings[key].as_f64().unwrap();
    let elems = number("elems") as usize;
    let betas = (settings["betas"][0].as_f64().unwrap(), settings["betas"][1].as_f64().unwrap());
    let master = place(&memory, 0, &numbers(11, elems), DType::F32);
    let codes =
        [place(&memory, 1, &vec![127u8; elems], DType::U8), place(&memory, 2, &vec![0u8; elems], DType::U8)];
    let absmax = [3, 4].map(|slot| place(&memory, slot, &vec![0f32; elems.div_ceil(256)], DType::F32));
    for (step, want) in (1..).zip(golden["adam"]["steps"].as_array().unwrap()) {
        let grad = place(&memory, 5, &numbers(20 + step as u32, elems), DType::F32);
        let [m, v] = [0, 1].map(|i| State::Blockwise { codes: codes[i], absmax: absmax[i] });
        let params = Params::Master { master, working: None };
        let weight_decay = number("weight_decay") as f32;
        let range = adamw::ParamRange { params, grad, m, v, rounding: None, weight_decay };
        let rates = adamw::Hyperparams::at(step, number("lr"), betas, number("eps"), 1.0);
        adamw::update(&Queue::cpu(2), range, &rates, None);
        for i in [0, 1] {
            let (mut got, want_codes) = (vec![0u8; elems], bytes(&want["codes"][i]));
            codes[i].read(&mut got).unwrap();
            let other = got.iter().zip(&want_codes).filter(|(got, want)| got != want).count();
            assert!(other <= elems / 100, "step {step}: {other} of {elems} codes of state {i} differ");
            assert!(got.iter().zip(&want_codes).all(|(got, want)| got.abs_diff(*want) <= 1));
            let mut got = vec![0f32; elems.div_ceil(256)];
            absmax[i].read(&mut got).unwrap();
            let near = |(got, want): (&f32, &f32)| (got - want).abs() <= 1e-6 * want;
            assert!(
                got.iter().zip(&floats(&want["absmax"][i])).all(near),
                "step {step}: scales of state {i}"
            );
        }
        let mut got = vec![0f32; elems];
        master.read(&mut got).unwrap();
        for (got, want) in got.iter().zip(floats(&want["parameters"])) {
            assert!((got - want).abs() <= 1e-3 * number("lr") as f32, "step {step}: {got} instead of {want}");
        }
    }
}
