//! Textbook matmul in f64, the reference for the fast versions.

/// C\[m, n\] = Σₖ a(m, k) · b(k, n).
pub fn matmul(
    m: usize,
    n: usize,
    k: usize,
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            c[i * n + j] = (0..k).map(|l| a(i, l) * b(l, j)).sum();
        }
    }
    c
}

/// About `wanted` of `count` indices, including the first and the last, at uneven distances.
pub fn some_of(count: usize, wanted: usize) -> Vec<usize> {
    let step = (count / wanted.max(1)).max(1);
    let mut some: Vec<usize> = (0..count).step_by(step).map(|i| (i + i / step * 5) % count).collect();
    some.extend(count.checked_sub(1));
    some.sort_unstable();
    some.dedup();
    some
}
