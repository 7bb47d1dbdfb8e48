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

mod axes;
mod budget;
mod buffer;
mod builder;
mod check;
mod happens_before;
mod input;
mod memory;
mod optimizer;
mod print;
mod resolve;
mod run_plan;
mod schedule;
pub mod strategy;
#[cfg(test)]
mod tests;
mod unit_layout;

pub use axes::Axes;
pub use buffer::{Access, Buffer, BufferId, BufferKind, InFlight, MemoryTier, ParamState};
pub use builder::{PassKind, StepBuilder, UnitPass};
pub use check::Violation;
pub use input::{
    AccumulationOrder, BatchBounds, DeviceNeeds, GenerationBounds, ModelPlan, ModelRole, ModelSettings,
    OwnedPart, Placement, Placements, PlanInput, RecomputePolicy,
};
pub use memory::{MemoryPlan, last_uses, pack};
pub use optimizer::{OptimizerSpec, OptimizerStateSpec};
pub use print::{memory_table, operation_text, schedule_text};
pub use resolve::{
    DeviceMemory, Hardware, ObjectiveNeeds, bounds, budget, chosen_strategy, default_head_chunk_tokens,
    optimizer_spec, resolve, storage,
};
pub use run_plan::{Phase, PhaseKind, PlanData, PlanError, Residents, RunPlan, build};
pub use schedule::{
    CopyEnd, CopyPayload, Lane, ModelId, Op, OpId, OpKind, ReduceInto, Schedule, Span, SpanId, SpanPart, Wait,
};
pub use unit_layout::{ProgramLayout, SlotBuffer, UnitLayout};
