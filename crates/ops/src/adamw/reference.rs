//! AdamW as PyTorch documents it, in f64.

/// The hyperparameters of an update.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub lr: f64,
    pub betas: (f64, f64),
    pub eps: f64,
    pub weight_decay: f64,
}

/// Update `t`, counted from 1, of parameters `p` and moments `m` and `v`.
pub fn update(p: &mut [f64], m: &mut [f64], v: &mut [f64], g: &[f64], t: i32, with: &Settings) {
    let (beta1, beta2) = with.betas;
    for i in 0..p.len() {
        p[i] -= with.lr * with.weight_decay * p[i];
        m[i] = beta1 * m[i] + (1.0 - beta1) * g[i];
        v[i] = beta2 * v[i] + (1.0 - beta2) * g[i] * g[i];
        let m_hat = m[i] / (1.0 - beta1.powi(t));
        let v_hat = v[i] / (1.0 - beta2.powi(t));
        p[i] -= with.lr * m_hat / (v_hat.sqrt() + with.eps);
    }
}
