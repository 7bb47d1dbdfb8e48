//! From a configuration and a model's shape to a [`RunPlan`]: who holds which bytes where, and the list
//! of operations that one optimizer step is.
//!
//! A strategy is a small function that emits operations through a [`StepBuilder`]. Every operation says
//! which buffers it defines, reads and updates; from that the builder derives the waits between lanes,
//! the memory plan derives lifetimes and packs an arena, and the tests derive that nothing is read
//! before it is written. The executor runs the same list.
//!
//! Nothing here touches a device, a clock, the environment, a disk or a network.

#![forbid(unsafe_code)]

mod budget;
mod buffer;
mod builder;
mod check;
mod input;
mod memory;
mod order;
mod print;
mod run_plan;
mod schedule;
mod scratch;
pub mod strategy;
#[cfg(test)]
mod tests;

pub use buffer::{Access, Buffer, BufferId, State, Tier, What};
pub use builder::{StepBuilder, Use, Work};
pub use check::Violation;
pub use input::{
    AccumulationOrder, Bounds, DeviceNeeds, Generation, ModelPlan, OwnedPart, Placement, Placements,
    PlanInput, Recomputation, Role, UnitKind,
};
pub use memory::{MemoryPlan, last_uses, pack};
pub use print::{memory_table, operation_text, schedule_text};
pub use run_plan::{Phase, PhaseKind, PlanData, PlanError, Residents, RunPlan, build};
pub use schedule::{Lane, ModelId, Op, OpId, OpKind, Schedule, Span, SpanId, SpanPart, Wait};
pub use scratch::{ProgramLayout, SlotHome, UnitLayout};
