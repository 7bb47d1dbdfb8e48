//! If a state cannot be read, no checkpoint is saved, and the previous one is kept.

use std::path::Path;

use lockstep_device::Queue;
use lockstep_device::cuda::CudaQueue;
use lockstep_device::cuda::fake::FakeGpu;
use lockstep_engine::Resources;
use lockstep_plan::{MemoryTier, ModelId};
use lockstep_testkit::{TestSetup, plan};

use super::*;

fn identity() -> RunIdentity {
    let data = DataCursor { next_step: 0, rows_per_step: 1, num_rows: 1, seed: 0, fingerprint: "f".into() };
    RunIdentity {
        data,
        switches: [("packing", false), ("shuffle", false)],
        config_hash: "c".into(),
        tokenizer_hash: "t".into(),
        run_config: String::new(),
        numerics: NumericsFingerprint::default(),
        settings: BTreeMap::new(),
        model_files: Vec::new(),
        syncs_reference: false,
    }
}

fn save(engine: &Engine, root: &Path, step: u64) -> Result<PathBuf, TrainError> {
    save_checkpoint(engine, root, &Position { step, ..Position::start(None) }, &identity(), &[])
}

/// Saves once, breaks the storage of the states, and saves again. Returns the error.
#[track_caller]
fn assert_previous_checkpoint_is_kept(engine: &Engine, break_it: impl FnOnce()) -> TrainError {
    let dir = tempfile::tempdir().unwrap();
    save(engine, dir.path(), 1).unwrap();
    break_it();
    let failed = save(engine, dir.path(), 2).expect_err("a checkpoint of states that cannot be read");
    assert!(!dir.path().join("step-2").exists(), "the failed checkpoint exists");
    let (latest, skipped) = lockstep_ckpt::open_latest(dir.path()).unwrap();
    assert_eq!(latest.unwrap().meta().step, Step(1));
    assert!(skipped.is_empty(), "{skipped:?}");
    failed
}

#[test]
fn losing_the_gpu_during_a_save_keeps_the_previous_checkpoint() {
    let shape = ModelShape::named("tiny", 101).unwrap();
    // The first read fails or a later one, permanently or once.
    for failing in [0..usize::MAX, 0..1, 31..32, 40..usize::MAX] {
        let (gpu, fake) = FakeGpu::make(None);
        let plan = plan(&shape, &TestSetup { separate_memory: true, ..TestSetup::default() });
        let resources = Resources::single_rank(&plan, Queue::Cuda(CudaQueue::new(gpu, 1).unwrap())).unwrap();
        let mut engine = Engine::new(plan, resources).unwrap();
        engine.model_mut(ModelId::FIRST).initialise(7).unwrap();
        let failed = assert_previous_checkpoint_is_kept(&engine, || fake.fail(failing));
        assert!(failed.to_string().contains("the GPU is lost"), "{failed}");
    }
}

/// Truncates the unnamed file through its path in `/proc`.
#[cfg(target_os = "linux")]
fn truncate_offload_file(dir: &Path) {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let ours = |path: &PathBuf| std::fs::read_link(path).is_ok_and(|file| file.starts_with(dir));
    let found: Vec<PathBuf> = open.filter(ours).collect();
    assert!(!found.is_empty(), "the offload file is open");
    std::fs::OpenOptions::new().write(true).open(&found[0]).unwrap().set_len(0).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn an_offload_file_that_cannot_be_read_leaves_the_last_checkpoint() {
    let shape = ModelShape::named("tiny", 101).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&shape, &TestSetup { optimizer_tier: MemoryTier::Nvme, ..TestSetup::default() });
    let mut resources = Resources::single_rank(&plan, Queue::cpu(1)).unwrap();
    resources.nvme_dir = Some(dir.path().to_path_buf());
    let mut engine = Engine::new(plan, resources).unwrap();
    engine.model_mut(ModelId::FIRST).initialise(7).unwrap();
    let failed = assert_previous_checkpoint_is_kept(&engine, || truncate_offload_file(dir.path()));
    assert!(failed.to_string().contains("offload file"), "{failed}");
}
