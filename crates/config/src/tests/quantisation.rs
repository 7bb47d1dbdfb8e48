//! The keys of weights in 4 bits.

use super::{accepted, refused};

#[test]
fn weights_in_4_bits() {
    // TRL's keys and bitsandbytes'.
    let trl = "use_peft: true\nload_in_4bit: true\nload_in_8bit: false\nbnb_4bit_quant_type: nf4\n\
        use_bnb_nested_quant: true\nbnb_4bit_quant_storage: uint8\n";
    assert!(accepted(trl, &[]).model.load_in_4bit);
    let bnb =
        "load_in_4bit: true\nbnb_4bit_use_double_quant: true\nbnb_4bit_compute_dtype: bfloat16\nbf16: true\n";
    assert!(accepted(bnb, &[]).model.load_in_4bit);
    let off = "load_in_4bit: false\nuse_bnb_nested_quant: false\nbnb_4bit_compute_dtype: float16\n";
    assert!(!accepted(off, &[]).model.load_in_4bit && !accepted("", &[]).model.load_in_4bit);
    insta::assert_snapshot!(refused("load_in_4bit: true\nbnb_4bit_quant_type: fp4\n", &[]), @r"
    run.yaml:4:22: `bnb_4bit_quant_type: fp4` is not implemented yet
      |
    4 | bnb_4bit_quant_type: fp4
      |                      ^^^
      hint: use `bnb_4bit_quant_type: nf4`.
    ");
    insta::assert_snapshot!(refused("load_in_4bit: true\nuse_bnb_nested_quant: false\n", &[]), @r"
    run.yaml:4:23: `use_bnb_nested_quant` must be true: scales are always quantized, which saves 0.37 bits per weight, found false
      |
    4 | use_bnb_nested_quant: false
      |                       ^^^^^
    ");
    insta::assert_snapshot!(refused("load_in_4bit: true\nbnb_4bit_compute_dtype: bfloat16\n", &[]), @r"
    run.yaml:4:25: `bnb_4bit_compute_dtype` must be the type of `mixed_precision`, which is that of all computation, found bfloat16
      |
    4 | bnb_4bit_compute_dtype: bfloat16
      |                         ^^^^^^^^
      hint: set `mixed_precision` to the same type, or remove this key.
    ");
    insta::assert_snapshot!(refused("load_in_8bit: true\n", &[]), @r"
    run.yaml:3:15: `load_in_8bit: true` is not implemented yet
      |
    3 | load_in_8bit: true
      |               ^^^^
      hint: use `load_in_4bit: true`.
    ");
}
