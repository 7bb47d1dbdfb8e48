//! Matmul: every layout, every way to accumulate, strided operands, outputs of both types.

use lockstep_core::DType;
use lockstep_device::View;
use lockstep_device::cuda::{CublasLt, GpuError};

use super::harness::{Case, Harness, Operands, PaddedMat, tolerance};
use crate::Mat;
use crate::matmul::{self, Accumulate};

#[derive(Clone, Copy, Debug)]
enum Layout {
    Nt,
    Nn,
    Tn,
}

#[derive(Clone, Copy, Debug)]
enum AddTo {
    Overwrite,
    Add,
    Residual,
}

/// A matmul of \[m, k\] and \[k, n\].
#[derive(Clone, Copy, Debug)]
struct Shape {
    layout: Layout,
    add_to: AddTo,
    sizes: [usize; 3],
    pad: usize,
    out: DType,
}

pub(super) fn run(harness: &Harness, dtype: DType) -> Result<(), GpuError> {
    // Sizes, and padding.
    let shapes = [
        ([0, 8, 8], 0),
        ([0, 8, 24], 3),
        ([1, 1, 1], 0),
        ([1, 64, 128], 0),
        ([5, 3, 7], 1),
        ([67, 33, 129], 3),
        ([64, 96, 80], 8),
        ([256, 384, 320], 0),
    ];
    // As large as in training; smaller on a CPU.
    let large = if harness.queue.cuda().is_some() { [2048, 1024, 4096] } else { [512, 768, 1024] };
    for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
        if harness.includes(large[0] * large[1]) {
            let out = if matches!(layout, Layout::Tn) { DType::F32 } else { dtype };
            large_matmul(
                harness,
                dtype,
                Shape { layout, add_to: AddTo::Overwrite, sizes: large, pad: 0, out },
            )?;
        }
    }
    for (sizes, pad) in shapes.into_iter().filter(|(sizes, _)| harness.includes(sizes[0] * sizes[1])) {
        for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
            // Zero tokens: no rows, or an empty sum.
            let sizes = match layout {
                Layout::Tn if sizes[0] == 0 => [sizes[1], sizes[2], 0],
                _ => sizes,
            };
            for add_to in [AddTo::Overwrite, AddTo::Add, AddTo::Residual] {
                for out in [dtype, DType::F32] {
                    // Weight gradients are f32; check other outputs in f32 only once.
                    let wanted = match layout {
                        Layout::Tn => out == DType::F32,
                        _ => out == dtype || matches!(add_to, AddTo::Overwrite),
                    };
                    if wanted {
                        small_matmul(harness, dtype, Shape { layout, add_to, sizes, pad, out })?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn small_matmul(harness: &Harness, dtype: DType, shape: Shape) -> Result<(), GpuError> {
    let Shape { layout, add_to, sizes: [m, n, k], pad, out } = shape;
    let tolerance = matmul_tolerance(harness, dtype, &shape);
    let name = format!("matmul {layout:?}, {add_to:?}, {dtype} to {out}, {m}×{n}×{k}, padding {pad}");
    harness.case(name, tolerance, |case| {
        let (a_rows, a_cols) = if matches!(layout, Layout::Tn) { (k, m) } else { (m, k) };
        let (b_rows, b_cols) = if matches!(layout, Layout::Nt) { (n, k) } else { (k, n) };
        let a = case.padded_normals(a_rows, a_cols, pad, dtype);
        let b = case.padded_normals(b_rows, b_cols, pad, dtype);
        // Use another stride where that does not change the alignment by which an algorithm is chosen.
        let apart = if k == 0 && matches!(add_to, AddTo::Residual) { pad + 2 } else { pad };
        let residual = case.padded_normals(m, n, apart, out);
        let c = match add_to {
            AddTo::Add => residual,
            _ => case.padded_output(m, n, pad, out),
        };
        let before = case.padded_values(&residual);
        let init = match add_to {
            AddTo::Overwrite => Accumulate::Overwrite,
            AddTo::Add => Accumulate::Add,
            AddTo::Residual => Accumulate::Residual(residual.mat),
        };
        let run = match layout {
            Layout::Nt => matmul::nt,
            Layout::Nn => matmul::nn,
            Layout::Tn => matmul::tn,
        };
        run(case.queue, c.mat, a.mat, b.mat, init, workspace(case));
        // The residual may cancel the result.
        case.compare_at("c", n, ((m * n * k) as f64).sqrt(), case.padded_values(&c), || {
            let mut want = reference(case, layout, (&a, &b), [m, n, k]);
            if !matches!(add_to, AddTo::Overwrite) {
                want.iter_mut().zip(&before).for_each(|(want, before)| *want += before);
            }
            want
        });
    })
}

/// Compares only some rows and some columns, because the reference is slow.
fn large_matmul(harness: &Harness, dtype: DType, shape: Shape) -> Result<(), GpuError> {
    let Shape { layout, sizes: [m, n, k], out, .. } = shape;
    let name = format!("matmul {layout:?} of training size, {dtype} to {out}, {m}×{n}×{k}");
    harness.case(name, matmul_tolerance(harness, dtype, &shape), |case| {
        let (a_rows, a_cols) = if matches!(layout, Layout::Tn) { (k, m) } else { (m, k) };
        let (b_rows, b_cols) = if matches!(layout, Layout::Nt) { (n, k) } else { (k, n) };
        let a = case.padded_normals(a_rows, a_cols, 0, dtype);
        let b = case.padded_normals(b_rows, b_cols, 0, dtype);
        let c = case.padded_output(m, n, 0, out);
        let run = match layout {
            Layout::Nt => matmul::nt,
            Layout::Nn => matmul::nn,
            Layout::Tn => matmul::tn,
        };
        run(case.queue, c.mat, a.mat, b.mat, Accumulate::Overwrite, workspace(case));
        let got = case.padded_values(&c);
        let unwritten = got.iter().filter(|value| value.is_nan()).count();
        if unwritten > 0 {
            case.add_note(format!("c: {unwritten} of {} elements not written, or NaN", got.len()));
        }
        let (av, bv) = (case.padded_values(&a), case.padded_values(&b));
        let a = |row: usize, inner: usize| match layout {
            Layout::Tn => av[inner * a_cols + row],
            _ => av[row * a_cols + inner],
        };
        let b = |inner: usize, column: usize| match layout {
            Layout::Nt => bv[column * b_cols + inner],
            _ => bv[inner * b_cols + column],
        };
        let [rows, columns] = [m, n].map(|count| matmul::reference::some_of(count, 8));
        let of_rows = rows.iter().flat_map(|i| &got[i * n..][..n]).copied().collect();
        case.compare("some rows", n, of_rows, || {
            matmul::reference::matmul(rows.len(), n, k, |i, l| a(rows[i], l), b)
        });
        let of_columns = columns.iter().flat_map(|j| got[*j..].iter().step_by(n)).copied().collect();
        case.compare("some columns", m, of_columns, || {
            matmul::reference::matmul(columns.len(), m, k, |j, l| b(l, columns[j]), |l, i| a(i, l))
        });
    })
}

/// The tolerance of the output's type, or of f32 sums of `k` terms, whose errors grow with the square root of `k`.
fn matmul_tolerance(harness: &Harness, dtype: DType, shape: &Shape) -> f64 {
    let rounds_more = dtype == DType::F32 && harness.queue.cuda().is_some_and(|cuda| cuda.tf32);
    let sums = 8.0 * (shape.sizes[2] as f64).sqrt() * f64::from(f32::EPSILON) / 2.0;
    if rounds_more { 2e-3 } else { tolerance(shape.out).max(sums) }
}

fn reference(
    case: &Case,
    layout: Layout,
    (a, b): (&PaddedMat, &PaddedMat),
    [m, n, k]: [usize; 3],
) -> Vec<f64> {
    let (av, bv) = (case.padded_values(a), case.padded_values(b));
    let (Mat { cols: a_cols, .. }, Mat { cols: b_cols, .. }) = (a.mat, b.mat);
    let a = |row: usize, inner: usize| match layout {
        Layout::Tn => av[inner * a_cols + row],
        _ => av[row * a_cols + inner],
    };
    let b = |inner: usize, column: usize| match layout {
        Layout::Nt => bv[column * b_cols + inner],
        _ => bv[inner * b_cols + column],
    };
    matmul::reference::matmul(m, n, k, a, b)
}

fn workspace<'a>(case: &'a Case<'_>) -> View<'a> {
    let bytes = match case.queue.cuda() {
        None => matmul::scratch_bytes(case.queue.num_threads()),
        Some(_) => CublasLt::WORKSPACE,
    };
    case.allocate(bytes.0 as usize / 4, DType::F32)
}
