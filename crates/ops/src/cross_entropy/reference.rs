//! Log-probabilities as the textbook has them, in f64.

/// log softmax(logits)\[target\] of each row.
pub fn forward(logits: &[f64], vocab: usize, targets: &[u32]) -> Vec<f64> {
    let rows = logits.chunks_exact(vocab).zip(targets);
    rows.map(|(row, target)| log_softmax(row)[*target as usize]).collect()
}

/// ∂L/∂logits = c · (onehot(target) − softmax(logits)), for L = Σ c · log p(target).
pub fn backward(logits: &[f64], vocab: usize, targets: &[u32], c: &[f64]) -> Vec<f64> {
    let mut gradient = Vec::with_capacity(logits.len());
    for ((row, target), c) in logits.chunks_exact(vocab).zip(targets).zip(c) {
        let start = gradient.len();
        gradient.extend(log_softmax(row).iter().map(|logp| -c * logp.exp()));
        gradient[start + *target as usize] += c;
    }
    gradient
}

/// Relative to the largest logit, so that its size costs no digits.
fn log_softmax(row: &[f64]) -> Vec<f64> {
    let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.iter().map(|x| (x - largest).exp()).sum();
    row.iter().map(|x| x - largest - sum.ln()).collect()
}
