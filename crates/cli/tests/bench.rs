//! `bench`: its arguments, and that its rates add up.

use insta::assert_snapshot;
use serde_json::Value;

use crate::support::{Folder, RUN};

/// Runs a benchmark on the CPU and reads what it printed.
fn measured(args: &[&str]) -> Value {
    let folder = Folder::new(RUN);
    let text =
        folder.succeeds(&[&["bench"], args, &["--device", "cpu", "--threads", "2", "--json"]].concat());
    serde_json::from_str(&text).unwrap()
}

/// The rates of a benchmark, each of them a number.
fn rates(found: &Value) -> Vec<&Value> {
    let rates: Vec<&Value> = found["rates"].as_array().unwrap().iter().collect();
    for rate in &rates {
        let of = |key: &str| rate[key].as_f64().unwrap();
        assert!(0.0 < of("fastest") && of("fastest") <= of("seconds"), "{rate}");
        assert!(of("seconds") <= of("slowest") && of("share") > 0.0, "{rate}");
    }
    rates
}

fn names<'a>(rates: &[&'a Value]) -> Vec<&'a str> {
    rates.iter().map(|rate| rate["name"].as_str().unwrap()).collect()
}

#[test]
fn kernels_sum_up_to_a_step() {
    let found = measured(&["kernels", "--size", "tiny", "--rows", "2", "--length", "64", "--vocab", "300"]);
    assert_eq!((found["rows"].as_u64(), found["dtype"].as_str()), (Some(2), Some("f32")));
    let rates = rates(&found);
    let seconds = |rate: &&Value| rate["times"].as_f64().unwrap() * rate["seconds"].as_f64().unwrap();
    let sum: f64 = rates.iter().map(seconds).sum();
    let whole = found["step_seconds"].as_f64().unwrap();
    assert!((sum - whole).abs() < 1e-9, "{sum} and {whole}");
    let names = names(&rates);
    for part in
        ["norm, forward", "rope of q and k", "swiglu, backward", "embedding, backward", "adamw of a block"]
    {
        assert!(names.contains(&part), "{part} in {names:#?}");
    }
}

#[test]
fn matmul_of_one_shape() {
    let found = measured(&["matmul", "--m", "48", "--n", "33", "--k", "65", "--dtype", "bf16"]);
    assert_eq!(
        names(&rates(&found)),
        [
            "matmul, forward, 48×33×65",
            "matmul, input gradient, 48×33×65",
            "matmul, weight gradient, 48×33×65"
        ]
    );
}

#[test]
fn attention_of_one_shape() {
    let shape = ["attention", "--rows", "2", "--length", "80", "--heads", "4", "--kv-heads", "2"];
    let found = measured(&[&shape[..], &["--head-dim", "16", "--window", "32"]].concat());
    assert_eq!(
        names(&rates(&found)),
        [
            "attention, forward, 2×80, heads 4/2×16, window 32",
            "attention, backward, 2×80, heads 4/2×16, window 32",
            "attention, 2×(80 + 1), heads 4/2×16, window 32"
        ]
    );
}

#[test]
fn collectives_over_every_carrier() {
    let folder = Folder::new(RUN);
    for (setting, words) in [("carrier=shm", "shared memory"), ("carrier=tcp", "TCP")] {
        let bench = ["bench", "collectives", "device=cpu", setting, "--largest", "1", "--json"];
        let found: Value = serde_json::from_str(&folder.succeeds(&bench)).unwrap();
        assert_eq!(found["ranks"], 2);
        assert!(found["carrier"].as_str().unwrap().contains(words), "{found}");
        let rates = found["rates"].as_array().unwrap();
        let named: Vec<&str> = rates.iter().map(|rate| rate["operation"].as_str().unwrap()).collect();
        assert_eq!(named, ["all-reduce", "all-gather", "reduce-scatter"]);
        assert!(rates.iter().all(|rate| rate["bytes_per_second"].as_f64().unwrap() > 0.0), "{found}");
    }
}

#[test]
fn a_step_is_timed_on_one_rank() {
    let folder = Folder::new(RUN);
    let step = ["bench", "step", "model=tiny", "device=cpu", "threads=2", "--vocab", "300", "--length", "32"];
    let text = folder.succeeds(&[&step[..], &["--rows", "2", "--steps", "3", "--json"]].concat());
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (found["tokens_per_step"].as_u64(), found["losses"].as_array().map(Vec::len)),
        (Some(64), Some(3))
    );
    for (more, expected) in [
        (&["--steps", "0"][..], "--steps"),
        (&["--rows", "0"], "--rows"),
        (&["--vocab", "0"], "--vocab"),
        (&["nproc_per_node=2"], "the settings are for 2 ranks, but this benchmark runs on one"),
        (&["algorithm=dpo"], "dpo"),
    ] {
        let ran = folder.run(&[&step[..], more].concat());
        assert!(
            ran.code.is_some_and(|code| code != 0) && ran.stderr.contains(expected),
            "{more:?}: {ran:#?}"
        );
        assert!(!ran.stderr.contains("panicked"), "{more:?}: {ran:#?}");
    }
}

#[test]
fn shapes_that_cannot_be() {
    let folder = Folder::new(RUN);
    assert_snapshot!(folder.refused(&["bench", "kernels", "--device", "cpu", "--size", "2b"], 64), @r"
    error: `2b` is not a model size
    hint: known sizes: tiny, 15m, 90m, 300m, 1b, 7b. Or give a map of config.json keys.
    ");
    let uneven = ["bench", "attention", "--device", "cpu", "--heads", "6", "--kv-heads", "4"];
    assert_snapshot!(folder.refused(&uneven, 64), @r"
    error: 6 query heads are not a multiple of 4 key-value heads
    hint: set --kv-heads to a divisor of --heads.
    ");
    assert_snapshot!(folder.refused(&["bench", "collectives", "device=cpu", "--nproc", "1"], 64), @r"
    error: collectives need at least two ranks
    hint: set --nproc to 2 or more.
    ");
    let zero = folder.refused(&["bench", "kernels", "--rows", "0"], 2);
    assert!(zero.contains("expected a number from 1 to 1048576"), "{zero}");
}
