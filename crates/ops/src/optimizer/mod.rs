//! What all optimizers share: the walk over a flat range of parameters, gradients and states.
//!
//! `adamw`, `sgd` and `lion` bring their formula for an element and nothing else. On both devices the states go through
//! memory once, and the working copy is rounded on the way.

pub(crate) mod cpu;
pub(crate) mod cuda;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_device::View;

use crate::apart::assert_apart;

/// One range of parameters with its gradients and `S` states, all f32 and of one length. `working`, where there is
/// one, receives the parameters rounded to its storage type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flat<'m, const S: usize> {
    pub(crate) master: View<'m>,
    pub(crate) working: Option<View<'m>>,
    pub(crate) grad: View<'m>,
    pub(crate) states: [View<'m>; S],
}

impl<const S: usize> Flat<'_, S> {
    /// Panics unless the shapes fit and nothing that is written overlaps anything else.
    #[track_caller]
    pub(crate) fn check(&self, verdict: Option<View>) {
        let Flat { master, working, grad, states } = *self;
        for state in [master, grad].iter().chain(&states) {
            assert_eq!((state.len(), state.dtype()), (master.len(), DType::F32), "state of a range");
        }
        if let Some(working) = working {
            assert_eq!(working.len(), master.len(), "working copy of a range");
        }
        if let Some(verdict) = verdict {
            assert_eq!((verdict.len(), verdict.dtype()), (4, DType::F64), "a verdict");
        }
        let [working, verdict] = [working, verdict].map(|view| view.unwrap_or(View::empty()));
        assert_apart(&states, &[master, working, grad, verdict]);
        assert_apart(&[master, working], &[grad, verdict]);
    }
}
