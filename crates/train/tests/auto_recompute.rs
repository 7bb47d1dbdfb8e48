//! `recompute: auto` chooses the amount of recomputation from the GPU's memory.

use lockstep_core::Bytes;
use lockstep_model::KernelBackend;
use lockstep_plan::RecomputePolicy;
use lockstep_shape::Recompute;
use lockstep_train::{RunModels, load_tokenizer, plan_for};

const TOKENIZER: &str = r#"{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0,"b":1},"unk_token":"b"}}"#;

/// The recomputation of a 7b model's plan on a GPU with `gib` GiB.
fn recomputed(gib: u64, settings: &[&str]) -> RecomputePolicy {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = dir.path().join("tokenizer.json");
    std::fs::write(&tokenizer, TOKENIZER).unwrap();
    let mut all = vec![
        format!("tokenizer={}", tokenizer.display()),
        format!("output_dir={}", dir.path().display()),
        "train_file=rows.jsonl".into(),
    ];
    let given =
        ["model=7b", "recompute=auto", "packing=none", "per_device_train_batch_size=4", "max_length=2049"];
    all.extend(given.iter().chain(settings).map(|s| s.to_string()));
    let config = lockstep_config::load(None, &all).unwrap();
    let tokenizer = load_tokenizer(&config).unwrap();
    let models = RunModels::of(&config, &tokenizer).unwrap();
    let kernels = KernelBackend::Cuda { memory: Some(Bytes(gib << 30)), name: Some("NVIDIA H200") };
    plan_for(&config, &models, &tokenizer, None, kernels).unwrap().input.models[0].recompute
}

#[test]
fn a_larger_gpu_recomputes_less() {
    const BLOCKS: u32 = 32;
    let (nothing, everything) = (RecomputePolicy::nth(0, BLOCKS), RecomputePolicy::nth(2 * BLOCKS, BLOCKS));
    assert_eq!(recomputed(100, &[]), everything);
    let some = recomputed(130, &[]);
    assert_eq!((some.early, some.late), (Recompute::Full, Recompute::Selective));
    assert!((1..BLOCKS).contains(&some.late_blocks), "{some:?}");
    assert_eq!(recomputed(190, &[]), nothing);
    // A memory budget overrides the GPU's memory, and ranks that share a GPU divide its memory.
    assert_eq!(recomputed(190, &["memory_budget_gib=126"]), some);
    assert_eq!(recomputed(190, &["share_gpus=true", "nproc_per_node=2", "strategy=ddp"]), everything);
}

/// Recomputation makes room for optimizer states on the device, and that saves more time than it costs: most blocks
/// recompute everything, though a plan in which none does would fit.
#[test]
fn offload_recomputes_more() {
    let offloaded = ["memory_budget_gib=44", "offload_optimizer=cpu"];
    let chosen = recomputed(139, &offloaded);
    assert!(chosen.early == Recompute::Full && chosen.late_blocks <= 16, "{chosen:?}");
    assert_eq!(recomputed(139, &offloaded), chosen);
}
