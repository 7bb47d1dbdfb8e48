//! What all optimizers share: how parameters and states are stored, and the loop over a flat range of them.
//!
//! `adamw`, `sgd` and `lion` only provide their formula for an element, in f32. The loop loads parameters, gradients and
//! states as f32, applies the formula and stores the results, each in its own format. On both devices everything is read
//! and written once. The formula sees a state before it is rounded; the next update sees what was stored.

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod operands;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_core::rounding::RoundingBits;
use lockstep_device::View;

use crate::disjoint::assert_disjoint;
use crate::quant::dynamic_map::{BLOCK_ELEMS, DynamicMap};

/// How the parameters of a range are stored.
#[derive(Clone, Copy, Debug)]
pub enum Params<'m> {
    /// f32 parameters. If there is a working copy, it receives the parameters rounded to its storage type
    /// ([`lockstep_device::Real::weight_from_f32`]).
    Master { master: View<'m>, working: Option<View<'m>> },
    /// f32 parameters as bf16 weights and i16 remainders ([`lockstep_core::rounding::split`]). An update gives the same
    /// bits as one of f32 parameters with a bf16 working copy.
    Split { weight: View<'m>, remainder: View<'m> },
    /// bf16 weights and no master: updated in f32, stored with stochastic rounding.
    Stochastic { weight: View<'m> },
}

/// How an optimizer state of a range is stored.
#[derive(Clone, Copy, Debug)]
pub enum State<'m> {
    /// f32, or bf16 with stochastic rounding.
    Float(View<'m>),
    /// 8-bit codes (u8) of a dynamic map, and one f32 scale for each block of 256 elements, counted from the start of the
    /// range ([`crate::quant::dynamic_map`]).
    Blockwise { codes: View<'m>, absmax: View<'m> },
}

impl<'m> From<View<'m>> for State<'m> {
    fn from(view: View<'m>) -> State<'m> {
        State::Float(view)
    }
}

/// The random bits that round a range, which must lie in one tensor.
#[derive(Clone, Copy, Debug)]
pub struct RangeRounding {
    pub bits: RoundingBits,
    /// The index in its tensor of the range's first element.
    pub first_elem: usize,
}

/// The formats of an update: what its kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdateFormat {
    pub params: ParamFormat,
    /// The format of all states.
    pub states: StateFormat,
    /// The type of gradients: f32 or bf16.
    pub grads: DType,
}

/// As [`Params`], without the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamFormat {
    /// f32 parameters with a working copy of this type, or without one if it is f32.
    Master {
        working: DType,
    },
    Split,
    Stochastic,
}

/// As [`State`], without the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateFormat {
    F32,
    Bf16,
    Blockwise,
}

/// A range of parameters with its gradients and `S` states, all of the same length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlatRange<'m, const S: usize> {
    pub(crate) params: Params<'m>,
    pub(crate) grad: View<'m>,
    pub(crate) states: [State<'m>; S],
    /// The map of each state that is stored as 8-bit codes.
    pub(crate) maps: [&'static DynamicMap; S],
    /// There if something is stored with stochastic rounding.
    pub(crate) rounding: Option<RangeRounding>,
}

impl<'m> Params<'m> {
    pub fn len(&self) -> usize {
        self.main().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Master parameters, or weights.
    fn main(&self) -> View<'m> {
        match *self {
            Params::Master { master: main, .. }
            | Params::Split { weight: main, .. }
            | Params::Stochastic { weight: main } => main,
        }
    }

    /// The working copy, or remainders.
    fn rest(&self) -> Option<View<'m>> {
        match *self {
            Params::Master { working, .. } => working,
            Params::Split { remainder, .. } => Some(remainder),
            Params::Stochastic { .. } => None,
        }
    }

    fn format(&self) -> ParamFormat {
        match self {
            Params::Master { working, .. } => {
                ParamFormat::Master { working: working.map_or(DType::F32, |working| working.dtype()) }
            }
            Params::Split { .. } => ParamFormat::Split,
            Params::Stochastic { .. } => ParamFormat::Stochastic,
        }
    }

    #[track_caller]
    fn check(&self) {
        match self {
            Params::Master { master, working } => {
                assert_eq!(master.dtype(), DType::F32, "master parameters must be f32");
                if let Some(working) = working {
                    assert_eq!(
                        working.len(),
                        master.len(),
                        "a working copy must have the length of its range"
                    );
                }
            }
            Params::Split { weight, remainder } => {
                assert_eq!(weight.dtype(), DType::BF16, "weights with remainders must be bf16");
                assert_eq!(
                    (remainder.len(), remainder.dtype()),
                    (weight.len(), DType::I16),
                    "remainders must be i16 of the length of their range"
                );
            }
            Params::Stochastic { weight } => {
                assert_eq!(weight.dtype(), DType::BF16, "weights without a master must be bf16");
            }
        }
    }
}

impl<'m> State<'m> {
    pub(crate) fn format(&self) -> StateFormat {
        match self {
            State::Float(view) if view.dtype() == DType::BF16 => StateFormat::Bf16,
            State::Float(_) => StateFormat::F32,
            State::Blockwise { .. } => StateFormat::Blockwise,
        }
    }

    /// Numbers or codes, and the scales of codes.
    fn views(&self) -> (View<'m>, Option<View<'m>>) {
        match *self {
            State::Float(view) => (view, None),
            State::Blockwise { codes, absmax } => (codes, Some(absmax)),
        }
    }

    #[track_caller]
    fn check(&self, len: usize) {
        match self {
            State::Float(view) => assert!(
                view.len() == len && matches!(view.dtype(), DType::F32 | DType::BF16),
                "states of a range must be f32 or bf16 of its length"
            ),
            State::Blockwise { codes, absmax } => {
                assert_eq!(
                    (codes.len(), codes.dtype()),
                    (len, DType::U8),
                    "codes must be u8 of their range's length"
                );
                assert_eq!(
                    (absmax.len(), absmax.dtype()),
                    (len.div_ceil(BLOCK_ELEMS), DType::F32),
                    "one f32 scale per block of {BLOCK_ELEMS} codes"
                );
            }
        }
    }
}

impl<'m, const S: usize> FlatRange<'m, S> {
    pub(crate) fn len(&self) -> usize {
        self.params.len()
    }

    pub(crate) fn format(&self) -> UpdateFormat {
        let states = self.states.first().map_or(StateFormat::F32, State::format);
        UpdateFormat { params: self.params.format(), states, grads: self.grad.dtype() }
    }

    /// All views that an update writes.
    fn outputs(&self) -> impl Iterator<Item = View<'m>> {
        let states = self.states.into_iter().flat_map(|state| {
            let (values, scales) = state.views();
            [Some(values), scales]
        });
        [Some(self.params.main()), self.params.rest()].into_iter().chain(states).flatten()
    }

    /// Panics unless the shapes match and nothing that is written overlaps anything else.
    #[track_caller]
    pub(crate) fn check(&self, decision: Option<View>) {
        let (len, format) = (self.len(), self.format());
        self.params.check();
        assert!(
            self.grad.len() == len && matches!(self.grad.dtype(), DType::F32 | DType::BF16),
            "gradients of a range must be f32 or bf16 of its length"
        );
        for state in &self.states {
            state.check(len);
            assert_eq!(state.format(), format.states, "all states of a range must have the same format");
        }
        if let Some(decision) = decision {
            assert_eq!((decision.len(), decision.dtype()), (4, DType::F64), "a step decision is four f64");
        }
        let rounds = format.params == ParamFormat::Stochastic || format.states == StateFormat::Bf16;
        assert!(!rounds || self.rounding.is_some(), "stochastic rounding needs random bits");
        if let Some(rounding) = &self.rounding {
            let end = rounding.first_elem.checked_add(len);
            assert!(end.is_some_and(|end| end as u64 <= 1 << 32), "a tensor has at most 2^32 elements");
        }
        // Operations allocate nothing: the parameters' two views, and two for each of at most two states.
        let mut outputs = [View::empty(); 6];
        assert!(S < RoundingBits::SLOTS, "an optimizer has at most two states");
        outputs.iter_mut().zip(self.outputs()).for_each(|(slot, view)| *slot = view);
        assert_disjoint(&outputs, &[self.grad, decision.unwrap_or(View::empty())]);
    }
}
