//! Model families as data.
//!
//! A model is a row of units (`embed`, `block 0..L-1`, `head`). A unit has segments, the tensors that
//! lie in its flat buffer, and programs: the ordered steps of its forward, recomputation and backward,
//! each step naming the slots it reads and writes. The planner walks programs for lifetimes; `model`
//! walks the same programs to compute. A new family is a new list of steps.
//!
//! Letters in shapes: T tokens, D model width, H query heads, G key-value heads, h head width,
//! F feed-forward width, V vocabulary.

#![forbid(unsafe_code)]

mod family;
mod hf;
mod program;
mod slot;
mod unit;

pub use family::{NAMED_SIZES, block_programs, embed_programs, head_programs};
pub use hf::{Architecture, ModelShape, ShapeError};
pub use program::{Cols, Operand, Program, Programs, Recompute, Step, Turn};
pub use slot::{Rows, Slot, SlotSpec};
pub use unit::{Adapter, Init, Param, Segment, UnitKind, UnitShape, units};
