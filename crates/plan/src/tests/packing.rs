//! How close packing comes to its lower bound.

use std::collections::HashMap;

use lockstep_config::StrategyName;
use lockstep_core::DType;
use lockstep_shape::Recompute;

use crate::{Access, BufferId, MemoryTier, Phase, RunPlan};

use super::{TestSetup, lane_simulator, train_phase};

fn setups() -> Vec<TestSetup> {
    let mut all = Vec::new();
    for size in ["tiny", "15m", "300m", "7b"] {
        for strategy in [
            StrategyName::Ddp,
            StrategyName::Zero1,
            StrategyName::Zero2,
            StrategyName::Zero3,
            StrategyName::ShardGradOp,
        ] {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                for num_micro_batches in [1, 2] {
                    all.push(TestSetup::new(size, strategy, 1, 4).with(|s| {
                        s.shape.vocab = 32_000;
                        s.recompute = recompute.into();
                        s.num_micro_batches = num_micro_batches;
                        s.tokens = 4096;
                        s.storage = DType::BF16;
                    }));
                }
            }
        }
    }
    all
}

#[test]
fn the_arena_is_within_two_percent_of_the_lower_bound() {
    for setup in setups() {
        let plan = setup.plan();
        let memory = &train_phase(&plan).memory;
        let limit = memory.live_peak.0 + memory.live_peak.0 / 50 + (64 << 10);
        assert!(memory.bytes.0 <= limit, "{setup:?}: {} against {}", memory.bytes, memory.live_peak);
    }
}

/// Some run of the lanes nearly fills the arena, so the lower bound is realistic.
#[test]
fn some_run_nearly_fills_the_arena() {
    for setup in setups().into_iter().filter(|s| s.shape.layers == 6) {
        let plan = setup.plan();
        let phase = train_phase(&plan);
        let runs = (0..40)
            .map(|seed| peak_live_bytes(&plan, phase, &lane_simulator::random_times(&phase.schedule, seed)));
        let peak = runs.max().unwrap();
        assert!(peak * 100 >= phase.memory.bytes.0 * 94, "{setup:?}: {peak} of {}", phase.memory.bytes.0);
    }
}

/// The largest number of bytes live at one moment of a run.
fn peak_live_bytes(plan: &RunPlan, phase: &Phase, times: &[(u64, u64)]) -> u64 {
    let mut lives: HashMap<BufferId, Vec<(u64, u64)>> = HashMap::new();
    for (op, (start, end)) in phase.schedule.ops.iter().zip(times) {
        for (id, access) in &op.accesses {
            let lives = lives.entry(*id).or_default();
            if *access == Access::Define {
                lives.push((*start, *end));
            } else if let Some(life) = lives.last_mut() {
                life.1 = life.1.max(*end);
            }
        }
    }
    let mut events: Vec<(u64, i64)> = Vec::new();
    for (id, lives) in lives {
        let buffer = &plan.buffers[id.0 as usize];
        if buffer.tier == MemoryTier::Device && !buffer.kind.is_resident() {
            let bytes = buffer.bytes().0 as i64;
            events.extend(lives.into_iter().flat_map(|(start, end)| [(start, bytes), (end, -bytes)]));
        }
    }
    events.sort_unstable();
    let mut alive = 0;
    let sums = events.into_iter().map(|(_, change)| {
        alive += change;
        alive
    });
    sums.max().unwrap_or(0) as u64
}
