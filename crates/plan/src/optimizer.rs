//! The states that each optimizer keeps for every trained parameter. Plans, placements, checkpoints and printed tables
//! read this list; only the update itself knows what the states mean.

use lockstep_core::{ALIGN_ELEMS, DType};

use crate::buffer::ParamState;

/// An optimizer's states, besides the parameter itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptimizerSpec {
    pub name: &'static str,
    /// The names of the states in PyTorch and in checkpoints. Each state is a number for every trained parameter, zero
    /// before the first step.
    pub states: &'static [&'static str],
    /// A name for all states together, as `lockstep plan` prints it.
    pub title: &'static str,
    pub format: StateFormat,
}

/// How an optimizer's states are stored. All but f32 are classes of numbers of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateFormat {
    #[default]
    F32,
    /// With stochastic rounding.
    Bf16,
    /// 8-bit codes, with an f32 scale for each block of 256 elements of a tensor.
    Int8,
}

impl StateFormat {
    pub const ALL: [StateFormat; 3] = [StateFormat::F32, StateFormat::Bf16, StateFormat::Int8];

    /// The type of a state's numbers or codes.
    pub const fn dtype(self) -> DType {
        match self {
            StateFormat::F32 => DType::F32,
            StateFormat::Bf16 => DType::BF16,
            StateFormat::Int8 => DType::U8,
        }
    }
}

impl OptimizerSpec {
    pub const ADAMW: OptimizerSpec = OptimizerSpec::of("adamw", &["exp_avg", "exp_avg_sq"], "Adam moments");

    /// SGD without momentum.
    pub const SGD: OptimizerSpec = OptimizerSpec::of("sgd", &[], "momentum");

    pub const SGD_MOMENTUM: OptimizerSpec = OptimizerSpec::of("sgd", &["momentum_buffer"], "momentum");

    pub const LION: OptimizerSpec = OptimizerSpec::of("lion", &["exp_avg"], "momentum");

    /// The most states any optimizer has.
    pub const MAX_STATES: usize = 2;

    const fn of(name: &'static str, states: &'static [&'static str], title: &'static str) -> OptimizerSpec {
        OptimizerSpec { name, states, title, format: StateFormat::F32 }
    }

    /// The same optimizer with its states in this format.
    pub const fn in_format(self, format: StateFormat) -> OptimizerSpec {
        OptimizerSpec { format, ..self }
    }

    /// What is stored for each parameter, in the order of the list: the states, then the scales of 8-bit codes.
    pub fn states(&self) -> impl Iterator<Item = ParamState> + use<> {
        let count = self.states.len() as u8;
        let scales = if self.format == StateFormat::Int8 { count } else { 0 };
        (0..count).map(ParamState::Optimizer).chain((0..scales).map(ParamState::Scales))
    }

    /// The name of a state in checkpoints.
    pub fn name_of(&self, state: ParamState) -> String {
        match state {
            ParamState::Optimizer(i) if self.format == StateFormat::Int8 => {
                format!("{}_codes", self.states[usize::from(i)])
            }
            ParamState::Optimizer(i) => self.states[usize::from(i)].into(),
            ParamState::Scales(i) => format!("{}_scales", self.states[usize::from(i)]),
            _ => {
                unreachable!("{state:?} is not a state of an optimizer")
            }
        }
    }
}

impl ParamState {
    /// How many parameters share one stored number, of states that are sharded as their parameters are. (The states of
    /// 4-bit parameters are sharded by themselves: [`ParamState::elems_per_entry`].)
    pub const fn params_per_number(self) -> usize {
        match self {
            ParamState::Scales(_) => ALIGN_ELEMS,
            _ => 1,
        }
    }
}

/// How trained parameters are kept where they are computed with in bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MasterFormat {
    /// An f32 master for every parameter. Where it lies in the same memory as the bf16 weight, only the 16 bits that the
    /// weight lacks are stored ([`lockstep_core::rounding::split`]).
    #[default]
    F32,
    /// No masters: updates round the bf16 weights stochastically.
    None,
}
