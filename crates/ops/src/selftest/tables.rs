//! Operations at the two ends of a model: embedding and cross-entropy.

use lockstep_core::DType;
use lockstep_device::cuda::GpuError;

use super::bench::{Bench, Operands, tolerance};
use crate::{cross_entropy, embedding};

pub(super) fn run(bench: &Bench, dtype: DType) -> Result<(), GpuError> {
    // Tokens, rows of the table, columns, elements between rows: few rows give long runs of one token.
    let tables = [
        (0, 5, 8, 0),
        (1, 1, 1, 0),
        (300, 7, 37, 1),
        (1000, 1, 64, 0),
        (700, 40, 96, 8),
        (5000, 3000, 128, 0),
        (4097, 20, 256, 0),
    ];
    for (tokens, rows, cols, pad) in tables {
        if bench.takes(tokens.max(rows) * cols) {
            look_up(bench, dtype, [tokens, rows, cols, pad])?;
        }
    }
    for (rows, vocab, pad) in
        [(0, 9, 0), (1, 1, 0), (5, 17, 1), (33, 1000, 4), (7, 50_257, 0), (64, 32_000, 0)]
    {
        for spread in [1e-3, 0.1, 10.0, 300.0].into_iter().filter(|_| bench.takes(rows * vocab)) {
            likelihood(bench, dtype, [rows, vocab, pad], spread)?;
        }
    }
    Ok(())
}

fn look_up(bench: &Bench, dtype: DType, [tokens, rows, cols, pad]: [usize; 4]) -> Result<(), GpuError> {
    let name = format!("embedding, {dtype}, {tokens} of {rows}×{cols}, margin {pad}");
    bench.case(name, tolerance(dtype), |case| {
        let table = case.framed_normals(rows, cols, pad, dtype);
        let indices = case.indices(tokens, rows);
        let (tokens_view, x) = (case.input_u32(&indices), case.framed_output(tokens, cols, pad, dtype));
        embedding::forward(case.queue, x.mat, table.mat, tokens_view);
        case.compare("x", cols, case.framed_values(&x), || {
            embedding::reference::forward(&case.framed_values(&table), cols, &indices)
        });
    })?;
    let name = format!("embedding backward, {dtype}, {tokens} of {rows}×{cols}, margin {pad}");
    // Sums are in f32 whatever the storage type.
    bench.case(name, tolerance(DType::F32), |case| {
        let dx = case.framed_normals(tokens, cols, pad, dtype);
        let dtable = case.framed_normals(rows, cols, pad, DType::F32);
        let indices = case.indices(tokens, rows);
        let mut want = case.framed_values(&dtable);
        let scratch = case.output(embedding::scratch_bytes(tokens).0 as usize / 4, DType::F32);
        embedding::backward(case.queue, dtable.mat, dx.mat, case.input_u32(&indices), scratch);
        case.compare("dtable", cols, case.framed_values(&dtable), || {
            embedding::reference::backward(&mut want, &case.framed_values(&dx), cols, &indices);
            want
        });
    })
}

fn likelihood(
    bench: &Bench,
    dtype: DType,
    [rows, vocab, pad]: [usize; 3],
    spread: f32,
) -> Result<(), GpuError> {
    let name = format!("cross-entropy, gradient in {dtype}, {rows}×{vocab}, margin {pad}, spread {spread}");
    bench.case(name, tolerance(dtype), |case| {
        let start: Vec<f32> = case.normal_values(rows * vocab).iter().map(|x| x * spread).collect();
        let logits = case.framed(&start, vocab, pad, DType::F32);
        let before = case.framed_values(&logits);
        let targets = case.indices(rows, vocab);
        let (targets_view, c) = (case.input_u32(&targets), case.normals(rows, DType::F32));
        let [logp, again] = [(); 2].map(|()| case.output(rows, DType::F32));
        cross_entropy::forward(case.queue, logp, logits.mat, targets_view);
        if case.framed_values(&logits) != before {
            case.add_note("forward changed the logits".into());
        }
        let gradient = cross_entropy::forward_backward(case.queue, again, logits.mat, targets_view, c, dtype);
        let cv = case.values(c);
        let size = cv.iter().map(|c| c * c).sum::<f64>().sqrt();
        let log_probs = || cross_entropy::reference::forward(&before, vocab, &targets);
        case.compare_at("log-probabilities", rows, (rows as f64).sqrt(), case.values(logp), log_probs);
        case.compare_at("their second time", rows, (rows as f64).sqrt(), case.values(again), log_probs);
        case.compare_at("gradient", vocab, size, case.mat_values(&gradient), || {
            cross_entropy::reference::backward(&before, vocab, &targets, &cv)
        });
        // For the margins: what lies between them has the gradient's type.
        case.framed_values(&logits);
    })
}
