//! The textbook score head, in f64.

/// x · w of each row.
pub fn forward(x: &[f64], w: &[f64]) -> Vec<f64> {
    x.chunks_exact(w.len()).map(|row| row.iter().zip(w).map(|(x, w)| x * w).sum()).collect()
}

/// (dx, dw) for L = Σ c · y.
pub fn backward(c: &[f64], x: &[f64], w: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let dx = c.iter().flat_map(|c| w.iter().map(move |w| c * w)).collect();
    let mut dw = vec![0.0; w.len()];
    for (c, row) in c.iter().zip(x.chunks_exact(w.len())) {
        dw.iter_mut().zip(row).for_each(|(sum, x)| *sum += c * x);
    }
    (dx, dw)
}
