//! Maps the steps of a program to calls of operations.

use lockstep_core::DType;
use lockstep_device::View;
use lockstep_ops::matmul::Accumulate;
use lockstep_ops::{bias, dropout, embedding, matmul, reduce, rmsnorm, rope, rows, scale, swiglu};
use lockstep_shape::{DropoutSite, Param, Program, ProgramStep, RopeDirection};

use crate::attention::attention_step;
use crate::head;
use crate::unit::Unit;

/// Runs all steps of a program in order.
pub fn run_program(program: &Program, unit: &Unit) {
    for step in &program.steps {
        run_step(step, unit);
    }
}

fn run_step(step: &ProgramStep, unit: &Unit) {
    let (queue, workspace) = (unit.queue, unit.workspace);
    match *step {
        ProgramStep::Embed { y, w } => {
            embedding::forward(queue, unit.mat(y.into()), unit.weight_mat(w), unit.inputs.tokens)
        }
        ProgramStep::EmbedBack { dy, w } => {
            if let Some(grad) = unit.grad_mat(w) {
                if unit.overwrite_grads {
                    reduce::zero(queue, grad.view);
                }
                embedding::backward(queue, grad, unit.mat(dy.into()), unit.inputs.tokens, workspace);
            }
        }
        ProgramStep::Norm { x, w, y, rstd } => {
            let eps = unit.model.norm_eps as f32;
            rmsnorm::forward(queue, unit.mat(y), unit.statistic(rstd), unit.mat(x), unit.weight(w), eps)
        }
        ProgramStep::NormBack { .. } => norm_back(step, unit),
        ProgramStep::Linear { .. }
        | ProgramStep::LinearBackInput { .. }
        | ProgramStep::LinearBackWeight { .. } => linear_step(step, unit),
        ProgramStep::Bias { y, b } => bias::forward(queue, unit.mat(y), unit.weight(b)),
        ProgramStep::BiasBack { dy, b } => {
            if unit.grad(b).is_some() {
                let dy = unit.mat(dy);
                let (scratch, last) = split_last(workspace, dy.cols);
                let db = VectorGrad::new(unit, b, last);
                bias::backward(queue, db.sum, dy, scratch);
                db.finish(unit);
            }
        }
        ProgramStep::Dropout { .. }
        | ProgramStep::DropoutBack { .. }
        | ProgramStep::DropoutCopy { .. }
        | ProgramStep::DropoutAdd { .. } => dropout_step(step, unit),
        ProgramStep::LoraScale { x } => {
            let lora = unit.model.lora.as_ref().expect("only models with adapters scale them");
            scale::in_place(queue, unit.mat(x), lora.scale())
        }
        ProgramStep::Rope { x, direction } => {
            let turn = match direction {
                RopeDirection::Forward => rope::Direction::Forward,
                RopeDirection::Backward => rope::Direction::Backward,
            };
            rope::apply(queue, unit.mat(x), unit.inputs.positions, unit.rope(), turn)
        }
        ProgramStep::Attention { .. } | ProgramStep::AttentionBack { .. } => attention_step(step, unit),
        ProgramStep::SwiGlu { g, u, y } => {
            swiglu::forward(queue, unit.mat(y.into()), unit.mat(g), unit.mat(u))
        }
        ProgramStep::SwiGluBack { g, u, dy, recompute_output: false } => {
            swiglu::backward_in_place(queue, unit.mat(g), unit.mat(u), unit.mat(dy.into()))
        }
        ProgramStep::SwiGluBack { g, u, dy, recompute_output: true } => {
            swiglu::backward_and_recompute_in_place(queue, unit.mat(g), unit.mat(u), unit.mat(dy.into()))
        }
        ProgramStep::Pick { x, y } => {
            rows::expand(queue, unit.mat(y.into()), unit.mat(x.into()), unit.inputs.head_rows.source)
        }
        ProgramStep::PickBack { dy, dx } => {
            rows::sum(queue, unit.mat(dx.into()), unit.mat(dy.into()), &unit.inputs.head_rows)
        }
        ProgramStep::HeadLogits { x, w, logits } => head::next_logits(unit, x, w, logits),
        ProgramStep::HeadOutputs { x, w, logits } => head::outputs(unit, x, w, logits),
        ProgramStep::HeadFused { x, w, logits, dx } => head::fused(unit, x, w, logits, dx),
        ProgramStep::Score { x, w } => head::score(unit, x, w),
        ProgramStep::ScoreBack { x, w, dx } => head::score_back(unit, x, w, dx),
    }
}

fn linear_step(step: &ProgramStep, unit: &Unit) {
    let (queue, workspace) = (unit.queue, unit.workspace);
    match *step {
        ProgramStep::Linear { x, w, y, residual } => {
            let init = match residual {
                None => Accumulate::Overwrite,
                Some(itself) if itself == y => Accumulate::Add,
                Some(other) => Accumulate::Residual(unit.mat(other)),
            };
            matmul::nt(queue, unit.mat(y), unit.mat(x), unit.weight_mat(w), init, workspace)
        }
        ProgramStep::LinearBackInput { dy, w, dx, add } => {
            let init = if add { Accumulate::Add } else { Accumulate::Overwrite };
            matmul::nn(queue, unit.mat(dx), unit.mat(dy), unit.weight_mat(w), init, workspace)
        }
        ProgramStep::LinearBackWeight { dy, x, w } => {
            if let Some(grad) = unit.grad_mat(w) {
                let init = if unit.overwrite_grads { Accumulate::Overwrite } else { Accumulate::Add };
                matmul::tn(queue, grad, unit.mat(dy), unit.mat(x), init, workspace);
            }
        }
        _ => unreachable!("a matmul"),
    }
}

fn dropout_step(step: &ProgramStep, unit: &Unit) {
    let (queue, cu_seqlens) = (unit.queue, unit.inputs.cu_seqlens);
    let mask = |site| unit.mask(mask_site(site));
    match *step {
        ProgramStep::Dropout { y, residual, site } => {
            let [y, residual] = [y, residual].map(|slot| unit.mat(slot.into()));
            dropout::forward(queue, y, residual, cu_seqlens, mask(site).as_ref())
        }
        ProgramStep::DropoutBack { dy, dx, site } => {
            let [dy, dx] = [dy, dx].map(|slot| unit.mat(slot.into()));
            dropout::backward(queue, dx, dy, cu_seqlens, mask(site).as_ref())
        }
        ProgramStep::DropoutCopy { x, y, site } => {
            let x = unit.mat(x);
            let y = unit.first_columns(y, x.cols);
            dropout::backward(queue, y, x, cu_seqlens, mask(site).as_ref())
        }
        ProgramStep::DropoutAdd { x, y, site } => {
            let y = unit.mat(y);
            let x = unit.first_columns(x, y.cols);
            dropout::add(queue, y, x, cu_seqlens, mask(site).as_ref())
        }
        _ => unreachable!("dropout"),
    }
}

const fn mask_site(site: DropoutSite) -> dropout::Site {
    match site {
        DropoutSite::AttentionOut => dropout::Site::AttentionOut,
        DropoutSite::MlpOut => dropout::Site::MlpOut,
        DropoutSite::Lora(of) => dropout::Site::Adapter(of as u8),
    }
}

fn norm_back(step: &ProgramStep, unit: &Unit) {
    let &ProgramStep::NormBack { dy, x, w, rstd, dx, add, recompute_output } = step else {
        unreachable!("a norm's backward")
    };
    let dim = unit.weight(w).len();
    let scratch = unit.workspace.first(rmsnorm::scratch_elems(unit.mat(dy).rows, dim) + dim);
    let (scratch, last) = split_last(scratch, dim);
    let dw = VectorGrad::new(unit, w, last);
    rmsnorm::backward(
        unit.queue,
        rmsnorm::BackwardArgs {
            dx: unit.mat(dx),
            add,
            recompute: recompute_output,
            dw: dw.sum,
            dy: unit.mat(dy),
            x: unit.mat(x),
            rstd: unit.statistic(rstd),
            w: unit.weight(w),
            scratch,
        },
    );
    dw.finish(unit);
}

/// A view without its last elements, and these.
fn split_last(view: View<'_>, elems: usize) -> (View<'_>, View<'_>) {
    let first = view.len() - elems;
    (view.first(first), view.slice(first, elems))
}

/// The gradient of a norm's weight or of a bias. Its kernels add to f32.
struct VectorGrad<'m> {
    /// What the kernel adds to.
    sum: View<'m>,
    /// The gradient that the sum is rounded to.
    rounded: Option<View<'m>>,
}

impl<'m> VectorGrad<'m> {
    /// `scratch` has the vector's length. It takes the sum if the gradient has another type, or if the vector is frozen:
    /// then the gradient is a by-product that nobody reads.
    fn new(unit: &Unit<'m>, param: Param, scratch: View<'m>) -> VectorGrad<'m> {
        let (sum, rounded) = match unit.grad(param) {
            None => return VectorGrad { sum: scratch, rounded: None },
            Some(grad) if grad.dtype() == DType::F32 => (grad, None),
            Some(grad) => (scratch, Some(grad)),
        };
        assert!(rounded.is_none() || unit.overwrite_grads, "gradients that are rounded are written once");
        if unit.overwrite_grads {
            reduce::zero(unit.queue, sum);
        }
        VectorGrad { sum, rounded }
    }

    fn finish(&self, unit: &Unit) {
        if let Some(rounded) = self.rounded {
            reduce::copy(unit.queue, rounded, self.sum);
        }
    }
}
