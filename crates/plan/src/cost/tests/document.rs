//! The tables of docs/cost-model.md are what the program computes.

use lockstep_config::StrategyName;
use lockstep_core::{Bytes, DType};
use lockstep_shape::{ModelShape, Recompute, Rope};

use crate::cost::table::columns;
use crate::cost::{
    CHIPS, Machine, PaperCluster, Workload, refusal_text, scaling_table, scaling_text, strategies_text,
    strategy_table, suggest_changes,
};

use super::{machine, single, workload, workload_of};

const DOCUMENT: &str = include_str!("../../../../../docs/cost-model.md");

/// A block of the document has exactly this text.
fn assert_documented(text: &str) {
    let indented: String = text
        .lines()
        .map(|line| if line.is_empty() { "\n".to_string() } else { format!("    {line}\n") })
        .collect();
    assert!(DOCUMENT.contains(&indented), "docs/cost-model.md should contain this block:\n\n{indented}");
}

#[test]
fn published_figures() {
    let header = ["GPU", "GB", "bf16 TFLOP/s", "f32 TFLOP/s", "GB/s", "SMs", "NVLink GB/s", "PCIe GB/s"];
    let mut rows = vec![header.map(String::from).to_vec()];
    for chip in CHIPS {
        rows.push(vec![
            chip.name.into(),
            chip.memory_gb.to_string(),
            chip.bf16_tflops.to_string(),
            chip.f32_tflops.to_string(),
            chip.memory_gb_per_s.to_string(),
            chip.multiprocessors.to_string(),
            chip.nvlink_gb_per_s.map_or("-".into(), |gb| gb.to_string()),
            (chip.pcie_bytes_per_s / 1e9).to_string(),
        ]);
    }
    assert_documented(&columns(&rows));
}

/// Predicted and measured tokens per second on one H200.
#[test]
fn steps_on_an_h200() {
    let cases = [
        ("300m", 16, Recompute::Selective, 201_100.0),
        ("1b", 8, Recompute::Selective, 78_240.0),
        ("7b", 4, Recompute::Full, 10_869.0),
    ];
    let header = ["model", "rows", "recompute", "predicted tok/s", "measured tok/s", "error"];
    let mut rows = vec![header.map(String::from).to_vec()];
    for (size, num_rows, recompute, measured) in cases {
        let machine = single("h200");
        let all = workload(size, num_rows, 2048).with_recompute(recompute.into());
        let predicted = machine.predict(&all.lay_out(&machine)).tokens_per_s;
        assert!((predicted / measured - 1.0).abs() < 0.15, "{size}: {predicted:.0} tokens/s");
        rows.push(vec![
            size.into(),
            format!("{num_rows}x2048"),
            format!("{recompute:?}").to_lowercase(),
            format!("{predicted:.0}"),
            format!("{measured:.0}"),
            format!("{:+.1} %", 100.0 * (predicted / measured - 1.0)),
        ]);
    }
    assert_documented(&columns(&rows));
}

/// Eight cards of 46 GB, as the guide's error message reports them.
fn eight_cards_of_46_gb() -> Machine {
    let capacity = (44.43 * (1u64 << 30) as f64) as u64;
    Machine { budget: Bytes(capacity / 100 * 97), ..machine("l40s", 1, 8, "100Gbps") }
}

/// The guide's run: LLaMA-7B with gradient checkpointing.
fn llama_7b(rows: u32) -> Workload<'static> {
    let all = workload("7b", rows, 2048).with_recompute(Recompute::Full.into());
    Workload { strategy: StrategyName::Ddp, ..all }
}

#[test]
fn llama_7b_on_eight_cards_of_46_gb() {
    let machine = eight_cards_of_46_gb();
    let table = strategy_table(&llama_7b(1), &machine);
    let row = |name| table.rows.iter().find(|row| row.strategy == name).unwrap();
    assert!(!row(StrategyName::Ddp).fits && row(StrategyName::Zero3).fits, "as in the guide");
    let (ddp, zero1) = (&row(StrategyName::Ddp).prediction, &row(StrategyName::Zero1).prediction);
    assert!(zero1.sent > ddp.sent && zero1.step_seconds > ddp.step_seconds, "zero1 also gathers parameters");
    assert_documented(&strategies_text(&table));
    let refusal = suggest_changes(&llama_7b(1), &machine).unwrap();
    assert_documented(&refusal_text(&refusal));
}

/// The guides' tables: 1 to 8 GPUs, in one node or two, at 10 and 100 Gbit/s.
#[test]
fn scaling_of_the_guides() {
    let ddp = Workload { strategy: StrategyName::Ddp, ..workload("300m", 8, 2048) };
    for (gpus, per_node, network) in [(8, 8, "100Gbps"), (16, 4, "10Gbps"), (16, 4, "100Gbps")] {
        let cluster = PaperCluster::parse(gpus, "a100-40g", network, Some(per_node)).unwrap();
        let table = scaling_table(&ddp, &cluster.machine(DType::BF16, None));
        assert_documented(&format!("{cluster}, ddp\n\n{}", scaling_text(&table)));
    }
}

#[test]
fn a_thousand_h100() {
    let zero3 = Workload { strategy: StrategyName::Zero3, ..workload("7b", 4, 2048) };
    for network in ["400Gbps", "400Gbps/gpu"] {
        let cluster = PaperCluster::parse(1024, "h100-80g", network, None).unwrap();
        let table = scaling_table(&zero3, &cluster.machine(DType::BF16, None));
        assert_documented(&format!("{cluster}, zero3\n\n{}", scaling_text(&table)));
    }
}

/// Published results of other trainers, each chosen and written down before it was simulated: a row of the documented
/// table.
fn published(run: &Workload<'_>, machine: &Machine, gpus: f64, tokens_per_s: f64) -> f64 {
    let prediction = machine.predict(&super::plan_under(run, StrategyName::Zero3, machine));
    let predicted = prediction.tokens_per_s / gpus;
    let error = predicted / tokens_per_s - 1.0;
    let header = ["", "predicted", "published", "error"].map(String::from).to_vec();
    let [predicted, published] = [predicted, tokens_per_s].map(|rate| format!("{rate:.0}"));
    let row = vec!["tokens/s per GPU".into(), predicted, published, format!("{:+.1} %", 100.0 * error)];
    assert_documented(&columns(&[header, row]));
    error
}

/// FSDP=4 of the MFU benchmark of KempnerForge (5 April 2026, its commit 01b461a): a compiled LLaMA 3 8B on four H200.
#[test]
fn a_published_result_of_another_trainer() {
    let sizes = ModelShape::named("7b", 128_256).unwrap();
    let shape = ModelShape { kv_heads: 8, ffn: 14_336, rope: Rope::plain(500_000.0), ..sizes };
    let mut run = workload_of(&shape, 4, 4096).with_recompute(Recompute::Full.into());
    run.input.num_micro_batches = 2;
    let machine = machine("h200", 1, 4, "400Gbps");
    let error = published(&run, &machine, 4.0, 38_983.0 / 4.0);
    assert!(error.abs() < 0.15, "{error}");
}

/// The 7B row of "Maximizing training throughput using PyTorch FSDP" (PyTorch blog, 13 March 2024): kernels that were not
/// compiled, which the model does not describe.
#[test]
fn a_published_result_without_compilation() {
    let machine =
        PaperCluster::parse(128, "a100-80g", "400Gbps", Some(8)).unwrap().machine(DType::BF16, None);
    let run = workload("7b", 2, 4096).with_recompute(Recompute::None.into());
    published(&run, &machine, 128.0, 3700.0);
}
