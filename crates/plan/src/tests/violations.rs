//! Tests that `check` finds what is wrong with plans that are broken on purpose.

use lockstep_config::StrategyName;
use lockstep_core::{Bytes, Rank};

use crate::check::{check, check_phase};
use crate::run_plan::lay_out;
use crate::{
    Access, BufferKind, MemoryTier, OpKind, ParamState, PlanData, PlanError, PlanInput, StepBuilder,
    Violation, Wait, build,
};

use super::TestSetup;

/// The violations of a zero3 plan after a change to it.
fn found(change: impl FnOnce(&mut PlanData)) -> Vec<Violation> {
    let mut plan = lay_out(TestSetup::new("tiny", StrategyName::Zero3, 1, 2).input());
    change(&mut plan);
    check_phase(&plan, &plan.phases[0])
}

#[test]
fn an_unchanged_plan_has_no_violations() {
    assert_eq!(found(|_| {}), []);
}

#[test]
fn missing_waits_are_races() {
    let all = found(|plan| plan.phases[0].schedule.ops.iter_mut().for_each(|op| op.waits.clear()));
    assert!(all.iter().any(|v| matches!(v, Violation::Race { .. })));
}

/// A step must not use parameters that the previous step is still updating.
#[test]
fn missing_waits_for_the_previous_step_are_races() {
    let setup = TestSetup::new("tiny", StrategyName::Ddp, 1, 1).with(|s| s.optimizer_tier = MemoryTier::Host);
    let mut plan = lay_out(setup.input());
    let phase = &mut plan.phases[0];
    assert_eq!(check(&phase.schedule, &plan.buffers, &phase.memory), []);
    for op in &mut phase.schedule.ops {
        op.waits.retain(|wait| matches!(wait, Wait::SameRun(_)));
    }
    let all = check(&phase.schedule, &plan.buffers, &phase.memory);
    let working =
        |kind: &BufferKind| matches!(kind, BufferKind::ParamState { state: ParamState::Working, .. });
    assert!(all.iter().any(|v| matches!(v, Violation::Race { buffer, .. } if working(buffer))), "{all:?}");
}

#[test]
fn a_missing_release_is_found() {
    let all = found(|plan| {
        let ops = &mut plan.phases[0].schedule.ops;
        let last = ops.iter().rposition(|op| matches!(op.kind, OpKind::Release(_))).unwrap();
        ops[last].kind = OpKind::ClipNorm { axes: &[] };
    });
    assert!(all.iter().any(|v| matches!(v, Violation::NeverReleased { .. })));
}

#[test]
fn a_missing_reduction_and_a_second_update_are_found() {
    let all = found(|plan| {
        for op in &mut plan.phases[0].schedule.ops {
            op.kind = match op.kind {
                OpKind::Reduce { .. } => OpKind::Update { unit: 0, start: 0, end: 256, staging: None },
                kind => kind,
            };
        }
    });
    assert!(all.iter().any(|v| matches!(v, Violation::WrongReduceCount { times: 0, .. })));
    assert!(all.iter().any(|v| matches!(v, Violation::NotUpdatedExactlyOnce { unit: 0, .. })));
}

#[test]
fn a_missing_definition_is_a_read_before_write() {
    let all = found(|plan| {
        for op in &mut plan.phases[0].schedule.ops {
            op.accesses.retain(|(_, access)| *access != Access::Define);
        }
    });
    assert!(all.iter().any(|v| matches!(v, Violation::ReadBeforeWritten { .. })));
}

/// Scratch buffers are defined and never read. They still must not share bytes if two lanes write them at the same
/// time.
#[test]
fn buffers_written_at_the_same_time_must_not_overlap() {
    let all = found(|plan| {
        let (scratch, staging) =
            (plan.find(BufferKind::Scratch).unwrap(), plan.find(BufferKind::ReduceScratch).unwrap());
        for (id, at) in &mut plan.phases[0].memory.offsets {
            // At the same offset, far from everything else.
            if *id == scratch || *id == staging {
                *at = Bytes(1 << 40);
            }
        }
        plan.arena_bytes = Bytes(1 << 41);
    });
    assert!(matches!(all[..], [Violation::Overlap { .. }]), "{all:?}");
}

#[test]
fn a_strategy_without_reductions_is_rejected() {
    fn without_reductions(b: &mut StepBuilder) {
        for micro_batch in 0..b.num_micro_batches() {
            let passes = b.micro_batch_passes(micro_batch);
            b.run_with_prefetch(&passes, &mut |_, _| {});
        }
        b.clip_and_update();
    }
    let input = TestSetup::new("tiny", StrategyName::Ddp, 1, 2).input();
    let error =
        build(PlanInput { strategy: without_reductions, ..input }, Rank(0)).expect_err("nothing is reduced");
    let PlanError::InvalidSchedule { phase, violations } = &error else { panic!("{error}") };
    assert_eq!(phase, "train");
    assert!(
        violations.iter().all(|v| matches!(v, Violation::WrongReduceCount { times: 0, .. })),
        "{violations:?}"
    );
    let text = error.to_string();
    assert!(
        text.starts_with("the strategy's train phase is invalid: element 0 of unit 0's gradient"),
        "{text}"
    );
}

#[test]
fn buffers_outside_the_arena_are_found() {
    let outside = found(|plan| plan.arena_bytes = Bytes(plan.arena_bytes.0 / 2));
    assert!(outside.iter().any(|v| matches!(v, Violation::NoAddress { .. })), "{outside:?}");
    let overlapping =
        found(|plan| plan.residents[0].offsets.iter_mut().for_each(|(_, at)| *at = Bytes::ZERO));
    assert!(overlapping.iter().any(|v| matches!(v, Violation::Overlap { .. })), "{overlapping:?}");
}
