//! Every setting of a run knows where its value came from.

use super::accepted;
use super::guide_configs::zero3;
use crate::list_settings;

#[test]
fn every_kind_of_origin_is_listed() {
    let yaml = "model: tiny\nfsdp: true\nexperiment_name: first\ntrain_batch_size: 32\nwarmup_ratio: 0.1\n";
    let line = "NCCL_TIMEOUT=60 torchrun --nproc_per_node=2 train.py --config run.yaml --seed 5";
    let config = accepted(&[("run.yaml", yaml)], line, &["learning_rate=1e-3"]).config;
    let rows = list_settings(&config);
    let row = |key: &str| {
        let row = rows.iter().find(|row| row.key == key).unwrap_or_else(|| panic!("{key}"));
        format!("{}: {}", row.value, row.origin)
    };
    assert_eq!(row("model"), "tiny: run.yaml:1:1");
    assert_eq!(row("learning_rate"), "1e-3: argument learning_rate=1e-3");
    assert_eq!(row("seed"), "5: argument --seed 5");
    assert_eq!(row("data_seed"), "5: derived from seed");
    assert_eq!(row("strategy"), "full_shard: derived from fsdp");
    assert_eq!(row("output_dir"), "outputs/first: derived from experiment_name");
    assert_eq!(row("per_device_train_batch_size"), "16: derived from train_batch_size");
    assert_eq!(row("warmup_steps"), "0.1: derived from warmup_ratio");
    assert_eq!(row("collective_timeout"), "60: variable NCCL_TIMEOUT");
    assert_eq!(row("nproc_per_node"), "2: argument --nproc_per_node 2");
    assert_eq!(row("weight_decay"), "0.0: default");
    assert!(rows.iter().all(|row| row.key != "num_generations"), "a key of another algorithm");
}

#[test]
fn auto_and_peers_defaults_are_listed() {
    let rows = list_settings(&accepted(&[("ds.json", &zero3())], "", &["model=tiny"]).config);
    let bucket = rows.iter().find(|row| row.key == "reduce_bucket_size").unwrap();
    assert_eq!((bucket.value.as_str(), bucket.origin.to_string().as_str()), ("0", "auto (ds.json:9:27)"));
    assert!(rows.iter().any(|row| row.key == "fp16.enabled" && row.value == "true"));
    let line = "trl sft --model_name_or_path m";
    let rows = list_settings(&accepted(&[], line, &[]).config);
    let steps = rows.iter().find(|row| row.key == "logging_steps").unwrap();
    assert_eq!((steps.value.as_str(), steps.origin.to_string().as_str()), ("10", "default of trl sft"));
}
