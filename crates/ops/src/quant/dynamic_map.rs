//! The dynamic map: 256 values between −1 and 1, or 0 and 1, that 8-bit codes stand for ("8-bit Optimizers via
//! Block-wise Quantization", Dettmers et al. 2022; the same bits as `create_dynamic_map` of bitsandbytes).
//!
//! There are seven decades, from [0.1·10⁻⁶, 10⁻⁶] to [0.1, 1]. The interval [0.1, 1] is divided into 2ⁱ equal parts for
//! decade i of the signed map, and into 2ⁱ⁺¹ for the unsigned one; a value is the middle of a part times 10^(i−6). The
//! signed map has these values with both signs. Both maps also have 0 and 1. Values are sorted; a code is an index.
//!
//! A block of 256 numbers is stored as codes of number / absmax and their largest magnitude, absmax. Codes are the
//! nearest: the count of midpoints between two neighbours that lie below the value.

/// Elements that share a scale.
pub const BLOCK_ELEMS: usize = 256;

/// Codes of a map.
const CODES: usize = 256;

/// The values of 256 codes, and what decides between them.
#[derive(Debug)]
pub struct DynamicMap {
    pub values: [f32; CODES],
    /// The midpoint between each value and the next, and infinity.
    midpoints: [f32; CODES],
}

/// For numbers of both signs, such as first moments.
pub static SIGNED: DynamicMap = DynamicMap::new(true);
/// For numbers that are not negative, such as second moments.
pub static UNSIGNED: DynamicMap = DynamicMap::new(false);

impl DynamicMap {
    const fn new(signed: bool) -> DynamicMap {
        let (mut values, mut midpoints) = ([0.0; CODES], [f32::INFINITY; CODES]);
        let mut code = 0;
        while code < CODES {
            values[code] = if signed { signed_value(code as u32) } else { unsigned_value(code as u32) };
            if code > 0 {
                midpoints[code - 1] = (values[code - 1] + values[code]) / 2.0;
            }
            code += 1;
        }
        DynamicMap { values, midpoints }
    }

    /// The code whose value is nearest. 0 for NaN.
    #[inline(always)]
    pub fn nearest(&self, value: f32) -> u8 {
        let mut code = 0u32;
        for step in [128, 64, 32, 16, 8, 4, 2, 1] {
            // Masked, so that the compiler knows that the index is in bounds and vectorizes the search.
            let at = (code + step - 1) as usize % CODES;
            code += if value > self.midpoints[at] { step } else { 0 };
        }
        code as u8
    }

    /// Writes the codes of a block and returns its scale. A block with NaN has the scale NaN.
    #[inline(always)]
    pub fn encode(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        let absmax = absmax(values);
        for (code, value) in codes.iter_mut().zip(values) {
            *code = self.nearest(scaled(*value, absmax));
        }
        absmax
    }

    /// Writes the numbers of a block.
    #[inline(always)]
    pub fn decode(&self, codes: &[u8], absmax: f32, values: &mut [f32]) {
        for (value, code) in values.iter_mut().zip(codes) {
            *value = self.values[usize::from(*code)] * absmax;
        }
    }
}

/// The value of a number between −1 and 1 in a block of zeros, too.
#[inline(always)]
fn scaled(value: f32, absmax: f32) -> f32 {
    if absmax == 0.0 { 0.0 } else { value / absmax }
}

/// The largest magnitude, or NaN if there is one.
#[inline(always)]
pub(crate) fn absmax(values: &[f32]) -> f32 {
    const LANES: usize = crate::math::LANES;
    let mut lanes = [0f32; LANES];
    let (whole, tail) = values.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, value.abs());
        }
    }
    lanes.into_iter().chain(tail.iter().map(|value| value.abs())).fold(0.0, larger)
}

/// The larger of two magnitudes, or NaN. Unlike floats, the bits of magnitudes have an order that includes NaN.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    f32::from_bits(a.to_bits().max(b.to_bits()))
}

const fn signed_value(code: u32) -> f32 {
    match code {
        0..127 => -signed_value(254 - code),
        127 => 0.0,
        // Decade i has the ranks 2ⁱ to 2ⁱ⁺¹ − 1.
        _ => {
            let rank = code - 127;
            let decade = rank.ilog2();
            if rank == 128 { 1.0 } else { decade_value(decade, 1 << decade, rank - (1 << decade)) }
        }
    }
}

const fn unsigned_value(code: u32) -> f32 {
    if code == 0 {
        return 0.0;
    }
    // Decade i has the ranks 2ⁱ⁺¹ to 2ⁱ⁺² − 1.
    let rank = code + 1;
    let parts = 1 << rank.ilog2();
    if rank == 256 { 1.0 } else { decade_value(rank.ilog2() - 1, parts, rank - parts) }
}

/// The middle of part `k` of [0.1, 1], divided into `parts`, times 10^(decade − 6).
const fn decade_value(decade: u32, parts: u32, k: u32) -> f32 {
    const POWERS: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0];
    POWERS[decade as usize] * ((boundary(parts, k) + boundary(parts, k + 1)) / 2.0)
}

/// Boundary `k` of the parts, counted from the nearer end, with one rounding, as in `torch.linspace`. `dynamic_boundary`
/// in the kernels.
const fn boundary(parts: u32, k: u32) -> f32 {
    let step = ((1.0 - 0.1f32) / parts as f32) as f64;
    // The sums are exact in f64.
    if k < parts.div_ceil(2) {
        (0.1f32 as f64 + step * k as f64) as f32
    } else {
        (1.0 - step * (parts - k) as f64) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_sorted_and_span_seven_decades() {
        for map in [&SIGNED, &UNSIGNED] {
            assert!(map.values.is_sorted_by(|a, b| a < b));
            assert_eq!(map.values[255], 1.0);
        }
        assert_eq!((SIGNED.values[127], UNSIGNED.values[0]), (0.0, 0.0));
        let near = |got: f32, want: f32| assert!((got - want).abs() < 1e-6 * want, "{got} instead of {want}");
        near(SIGNED.values[128], 0.55e-6);
        near(UNSIGNED.values[1], 0.325e-6);
        near(UNSIGNED.values[2], 0.775e-6);
        for code in 0..127 {
            assert_eq!(SIGNED.values[code], -SIGNED.values[254 - code]);
        }
    }

    /// Plain search.
    fn nearest(map: &DynamicMap, value: f32) -> f32 {
        let off = |code: &f32| (f64::from(*code) - f64::from(value)).abs();
        map.values.into_iter().min_by(|a, b| off(a).total_cmp(&off(b))).unwrap()
    }

    #[test]
    fn codes_are_nearest() {
        for map in [&SIGNED, &UNSIGNED] {
            for code in 0..CODES {
                assert_eq!(usize::from(map.nearest(map.values[code])), code);
            }
            for i in 0..100_000 {
                let sign = if i % 2 == 0 || map.values[0] == 0.0 { 1.0 } else { -1.0 };
                let value = sign * (-f32::from(i as u16) / 3500.0).exp();
                let off = |got: f32| (got - value).abs();
                let (got, want) = (map.values[usize::from(map.nearest(value))], nearest(map, value));
                assert!(off(got) <= off(want) * (1.0 + 1e-5), "{value}: {got} instead of {want}");
            }
        }
    }

    #[test]
    fn blocks_of_zeros_and_broken_blocks() {
        let (mut codes, mut values) = ([9; 4], [1.0; 4]);
        let absmax = SIGNED.encode(&[0.0, -0.0, 0.0, 0.0], &mut codes);
        SIGNED.decode(&codes, absmax, &mut values);
        assert_eq!((absmax, values), (0.0, [0.0; 4]));
        for broken in [f32::NAN, f32::INFINITY] {
            let absmax = SIGNED.encode(&[1.0, broken, 2.0, 0.0], &mut codes);
            SIGNED.decode(&codes, absmax, &mut values);
            assert!(!values[1].is_finite(), "{broken} is not hidden");
        }
        // The smallest scale.
        let tiny = f32::from_bits(1);
        let absmax = UNSIGNED.encode(&[tiny, 0.0, 0.0, 0.0], &mut codes);
        UNSIGNED.decode(&codes, absmax, &mut values);
        assert_eq!(values, [tiny, 0.0, 0.0, 0.0]);
    }
}
