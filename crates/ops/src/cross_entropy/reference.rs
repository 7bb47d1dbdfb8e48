//! Textbook log-probabilities, in f64.
//!
//! At a temperature t, pass the logits divided by t ([`scaled`]); gradients are then with respect to these, and those
//! of the logits themselves are the same with coefficients divided by t.

/// Logits, or coefficients, divided by the temperature.
pub fn scaled(values: &[f64], inverse_temperature: f32) -> Vec<f64> {
    values.iter().map(|value| value * f64::from(inverse_temperature)).collect()
}

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

/// H = −Σ p log p of each row. Tokens with probability zero contribute nothing.
pub fn entropy(logits: &[f64], vocab: usize) -> Vec<f64> {
    let term = |logp: &f64| if logp.exp() == 0.0 { 0.0 } else { -logp.exp() * logp };
    logits.chunks_exact(vocab).map(|row| log_softmax(row).iter().map(term).sum()).collect()
}

/// M = (1/V) Σ log p of each row.
pub fn mean_log_prob(logits: &[f64], vocab: usize) -> Vec<f64> {
    logits.chunks_exact(vocab).map(|row| log_softmax(row).iter().sum::<f64>() / vocab as f64).collect()
}

/// ∂L/∂logits = −c · p (log p + H), for L = Σ c · H.
pub fn entropy_backward(logits: &[f64], vocab: usize, c: &[f64]) -> Vec<f64> {
    let rows = logits.chunks_exact(vocab).zip(entropy(logits, vocab)).zip(c);
    rows.flat_map(|((row, entropy), c)| {
        let slope = move |logp: f64| if logp.exp() == 0.0 { 0.0 } else { -c * logp.exp() * (logp + entropy) };
        log_softmax(row).into_iter().map(slope)
    })
    .collect()
}

/// ∂L/∂logits = c · (1/V − p), for L = Σ c · M.
pub fn mean_log_prob_backward(logits: &[f64], vocab: usize, c: &[f64]) -> Vec<f64> {
    let rows = logits.chunks_exact(vocab).zip(c);
    rows.flat_map(|(row, c)| {
        log_softmax(row).into_iter().map(move |logp| c * (1.0 / vocab as f64 - logp.exp()))
    })
    .collect()
}

/// Computed relative to the largest logit, so that its magnitude costs no precision.
fn log_softmax(row: &[f64]) -> Vec<f64> {
    let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.iter().map(|x| (x - largest).exp()).sum();
    row.iter().map(|x| x - largest - sum.ln()).collect()
}
