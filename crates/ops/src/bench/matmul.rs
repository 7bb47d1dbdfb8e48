//! Matmul: those of a training step, with what they are added to, and any shape in the three layouts.

use std::fmt;

use lockstep_core::DType;
use lockstep_device::{MemoryError, Queue, View};

use super::StepShape;
use super::operand::{normals, zeros};
use super::runner::{Case, Runner};
use crate::Mat;
use crate::matmul::{self, Accumulate};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// A linear layer forward.
    Nt,
    /// The gradient of its input.
    Nn,
    /// The gradient of its weight.
    Tn,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Layout::Nt => "forward",
            Layout::Nn => "input gradient",
            Layout::Tn => "weight gradient",
        })
    }
}

/// A matmul of \[m, k\] and \[k, n\].
#[derive(Clone, Copy, Debug)]
pub(super) struct MatmulCase {
    pub(super) layout: Layout,
    pub(super) sizes: [usize; 3],
    pub(super) a_dtype: DType,
    pub(super) b_dtype: DType,
    pub(super) out: DType,
    pub(super) adds: AddTo,
    /// Elements from one row of A to the next, if they have gaps: the logits' gradient is stored in the logits' bytes.
    pub(super) a_stride: Option<usize>,
}

/// What a matmul's result is added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AddTo {
    Nothing,
    /// The previous contents of the output.
    Output,
    /// The residual stream.
    Residual,
}

impl MatmulCase {
    pub(super) fn plain(layout: Layout, sizes: [usize; 3], dtype: DType) -> MatmulCase {
        let out = if layout == Layout::Tn { DType::F32 } else { dtype };
        MatmulCase {
            layout,
            sizes,
            a_dtype: dtype,
            b_dtype: dtype,
            out,
            adds: AddTo::Nothing,
            a_stride: None,
        }
    }

    pub(super) fn measure(
        &self,
        runner: &Runner,
        name: impl Into<String>,
        calls_per_step: usize,
    ) -> Result<(), MemoryError> {
        let MatmulCase { layout, sizes: [m, n, k], a_dtype, b_dtype, out, adds, a_stride } = *self;
        let (a_rows, a_cols) = if layout == Layout::Tn { (k, m) } else { (m, k) };
        let (b_rows, b_cols) = if layout == Layout::Nt { (n, k) } else { (k, n) };
        let a_stride = a_stride.unwrap_or(a_cols);
        let residual = if adds == AddTo::Residual { m * n } else { 0 };
        let read = usize::from(adds != AddTo::Nothing);
        let case = Case {
            name: name.into(),
            calls_per_step,
            bytes: a_rows * a_cols * a_dtype.size()
                + b_rows * b_cols * b_dtype.size()
                + (1 + read) * m * n * out.size(),
            flops: 2.0 * (m * n) as f64 * k as f64,
        };
        let workspace = runner.workspace();
        let operands = [
            zeros(m * n, out),
            normals(a_rows * a_stride, a_dtype),
            normals(b_rows * b_cols, b_dtype),
            normals(residual, out),
        ];
        runner.measure(case, operands, |queue: &Queue, [c, a, b, residual]: [View<'_>; 4]| {
            let c = Mat::dense(c, m, n);
            let (a, b) = (Mat::strided(a, a_rows, a_cols, a_stride), Mat::dense(b, b_rows, b_cols));
            let init = match adds {
                AddTo::Nothing => Accumulate::Overwrite,
                AddTo::Output => Accumulate::Add,
                AddTo::Residual => Accumulate::Residual(Mat::dense(residual, m, n)),
            };
            match layout {
                Layout::Nt => matmul::nt(queue, c, a, b, init, workspace),
                Layout::Nn => matmul::nn(queue, c, a, b, init, workspace),
                Layout::Tn => matmul::tn(queue, c, a, b, init, workspace),
            }
        })
    }
}

/// The three layouts of one shape.
pub(super) fn layouts(runner: &Runner, dtype: DType, [m, n, k]: [usize; 3]) -> Result<(), MemoryError> {
    for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
        let name = format!("matmul, {layout}, {m}×{n}×{k}");
        MatmulCase::plain(layout, [m, n, k], dtype).measure(runner, name, 0)?;
    }
    Ok(())
}

/// A linear layer of every block. Queries, keys and values are one layer, and so are gate and up.
struct Linear {
    name: &'static str,
    /// Columns of its input and its output.
    in_cols: usize,
    out_cols: usize,
    /// Whether its output is added to the residual stream.
    adds_residual: bool,
}

pub(super) fn of_step(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    let (dim, ffn, q, kv) = (step.dim, step.ffn, step.q_width(), step.kv_width());
    let linears = [
        Linear { name: "q, k, v", in_cols: dim, out_cols: q + 2 * kv, adds_residual: false },
        Linear { name: "o", in_cols: q, out_cols: dim, adds_residual: true },
        Linear { name: "gate, up", in_cols: dim, out_cols: 2 * ffn, adds_residual: false },
        Linear { name: "down", in_cols: ffn, out_cols: dim, adds_residual: true },
    ];
    for linear in linears {
        linear.measure(runner, step)?;
    }
    head(runner, step)
}

impl Linear {
    fn measure(&self, runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
        let Linear { name, in_cols: from, out_cols: to, adds_residual } = *self;
        let (tokens, layers) = (step.tokens, step.layers);
        // The last matmul of a block is not recomputed: nothing in its backward reads the result.
        let forward = if name == "down" { layers } else { step.forward_times() };
        let adds = if adds_residual { AddTo::Residual } else { AddTo::Nothing };
        let cases = [
            (MatmulCase { adds, ..MatmulCase::plain(Layout::Nt, [tokens, to, from], step.dtype) }, forward),
            (MatmulCase::plain(Layout::Nn, [tokens, from, to], step.dtype), layers),
            (MatmulCase::plain(Layout::Tn, [to, from, tokens], step.dtype), layers),
        ];
        for (case, calls_per_step) in cases {
            case.measure(runner, format!("matmul {name}, {}", case.layout), calls_per_step)?;
        }
        Ok(())
    }
}

/// The matmuls of the head, one chunk of tokens at a time. The logits are f32. Their gradient is stored in their bytes:
/// on a GPU in the storage type, on a CPU in f32.
fn head(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    let ((chunks, rows), StepShape { vocab, dim, dtype, .. }) = (step.chunks(), *step);
    let case = |layout, sizes| MatmulCase::plain(layout, sizes, dtype);
    let logits = MatmulCase { out: DType::F32, ..case(Layout::Nt, [rows, vocab, dim]) };
    logits.measure(runner, format!("matmul head, {}", Layout::Nt), chunks)?;
    let a_dtype = if runner.on_gpu() { dtype } else { DType::F32 };
    let a_stride = Some(vocab * (DType::F32.size() / a_dtype.size()));
    MatmulCase { a_dtype, a_stride, ..case(Layout::Nn, [rows, dim, vocab]) }.measure(
        runner,
        format!("matmul head, {}", Layout::Nn),
        chunks,
    )?;
    let weight = MatmulCase { a_dtype, a_stride, ..case(Layout::Tn, [vocab, dim, rows]) };
    weight.measure(runner, format!("matmul head, {}", Layout::Tn), 1)?;
    if chunks > 1 {
        MatmulCase { adds: AddTo::Output, ..weight }.measure(
            runner,
            format!("matmul head, {} added", Layout::Tn),
            chunks - 1,
        )?;
    }
    Ok(())
}
