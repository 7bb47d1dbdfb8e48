//! Snapshots of the printed tables and schedules of small plans.

use lockstep_config::StrategyName;
use lockstep_core::DType;

use crate::{MemoryTier, memory_table, schedule_text};

use super::TestSetup;

/// The table, then every phase's schedule.
fn assert_plan_text(name: &str, setup: &TestSetup) {
    let plan = setup.plan();
    let mut text = memory_table(&plan);
    for phase in &plan.phases {
        text.push('\n');
        text.push_str(&schedule_text(&plan, phase));
    }
    insta::with_settings!({ snapshot_path => "../snapshots", prepend_module_to_snapshot => false, omit_expression => true }, {
        insta::assert_snapshot!(name, text);
    });
}

#[test]
fn zero3_on_eight_ranks() {
    assert_plan_text("zero3_on_eight_ranks", &TestSetup::new("tiny", StrategyName::Zero3, 1, 8));
}

#[test]
fn zero3_on_two_nodes_of_four() {
    let setup = TestSetup::new("tiny", StrategyName::Zero3, 2, 4).with(|s| s.num_micro_batches = 2);
    assert_plan_text("zero3_on_two_nodes_of_four", &setup);
}

#[test]
fn ddp_with_buckets() {
    let setup = TestSetup::new("tiny", StrategyName::Ddp, 1, 2).with(|s| s.bucket_bytes = 256 << 10);
    assert_plan_text("ddp_with_buckets", &setup);
}

#[test]
fn hybrid_shard() {
    let setup = TestSetup::new("tiny", StrategyName::HybridShard, 2, 2).with(|s| s.storage = DType::BF16);
    assert_plan_text("hybrid_shard", &setup);
}

#[test]
fn optimizer_on_the_host() {
    let setup = TestSetup::new("tiny", StrategyName::Zero2, 1, 2).with(|s| {
        s.storage = DType::BF16;
        s.optimizer_tier = MemoryTier::Host;
    });
    assert_plan_text("optimizer_on_the_host", &setup);
}

#[test]
fn ppo_with_four_models() {
    let setup = TestSetup::new("tiny", StrategyName::Zero3, 1, 2).with(|s| {
        s.ppo = true;
        s.coefficients_ahead = false;
    });
    assert_plan_text("ppo_with_four_models", &setup);
}

#[test]
fn frozen_tensors() {
    let setup = TestSetup::new("tiny", StrategyName::Zero1, 1, 2).with(|s| {
        s.frozen = vec!["model.layers.0".into(), "*embed_tokens".into(), "*k_proj".into()];
        s.storage = DType::BF16;
    });
    assert_plan_text("frozen_tensors", &setup);
}
