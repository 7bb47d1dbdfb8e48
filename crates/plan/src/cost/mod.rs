//! The cost model: how long a step takes, on this machine or on a cluster that exists on paper only.
//!
//! - `work` counts the floating-point operations, bytes and kernels of a unit's program.
//! - `operation` turns every operation of a schedule into a demand: work on a lane, a copy, or a collective.
//! - `rates` and `chips` say how fast a device does such work; `cluster` and `collective` say the same of links.
//! - `simulate` runs a schedule on its lanes with these durations.
//! - `prediction` is the result for a whole plan: seconds per step, tokens per second, communication.
//! - `workload`, `strategies`, `changes` and `scaling` compare plans; `memory_curve` shows one plan's memory over time.
//! - `paper` describes a cluster that is not here; `figures` has what is published of this machine.
//!
//! Everything here is a pure function. A caller measures rates or takes published ones. `docs/cost-model.md` has the
//! formulas and the known errors.

mod changes;
mod chips;
mod cluster;
mod collective;
mod curve_picture;
mod figures;
mod json;
mod memory_curve;
mod memory_kinds;
mod oom;
mod operation;
mod paper;
mod prediction;
mod rates;
mod scaling;
mod simulate;
mod strategies;
mod table;
#[cfg(test)]
mod tests;
mod text;
mod work;
mod workload;

pub use changes::{Change, Refusal, Suggestion, suggest_changes};
pub use chips::{CHIPS, Chip, ChipError, HostRates};
pub use cluster::{Cluster, Link, NetworkError, NetworkSpeed, Transport};
pub use collective::{Collective, Group};
pub use curve_picture::{curve_svg, curve_text};
pub use figures::Figures;
pub use json::{
    curve_json, memory_json, rates_from_json, rates_json, refusal_json, scaling_json, strategies_json,
};
pub use memory_curve::{CurvePoint, MemoryCurve};
pub use memory_kinds::MemoryByKind;
pub use oom::{OutOfMemoryReport, explain_oom};
pub use operation::{CopyLink, OpDemand, demand};
pub use paper::{PaperCluster, PaperClusterError};
pub use prediction::{PhaseTime, Prediction, model_flops_per_token, predict};
pub use rates::{GemmTile, MatmulRates, Rates};
pub use scaling::{ScalingRow, ScalingTable, scaling_table};
pub use simulate::{OpTime, Simulation, Straggler, simulate};
pub use strategies::{
    RunChoices, STRATEGIES, StrategyChoice, StrategyRow, StrategyTable, choose_rows, choose_strategy,
    strategy_table,
};
pub use text::{changes_text, refusal_text, scaling_text, strategies_text};
pub use work::{Gemm, Work};
pub use workload::{Machine, Workload, WorkspaceBytes};
