//! The memory curve, its pictures, and memory by kind.

use lockstep_config::StrategyName;
use lockstep_core::Bytes;

use crate::MemoryTier;
use crate::cost::{MemoryByKind, MemoryCurve, STRATEGIES, curve_json, curve_svg, curve_text};

use super::{machine, plan_under, workload};

#[test]
fn the_curve_reaches_the_plans_peak() {
    let machine = machine("h100-80g", 2, 4, "100Gbps");
    for name in STRATEGIES {
        for tier in [MemoryTier::Device, MemoryTier::Host] {
            let mut all = workload("15m", 4, 512);
            all.input.models[0].placements.optimizer_tier = tier;
            let plan = plan_under(&all, name, &machine);
            let curve = MemoryCurve::of(&plan, &plan.phases[0]);
            assert_eq!(curve.peak(), plan.arena_bytes, "{name}");
            assert_eq!(curve.points.len(), plan.phases[0].schedule.ops.len());
            assert!(curve.points.iter().all(|point| point.live <= point.extent), "{name}");
            assert!(curve.points.iter().all(|point| point.live >= curve.residents));
            let most = curve.points.iter().map(|point| point.live).max().unwrap();
            // What is live at once is at most what packing proves to be live at once.
            assert!(most <= curve.residents + plan.phases[0].memory.live_peak, "{name}");
        }
    }
}

#[test]
fn buffers_are_in_the_curve_while_operations_use_them() {
    let machine = machine("h100-80g", 1, 4, "100Gbps");
    let plan = plan_under(&workload("15m", 4, 512), StrategyName::Zero3, &machine);
    let phase = &plan.phases[0];
    let curve = MemoryCurve::of(&plan, phase);
    for (op, point) in phase.schedule.ops.iter().zip(&curve.points) {
        let used: u64 = op
            .accesses
            .iter()
            .map(|(id, _)| &plan.buffers[id.0 as usize])
            .filter(|buffer| !buffer.kind.is_resident() && buffer.tier == MemoryTier::Device)
            .map(|buffer| buffer.bytes().0)
            .sum();
        assert!(point.live.0 >= curve.residents.0 + used, "{:?}", op.kind);
    }
}

/// Every kind is counted once, none is negative, and together they are the plan's number.
#[test]
fn kinds_add_up_to_the_plans_number() {
    let machine = machine("h100-80g", 2, 4, "100Gbps");
    for name in STRATEGIES {
        let plan = plan_under(&workload("90m", 2, 1024), name, &machine);
        let kinds = MemoryByKind::of(&plan);
        assert_eq!(kinds.total(), plan.device_bytes(), "{name}");
        assert_eq!(kinds.foreign, plan.input.needs.overhead_bytes);
        assert!(kinds.activations > Bytes::ZERO && kinds.buffers > Bytes::ZERO);
    }
    let optimizer =
        |name| MemoryByKind::of(&plan_under(&workload("90m", 2, 1024), name, &machine)).optimizer.0;
    let (ddp, zero1) = (optimizer(StrategyName::Ddp), optimizer(StrategyName::Zero1));
    assert!(zero1 * 8 >= ddp && zero1 * 8 < ddp + ddp / 50, "{ddp} {zero1}");
}

#[test]
fn the_picture_of_a_step() {
    let machine = machine("h100-80g", 1, 4, "100Gbps");
    let plan = plan_under(&workload("15m", 4, 512), StrategyName::Zero3, &machine);
    let curve = MemoryCurve::of_largest_phase(&plan).unwrap();
    let text = curve_text(&curve, 80);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    insta::with_settings!({ snapshot_path => "../../snapshots", prepend_module_to_snapshot => false, omit_expression => true }, {
        insta::assert_snapshot!("memory_curve", text);
    });
    // A narrow picture has fewer columns, a wide one repeats operations.
    for width in [0, 20, 400] {
        assert_eq!(curve_text(&curve, width).lines().count(), text.lines().count());
    }
}

#[test]
fn the_svg_is_well_formed() {
    let machine = machine("h100-80g", 1, 4, "100Gbps");
    let plan = plan_under(&workload("tiny", 1, 256), StrategyName::Zero3, &machine);
    let curve =
        MemoryCurve { phase: "train <policy>".into(), ..MemoryCurve::of_largest_phase(&plan).unwrap() };
    let svg = curve_svg(&curve, Some(machine.budget));
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert!(svg.contains("train &lt;policy&gt;") && svg.contains("stroke-dasharray"));
    assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    assert!(!curve_svg(&curve, None).contains("stroke-dasharray"), "without a budget there is no line");
    let json = curve_json(&curve);
    assert_eq!(json["peak_bytes"], plan.arena_bytes.0);
    assert_eq!(json["live_bytes"].as_array().unwrap().len(), curve.points.len());
}
