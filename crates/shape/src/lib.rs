//! Model families as data.
//!
//! A model is a sequence of units: `embed`, `block 0..L-1`, and a language-model head or a scalar head. A unit has
//! segments, the tensors in its flat buffer, and programs: the ordered steps of its forward, recompute and backward
//! passes. Each step names the slots it reads and writes. The planner walks programs to find lifetimes; `model` walks
//! the same programs to compute. A new family is a new list of steps.
//!
//! Letters in shapes: T tokens, D model width, H query heads, G key-value heads, h head width,
//! F feed-forward width, V vocabulary.

#![forbid(unsafe_code)]

mod architecture;
mod channel;
mod error;
mod family;
mod hf;
mod lora;
mod model_shape;
mod program;
mod rope;
mod sizes;
mod slot;
mod unit;

pub use architecture::Architecture;
pub use channel::{Channel, Channels};
pub use error::ShapeError;
pub use family::{block_programs, embed_programs, head_programs, score_head_programs};
pub use lora::{ALL_LINEAR, Lora, target_matches};
pub use model_shape::{Biases, Dropout, Head, ModelShape, SlidingWindow, WeightFormat};
pub use program::{DropoutSite, Program, ProgramStep, Programs, Recompute, RopeDirection, SlotCols};
pub use rope::{Rope, RopeScaling, Yarn};
pub use sizes::NAMED_SIZES;
pub use slot::{Slot, SlotRows, SlotSpec};
pub use unit::{
    FlatParam, Freeze, Param, ParamGroup, Projection, Segment, UnitKind, UnitShape, WeightExtent, WeightInit,
    pattern_matches, units,
};
