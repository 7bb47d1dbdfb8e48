//! The gated unit of the feed-forward layer: y = silu(g) · u with silu(g) = g · sigmoid(g).

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_device::{Queue, View};

/// y from g and u, all of one length and storage type.
pub fn forward(queue: &Queue, y: View, g: View, u: View) {
    check(&y, &g, &u);
    y.assert_apart(&g);
    y.assert_apart(&u);
    match queue {
        Queue::Cpu(cpu) => cpu::forward(cpu, y, g, u),
        Queue::Cuda(cuda) => cuda::forward(cuda, y, g, u),
    }
}

/// Replaces g by ∂L/∂g and u by ∂L/∂u: nothing reads the values afterwards, and the gradients need no
/// memory of their own.
pub fn backward_in_place(queue: &Queue, g: View, u: View, dy: View) {
    check(&dy, &g, &u);
    g.assert_apart(&u);
    dy.assert_apart(&g);
    dy.assert_apart(&u);
    match queue {
        Queue::Cpu(cpu) => cpu::backward_in_place(cpu, g, u, dy),
        Queue::Cuda(cuda) => cuda::backward_in_place(cuda, g, u, dy),
    }
}

fn check(y: &View, g: &View, u: &View) {
    assert!(y.len() == g.len() && g.len() == u.len(), "lengths {} {} {}", y.len(), g.len(), u.len());
    assert!(y.dtype() == g.dtype() && g.dtype() == u.dtype(), "one storage type");
}
