//! Strategies. Each is a small function that emits the operations of a training step.
//!
//! They differ in when parameters are gathered and released, and in how gradients are reduced; units compute the same
//! in all of them. A custom strategy has the same type.

use lockstep_config::StrategyName;

use crate::builder::{StepBuilder, UnitPass};
use crate::input::Placement;

/// Emits one training step.
pub type Strategy = fn(&mut StepBuilder);

/// The function of a named strategy, and its placements of parameters, gradients and optimizer states.
pub fn by_name(name: StrategyName) -> (Strategy, [Placement; 3]) {
    use Placement::{Replicate, Shard};
    match name {
        StrategyName::Ddp | StrategyName::NoShard | StrategyName::Auto => {
            (ddp, [Replicate, Replicate, Replicate])
        }
        StrategyName::Zero1 => (zero1, [Replicate, Replicate, Shard]),
        StrategyName::Zero2 => (zero2, [Replicate, Shard, Shard]),
        StrategyName::ShardGradOp => (shard_grad_op, [Shard, Shard, Shard]),
        StrategyName::Zero3 | StrategyName::FullShard | StrategyName::HybridShard => {
            (zero3, [Shard, Shard, Shard])
        }
    }
}

/// Everything is replicated. Gradients are all-reduced in buckets while backward runs.
pub fn ddp(b: &mut StepBuilder) {
    for micro_batch in 0..b.num_micro_batches() {
        let passes = b.micro_batch_passes(micro_batch);
        b.run_with_prefetch(&passes, &mut |b, pass| {
            if let Some(unit) = b.unit_to_reduce(pass) {
                b.add_to_bucket(unit, micro_batch);
            }
        });
        b.flush_bucket(micro_batch);
    }
    b.clip_and_update();
}

/// Like ddp, but each rank updates its shard, and updated parameters are all-gathered.
pub fn zero1(b: &mut StepBuilder) {
    ddp(b);
}

/// Gradients are reduce-scattered unit by unit.
pub fn zero2(b: &mut StepBuilder) {
    let passes = b.step_passes();
    b.run_with_prefetch(&passes, &mut reduce_own_unit);
    b.clip_and_update();
}

/// Parameters are gathered for each use, ahead of it by the prefetch depth, and released after it.
pub fn zero3(b: &mut StepBuilder) {
    zero2(b);
}

/// Parameters stay gathered from a micro-batch's forward to its backward.
pub fn shard_grad_op(b: &mut StepBuilder) {
    for micro_batch in 0..b.num_micro_batches() {
        let passes = b.micro_batch_passes(micro_batch);
        b.run_keeping_gathered(&passes, &mut reduce_own_unit);
    }
    b.clip_and_update();
}

fn reduce_own_unit(b: &mut StepBuilder, pass: &UnitPass) {
    if let Some(unit) = b.unit_to_reduce(pass) {
        b.reduce_unit(unit, pass.micro_batch);
    }
}
