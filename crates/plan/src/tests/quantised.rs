//! Units with parameters in 4 bits: what they take, when they are gathered, and when they are dequantised.

use lockstep_config::StrategyName;
use lockstep_core::DType;
use lockstep_shape::{ALL_LINEAR, Lora, ModelShape, Recompute, UnitShape, WeightFormat};

use crate::{
    BufferKind, Lane, MemoryTier, ModelId, OpKind, ParamState, RunPlan, memory_table, schedule_text,
};

use super::{TestSetup, resident_bytes, train_phase};

fn setup(strategy: StrategyName, shard: u32) -> TestSetup {
    TestSetup::new("15m", strategy, 1, shard).with(|s| {
        let targets = Lora::targets_of(&[ALL_LINEAR.into()], s.shape.layers).unwrap();
        let modules_to_save = vec![];
        s.shape.lora = Some(Lora {
            rank: 8,
            alpha: 8.0,
            dropout: 0.0,
            rank_stabilized: false,
            targets,
            modules_to_save,
        });
        s.shape.frozen_projections = WeightFormat::Nf4;
        s.storage = DType::BF16;
        s.recompute = Recompute::Full.into();
    })
}

fn quantised_elems(plan: &RunPlan) -> u64 {
    let units = plan.input.models[0].units.iter();
    let flat = units.flat_map(UnitShape::flat_params).filter(|flat| flat.quantised);
    flat.map(|flat| flat.elems() as u64).sum()
}

fn device(plan: &RunPlan, state: ParamState) -> u64 {
    resident_bytes(plan, MemoryTier::Device, &[state])
}

/// A code for two elements, a scale for 64, a scale of scales for 16,384; on four ranks a quarter of the first two.
#[test]
fn a_weight_takes_an_eighth_of_f32() {
    let (one, four) = (setup(StrategyName::Zero3, 1).plan(), setup(StrategyName::Zero3, 4).plan());
    let elems = quantised_elems(&one);
    assert!(elems > 5_000_000, "{elems}");
    assert_eq!(device(&one, ParamState::Codes), elems / 2);
    assert_eq!(device(&one, ParamState::ScaleCodes), elems / 64);
    let tensors = one.input.models[0].units.iter().flat_map(|unit| &unit.segments).filter(|s| s.quantised);
    let tables: usize = tensors.map(|s| s.elems().div_ceil(16_384)).sum();
    for plan in [&one, &four] {
        assert_eq!(device(plan, ParamState::ScaleTable), 4 * tables as u64);
        // No other copy: working parameters are the embedding, the head, norms and adapters.
        let kept = plan.input.models[0].params() - elems;
        let rank = device(plan, ParamState::Working) / 2 * u64::from(plan.input.mesh.shard);
        assert!(rank >= kept && rank < kept + 256 * 4 * 8 * 3, "{rank} of {kept}");
    }
    // Shards are rounded up to 256 entries for each unit.
    let rounding = 256 * one.input.models[0].units.len() as u64;
    for state in [ParamState::Codes, ParamState::ScaleCodes] {
        let (all, quarter) = (device(&one, state), device(&four, state));
        assert!(quarter >= all / 4 && quarter <= all / 4 + rounding, "{state:?}: {quarter} of {all}");
    }
}

/// The shards of codes and of scale codes start on whole blocks and on whole groups of scales, and cover all of them.
#[test]
fn no_shard_cuts_a_block() {
    for shard in [1, 2, 3, 4, 7] {
        let plan = setup(StrategyName::Zero3, shard).plan();
        for (state, multiple) in [(ParamState::Codes, 512), (ParamState::ScaleCodes, 64 * 256)] {
            for unit in 1..=6 {
                let whole = plan.input.whole(ModelId::FIRST, unit, state);
                let mut next: Vec<usize> = whole.iter().map(|part| part.start).collect();
                for rank in 0..shard {
                    let owned = plan.input.owned(ModelId::FIRST, unit, state, lockstep_core::Rank(rank));
                    for ((own, next), whole) in owned.iter().zip(&mut next).zip(&whole) {
                        assert_eq!(own.start, *next);
                        let first = (own.start - whole.start) * state.elems_per_entry();
                        assert!(own.elems() == 0 || first.is_multiple_of(multiple), "{own:?}");
                        *next = own.end;
                    }
                }
                assert_eq!(next, whole.iter().map(|part| part.end).collect::<Vec<_>>());
            }
        }
    }
}

/// Every use of a unit follows its dequantisation, and what is gathered ahead has 4 bits.
#[test]
fn units_are_dequantised_just_ahead_of_use() {
    for (strategy, shard) in
        [(StrategyName::Ddp, 1), (StrategyName::Zero3, 4), (StrategyName::ShardGradOp, 4)]
    {
        let plan = setup(strategy, shard).plan();
        let ops = &train_phase(&plan).schedule.ops;
        let compute: Vec<&OpKind> =
            ops.iter().filter(|op| op.lane == Lane::Compute).map(|op| &op.kind).collect();
        let mut uses = 0;
        for pair in compute.windows(2) {
            let (before, now) = (pair[0], pair[1]);
            let dequantised = |unit: u32| *before == OpKind::Dequantise { unit };
            match *now {
                OpKind::Forward { unit, .. } | OpKind::Recompute { unit, .. } if unit > 0 => {
                    assert!(dequantised(unit), "{now:?} after {before:?}");
                    uses += 1;
                }
                OpKind::Backward { unit, .. } if unit > 0 => {
                    assert!(matches!(before, OpKind::Recompute { unit: other, .. } if *other == unit));
                }
                _ => {}
            }
        }
        assert_eq!(uses, 12, "six blocks, forward and backward");
        let gathers: Vec<_> = ops.iter().filter(|op| matches!(op.kind, OpKind::Gather { .. })).collect();
        assert_eq!(gathers.is_empty(), shard == 1);
        let whole = |unit: u32| matches!(unit, 1..=6);
        for (id, _) in gathers.iter().flat_map(|op| &op.accesses) {
            let kind = plan.buffers[id.0 as usize].kind;
            assert!(!matches!(kind, BufferKind::UnshardedParams { unit, .. } if whole(unit)), "{kind:?}");
        }
    }
}

#[test]
fn schedules_and_tables_name_it() {
    let plan = setup(StrategyName::Zero3, 4).plan();
    let phase = train_phase(&plan);
    let text = schedule_text(&plan, phase);
    assert!(text.contains(" dequantise block 0 "), "{text}");
    let table = memory_table(&plan);
    for row in ["4-bit weights, u8, 1/4", "scales of 4-bit weights, f32", "dequantised weights"] {
        assert!(table.lines().any(|line| line.trim_start().starts_with(row)), "{row}: {table}");
    }
    // A block's codes and scales, norms and adapters: less than a third of its weights in bf16.
    let block = &plan.input.models[0].units[1];
    let gathered = plan.input.gathered_bytes(ModelId::FIRST, 1).0 as usize;
    let plain =
        ModelShape { frozen_projections: WeightFormat::Storage, ..plan.input.models[0].shape.clone() };
    assert!(gathered * 3 < 2 * block.elems, "{gathered} of {}", 2 * block.elems);
    assert!(text.contains(&lockstep_core::Bytes(gathered as u64).to_string()), "{text}");
    let setup = setup(StrategyName::Zero3, 4).with(|s| s.shape = plain);
    assert!(!memory_table(&setup.plan()).contains("4-bit"));
}
