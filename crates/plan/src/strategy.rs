//! Strategies: each a small function that emits the operations of a training step.
//!
//! They differ in when parameters are gathered and released and in how gradients reach their owners;
//! what a unit computes is the same in all. A user's own strategy has the same type.

use lockstep_config::StrategyName;

use crate::builder::{StepBuilder, Work};
use crate::input::Placement;

/// Emits one training step.
pub type Strategy = fn(&mut StepBuilder);

/// The function and the placements (parameters, gradients, optimizer) behind a name.
pub fn by_name(name: StrategyName) -> (Strategy, [Placement; 3]) {
    use Placement::{Shard, Whole};
    match name {
        StrategyName::Ddp | StrategyName::NoShard | StrategyName::Auto => (ddp, [Whole, Whole, Whole]),
        StrategyName::Zero1 => (zero1, [Whole, Whole, Shard]),
        StrategyName::Zero2 => (zero2, [Whole, Shard, Shard]),
        StrategyName::ShardGradOp => (shard_grad_op, [Shard, Shard, Shard]),
        StrategyName::Zero3 | StrategyName::FullShard | StrategyName::HybridShard => {
            (zero3, [Shard, Shard, Shard])
        }
    }
}

/// Everything whole; gradients summed in buckets while backward goes on.
pub fn ddp(b: &mut StepBuilder) {
    for micro in 0..b.num_micros() {
        let uses = b.uses_of_micro();
        b.run_windowed(&uses, micro, &mut |b, work| {
            if b.reduces_after(micro) {
                match work {
                    Work::Head => b.bucket_unit(b.head_unit(), micro),
                    Work::Backward(unit) => b.bucket_unit(unit, micro),
                    Work::Forward(_) => {}
                }
            }
        });
        b.flush_bucket(micro);
    }
    b.clip_and_update();
}

/// As ddp, but each rank updates its shard and publishes it.
pub fn zero1(b: &mut StepBuilder) {
    ddp(b);
}

/// Gradients reach their owners unit by unit.
pub fn zero2(b: &mut StepBuilder) {
    for micro in 0..b.num_micros() {
        let uses = b.uses_of_micro();
        b.run_windowed(&uses, micro, &mut |b, work| reduce_own_unit(b, work, micro));
    }
    b.clip_and_update();
}

/// Parameters whole only while in use; gathered ahead by the prefetch depth.
pub fn zero3(b: &mut StepBuilder) {
    zero2(b);
}

/// Parameters whole from a micro-batch's forward to its backward.
pub fn shard_grad_op(b: &mut StepBuilder) {
    for micro in 0..b.num_micros() {
        let uses = b.uses_of_micro();
        let first_backward =
            uses.iter().position(|u| matches!(u.work, Work::Backward(_))).unwrap_or(uses.len());
        let (forward, backward) = uses.split_at(first_backward);
        for one in forward {
            if b.gathers() {
                one.units.iter().for_each(|unit| b.gather(*unit, None));
            }
            let done = b.run(one.work, micro);
            // A unit of the body is held until its backward; the head's own hold ends here.
            if b.gathers() && one.work == Work::Head {
                one.units.iter().for_each(|unit| {
                    b.release(*unit, done);
                });
            }
            reduce_own_unit(b, one.work, micro);
        }
        for one in backward {
            let done = b.run(one.work, micro);
            if b.gathers() {
                one.units.iter().for_each(|unit| {
                    b.release(*unit, done);
                });
            }
            reduce_own_unit(b, one.work, micro);
        }
    }
    b.clip_and_update();
}

fn reduce_own_unit(b: &mut StepBuilder, work: Work, micro: u32) {
    if b.reduces_after(micro) {
        match work {
            Work::Head => b.reduce_unit(b.head_unit(), micro),
            Work::Backward(unit) => b.reduce_unit(unit, micro),
            Work::Forward(_) => {}
        }
    }
}
