//! Strategies: each a small function that emits the operations of a training step.
//!
//! They differ in when parameters are gathered and released and in how gradients reach their owners;
//! what a unit computes is the same in all. A user's own strategy has the same type.

use lockstep_config::StrategyName;

use crate::builder::{StepBuilder, UnitPass};
use crate::input::Placement;

/// Emits one training step.
pub type Strategy = fn(&mut StepBuilder);

/// The function and the placements (parameters, gradients, optimizer) behind a name.
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

/// Everything whole; gradients summed in buckets while backward goes on.
pub fn ddp(b: &mut StepBuilder) {
    for micro_batch in 0..b.num_micro_batches() {
        let uses = b.micro_batch_passes(micro_batch);
        b.run_with_prefetch(&uses, &mut |b, done| {
            if let Some(unit) = b.unit_to_reduce(done) {
                b.add_to_bucket(unit, micro_batch);
            }
        });
        b.flush_bucket(micro_batch);
    }
    b.clip_and_update();
}

/// As ddp, but each rank updates its shard and publishes it.
pub fn zero1(b: &mut StepBuilder) {
    ddp(b);
}

/// Gradients reach their owners unit by unit.
pub fn zero2(b: &mut StepBuilder) {
    let uses = b.step_passes();
    b.run_with_prefetch(&uses, &mut reduce_own_unit);
    b.clip_and_update();
}

/// Parameters whole only while in use; gathered ahead by the prefetch depth.
pub fn zero3(b: &mut StepBuilder) {
    zero2(b);
}

/// Parameters whole from a micro-batch's forward to its backward.
pub fn shard_grad_op(b: &mut StepBuilder) {
    for micro_batch in 0..b.num_micro_batches() {
        let uses = b.micro_batch_passes(micro_batch);
        b.run_keeping_gathered(&uses, &mut reduce_own_unit);
    }
    b.clip_and_update();
}

fn reduce_own_unit(b: &mut StepBuilder, done: &UnitPass) {
    if let Some(unit) = b.unit_to_reduce(done) {
        b.reduce_unit(unit, done.micro_batch);
    }
}
