//! The textbook SwiGLU, in f64.

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// y = g · sigmoid(g) · u.
pub fn forward(g: &[f64], u: &[f64]) -> Vec<f64> {
    g.iter().zip(u).map(|(g, u)| g * sigmoid(*g) * u).collect()
}

/// (∂L/∂g, ∂L/∂u), from silu′(g) = s · (1 + g · (1 − s)) with s = sigmoid(g).
pub fn backward(dy: &[f64], g: &[f64], u: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let each = dy.iter().zip(g).zip(u).map(|((dy, g), u)| {
        let s = sigmoid(*g);
        (dy * u * s * (1.0 + g * (1.0 - s)), dy * g * s)
    });
    each.unzip()
}
