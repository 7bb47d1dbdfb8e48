//! Test support: goldens made with PyTorch and transformers, plans and engines for small models, and runs with all ranks
//! in one process; and a stand-in for the Hugging Face Hub. Used as a dev-dependency only.

#![forbid(unsafe_code)]

mod cases;
mod golden;
mod hub_stand_in;
mod setup;
mod test_objective;
mod world;

pub use cases::{
    CarrierKind, Case, CaseTraining, all_cases, assert_same_as_plain_ddp, pairwise_cases, run_case,
    run_case_from, run_case_of, run_case_with,
};
pub use golden::{Golden, golden_dir};
pub use hub_stand_in::{HubStandIn, Misbehavior, SeenRequest};
pub use setup::{TestSetup, engine, input, model, plan, read_state, settings};
pub use test_objective::{TestBatch, TestObjective, score, score_with};
pub use world::{BatchSource, TrainingTrace, run_in_world, run_plan_in_world, train_world};
