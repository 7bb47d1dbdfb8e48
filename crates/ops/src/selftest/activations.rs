//! Row-wise operations on activations: norms, RoPE, SwiGLU, biases, scaling, dropout, the score head.

use lockstep_core::DType;
use lockstep_device::cuda::GpuError;

use super::harness::{Case, Harness, Operands, tolerance};
use crate::dropout::{self, Mask, Site};
use crate::rope::{self, Direction, Table};
use crate::{Mat, bias, rmsnorm, scale, score_head, swiglu};

const EPS: f32 = 1e-5;

pub(super) fn run(harness: &Harness, dtype: DType) -> Result<(), GpuError> {
    // Rows, groups, width of a group, padding.
    let norms = [
        (0, 1, 64, 0),
        (1, 1, 1, 0),
        (1, 1, 8192, 0),
        (3, 1, 20_003, 1),
        (5, 1, 40_000, 0),
        (65, 1, 288, 0),
        (130, 3, 37, 2),
        (77, 5, 128, 8),
        (300, 4, 64, 0),
        (2051, 1, 1024, 0),
        (4096, 1, 768, 8),
    ];
    for (rows, groups, dim, pad) in norms {
        if harness.includes(rows * groups * dim) {
            norm(harness, dtype, [rows, groups, dim, pad], EQUAL)?;
        }
    }
    for shape in [[65, 1, 288, 0], [130, 3, 37, 2], [2051, 1, 1024, 0]] {
        if harness.includes(shape[0] * shape[1] * shape[2]) {
            norm(harness, dtype, shape, MIXED)?;
        }
    }
    for (rows, heads, half, pad) in
        [(0, 2, 4, 0), (1, 1, 1, 0), (67, 3, 20, 3), (130, 5, 64, 8), (2048, 4, 32, 0)]
    {
        if harness.includes(rows * heads * 2 * half) {
            rotate(harness, dtype, [rows, heads, half, pad])?;
        }
    }
    // Rows, columns, padding.
    let gates = [
        (0, 8, 0),
        (1, 1, 0),
        (1, 7, 0),
        (3, 20, 1),
        (5, 1000, 8),
        (1, 4099, 0),
        (67, 768, 0),
        (1024, 1024, 8),
    ];
    for (rows, cols, pad) in gates {
        if harness.includes(2 * rows * cols) {
            gate(harness, dtype, [rows, cols, pad])?;
        }
    }
    for (rows, dim, pad) in [(0, 8, 0), (1, 5, 0), (63, 37, 3), (200, 256, 8), (65, 2816, 0), (4100, 1024, 0)]
    {
        if harness.includes(rows * dim) {
            biased(harness, dtype, [rows, dim, pad])?;
            scaled(harness, dtype, [rows, dim, pad])?;
            scored(harness, dtype, [rows, dim, pad])?;
        }
    }
    for (rows, dim, pad) in [(1, 3, 0), (70, 37, 1), (300, 128, 8), (2048, 1024, 0)] {
        for masked in [false, true].into_iter().filter(|_| harness.includes(rows * dim)) {
            dropped(harness, dtype, [rows, dim, pad], masked)?;
        }
    }
    Ok(())
}

/// The magnitudes of rows, repeating.
const EQUAL: [f32; 3] = [1.0; 3];
const MIXED: [f32; 3] = [1e3, 1.0, 1e-4];

fn norm(
    harness: &Harness,
    dtype: DType,
    [rows, groups, dim, pad]: [usize; 4],
    sizes: [f32; 3],
) -> Result<(), GpuError> {
    let magnitudes = if sizes == EQUAL { "" } else { ", rows of 1e3, 1 and 1e-4" };
    let (cols, shape) = (groups * dim, format!("{dtype}, {rows}×{groups}×{dim}, padding {pad}{magnitudes}"));
    let fresh_rows = |case: &Case| -> Vec<f32> {
        case.normal_values(rows * cols).iter().enumerate().map(|(i, x)| x * sizes[i / cols % 3]).collect()
    };
    harness.case(format!("rmsnorm forward, {shape}"), tolerance(dtype), |case| {
        let (x, w) = (case.padded(&fresh_rows(case), cols, pad, dtype), case.normals(dim, dtype));
        let (y, rstd) = (case.padded_output(rows, cols, pad, dtype), case.output(rows * groups, DType::F32));
        rmsnorm::forward(case.queue, y.mat, rstd, x.mat, w, EPS);
        let (xv, wv) = (case.padded_values(&x), case.values(w));
        let eps = f64::from(EPS);
        case.compare("y", dim, case.padded_values(&y), || rmsnorm::reference::forward(&xv, &wv, eps));
        case.compare("rstd", 1, case.values(rstd), || {
            xv.chunks_exact(dim).map(|x| rmsnorm::reference::rstd(x, eps)).collect()
        });
    })?;
    let ways = [
        ("", false, false),
        (", added", true, false),
        (", in place", false, true),
        (", added, recompute", true, false),
    ];
    for (how, add, in_place) in ways {
        let recompute = how.ends_with("recompute");
        harness.case(format!("rmsnorm backward{how}, {shape}"), tolerance(dtype), |case| {
            let x = case.padded(&fresh_rows(case), cols, pad, dtype);
            let dy = case.padded_normals(rows, cols, pad, dtype);
            let w = case.normals(dim, dtype);
            let dx = match (in_place, add) {
                (true, _) => dy,
                (false, true) => case.padded_normals(rows, cols, pad, dtype),
                (false, false) => case.padded_output(rows, cols, pad, dtype),
            };
            let (xv, wv) = (case.padded_values(&x), case.values(w));
            let (dyv, before) = (case.padded_values(&dy), case.padded_values(&dx));
            // As forward computes them, up to rounding.
            let rstds: Vec<f32> =
                xv.chunks_exact(dim).map(|x| rmsnorm::reference::rstd(x, f64::from(EPS)) as f32).collect();
            let (rstd, dw) = (case.input(&rstds, DType::F32), case.normals(dim, DType::F32));
            let dw_before = case.values(dw);
            let scratch = case.output(rmsnorm::scratch_elems(rows, dim), DType::F32);
            let (dx_mat, dy_mat, x) = (dx.mat, dy.mat, x.mat);
            let call =
                rmsnorm::BackwardArgs { dx: dx_mat, add, recompute, dw, dy: dy_mat, x, rstd, w, scratch };
            rmsnorm::backward(case.queue, call);
            let want = || rmsnorm::reference::backward(&dyv, &xv, &wv, f64::from(EPS));
            let wanted_dx = || -> Vec<f64> {
                want().0.iter().zip(before).map(|(dx, before)| if add { dx + before } else { *dx }).collect()
            };
            // In a group of few columns the gradient's terms cancel: measure errors against the norm before
            // cancellation.
            let squares = |(dy, rstd): (&[f64], &f32)| -> f64 {
                dy.iter().zip(&wv).map(|(dy, w)| (dy * w * f64::from(*rstd)).powi(2)).sum()
            };
            let terms: Vec<f64> = dyv.chunks_exact(dim).zip(&rstds).map(squares).collect();
            let whole = terms.iter().sum::<f64>().sqrt();
            let scales = (whole, |group: usize| terms[group].sqrt());
            case.compare_rows("dx", dim, scales, case.padded_values(&dx), wanted_dx);
            case.compare("dw", dim, case.values(dw), || {
                want().1.iter().zip(dw_before).map(|(dw, before)| dw + before).collect()
            });
            if recompute {
                let want = || rmsnorm::reference::forward(&xv, &wv, f64::from(EPS));
                case.compare("recomputed y", dim, case.padded_values(&dy), want);
            }
        })?;
    }
    Ok(())
}

fn rotate(harness: &Harness, dtype: DType, [rows, heads, half, pad]: [usize; 4]) -> Result<(), GpuError> {
    const POSITIONS: usize = 500;
    let cols = heads * 2 * half;
    let frequencies: Vec<f64> = (0..half).map(|i| 10_000f64.powf(-(i as f64) / half as f64)).collect();
    for (name, direction) in [("forward", Direction::Forward), ("backward", Direction::Backward)] {
        let name = format!("rope {name}, {dtype}, {rows}×{heads}×{}, padding {pad}", 2 * half);
        harness.case(name, tolerance(dtype), |case| {
            let x = case.padded_normals(rows, cols, pad, dtype);
            let positions = case.indices(rows, POSITIONS);
            let angles = || case.output(POSITIONS * half, DType::F32);
            let table = Table { cos: angles(), sin: angles(), half };
            case.check_device(rope::fill(table, &frequencies, 1.0));
            let before = case.padded_values(&x);
            rope::apply(case.queue, x.mat, case.input_u32(&positions), table, direction);
            case.compare("x", 2 * half, case.padded_values(&x), || match direction {
                Direction::Forward => rope::reference::forward(&before, cols, &positions, &frequencies),
                Direction::Backward => rope::reference::backward(&before, cols, &positions, &frequencies),
            });
        })?;
    }
    Ok(())
}

fn gate(harness: &Harness, dtype: DType, [rows, cols, pad]: [usize; 3]) -> Result<(), GpuError> {
    let shape = format!("{dtype}, {rows}×{cols}, padding {pad}");
    // Gate and up as columns of one matrix, then as separate matrices.
    harness.case(format!("swiglu, gate and up in one matrix, {shape}"), tolerance(dtype), |case| {
        // Wide enough to saturate some gates.
        let both: Vec<f32> = case.normal_values(2 * rows * cols).iter().map(|x| 6.0 * x).collect();
        let both = case.padded(&both, 2 * cols, pad, dtype);
        let [g, u] = [0, cols].map(|start| both.mat.columns(start, cols));
        gate_both_ways(case, g, u, pad);
        // Check the padding.
        case.padded_values(&both);
    })?;
    harness.case(format!("swiglu, {shape}"), tolerance(dtype), |case| {
        let [g, u] = [(); 2].map(|()| case.padded_normals(rows, cols, pad, dtype));
        gate_both_ways(case, g.mat, u.mat, pad);
        case.padded_values(&g);
        case.padded_values(&u);
    })
}

fn gate_both_ways(case: &Case, g: Mat, u: Mat, pad: usize) {
    // The output of a saturated gate may be too small for the full precision of f16.
    const SMALL: f64 = 1e-3;
    let (rows, cols, dtype) = (g.rows, g.cols, g.view.dtype());
    let dy = case.padded_normals(rows, cols, pad, dtype);
    let y = case.padded_output(rows, cols, pad, dtype);
    let [gv, uv, dyv] = [g, u, dy.mat].map(|mat| case.mat_values(&mat));
    swiglu::forward(case.queue, y.mat, g, u);
    case.compare_at("y", cols, SMALL, case.padded_values(&y), || swiglu::reference::forward(&gv, &uv));
    swiglu::backward_in_place(case.queue, g, u, dy.mat);
    let want = || swiglu::reference::backward(&dyv, &gv, &uv);
    case.compare_at("dg", cols, SMALL, case.mat_values(&g), || want().0);
    case.compare_at("du", cols, SMALL, case.mat_values(&u), || want().1);
    // Once more with the gradients as inputs, and with recompute.
    let [gv, uv] = [g, u].map(|mat| case.mat_values(&mat));
    swiglu::backward_and_recompute_in_place(case.queue, g, u, dy.mat);
    let want = || swiglu::reference::backward(&dyv, &gv, &uv);
    case.compare_at("dg with y", cols, SMALL, case.mat_values(&g), || want().0);
    case.compare_at("du with y", cols, SMALL, case.mat_values(&u), || want().1);
    case.compare_at("recomputed y", cols, SMALL, case.padded_values(&dy), || {
        swiglu::reference::forward(&gv, &uv)
    });
}

fn scaled(harness: &Harness, dtype: DType, [rows, dim, pad]: [usize; 3]) -> Result<(), GpuError> {
    harness.case(format!("scale, {dtype}, {rows}×{dim}, padding {pad}"), tolerance(dtype), |case| {
        const FACTOR: f32 = 1.75;
        let x = case.padded_normals(rows, dim, pad, dtype);
        let before = case.padded_values(&x);
        scale::in_place(case.queue, x.mat, FACTOR);
        case.compare("x", dim, case.padded_values(&x), || {
            scale::reference::in_place(&before, f64::from(FACTOR))
        });
    })
}

fn biased(harness: &Harness, dtype: DType, [rows, dim, pad]: [usize; 3]) -> Result<(), GpuError> {
    harness.case(format!("bias, {dtype}, {rows}×{dim}, padding {pad}"), tolerance(dtype), |case| {
        let (y, b) = (case.padded_normals(rows, dim, pad, dtype), case.normals(dim, dtype));
        let (before, bv) = (case.padded_values(&y), case.values(b));
        bias::forward(case.queue, y.mat, b);
        case.compare("y", dim, case.padded_values(&y), || {
            before.iter().enumerate().map(|(i, y)| y + bv[i % dim]).collect()
        });
        let (dy, db) = (case.padded_normals(rows, dim, pad, dtype), case.normals(dim, DType::F32));
        let db_before = case.values(db);
        let scratch = case.output(bias::scratch_elems(rows, dim), DType::F32);
        bias::backward(case.queue, db, dy.mat, scratch);
        case.compare("db", dim, case.values(db), || {
            let mut sums = db_before;
            let dyv = case.padded_values(&dy);
            dyv.chunks_exact(dim).for_each(|row| sums.iter_mut().zip(row).for_each(|(s, x)| *s += x));
            sums
        });
    })
}

fn dropped(
    harness: &Harness,
    dtype: DType,
    [rows, dim, pad]: [usize; 3],
    masked: bool,
) -> Result<(), GpuError> {
    let name = format!("dropout{}, {dtype}, {rows}×{dim}, padding {pad}", if masked { "" } else { " off" });
    harness.case(name, tolerance(dtype), |case| {
        // Documents of different lengths, including an empty one.
        let bounds = [0, rows / 3, rows / 3, rows / 2, rows].map(|bound| bound as u32);
        let samples = [7u32, 3, 2_000_000_000, 0];
        let (rate, site) = (0.3, Site::MlpOut);
        let samples_view = case.input_u32(&samples);
        let mask =
            Mask { rate, seed: 0x1234_5678_9abc_def0, step: 9, layer: 11, site, samples: samples_view };
        let factors: Vec<f64> = (0..rows * dim)
            .map(|i| {
                let (row, column) = (i / dim, i % dim);
                let doc = bounds.partition_point(|start| *start as usize <= row) - 1;
                let position = row - bounds[doc] as usize;
                if masked {
                    dropout::reference::factor(&mask, samples[doc], 0, position, column)
                } else {
                    1.0
                }
            })
            .collect();
        let (bounds, mask) = (case.input_u32(&bounds), masked.then_some(&mask));
        let [y, residual, dy] = [(); 3].map(|()| case.padded_normals(rows, dim, pad, dtype));
        let dx = case.padded_output(rows, dim, pad, dtype);
        let yv = case.padded_values(&y);
        dropout::forward(case.queue, y.mat, residual.mat, bounds, mask);
        case.compare("y", dim, case.padded_values(&y), || {
            dropout::reference::forward(&case.padded_values(&residual), &yv, &factors)
        });
        dropout::backward(case.queue, dx.mat, dy.mat, bounds, mask);
        case.compare("dx", dim, case.padded_values(&dx), || {
            dropout::reference::backward(&case.padded_values(&dy), &factors)
        });
    })
}

fn scored(harness: &Harness, dtype: DType, [rows, dim, pad]: [usize; 3]) -> Result<(), GpuError> {
    let shape = format!("{dtype}, {rows}×{dim}, padding {pad}");
    // Sums are f32 whatever the storage type.
    harness.case(format!("score head forward, {shape}"), tolerance(DType::F32), |case| {
        let (x, w) = (case.padded_normals(rows, dim, pad, dtype), case.normals(dim, dtype));
        let y = case.output(rows, DType::F32);
        score_head::forward(case.queue, y, x.mat, w);
        let (xv, wv) = (case.padded_values(&x), case.values(w));
        // Products of opposite signs cancel.
        let size = (rows as f64 * dim as f64).sqrt();
        case.compare_at("y", 1, size, case.values(y), || score_head::reference::forward(&xv, &wv));
    })?;
    for (how, add, frozen) in [("", false, false), (", added", true, false), (", frozen", true, true)] {
        harness.case(format!("score head backward{how}, {shape}"), tolerance(dtype), |case| {
            let (x, w) = (case.padded_normals(rows, dim, pad, dtype), case.normals(dim, dtype));
            let c = case.normals(rows, DType::F32);
            let (dx, dw) = match add {
                true => (case.padded_normals(rows, dim, pad, dtype), case.normals(dim, DType::F32)),
                false => (case.padded_output(rows, dim, pad, dtype), case.output(dim, DType::F32)),
            };
            let (dx_before, dw_before) = (case.padded_values(&dx), case.values(dw));
            let scratch = case.output(score_head::scratch_elems(rows, dim), DType::F32);
            let given = (!frozen).then_some(dw);
            score_head::backward(
                case.queue,
                score_head::BackwardArgs {
                    dx: dx.mat,
                    add_dx: add,
                    dw: given,
                    add_dw: add,
                    c,
                    x: x.mat,
                    w,
                    scratch,
                },
            );
            let (xv, wv, cv) = (case.padded_values(&x), case.values(w), case.values(c));
            let slopes = || score_head::reference::backward(&cv, &xv, &wv);
            let sum = |slope: Vec<f64>, before: Vec<f64>, add: bool| -> Vec<f64> {
                slope.into_iter().zip(before).map(|(s, before)| if add { s + before } else { s }).collect()
            };
            let squares = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
            let size = (squares(&cv) * squares(&wv)).sqrt();
            case.compare_at("dx", dim, size, case.padded_values(&dx), || sum(slopes().0, dx_before, add));
            if frozen {
                case.compare("dw", dim, case.values(dw), || dw_before);
            } else {
                let size = (rows.max(1) as f64 * dim as f64).sqrt();
                case.compare_at("dw", dim, size, case.values(dw), || sum(slopes().1, dw_before, add));
            }
        })?;
    }
    Ok(())
}
