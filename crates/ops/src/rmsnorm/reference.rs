//! The textbook norm, in f64. A group is as wide as the weight.

/// y = x / √(mean(x²) + ε) · w.
pub fn forward(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    let mut y = Vec::with_capacity(x.len());
    for x in x.chunks_exact(w.len()) {
        let rstd = rstd(x, eps);
        y.extend(x.iter().zip(w).map(|(x, w)| x * rstd * w));
    }
    y
}

/// 1 / √(mean(x²) + ε) of one group.
pub fn rstd(x: &[f64], eps: f64) -> f64 {
    let mean_square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    1.0 / (mean_square + eps).sqrt()
}

/// (∂L/∂x, ∂L/∂w): with n = x · rstd, dx = rstd · (dy·w − n · mean(dy·w·n)) and dw = Σ dy·n.
pub fn backward(dy: &[f64], x: &[f64], w: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let dim = w.len();
    let (mut dx, mut dw) = (Vec::with_capacity(x.len()), vec![0.0; dim]);
    for (dy, x) in dy.chunks_exact(dim).zip(x.chunks_exact(dim)) {
        let rstd = rstd(x, eps);
        let mean = (0..dim).map(|j| dy[j] * w[j] * x[j] * rstd).sum::<f64>() / dim as f64;
        for j in 0..dim {
            let normed = x[j] * rstd;
            dx.push(rstd * (dy[j] * w[j] - normed * mean));
            dw[j] += dy[j] * normed;
        }
    }
    (dx, dw)
}
