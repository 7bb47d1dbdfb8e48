//! Plain sums, in f64.

/// Σ x² of every block of `block` elements.
pub fn square_sums(x: &[f64], block: usize) -> Vec<f64> {
    x.chunks_exact(block).map(|x| x.iter().map(|x| x * x).sum()).collect()
}
