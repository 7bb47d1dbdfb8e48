//! Counts of arithmetic and memory traffic against formulas.

use lockstep_config::StrategyName;
use lockstep_core::DType;
use lockstep_shape::{Architecture, ModelShape, Recompute, SlidingWindow};

use crate::cost::{Gemm, OpDemand, Workload, demand, model_flops_per_token};
use crate::run_plan::PlanData;
use crate::{ModelPlan, ModelSettings, OpKind, OptimizerSpec};

use super::{machine, plan_under, single, workload};

/// FLOPs of the GEMMs and of attention in the operations that `wanted` picks.
fn flops(plan: &PlanData, wanted: impl Fn(&OpKind) -> bool) -> (f64, f64) {
    let phase = &plan.phases[0];
    let ops = phase.schedule.ops.iter().filter(|op| wanted(&op.kind));
    ops.fold((0.0, 0.0), |sum, op| match demand(plan, phase, op) {
        OpDemand::Device(work) => (sum.0 + work.gemm_flops(), sum.1 + work.attention_flops),
        _ => sum,
    })
}

fn plan_with(size: &str, recompute: Recompute) -> PlanData {
    let all = workload(size, 4, 512).with_recompute(recompute.into());
    all.lay_out(&single("h200"))
}

#[test]
fn a_step_multiplies_every_matrix_three_times() {
    let plan = plan_with("tiny", Recompute::None);
    // d 64, 2 layers, 4 heads of 16 with 2 KV heads, ffn 176, vocabulary 32000; 4 documents of 512 tokens.
    let block = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 176;
    let matrices = (2 * block + 32_000 * 64) as f64;
    let tokens = 2048.0;
    let pairs = 4.0 * 512.0 * 513.0 / 2.0;
    let (gemms, attention) = flops(&plan, |_| true);
    assert_eq!(gemms, 6.0 * tokens * matrices);
    // Two matmuls forward and five backward, each 2 · 16 operations for every pair, in 4 heads and 2 layers.
    assert_eq!(attention, 7.0 * 32.0 * pairs * 4.0 * 2.0);
    let (forward, _) = flops(&plan, |kind| matches!(kind, OpKind::Forward { .. }));
    assert_eq!(forward, 2.0 * tokens * (2 * block) as f64, "the head's forward is part of its fused step");
}

#[test]
fn recomputation_adds_arithmetic() {
    let [none, selective, full] = [Recompute::None, Recompute::Selective, Recompute::Full]
        .map(|recompute| flops(&plan_with("15m", recompute), |_| true));
    assert_eq!(selective, none, "selective recomputation repeats no matmul");
    let forward = flops(&plan_with("15m", Recompute::None), |kind| matches!(kind, OpKind::Forward { .. }));
    assert!(full.0 > none.0 && full.0 <= none.0 + forward.0, "{full:?} {none:?} {forward:?}");
    assert_eq!(full.1, none.1 + forward.1);
}

#[test]
fn a_window_limits_attention() {
    let plan_of = |window: Option<usize>| {
        let base = workload("tiny", 1, 1024);
        let mut shape = base.input.models[0].shape.clone();
        shape.architecture = Architecture::Mistral;
        shape.window = window.map(|keys| SlidingWindow { keys, layers: vec![true, true] });
        with_shape(base, shape).lay_out(&single("h200"))
    };
    let attention = |window: Option<usize>| flops(&plan_of(window), |_| true).1;
    assert_eq!(attention(Some(4096)), attention(None));
    let per_pair = attention(None) / (1024.0 * 1025.0 / 2.0);
    let pairs = attention(Some(100)) / per_pair;
    assert!((pairs - (100.0 * 101.0 / 2.0 + 924.0 * 100.0)).abs() < 1e-6, "{pairs}");
}

fn with_shape(mut workload: Workload<'_>, shape: ModelShape) -> Workload<'_> {
    let model = &workload.input.models[0];
    let settings = ModelSettings {
        placements: model.placements,
        bounds: model.bounds,
        head_chunk_tokens: model.head_chunk_tokens,
        recompute: model.recompute,
        channels: model.channels,
        temperature: 1.0,
        optimizer: OptimizerSpec::ADAMW,
        freeze: Default::default(),
        decay_norms: false,
        scores: false,
        generation: None,
    };
    workload.input.models = vec![ModelPlan::new(model.role, &shape, settings)];
    workload
}

/// 300m on an H200 counts 6 · (parameters less embedding) + 6 · L · T · d.
#[test]
fn model_flops_follow_the_definition_of_mfu() {
    let plain = workload("300m", 1, 2048);
    let params = plain.params() - 32_000 * 1024;
    let expected = 6.0 * params as f64 + 6.0 * 24.0 * 2048.0 * 1024.0;
    assert_eq!(model_flops_per_token(&plain.input.models[0]), expected);
    let mut shape = plain.input.models[0].shape.clone();
    shape.tied = true;
    let tied = with_shape(plain, shape);
    assert_eq!(model_flops_per_token(&tied.input.models[0]), expected, "a tied head counts its table");
}

#[test]
fn an_update_reads_and_writes_every_state() {
    let machine = machine("h200", 1, 4, "100Gbps");
    for (name, ranks) in [(StrategyName::Ddp, 1), (StrategyName::Zero1, 4)] {
        let plan = plan_under(&workload("15m", 1, 512), name, &machine);
        let phase = &plan.phases[0];
        let updates = phase.schedule.ops.iter().filter(|op| matches!(op.kind, OpKind::Update { .. }));
        let bytes: f64 = updates
            .map(|op| match demand(&plan, phase, op) {
                OpDemand::Device(work) => work.bytes,
                other => panic!("an update on the device demands {other:?}"),
            })
            .sum();
        // Gradient 4; two moments 8, remainder 2 and bf16 parameter 2 each way.
        let elems: usize = plan.input.models[0].units.iter().map(|unit| unit.elems).sum();
        let expected = (4 + 2 * (8 + 2 + 2)) as f64 * elems as f64 / f64::from(ranks);
        assert!((bytes / expected - 1.0).abs() < 0.01, "{name}: {bytes} against {expected}");
    }
}

/// A CPU rank: its memory is the host's.
fn on_a_cpu(mut workload: Workload<'_>) -> Workload<'_> {
    workload.input.needs.host_overhead_bytes = None;
    workload
}

#[test]
fn updates_of_a_cpu_run_at_the_hosts_rate() {
    let machine = single("h200");
    let plan = on_a_cpu(workload("15m", 1, 512)).lay_out(&machine);
    let phase = &plan.phases[0];
    let updates = phase.schedule.ops.iter().filter(|op| matches!(op.kind, OpKind::Update { .. }));
    let bytes: f64 = updates
        .map(|op| match demand(&plan, phase, op) {
            OpDemand::Host { bytes } => bytes,
            other => panic!("an update on a CPU demands {other:?}"),
        })
        .sum();
    let elems: usize = plan.input.models[0].units.iter().map(|unit| unit.elems).sum();
    assert_eq!(bytes, (4 + 2 * (8 + 2 + 2)) as f64 * elems as f64);
}

/// On a CPU the gradient of the logits is f32, so the matmuls that read it are not those of the storage type.
#[test]
fn the_heads_gradients_are_f32_on_a_cpu() {
    let machine = single("h200");
    let head_dtypes = |workload: Workload<'_>| {
        let plan = workload.lay_out(&machine);
        let phase = &plan.phases[0];
        let head = phase.schedule.ops.iter().find(|op| matches!(op.kind, OpKind::HeadStep { .. })).unwrap();
        let OpDemand::Device(work) = demand(&plan, phase, head) else { panic!("the head computes") };
        let over_vocab =
            work.gemms.iter().filter(|(gemm, _)| [gemm.rows, gemm.cols, gemm.inner].contains(&32_000));
        over_vocab.map(|(gemm, _)| gemm.dtype).collect::<Vec<_>>()
    };
    assert_eq!(head_dtypes(workload("15m", 1, 512)), [DType::BF16; 3]);
    assert_eq!(head_dtypes(on_a_cpu(workload("15m", 1, 512))), [DType::BF16, DType::F32, DType::F32]);
}

#[test]
fn large_gemms_are_efficient_and_small_ones_are_not() {
    let rates = single("h200").rates;
    let gemm = |rows, cols, inner| Gemm { rows, cols, inner, dtype: DType::BF16, bytes: 0.0 };
    assert!(rates.gemm_efficiency(&gemm(8192, 8192, 8192)) > 0.99);
    // One tile on one of 132 multiprocessors.
    assert!((rates.gemm_efficiency(&gemm(128, 128, 512)) - 1.0 / 132.0).abs() < 1e-12);
    // A tile that is half empty, and one round that is nearly full: 132 tiles would fill it.
    let edge = rates.gemm_efficiency(&gemm(64, 131 * 128, 512));
    assert!((edge - 0.5 * 131.0 / 132.0).abs() < 1e-12, "{edge}");
    // The GEMM that the published rate was measured with attains it, but for its launch.
    let mut burst = rates;
    burst.sustained_share = 1.0;
    let attained = gemm(8192, 8192, 8192).flops() / burst.gemm_seconds(&gemm(8192, 8192, 8192));
    assert!((attained / 790e12 - 1.0).abs() < 0.02, "{attained:e}");
}
