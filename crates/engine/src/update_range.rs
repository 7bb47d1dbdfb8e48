//! The operands of one call of the optimizer, as addresses.

use lockstep_core::ALIGN_ELEMS;
use lockstep_plan::OptimizerSpec;

use crate::addresses::Address;

/// A range of elements that all have weight decay, or all have none. With stochastic rounding they are of one tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdateRange {
    pub(crate) params: ParamAddresses,
    pub(crate) grad: Address,
    /// As many as the optimizer has, then `None`.
    pub(crate) states: [Option<StateAddress>; OptimizerSpec::MAX_STATES],
    pub(crate) decays: bool,
    /// Set if something is stored with stochastic rounding.
    pub(crate) tensor: Option<TensorRange>,
}

/// Where the parameters of an update are, as [`lockstep_ops::optimizer::Params`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum ParamAddresses {
    Master {
        master: Address,
        working: Option<Address>,
    },
    Split {
        weight: Address,
        remainder: Address,
    },
    /// The updated weights are then copied to `copy`, if the working copy is in another memory.
    Stochastic {
        weight: Address,
        copy: Option<Address>,
    },
}

/// Where an optimizer state is: its numbers or codes, and the scales of codes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateAddress {
    pub(crate) values: Address,
    pub(crate) scales: Option<Address>,
}

/// The tensor that a range lies in, and the index in it of the range's first element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorRange {
    pub(crate) unit: u32,
    pub(crate) segment: u32,
    pub(crate) first_elem: usize,
}

impl ParamAddresses {
    fn slice(&self, start: usize, elems: usize) -> ParamAddresses {
        let part = |address: Address| address.slice(start, elems);
        match *self {
            ParamAddresses::Master { master, working } => {
                ParamAddresses::Master { master: part(master), working: working.map(part) }
            }
            ParamAddresses::Split { weight, remainder } => {
                ParamAddresses::Split { weight: part(weight), remainder: part(remainder) }
            }
            ParamAddresses::Stochastic { weight, copy } => {
                ParamAddresses::Stochastic { weight: part(weight), copy: copy.map(part) }
            }
        }
    }
}

impl StateAddress {
    fn slice(&self, start: usize, elems: usize) -> StateAddress {
        StateAddress {
            values: self.values.slice(start, elems),
            scales: self.scales.map(|scales| scales.slice(start / ALIGN_ELEMS, elems / ALIGN_ELEMS)),
        }
    }
}

impl UpdateRange {
    pub(crate) fn slice(
        &self,
        start: usize,
        elems: usize,
        decays: bool,
        tensor: Option<TensorRange>,
    ) -> UpdateRange {
        UpdateRange {
            params: self.params.slice(start, elems),
            grad: self.grad.slice(start, elems),
            states: self.states.map(|state| state.map(|state| state.slice(start, elems))),
            decays,
            tensor,
        }
    }
}
