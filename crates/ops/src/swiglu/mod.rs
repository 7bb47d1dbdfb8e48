//! SwiGLU, the gated activation of the feed-forward layer: y = silu(g) · u with silu(g) = g · sigmoid(g).

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_device::Queue;

use crate::Mat;

/// y from g and u, all of the same shape and storage type. g and u may be columns of one matrix.
pub fn forward(queue: &Queue, y: Mat, g: Mat, u: Mat) {
    check(&y, &g, &u);
    y.assert_disjoint(&g);
    y.assert_disjoint(&u);
    match queue {
        Queue::Cpu(cpu) => cpu::forward(cpu, y, g, u),
        Queue::Cuda(cuda) => cuda::forward(cuda, y, g, u),
    }
}

/// Replaces g by ∂L/∂g and u by ∂L/∂u: nothing reads the values afterwards, so the gradients need no memory of their
/// own.
pub fn backward_in_place(queue: &Queue, g: Mat, u: Mat, dy: Mat) {
    check_backward(&g, &u, &dy);
    match queue {
        Queue::Cpu(cpu) => cpu::backward_in_place::<false>(cpu, g, u, dy),
        Queue::Cuda(cuda) => cuda::backward_in_place::<false>(cuda, g, u, dy),
    }
}

/// As [`backward_in_place`], and also recomputes y in the place of dy. This saves a pass if y was not kept.
pub fn backward_and_recompute_in_place(queue: &Queue, g: Mat, u: Mat, dy: Mat) {
    check_backward(&g, &u, &dy);
    match queue {
        Queue::Cpu(cpu) => cpu::backward_in_place::<true>(cpu, g, u, dy),
        Queue::Cuda(cuda) => cuda::backward_in_place::<true>(cuda, g, u, dy),
    }
}

fn check_backward(g: &Mat, u: &Mat, dy: &Mat) {
    check(dy, g, u);
    g.assert_disjoint(u);
    dy.assert_disjoint(g);
    dy.assert_disjoint(u);
}

fn check(y: &Mat, g: &Mat, u: &Mat) {
    for mat in [g, u] {
        assert_eq!((mat.rows, mat.cols), (y.rows, y.cols), "shapes must match");
        assert_eq!(mat.view.dtype(), y.view.dtype(), "storage types must match");
    }
}
