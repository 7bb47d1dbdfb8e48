//! Converts little-endian elements on disk to and from f32. Narrowing rounds to nearest: to bf16 with ties away from zero, as
//! parameters are rounded everywhere ([`lockstep_core::rounding`]), to f16 with ties to even. 8-bit codes are numbers from 0
//! to 255.

use half::{bf16, f16};
use lockstep_core::DType;
use lockstep_core::rounding::bf16_ties_away;

/// The types of parameters.
pub(crate) const fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Whether [`decode`] and [`encode`] support `dtype`: floats, and the codes of optimizer states.
pub(crate) const fn convertible(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::U8)
}

/// Widens `bytes`, elements of `dtype`, into `out`.
pub(crate) fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * dtype.size(), "{dtype} bytes for {} elements", out.len());
    match dtype {
        DType::F32 => fill(bytes, out, f32::from_le_bytes),
        DType::BF16 => fill(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        DType::F16 => fill(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        DType::U8 => fill(bytes, out, |[code]: [u8; 1]| code.into()),
        DType::F64 | DType::U32 | DType::I16 => panic!("{dtype} cannot be read as f32"),
    }
}

/// Appends `values` to `out` as elements of `dtype`.
pub(crate) fn encode(dtype: DType, values: &[f32], out: &mut Vec<u8>) {
    match dtype {
        DType::F32 => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        DType::BF16 => out.extend(values.iter().flat_map(|v| bf16_ties_away(*v).to_le_bytes())),
        DType::F16 => out.extend(values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes())),
        DType::U8 => out.extend(values.iter().map(|v| *v as u8)),
        DType::F64 | DType::U32 | DType::I16 => panic!("{dtype} cannot be written from f32"),
    }
}

fn fill<const N: usize>(bytes: &[u8], out: &mut [f32], one: impl Fn([u8; N]) -> f32) {
    let (chunks, _) = bytes.as_chunks::<N>();
    for (value, chunk) in out.iter_mut().zip(chunks) {
        *value = one(*chunk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(dtype: DType, value: f32) -> f32 {
        let (mut bytes, mut out) = (Vec::new(), [0.0]);
        encode(dtype, &[value], &mut bytes);
        decode(dtype, &bytes, &mut out);
        out[0]
    }

    #[test]
    fn narrowing_rounds_to_nearest() {
        // bf16 has 7 fraction bits: 1 + 2^-8 is a tie and rounds up. f16 has 10, and ties round to even.
        let ulp = |n: f32, bits: i32| 1.0 + n * 2f32.powi(-bits);
        assert_eq!(round_trip(DType::BF16, ulp(1.0, 8)), ulp(1.0, 7));
        assert_eq!(round_trip(DType::BF16, ulp(0.99, 8)), 1.0);
        assert_eq!(round_trip(DType::BF16, ulp(3.0, 8)), ulp(2.0, 7));
        assert_eq!(round_trip(DType::BF16, ulp(1.01, 8)), ulp(1.0, 7));
        assert_eq!(round_trip(DType::F16, ulp(1.0, 11)), 1.0);
        assert_eq!(round_trip(DType::F16, ulp(3.0, 11)), ulp(2.0, 10));
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            assert!(round_trip(dtype, f32::NAN).is_nan());
            assert_eq!(round_trip(dtype, f32::NEG_INFINITY), f32::NEG_INFINITY);
            assert_eq!(round_trip(dtype, -0.0).to_bits(), (-0.0f32).to_bits());
        }
    }
}
