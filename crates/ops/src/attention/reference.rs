//! Textbook causal attention in f64. Per document and head, P = softmax(scale · Q·Kᵀ) over the keys that the query
//! sees, and O = P·V.

use super::Heads;

/// The gradients of q\[T, H·h\], k\[T, G·h\] and v\[T, G·h\].
#[derive(Clone, Debug)]
pub struct Gradients {
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

/// The dropout factor of a probability: f(document, query head, query, key), the last two counted from the document's
/// start.
pub type DropoutFactor<'a> = &'a dyn Fn(usize, usize, usize, usize) -> f64;

/// out\[T, H·h\] and lse\[T, H\], for documents delimited by `bounds`.
pub fn forward(heads: Heads, bounds: &[u32], q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    forward_dropped(heads, bounds, q, k, v, &|_, _, _, _| 1.0)
}

/// The same with dropout: O = (M ∘ P)·V.
pub fn forward_dropped(
    heads: Heads,
    bounds: &[u32],
    q: &[f64],
    k: &[f64],
    v: &[f64],
    mask: DropoutFactor,
) -> (Vec<f64>, Vec<f64>) {
    let (num_q, width) = (heads.num_q, heads.width);
    let mut out = vec![0.0; q.len()];
    let mut lse = vec![0.0; q.len() / width];
    each_row(heads, bounds, |row| {
        let Row { doc, start, head, kv_head, first, i } = row;
        let (p, log_sum) = probabilities(heads, q, k, head, kv_head, first, i);
        lse[i * num_q + head] = log_sum;
        let out = &mut out[(i * num_q + head) * width..][..width];
        for (p, j) in p.iter().zip(first..) {
            let kept = mask(doc, head, i - start, j - start);
            axpy(out, kept * p, row_of(v, heads.num_kv, kv_head, j, width));
        }
    });
    (out, lse)
}

/// With dP = dO·Vᵀ and dS = scale · P ∘ (dP − rowsum(P ∘ dP)): dQ = dS·K, dK = dSᵀ·Q, dV = Pᵀ·dO.
pub fn backward(heads: Heads, bounds: &[u32], q: &[f64], k: &[f64], v: &[f64], dout: &[f64]) -> Gradients {
    backward_dropped(heads, bounds, [q, k, v], dout, &|_, _, _, _| 1.0)
}

/// The same with dropout: dP = M ∘ (dO·Vᵀ), dV = (M ∘ P)ᵀ·dO.
pub fn backward_dropped(
    heads: Heads,
    bounds: &[u32],
    [q, k, v]: [&[f64]; 3],
    dout: &[f64],
    mask: DropoutFactor,
) -> Gradients {
    let Heads { num_q, num_kv, width, scale, .. } = heads;
    let mut all = Gradients { dq: vec![0.0; q.len()], dk: vec![0.0; k.len()], dv: vec![0.0; v.len()] };
    each_row(heads, bounds, |row| {
        let Row { doc, start, head, kv_head, first, i } = row;
        let (p, _) = probabilities(heads, q, k, head, kv_head, first, i);
        let dout = row_of(dout, num_q, head, i, width);
        let kept: Vec<f64> = (first..=i).map(|j| mask(doc, head, i - start, j - start)).collect();
        let dp =
            (first..=i).zip(&kept).map(|(j, kept)| kept * dot(dout, row_of(v, num_kv, kv_head, j, width)));
        let dp: Vec<f64> = dp.collect();
        let mean = dot(&p, &dp);
        for j in first..=i {
            let (p, dp, kept) = (p[j - first], dp[j - first], kept[j - first]);
            let ds = f64::from(scale) * p * (dp - mean);
            let kv = (j * num_kv + kv_head) * width;
            axpy(&mut all.dq[(i * num_q + head) * width..][..width], ds, &k[kv..][..width]);
            axpy(&mut all.dk[kv..][..width], ds, row_of(q, num_q, head, i, width));
            axpy(&mut all.dv[kv..][..width], kept * p, dout);
        }
    });
    all
}

/// One query of one head: its document, that document's first token, the first token it sees, and itself.
struct Row {
    doc: usize,
    start: usize,
    head: usize,
    kv_head: usize,
    first: usize,
    i: usize,
}

fn each_row(heads: Heads, bounds: &[u32], mut f: impl FnMut(Row)) {
    for (doc, pair) in bounds.windows(2).enumerate() {
        let (start, end) = (pair[0] as usize, pair[1] as usize);
        for head in 0..heads.num_q {
            for i in start..end {
                let first = heads.window.map_or(start, |window| start.max((i + 1).saturating_sub(window)));
                f(Row { doc, start, head, kv_head: head / (heads.num_q / heads.num_kv), first, i });
            }
        }
    }
}

/// Token i's probabilities of tokens first..=i, and the log of the sum that normalizes them.
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
    let q = row_of(q, num_q, head, i, width);
    let scores = (first..=i).map(|j| f64::from(scale) * dot(q, row_of(k, num_kv, kv_head, j, width)));
    let scores: Vec<f64> = scores.collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = largest + scores.iter().map(|s| (s - largest).exp()).sum::<f64>().ln();
    (scores.iter().map(|s| (s - lse).exp()).collect(), lse)
}

fn row_of(x: &[f64], num_heads: usize, head: usize, token: usize, width: usize) -> &[f64] {
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
