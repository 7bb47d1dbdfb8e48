//! The global gradient norm, in the fixed order of `lockstep_core::sum`.

use lockstep_core::ALIGN_ELEMS;
use lockstep_core::sum::{fold_range, merge};
use lockstep_ops::reduce;

use crate::engine::Engine;

impl Engine {
    pub(crate) fn grad_norm(&mut self) -> f64 {
        let leaves = self.places.norm_leaves.view(&self.memory);
        self.nodes.clear();
        let mut at = 0;
        for (places, first_block) in self.places.units.iter().zip(&self.first_block) {
            let Some(grad) = places.grad else { continue };
            let blocks = grad.elems() / ALIGN_ELEMS;
            let part = leaves.slice(at, blocks);
            reduce::square_leaves(&self.queue, part, grad.view(&self.memory));
            lockstep_ops::host::with(part, |leaves| fold_range(leaves, *first_block, &mut self.nodes));
            at += blocks;
        }
        merge(&mut self.nodes).sqrt()
    }
}

/// What gradients are multiplied by so that their norm is at most `max_norm`, as torch computes it.
pub(crate) fn clip_factor(norm: f64, max_norm: Option<f64>) -> f32 {
    match max_norm {
        Some(max) => (max / (norm + 1e-6)).min(1.0) as f32,
        None => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_only_shrinks() {
        assert_eq!(clip_factor(0.5, Some(1.0)), 1.0);
        assert!((clip_factor(4.0, Some(1.0)) - 0.25).abs() < 1e-6);
        assert_eq!(clip_factor(4.0, None), 1.0);
    }
}
