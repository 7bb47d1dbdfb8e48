//! Causal attention as the textbook has it, in f64: per document and head,
//! P = softmax(scale · Q·Kᵀ) over the keys that the query sees, O = P·V.

use super::Heads;

/// The gradients of q\[T, H·h\], k\[T, G·h\] and v\[T, G·h\].
#[derive(Clone, Debug)]
pub struct Gradients {
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

/// out\[T, H·h\] and lse\[T, H\], for documents between neighbouring `bounds`.
pub fn forward(heads: Heads, bounds: &[u32], q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (num_q, width) = (heads.num_q, heads.width);
    let mut out = vec![0.0; q.len()];
    let mut lse = vec![0.0; q.len() / width];
    each_row(heads, bounds, |head, kv_head, first, i| {
        let (p, log_sum) = probabilities(heads, q, k, head, kv_head, first, i);
        lse[i * num_q + head] = log_sum;
        let out = &mut out[(i * num_q + head) * width..][..width];
        for (p, j) in p.iter().zip(first..) {
            axpy(out, *p, row(v, heads.num_kv, kv_head, j, width));
        }
    });
    (out, lse)
}

/// With dP = dO·Vᵀ and dS = scale · P ∘ (dP − rowsum(P ∘ dP)): dQ = dS·K, dK = dSᵀ·Q, dV = Pᵀ·dO.
pub fn backward(heads: Heads, bounds: &[u32], q: &[f64], k: &[f64], v: &[f64], dout: &[f64]) -> Gradients {
    let Heads { num_q, num_kv, width, scale, .. } = heads;
    let mut all = Gradients { dq: vec![0.0; q.len()], dk: vec![0.0; k.len()], dv: vec![0.0; v.len()] };
    each_row(heads, bounds, |head, kv_head, first, i| {
        let (p, _) = probabilities(heads, q, k, head, kv_head, first, i);
        let dout = row(dout, num_q, head, i, width);
        let dp: Vec<f64> = (first..=i).map(|j| dot(dout, row(v, num_kv, kv_head, j, width))).collect();
        let mean = dot(&p, &dp);
        for j in first..=i {
            let (p, dp) = (p[j - first], dp[j - first]);
            let ds = f64::from(scale) * p * (dp - mean);
            let kv = (j * num_kv + kv_head) * width;
            axpy(&mut all.dq[(i * num_q + head) * width..][..width], ds, &k[kv..][..width]);
            axpy(&mut all.dk[kv..][..width], ds, row(q, num_q, head, i, width));
            axpy(&mut all.dv[kv..][..width], p, dout);
        }
    });
    all
}

/// Calls f(query head, its key-value head, the first token it sees, token) for all of them.
fn each_row(heads: Heads, bounds: &[u32], mut f: impl FnMut(usize, usize, usize, usize)) {
    for doc in bounds.windows(2) {
        let (first, end) = (doc[0] as usize, doc[1] as usize);
        for head in 0..heads.num_q {
            for i in first..end {
                let seen_from =
                    heads.window.map_or(first, |window| first.max((i + 1).saturating_sub(window)));
                f(head, head / (heads.num_q / heads.num_kv), seen_from, i);
            }
        }
    }
}

/// Token i's probabilities of tokens first..=i, and the log of the sum they were divided by.
fn probabilities(
    heads: Heads,
    q: &[f64],
    k: &[f64],
    head: usize,
    kv_head: usize,
    first: usize,
    i: usize,
) -> (Vec<f64>, f64) {
    let Heads { num_q, num_kv, width, scale, .. } = heads;
    let q = row(q, num_q, head, i, width);
    let scores = (first..=i).map(|j| f64::from(scale) * dot(q, row(k, num_kv, kv_head, j, width)));
    let scores: Vec<f64> = scores.collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = largest + scores.iter().map(|s| (s - largest).exp()).sum::<f64>().ln();
    (scores.iter().map(|s| (s - lse).exp()).collect(), lse)
}

fn row(x: &[f64], num_heads: usize, head: usize, token: usize, width: usize) -> &[f64] {
    &x[(token * num_heads + head) * width..][..width]
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// y += a · x.
fn axpy(y: &mut [f64], a: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}
