//! Turns a configuration and a model's shape into a [`RunPlan`]: which rank holds which bytes where, and the list of
//! operations that make up one optimizer step.
//!
//! A strategy is a small function that emits operations through a [`StepBuilder`]. Every operation states which
//! buffers it defines, reads and updates. From that the builder derives the waits between lanes, the memory plan
//! derives lifetimes and packs the arena, and the checks derive that nothing is read before it is written. The engine
//! runs the same list.
//!
//! This crate uses no device, clock, environment, disk or network.

#![forbid(unsafe_code)]

mod axes;
mod budget;
mod buffer;
mod builder;
mod check;
pub mod cost;
mod generation;
mod happens_before;
mod input;
mod lane;
mod memory;
mod memory_table;
mod optimizer;
mod print;
mod quantised;
mod resolve;
mod run_plan;
mod schedule;
pub mod strategy;
#[cfg(test)]
mod tests;
mod unit_layout;

pub use axes::Axes;
pub use budget::OpenChoices;
pub use buffer::{Access, Buffer, BufferId, BufferKind, InFlight, MemoryTier, ParamState};
pub use builder::{PassKind, StepBuilder, UnitPass};
pub use check::Violation;
pub use generation::{GenerationBounds, KvPage, WantedGeneration};
pub use input::{
    AccumulationOrder, BatchBounds, DeviceNeeds, InputsLayout, InputsSize, ModelPlan, ModelRole,
    ModelSettings, OwnedPart, Placement, Placements, PlanInput, RecomputePolicy,
};
pub use lane::{Lane, LaneProcessor, LaneSpec, LaneThreads};
pub use memory::{MemoryPlan, last_uses, pack};
pub use memory_table::{MemoryBreakdown, MemoryGroup, TierBytes, memory_table};
pub use optimizer::{MasterFormat, OptimizerSpec, StateFormat};
pub use print::{operation_text, schedule_text};
pub use resolve::{
    DeviceMemory, Hardware, ModelNeeds, RunNeeds, bounds, budget, chosen_strategy, default_budget,
    default_head_chunk_tokens, optimizer_spec, resolve, sequence_bounds, storage,
};
pub use run_plan::{Phase, PhaseKind, PlanData, PlanError, Residents, RunPlan, build};
pub use schedule::{
    CopyEnd, CopyPayload, ModelId, Op, OpId, OpKind, ReduceInto, Schedule, Span, SpanId, SpanPart, Wait,
};
pub use unit_layout::{ProgramLayout, SlotBuffer, UnitLayout};
