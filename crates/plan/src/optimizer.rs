//! The states that each optimizer keeps for every trained parameter. Plans, placements, checkpoints and printed tables
//! read this list; only the update itself knows what the states mean.

use lockstep_core::DType;

use crate::buffer::ParamState;

/// An optimizer's states, besides the parameter itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptimizerSpec {
    pub name: &'static str,
    pub states: &'static [OptimizerStateSpec],
    /// A name for all states together, as `lockstep plan` prints it.
    pub title: &'static str,
}

/// One optimizer state: a number for every trained parameter, zero before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptimizerStateSpec {
    /// The name in PyTorch and in checkpoints.
    pub name: &'static str,
    pub dtype: DType,
}

const fn f32_state(name: &'static str) -> OptimizerStateSpec {
    OptimizerStateSpec { name, dtype: DType::F32 }
}

impl OptimizerSpec {
    pub const ADAMW: OptimizerSpec = OptimizerSpec {
        name: "adamw",
        states: &[f32_state("exp_avg"), f32_state("exp_avg_sq")],
        title: "Adam moments",
    };

    /// SGD without momentum.
    pub const SGD: OptimizerSpec = OptimizerSpec { name: "sgd", states: &[], title: "momentum" };

    pub const SGD_MOMENTUM: OptimizerSpec =
        OptimizerSpec { name: "sgd", states: &[f32_state("momentum_buffer")], title: "momentum" };

    pub const LION: OptimizerSpec =
        OptimizerSpec { name: "lion", states: &[f32_state("exp_avg")], title: "momentum" };

    /// The most states any optimizer has.
    pub const MAX_STATES: usize = 2;

    /// The states, in the order of the list.
    pub fn states(&self) -> impl Iterator<Item = ParamState> + use<> {
        (0..self.states.len() as u8).map(ParamState::Optimizer)
    }
}
