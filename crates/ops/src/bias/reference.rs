//! The textbook bias, in f64.

/// y + b, row by row.
pub fn forward(y: &[f64], b: &[f64]) -> Vec<f64> {
    y.chunks_exact(b.len()).flat_map(|row| row.iter().zip(b).map(|(y, b)| y + b)).collect()
}

/// db: the sum of dy's rows.
pub fn backward(dy: &[f64], dim: usize) -> Vec<f64> {
    (0..dim).map(|column| dy.iter().skip(column).step_by(dim).sum()).collect()
}
