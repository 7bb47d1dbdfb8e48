//! Weights in 4 bits: transformers' `load_in_4bit` with bitsandbytes' keys.

use crate::reader::{Later, Reader};
use crate::sections::Precision;

/// Whether the frozen projections of the model are loaded in 4 bits.
pub(super) fn read_load_in_4bit(r: &mut Reader<'_>) -> bool {
    let is_on = r.bool("load_in_4bit").unwrap_or(false);
    if !is_on {
        // Recorded as read; without `load_in_4bit` the other keys have no effect.
        for key in ["bnb_4bit_quant_type", "bnb_4bit_use_double_quant"] {
            r.given(key);
        }
        return false;
    }
    r.word("bnb_4bit_quant_type", &[("nf4", ())], Later(&["fp4"], "use `bnb_4bit_quant_type: nf4`."));
    if r.bool("bnb_4bit_use_double_quant") == Some(false)
        && let Some(given) = r.given("bnb_4bit_use_double_quant")
    {
        let rule = "true: scales are always quantized, which saves 0.37 bits per weight";
        r.out_of_range(&given.spelled, rule, &given.node);
    }
    true
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ComputeType {
    F32,
    Bf16,
    F16,
}

/// The type that weights are dequantised to is that of the run.
pub(crate) fn check_compute_dtype(r: &mut Reader<'_>, precision: &Precision, is_on: bool) {
    let words = [
        ("float32", ComputeType::F32),
        ("fp32", ComputeType::F32),
        ("bfloat16", ComputeType::Bf16),
        ("bf16", ComputeType::Bf16),
        ("float16", ComputeType::F16),
        ("fp16", ComputeType::F16),
    ];
    let Some(wanted) = r.word("bnb_4bit_compute_dtype", &words, Later::NONE).filter(|_| is_on) else {
        return;
    };
    let fits = match precision {
        Precision::Auto => wanted != ComputeType::F16,
        Precision::F32 => wanted == ComputeType::F32,
        Precision::Bf16 => wanted == ComputeType::Bf16,
        Precision::F16(_) => wanted == ComputeType::F16,
    };
    if let Some(given) = r.given("bnb_4bit_compute_dtype").filter(|_| !fits) {
        r.out_of_range_with(
            &given.spelled,
            "the type of `mixed_precision`, which is that of all computation",
            "set `mixed_precision` to the same type, or remove this key.",
            &given.node,
        );
    }
}
