//! What all optimizers share: the loop over a flat range of parameters, gradients and states.
//!
//! `adamw`, `sgd` and `lion` only provide their formula for an element. On both devices the states are read and written
//! once, and the working copy is rounded on the way.

pub(crate) mod cpu;
pub(crate) mod cuda;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_device::View;

use crate::disjoint::assert_disjoint;

/// A range of parameters with its gradients and `S` states, all f32 and of the same length. If there is a working copy,
/// it receives the parameters rounded to its storage type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlatRange<'m, const S: usize> {
    pub(crate) master: View<'m>,
    pub(crate) working: Option<View<'m>>,
    pub(crate) grad: View<'m>,
    pub(crate) states: [View<'m>; S],
}

impl<const S: usize> FlatRange<'_, S> {
    /// Panics unless the shapes match and nothing that is written overlaps anything else.
    #[track_caller]
    pub(crate) fn check(&self, decision: Option<View>) {
        let FlatRange { master, working, grad, states } = *self;
        for state in [master, grad].iter().chain(&states) {
            assert_eq!(
                (state.len(), state.dtype()),
                (master.len(), DType::F32),
                "states of a range must be f32 of its length"
            );
        }
        if let Some(working) = working {
            assert_eq!(working.len(), master.len(), "a working copy must have the length of its range");
        }
        if let Some(decision) = decision {
            assert_eq!((decision.len(), decision.dtype()), (4, DType::F64), "a step decision is four f64");
        }
        let [working, decision] = [working, decision].map(|view| view.unwrap_or(View::empty()));
        assert_disjoint(&states, &[master, working, grad, decision]);
        assert_disjoint(&[master, working], &[grad, decision]);
    }
}
