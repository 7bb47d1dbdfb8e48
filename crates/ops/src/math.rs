//! Scalar functions and sums that the compiler vectorizes, with the same bits on every instruction set: they use
//! explicit fused multiply-adds and a fixed number of lanes.

use lockstep_device::Real;

/// Lanes of a row sum: one AVX-512 vector, two AVX2 vectors.
pub(crate) const LANES: usize = 16;

/// eˣ with an error of about 1.5 ulp; 0 below -87.3, where the result would be subnormal.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
    let shifted = x.min(88.3).mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // x - n * ln 2 in two parts, the first exact.
    let r = n.mul_add(-0.693_359_4, x.min(88.3));
    let r = n.mul_add(2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 5.0e-1);
    let value = p.mul_add(r * r, r) + 1.0;
    // Multiply by 2^n through the exponent bits.
    let scaled = f32::from_bits(value.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x < -87.3 {
        0.0
    } else if x.is_nan() {
        x
    } else {
        scaled
    }
}

/// 1 / (1 + e⁻ˣ).
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Forces the lanes into memory. Otherwise the compiler, seeing how the lanes are combined later, would split the
/// vector in the loop before to suit that.
#[inline(always)]
fn materialized(lanes: [f32; LANES]) -> [f32; LANES] {
    std::hint::black_box(lanes)
}

/// Reduces lanes in a fixed tree.
#[inline(always)]
fn tree(lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = materialized(lanes);
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Adds lanes in a fixed tree.
#[inline(always)]
pub(crate) fn fold(lanes: [f32; LANES]) -> f32 {
    tree(lanes, |a, b| a + b)
}

/// The larger of two values; `a` if `b` is NaN.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// out = f(x) for each element, one vector at a time. The compiler would otherwise unroll the loop by more elements
/// than a head-sized row has, and never enter the unrolled body.
#[inline(always)]
pub(crate) fn map_lanes<A: Copy, B>(out: &mut [B], x: &[A], f: impl Fn(A) -> B) {
    assert_eq!(out.len(), x.len(), "rows must have the same length");
    let ((out, out_tail), (x, x_tail)) = (out.as_chunks_mut::<LANES>(), x.as_chunks::<LANES>());
    for (out, x) in out.iter_mut().zip(x) {
        *out = x.map(&f);
    }
    for (out, x) in out_tail.iter_mut().zip(x_tail) {
        *out = f(*x);
    }
}

/// x = x · factor, also one vector at a time.
#[inline(always)]
pub(crate) fn multiply(x: &mut [f32], factor: f32) {
    let (whole, tail) = x.as_chunks_mut::<LANES>();
    for x in whole {
        *x = x.map(|x| x * factor);
    }
    for x in tail {
        *x *= factor;
    }
}

/// Σ f(a, b) over two rows: lane i % 16 sums its elements in order, then the lanes are added. The tail uses the same
/// lanes.
#[inline(always)]
pub(crate) fn sum2<A: Real, B: Real>(a: &[A], b: &[B], f: impl Fn(f32, f32) -> f32) -> f32 {
    sum3(a, b, b, |a, b, _| f(a, b))
}

/// Σ f(a, b, c) over three rows of one length.
#[inline(always)]
pub(crate) fn sum3<A: Real, B: Real, C: Real>(
    a: &[A],
    b: &[B],
    c: &[C],
    f: impl Fn(f32, f32, f32) -> f32,
) -> f32 {
    assert!(a.len() == b.len() && b.len() == c.len(), "rows must have the same length");
    let mut lanes = [0f32; LANES];
    let ((a, a_tail), (b, b_tail), (c, c_tail)) = (a.as_chunks(), b.as_chunks(), c.as_chunks());
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        let (a, b, c): ([f32; LANES], [f32; LANES], [f32; LANES]) =
            (a.map(A::to_f32), b.map(B::to_f32), c.map(C::to_f32));
        for (i, sum) in lanes.iter_mut().enumerate() {
            *sum += f(a[i], b[i], c[i]);
        }
    }
    if !a_tail.is_empty() {
        lanes = materialized(lanes);
        for (i, sum) in lanes.iter_mut().enumerate().take(a_tail.len()) {
            *sum += f(a_tail[i].to_f32(), b_tail[i].to_f32(), c_tail[i].to_f32());
        }
    }
    fold(lanes)
}

/// The largest of `values`, or negative infinity if there are none. Ignores NaN; sums propagate it.
#[inline(always)]
pub(crate) fn max(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, tail) = values.as_chunks::<LANES>();
    for chunk in whole {
        for (largest, value) in lanes.iter_mut().zip(chunk) {
            *largest = larger(*largest, *value);
        }
    }
    tail.iter().fold(tree(lanes, larger), |a, b| larger(a, *b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_everywhere() {
        let mut worst = 0f64;
        for i in -873_000..880_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp();
            worst = worst.max(((f64::from(exp(x)) - want) / want).abs());
        }
        assert!(worst < 2e-7, "worst relative error {worst:e}");
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(200.0) > 1e38);
    }
}
