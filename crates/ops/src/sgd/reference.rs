//! SGD as PyTorch documents it, in f64.

/// The hyperparameters of an update.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub lr: f64,
    /// 0 for none; the momentum buffer is then unused.
    pub momentum: f64,
    pub nesterov: bool,
    pub weight_decay: f64,
}

/// An update of parameters `p` and their momentum buffer, which is zero at first.
pub fn update(p: &mut [f64], momentum: &mut [f64], g: &[f64], with: &Settings) {
    for i in 0..p.len() {
        let mut g = g[i] + with.weight_decay * p[i];
        if with.momentum != 0.0 {
            momentum[i] = with.momentum * momentum[i] + g;
            g = if with.nesterov { g + with.momentum * momentum[i] } else { momentum[i] };
        }
        p[i] -= with.lr * g;
    }
}
