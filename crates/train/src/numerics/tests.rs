use lockstep_config::load;
use lockstep_model::KernelBackend;

use super::*;
use crate::models::RunModels;
use crate::setup::{load_tokenizer, plan_for};

/// The fingerprint of a small model with these settings.
fn numbers_with(settings: &[&str], cuda: Option<&CudaVersions>) -> NumericsFingerprint {
    let base = ["model=tiny", "output_dir=out", "max_length=64", "threads=1"];
    let settings: Vec<String> = base.iter().chain(settings).map(ToString::to_string).collect();
    let config = load(None, &settings).unwrap();
    let tokenizer = load_tokenizer(&config).unwrap();
    let models = RunModels::of(&config, &tokenizer).unwrap();
    let kernels = match cuda {
        Some(_) => KernelBackend::Cuda { memory: None, name: None },
        None => KernelBackend::Cpu { num_threads: 1 },
    };
    let plan = plan_for(&config, &models, &tokenizer, None, kernels).unwrap();
    let mpi = settings.iter().any(|setting| setting == "carrier=mpi");
    let mpi = mpi.then(|| MpiVersion(Some("MPICH 5.0.2".into())));
    NumericsFingerprint::of(&config, &plan, cuda, mpi.as_ref())
}

fn numbers(settings: &[&str]) -> NumericsFingerprint {
    numbers_with(settings, None)
}

fn changed(now: &NumericsFingerprint, then: &NumericsFingerprint) -> Vec<String> {
    now.differences(then).iter().map(ToString::to_string).collect()
}

#[test]
fn the_hash_covers_the_lines() {
    let fields = [("storage", "bf16"), ("micro-batches", "2")];
    let numbers =
        NumericsFingerprint::from_fields(fields.map(|(name, value)| (name.into(), value.into())).into());
    assert_eq!(numbers.lines().collect::<Vec<_>>(), ["storage: bf16", "micro-batches: 2"]);
    let hash = blake3::hash(b"storage: bf16\nmicro-batches: 2\n").to_hex();
    assert_eq!(numbers.hash(), hash[..12]);
    // Checkpoints and logs store the hash, so it must not change between versions.
    assert_eq!(numbers.hash(), "b15401e2354d");
    let lines = numbers.lines().collect::<Vec<_>>().join("\n");
    assert_eq!(NumericsFingerprint::from_lines(lines.as_bytes()), numbers);
}

#[test]
fn fields_of_a_cpu_run() {
    let numbers = numbers(&["gradient_accumulation_steps=2", "nproc_per_node=3"]);
    let lines: Vec<String> = numbers.lines().filter(|line| !line.starts_with("math library: ")).collect();
    let version = format!("lockstep: {}", env!("CARGO_PKG_VERSION"));
    assert_eq!(
        lines,
        [
            version.as_str(),
            "device: CPU",
            "storage: f32",
            "gradients: f32",
            "optimizer: adamw, f32 states",
            "matmul: vector instructions",
            "head chunk: whole micro-batch",
            "gradient scaling: none",
            "micro-batches: 2",
            "accumulation order: local",
            "sum over ranks: fixed tree over 3 ranks",
        ]
    );
    assert!(numbers.is_complete());
}

#[test]
fn the_accumulation_order_matters_with_several_micro_batches() {
    let [local, reduced] = ["local", "reduced"].map(|order| format!("accumulation_order={order}"));
    let two = |order: &str| numbers(&["gradient_accumulation_steps=2", order]);
    assert_ne!(two(&local).hash(), two(&reduced).hash());
    assert_eq!(changed(&two(&reduced), &two(&local)), ["accumulation order: local -> reduced"]);
    assert_eq!(numbers(&[&local]), numbers(&[&reduced]), "one micro-batch has only one order");
}

/// `docs/worlds.md`: strategies sum by the same tree and give the same bits, but they have different default
/// accumulation orders.
#[test]
fn strategies_differ_only_in_the_accumulation_order() {
    let of = |strategy: &str, settings: &[&str]| {
        let strategy = format!("strategy={strategy}");
        numbers(&[&["nproc_per_node=4", strategy.as_str()], settings].concat())
    };
    let two = "gradient_accumulation_steps=2";
    for (strategy, default) in
        [("zero1", "local"), ("zero2", "reduced"), ("zero3", "reduced"), ("shard_grad_op", "reduced")]
    {
        assert_eq!(of(strategy, &[]), of("ddp", &[]), "{strategy}");
        let same = |order: &str| {
            let order = format!("accumulation_order={order}");
            of(strategy, &[two, &order]) == of("ddp", &[two, &order])
        };
        assert!(same("local") && same("reduced"), "{strategy}");
        let fields = of(strategy, &[two]);
        assert!(fields.lines().any(|line| line == format!("accumulation order: {default}")), "{strategy}");
    }
}

#[test]
fn settings_that_change_no_bits_are_left_out() {
    let plain = numbers(&["nproc_per_node=2"]);
    for setting in [
        "recompute=full",
        "prefetch=3",
        "carrier=tcp",
        "threads=3",
        "offload_optimizer=cpu",
        "learning_rate=1",
        "seed=7",
    ] {
        assert_eq!(numbers(&["nproc_per_node=2", setting]), plain, "{setting}");
    }
    let fp16 = numbers(&["nproc_per_node=2", "fp16=true"]);
    let fields: Vec<String> = fp16.differences(&plain).into_iter().map(|d| d.field).collect();
    assert_eq!(fields, ["storage", "gradient scaling"]);
    let long = ["nproc_per_node=2", "max_length=1024", "head_chunk_tokens=256"];
    assert!(numbers(&long).lines().any(|line| line == "head chunk: 256 tokens"));
}

#[test]
fn nodes_matter_only_if_they_change_the_tree() {
    let tree = |replicate, per_node| fixed_tree(&Mesh { replicate, shard: 1, per_node });
    assert_eq!(tree(1, 1), "one rank");
    assert_eq!(tree(4, 2), tree(4, 4));
    assert_eq!(tree(6, 2), tree(6, 6));
    assert_eq!(tree(6, 3), "fixed tree over 6 ranks, in nodes of 3 first");
}

/// The claim behind the test above: with a power of two of ranks per node, the nodes do not change the tree.
#[test]
fn nodes_with_a_power_of_two_of_ranks_do_not_change_the_tree() {
    let steps = |world: u32, per_node: u32| {
        let nodes: Vec<u32> = (0..world).map(|rank| rank / per_node).collect();
        let mut steps = Vec::new();
        lockstep_core::fold::fold_steps(&nodes, &mut |step| steps.push(step));
        steps
    };
    for (per_node, nodes) in [(1, 7), (2, 3), (2, 5), (4, 3), (8, 2), (4, 7)] {
        let world = per_node * nodes;
        assert_eq!(steps(world, per_node), steps(world, world), "{nodes} nodes of {per_node}");
    }
    assert_ne!(steps(6, 3), steps(6, 6));
}

#[test]
fn gpu_runs_have_library_versions() {
    let cuda = CudaVersions {
        gpu: Some(("NVIDIA H200".into(), 90)),
        driver: Some(13000),
        nvrtc: Some((13, 1)),
        cublas_lt: Some(130_201),
        nccl: Some("2.28.3".into()),
    };
    let one = numbers_with(&[], Some(&cuda));
    let lines: Vec<String> = one.lines().skip(11).collect();
    assert_eq!(
        lines,
        [
            "sum over ranks: one rank",
            "optimizer step: on the GPU",
            "GPU: NVIDIA H200, sm 90",
            "driver: CUDA 13.0",
            "NVRTC: 13.1",
            "cuBLASLt: 13.2.1",
        ]
    );
    assert!(one.is_complete());
    let tf32 = numbers_with(&["tf32=true"], Some(&cuda));
    assert_eq!(changed(&tf32, &one), ["matmul: cuBLASLt, tf32 off -> cuBLASLt, tf32 on"]);
    // NCCL's order of summation depends on the strategy.
    let [ddp, zero3] = ["ddp", "zero3"]
        .map(|strategy| numbers_with(&["nproc_per_node=2", &format!("strategy={strategy}")], Some(&cuda)));
    assert_ne!(ddp.hash(), zero3.hash());
    assert!(ddp.lines().any(|line| line == "NCCL: 2.28.3"));
    let unknown = numbers_with(&[], Some(&CudaVersions::default()));
    assert!(!unknown.is_complete());
    assert_eq!(changed(&one, &unknown)[0], "GPU: unknown here -> NVIDIA H200, sm 90");
    let cpu = numbers(&[]);
    assert!(changed(&cpu, &one).contains(&"NVRTC: 13.1 -> none".to_string()));
}

#[test]
fn an_opened_gpu_reports_its_versions() {
    let (gpu, _fake) = lockstep_device::cuda::fake::FakeGpu::make(None);
    let versions = CudaVersions::of(gpu, None);
    assert_eq!(versions.gpu, Some((gpu.name.clone(), gpu.sm)));
    assert!(versions.driver.is_some() && versions.nvrtc.is_some() && versions.cublas_lt.is_some());
    assert!(numbers_with(&[], Some(&versions)).is_complete());
}

#[test]
fn sums_by_mpi_depend_on_the_library_and_the_buckets() {
    let mpi = numbers(&["nproc_per_node=4", "carrier=mpi", "strategy=zero2"]);
    let differences = changed(&mpi, &numbers(&["nproc_per_node=4", "strategy=zero2"]));
    assert_eq!(differences.len(), 2, "{differences:?}");
    let sum = "sum over ranks: fixed tree over 4 ranks -> MPI, zero2, 1 x 4 ranks (replicate x shard), 4 per node, buckets";
    assert!(differences[0].starts_with(sum), "{differences:?}");
    assert_eq!(differences[1], "MPI: none -> MPICH 5.0.2");
    assert_eq!(numbers(&["carrier=mpi"]), numbers(&[]), "one rank sums nothing");
}
