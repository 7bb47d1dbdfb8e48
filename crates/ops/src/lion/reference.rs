//! Lion as in the authors' paper, in f64.

/// The hyperparameters of an update.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub lr: f64,
    pub betas: (f64, f64),
    pub weight_decay: f64,
}

/// The value whose sign an update uses: β₁m + (1−β₁)g.
pub fn direction(m: f64, g: f64, with: &Settings) -> f64 {
    with.betas.0 * m + (1.0 - with.betas.0) * g
}

/// An update of parameters `p` and the moving average `m` of gradients, which is zero at first.
pub fn update(p: &mut [f64], m: &mut [f64], g: &[f64], with: &Settings) {
    let beta2 = with.betas.1;
    for i in 0..p.len() {
        p[i] -= with.lr * with.weight_decay * p[i];
        let direction = direction(m[i], g[i], with);
        if direction != 0.0 {
            p[i] -= with.lr * direction.signum();
        }
        m[i] = beta2 * m[i] + (1.0 - beta2) * g[i];
    }
}
