//! Operations that look rows up or run over the vocabulary: embedding, row maps and cross-entropy.

use std::cell::LazyCell;

use lockstep_core::DType;
use lockstep_device::cuda::GpuError;

use super::harness::{Case, Harness, Operands, tolerance};
use crate::cross_entropy::{self, Channels, reference};
use crate::embedding;
use crate::rows::{self, RowMap};

pub(super) fn run(harness: &Harness, dtype: DType) -> Result<(), GpuError> {
    // Tokens, rows of the table, columns, padding. A table of few rows gives long runs of equal tokens.
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
        if harness.includes(tokens.max(rows) * cols) {
            look_up(harness, dtype, [tokens, rows, cols, pad])?;
        }
    }
    // Positions, rows, columns, padding of rows, positions at the end that pad the batch.
    for shape in [
        (0, 3, 8, 0, 0),
        (1, 1, 1, 0, 0),
        (300, 200, 37, 1, 9),
        (700, 700, 96, 8, 0),
        (4096, 1500, 128, 0, 200),
    ] {
        if harness.includes(shape.0.max(shape.1) * shape.2) {
            row_maps(harness, dtype, shape)?;
        }
    }
    for (rows, vocab, pad) in
        [(0, 9, 0), (1, 1, 0), (5, 17, 1), (33, 1000, 4), (5, 36_864, 0), (7, 50_257, 0), (64, 32_000, 0)]
    {
        let logits = [(1e-3, 1.0), (0.1, 1.0), (10.0, 1.0), (300.0, 1.0), (10.0, 0.6), (3.0, 1.7)];
        for logits in logits.into_iter().filter(|_| harness.includes(rows * vocab)) {
            likelihood(harness, dtype, [rows, vocab, pad], logits)?;
            channels(harness, dtype, [rows, vocab, pad], logits)?;
        }
    }
    Ok(())
}

fn look_up(harness: &Harness, dtype: DType, [tokens, rows, cols, pad]: [usize; 4]) -> Result<(), GpuError> {
    let name = format!("embedding forward, {dtype}, {tokens} tokens, table {rows}×{cols}, padding {pad}");
    harness.case(name, tolerance(dtype), |case| {
        let table = case.padded_normals(rows, cols, pad, dtype);
        let indices = case.indices(tokens, rows);
        let (tokens_view, x) = (case.input_u32(&indices), case.padded_output(tokens, cols, pad, dtype));
        embedding::forward(case.queue, x.mat, table.mat, tokens_view);
        case.compare("x", cols, case.padded_values(&x), || {
            embedding::reference::forward(&case.padded_values(&table), cols, &indices)
        });
    })?;
    let name = format!("embedding backward, {dtype}, {tokens} tokens, table {rows}×{cols}, padding {pad}");
    // Sums are f32 whatever the storage type.
    harness.case(name, tolerance(DType::F32), |case| {
        let dx = case.padded_normals(tokens, cols, pad, dtype);
        let dtable = case.padded_normals(rows, cols, pad, DType::F32);
        let indices = case.indices(tokens, rows);
        let mut want = case.padded_values(&dtable);
        let scratch = case.output(embedding::scratch_bytes(tokens).0 as usize / 4, DType::F32);
        embedding::backward(case.queue, dtable.mat, dx.mat, case.input_u32(&indices), scratch);
        case.compare("dtable", cols, case.padded_values(&dtable), || {
            embedding::reference::backward(&mut want, &case.padded_values(&dx), cols, &indices);
            want
        });
    })
}

fn row_maps(
    harness: &Harness,
    dtype: DType,
    (positions, rows, cols, pad, padding): (usize, usize, usize, usize, usize),
) -> Result<(), GpuError> {
    let name = format!("row maps, {dtype}, {positions} positions of {rows} rows of {cols}, padding {pad}");
    harness.case(name, tolerance(dtype), |case| {
        let source = case.indices(positions, rows);
        let (offsets, entries) = rows::reference::positions_of_rows(&source, rows, padding);
        let [source_view, offsets, entries] =
            [&source[..], &offsets, &entries].map(|table| case.input_u32(table));
        let map = RowMap { source: source_view, offsets, entries };
        let x = case.padded_normals(rows, cols, pad, dtype);
        let y = case.padded_normals(positions, cols, pad, dtype);
        let [expanded, firsts] = [(); 2].map(|()| case.padded_output(positions, cols, pad, dtype));
        let [picked, sums] = [(); 2].map(|()| case.padded_output(rows, cols, pad, dtype));
        rows::expand(case.queue, expanded.mat, x.mat, map.source);
        rows::expand_first(case.queue, firsts.mat, x.mat, &map);
        rows::first(case.queue, picked.mat, y.mat, &map);
        rows::sum(case.queue, sums.mat, y.mat, &map);
        let [xv, yv] = [case.padded_values(&x), case.padded_values(&y)];
        let size = yv.iter().map(|y| y * y).sum::<f64>().sqrt();
        case.compare("expanded", cols, case.padded_values(&expanded), || {
            embedding::reference::forward(&xv, cols, &source)
        });
        case.compare("first positions", cols, case.padded_values(&firsts), || {
            rows::reference::expand_first(&xv, cols, &source, padding)
        });
        case.compare("picked", cols, case.padded_values(&picked), || {
            rows::reference::first(&yv, cols, &source, rows, padding)
        });
        case.compare_at("sums", cols, size, case.padded_values(&sums), || {
            rows::reference::sum(&yv, cols, &source, rows, padding)
        });
    })
}

fn likelihood(
    harness: &Harness,
    dtype: DType,
    [rows, vocab, pad]: [usize; 3],
    (spread, temperature): (f32, f32),
) -> Result<(), GpuError> {
    let name = format!(
        "cross-entropy, gradient in {dtype}, {rows}×{vocab}, padding {pad}, logit magnitude {spread}, \
         temperature {temperature}"
    );
    let inverse = 1.0 / temperature;
    harness.case(name, tolerance(dtype), |case| {
        let start: Vec<f32> = case.normal_values(rows * vocab).iter().map(|x| x * spread).collect();
        let logits = case.padded(&start, vocab, pad, DType::F32);
        let before = case.padded_values(&logits);
        let targets = case.indices(rows, vocab);
        let (targets_view, c) = (case.input_u32(&targets), case.normals(rows, DType::F32));
        let [logp, second] = [(); 2].map(|()| case.output(rows, DType::F32));
        cross_entropy::forward(case.queue, logp, logits.mat, targets_view, inverse);
        if case.padded_values(&logits) != before {
            case.add_note("forward changed the logits".into());
        }
        let gradient =
            cross_entropy::forward_backward(case.queue, second, logits.mat, targets_view, c, inverse, dtype);
        let [before, cv] = [before, case.values(c)].map(|x| reference::scaled(&x, inverse));
        let size = cv.iter().map(|c| c * c).sum::<f64>().sqrt();
        let log_probs = || reference::forward(&before, vocab, &targets);
        case.compare_at("log-probabilities", rows, (rows as f64).sqrt(), case.values(logp), log_probs);
        case.compare_at(
            "log-probabilities with gradient",
            rows,
            (rows as f64).sqrt(),
            case.values(second),
            log_probs,
        );
        case.compare_at("gradient", vocab, size, case.mat_values(&gradient), || {
            reference::backward(&before, vocab, &targets, &cv)
        });
        // Check the padding; the elements inside have the gradient's type.
        case.padded_values(&logits);
    })
}

/// Also computes entropy and mean log-probability, each with a coefficient; then repeats with one of them, which must
/// agree.
fn channels(
    harness: &Harness,
    dtype: DType,
    [rows, vocab, pad]: [usize; 3],
    (spread, temperature): (f32, f32),
) -> Result<(), GpuError> {
    let name = format!(
        "cross-entropy with entropy and mean log-probability, gradient in {dtype}, {rows}×{vocab}, padding {pad}, \
         logit magnitude {spread}, temperature {temperature}"
    );
    let inverse = 1.0 / temperature;
    harness.case(name, tolerance(dtype), |case| {
        let start: Vec<f32> = case.normal_values(rows * vocab).iter().map(|x| x * spread).collect();
        let [logits, other] = [(); 2].map(|()| case.padded(&start, vocab, pad, DType::F32));
        let before = case.padded_values(&logits);
        let targets = case.indices(rows, vocab);
        let targets_view = case.input_u32(&targets);
        let all = || Channels {
            log_prob: case.output(rows, DType::F32),
            entropy: Some(case.output(rows, DType::F32)),
            mean_log_prob: Some(case.output(rows, DType::F32)),
        };
        let (out, second, plain) = (all(), all(), case.output(rows, DType::F32));
        let c = [(); 3].map(|()| case.normals(rows, DType::F32));
        let with = Channels { log_prob: c[0], entropy: Some(c[1]), mean_log_prob: Some(c[2]) };
        cross_entropy::forward(case.queue, plain, logits.mat, targets_view, inverse);
        cross_entropy::forward(case.queue, out, logits.mat, targets_view, inverse);
        if case.padded_values(&logits) != before {
            case.add_note("forward changed the logits".into());
        }
        let gradient = cross_entropy::forward_backward(
            case.queue,
            second,
            logits.mat,
            targets_view,
            with,
            inverse,
            dtype,
        );
        let before = reference::scaled(&before, inverse);
        let numbers = |of: &Channels| {
            [Some(of.log_prob), of.entropy, of.mean_log_prob].map(|view| view.map(|view| case.values(view)))
        };
        let names = ["log-probabilities", "entropies", "mean log-probabilities"];
        for (name, (one, other)) in names.into_iter().zip(numbers(&out).into_iter().zip(numbers(&second))) {
            compare_calls(case, name, one, other);
        }
        compare_calls(case, names[0], Some(case.values(plain)), Some(case.values(out.log_prob)));
        let [log_prob, entropy, mean] =
            numbers(&out).map(|values| values.expect("all channels were requested"));
        let size = (rows as f64).sqrt();
        case.compare_at("log-probabilities", rows, size, log_prob, || {
            reference::forward(&before, vocab, &targets)
        });
        case.compare_at("entropies", rows, size, entropy, || reference::entropy(&before, vocab));
        case.compare_at("mean log-probabilities", rows, size, mean, || {
            reference::mean_log_prob(&before, vocab)
        });
        let [c, c_entropy, c_mean] = c.map(|c| reference::scaled(&case.values(c), inverse));
        let squares = c.iter().chain(&c_entropy).chain(&c_mean).map(|c| c * c).sum::<f64>();
        let size = squares.sqrt();
        let entropy_gradient = LazyCell::new(|| reference::entropy_backward(&before, vocab, &c_entropy));
        case.compare_at("gradient", vocab, size, case.mat_values(&gradient), || {
            let mut sum = reference::backward(&before, vocab, &targets, &c);
            let mean = reference::mean_log_prob_backward(&before, vocab, &c_mean);
            for (sum, (a, b)) in sum.iter_mut().zip(entropy_gradient.iter().zip(mean)) {
                *sum += a + b;
            }
            sum
        });
        // Check the padding; the elements inside have the gradient's type.
        case.padded_values(&logits);

        let zeros = case.input(&vec![0.0; rows], DType::F32);
        let with = Channels { log_prob: zeros, mean_log_prob: None, ..with };
        let gradient =
            cross_entropy::forward_backward(case.queue, plain, other.mat, targets_view, with, inverse, dtype);
        case.compare_at("gradient of the entropy", vocab, size, case.mat_values(&gradient), || {
            entropy_gradient.clone()
        });
    })
}

/// Notes if two calls that must agree do not.
fn compare_calls(case: &Case, name: &str, one: Option<Vec<f64>>, other: Option<Vec<f64>>) {
    let pairs = one.iter().flatten().zip(other.iter().flatten());
    let far = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    if one != other {
        case.add_note(format!("the calls differ in their {name} by up to {far:e}"));
    }
}
