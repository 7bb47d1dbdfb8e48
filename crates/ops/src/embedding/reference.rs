//! The textbook lookup, in f64.

/// Row t is the table's row tokens\[t\].
pub fn forward(table: &[f64], cols: usize, tokens: &[u32]) -> Vec<f64> {
    tokens.iter().flat_map(|token| &table[*token as usize * cols..][..cols]).copied().collect()
}

/// dtable\[tokens\[t\]\] += dx\[t\].
pub fn backward(dtable: &mut [f64], dx: &[f64], cols: usize, tokens: &[u32]) {
    for (dx, token) in dx.chunks_exact(cols).zip(tokens) {
        for (sum, dx) in dtable[*token as usize * cols..][..cols].iter_mut().zip(dx) {
            *sum += dx;
        }
    }
}
