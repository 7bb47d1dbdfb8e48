//! The textbook rotation, in f64.

/// Rotates pair i of every head of row t, (x\[i\], x\[i + h/2\]), by the angle positions\[t\] · frequencies\[i\]. A row
/// holds heads of width h = 2 · frequencies.len().
pub fn forward(x: &[f64], cols: usize, positions: &[u32], frequencies: &[f64]) -> Vec<f64> {
    rotate(x, cols, positions, frequencies, 1.0)
}

/// The gradient is rotated by the negative angle.
pub fn backward(dy: &[f64], cols: usize, positions: &[u32], frequencies: &[f64]) -> Vec<f64> {
    rotate(dy, cols, positions, frequencies, -1.0)
}

fn rotate(x: &[f64], cols: usize, positions: &[u32], frequencies: &[f64], direction: f64) -> Vec<f64> {
    let half = frequencies.len();
    let mut out = x.to_vec();
    for (row, position) in out.chunks_exact_mut(cols).zip(positions) {
        for head in row.chunks_exact_mut(2 * half) {
            for (i, frequency) in frequencies.iter().enumerate() {
                let (sin, cos) = (direction * f64::from(*position) * frequency).sin_cos();
                let (a, b) = (head[i], head[i + half]);
                head[i] = a * cos - b * sin;
                head[i + half] = a * sin + b * cos;
            }
        }
    }
    out
}
