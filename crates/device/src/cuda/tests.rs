//! Failing driver calls, on a fake GPU.

use lockstep_core::{Bytes, DType};

use super::fake::FakeGpu;
use super::{
    CudaQueue, Event, Gemm, GemmOperand, Gpu, GpuError, KernelCache, KernelSource, KernelVariant, Launch,
};
use crate::{Memory, Pool, View, args};

static SOURCE: KernelSource = KernelSource {
    name: "test",
    text: r#"
        extern "C" __global__ void kernel(f32* x, u32 count) {}
        extern "C" __global__ void __launch_bounds__(128) mixed(
            const REAL* x, u32 count, u64 seed, f32 scale, const f64* decision
        ) {}
        extern "C" __global__ void nothing() {}
    "#,
    defines: &[],
};

fn memory(gpu: &'static Gpu) -> Memory {
    Memory::allocate_on(gpu, Bytes(1 << 16)).unwrap()
}

/// Issues one of each kind of work.
fn issue_everything(queue: &CudaQueue, event: &Event, view: View<'_>) {
    let kernel = queue.kernel(&SOURCE, DType::F32, "kernel");
    // SAFETY: the fake GPU's kernels do nothing.
    unsafe { queue.launch(kernel, Launch { shared: 1024, ..Launch::each(64) }, args![view, 64usize]) };
    queue.zero(view.first(64));
    queue.copy(view.slice(64, 64), view.first(64));
    queue.record(event);
    queue.wait_for(event);
    let factor = |at| GemmOperand { view: view.slice(at, 64), stride: 8, transposed: false };
    queue.gemm(&Gemm {
        m: 8,
        n: 8,
        k: 8,
        a: factor(0),
        b: factor(64),
        c: None,
        d: (view.slice(128, 64), 8),
        workspace: view.slice(256, 64),
    });
}

#[test]
fn a_failed_stream_ignores_all_further_work() {
    // One round per call, in which that call fails. The fake driver itself would accept further work.
    for failing in 0.. {
        let (gpu, fake) = FakeGpu::make(None);
        let (memory, event) = (memory(gpu), Event::new(gpu).unwrap());
        let view = memory.view(0, 1024, DType::F32);
        let queue = CudaQueue::new(gpu, 1).unwrap();
        queue.kernel(&SOURCE, DType::F32, "kernel").unwrap();
        fake.forget_calls();
        fake.fail(failing..failing + 1);
        issue_everything(&queue, &event, view);
        let calls = fake.calls();
        if calls.len() <= failing {
            assert!(failing >= 7 && queue.check().is_ok(), "{calls:?}");
            break;
        }
        assert_eq!(calls.len(), failing + 1, "{} failed, and more was issued: {calls:?}", calls[failing]);
        let text = queue.check().unwrap_err().to_string();
        assert!(text.contains("lost"), "{text}");
        issue_everything(&queue, &event, view);
        assert!(queue.synchronize().is_err() && queue.is_idle().is_err());
        assert_eq!(fake.calls().len(), failing + 1, "{:?}", fake.calls());
    }
}

/// Every way in which the host accesses GPU memory.
fn host_copies<'m>(gpu_view: View<'m>, host_view: View<'m>) -> Vec<(&'static str, Result<(), GpuError>)> {
    let (half, len) = (gpu_view.len() / 2, gpu_view.len());
    let mut values = vec![0f32; len];
    vec![
        ("write", gpu_view.write(&values)),
        ("write_f32", gpu_view.write_f32(&values)),
        ("write_f32, rounded", gpu_view.cast(DType::BF16).write_f32(&values)),
        ("read", gpu_view.read(&mut values)),
        ("read_f32", gpu_view.read_f32(&mut values)),
        ("read_f32, rounded", gpu_view.cast(DType::BF16).read_f32(&mut values)),
        ("zero", gpu_view.zero()),
        ("copy to the GPU", gpu_view.copy_from(&host_view)),
        ("copy from the GPU", host_view.copy_from(&gpu_view)),
        ("copy on the GPU", gpu_view.first(half).copy_from(&gpu_view.slice(half, half))),
    ]
}

#[test]
fn host_copies_return_the_driver_failure() {
    let host = Memory::allocate(Bytes(4096), &Pool::new(1)).unwrap();
    let host = host.view(0, 1024, DType::F32);
    let (gpu, fake) = FakeGpu::make(None);
    let device = memory(gpu);
    let device = device.view(0, 1024, DType::F32);
    for (what, outcome) in host_copies(device, host) {
        outcome.unwrap_or_else(|cause| panic!("{what}: {cause}"));
    }
    // Each is two driver calls, the copy and the wait for it. After a failure no calls are made.
    for i in 0..host_copies(device, host).len() {
        for failing in [2 * i, 2 * i + 1] {
            let (gpu, fake) = FakeGpu::make(None);
            let device = memory(gpu);
            fake.forget_calls();
            fake.fail(failing..failing + 1);
            for (j, (what, outcome)) in
                host_copies(device.view(0, 1024, DType::F32), host).into_iter().enumerate()
            {
                assert_eq!(outcome.is_err(), j >= i, "{what}, after call {failing} failed: {outcome:?}");
            }
            assert_eq!(fake.calls().len(), failing + 1, "{:?}", fake.calls());
        }
    }
    assert!(fake.calls().len() >= 20);
}

#[test]
fn memory_that_could_not_be_zeroed_is_freed() {
    // The calls are: allocate, set to zero, wait.
    for failing in 0..3 {
        let (gpu, fake) = FakeGpu::make(None);
        fake.fail(failing..failing + 1);
        assert!(Memory::allocate_on(gpu, Bytes(4096)).is_err());
        let freed = fake.calls().iter().filter(|call| **call == "cuMemFree").count();
        assert_eq!(freed, usize::from(failing > 0), "{:?}", fake.calls());
    }
}

#[test]
fn a_thread_that_cannot_set_its_context_gets_an_error() {
    let (gpu, fake) = FakeGpu::make(None);
    let (memory, queue) = (memory(gpu), CudaQueue::new(gpu, 1).unwrap());
    let view = memory.view(0, 64, DType::F32);
    fake.fail(0..usize::MAX);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(gpu.enter().is_err() && gpu.free_bytes().is_err() && view.zero().is_err());
            queue.zero(view);
            assert!(queue.check().is_err() && Event::new(gpu).is_err() && CudaQueue::new(gpu, 1).is_err());
        });
    });
    fake.forget_calls();
}

#[test]
fn launch_arguments_are_checked_against_the_kernel() {
    let (gpu, fake) = FakeGpu::make(None);
    let memory = memory(gpu);
    let view = memory.view(0, 64, DType::F32);
    let queue = CudaQueue::new(gpu, 1).unwrap();
    let kernel = queue.kernel(&SOURCE, DType::F32, "mixed");
    // SAFETY: the fake GPU's kernels do nothing.
    unsafe { queue.launch(kernel, Launch::each(64), args![view, 64usize, 1u64, -0.5f32, None::<View>]) };
    queue.check().unwrap();
    assert_eq!(fake.launched(), ["mixed"]);
    fake.forget_calls();
    // SAFETY: as above.
    unsafe { queue.launch(kernel, Launch::each(64), args![view, 64usize, 1u32, -0.5f32, None::<View>]) };
    let wrong = GpuError::ArgumentSize { kernel: "mixed", index: 2, declared: 8, given: 4 };
    assert_eq!(queue.check(), Err(wrong));
    let queue = CudaQueue::new(gpu, 1).unwrap();
    // SAFETY: as above.
    unsafe { queue.launch(kernel, Launch::each(64), args![view, 64usize, 1u64]) };
    let wrong = GpuError::ArgumentCount { kernel: "mixed", declared: 5, given: 3 };
    assert_eq!(queue.check(), Err(wrong));
    assert!(!fake.calls().contains(&"cuLaunchKernel"), "invalid arguments are not launched");
    // Nothing is checked for a kernel whose parameters the driver does not report.
    let queue = CudaQueue::new(gpu, 1).unwrap();
    let unknown = queue.kernel(&SOURCE, DType::F32, "nothing");
    // SAFETY: as above.
    unsafe { queue.launch(unknown, Launch::each(64), args![view]) };
    queue.check().unwrap();
    assert_eq!(fake.launched(), ["mixed", "nothing"]);
}

#[test]
fn cached_code_is_loaded_and_damaged_code_is_recompiled() {
    let dir = tempfile::tempdir().unwrap();
    // How many times a new process compiles.
    let compiles = || {
        let (gpu, fake) = FakeGpu::make(Some(KernelCache::open(&dir.path().join("kernels")).unwrap()));
        gpu.kernel(&SOURCE, KernelVariant::of(DType::F32), "kernel").unwrap();
        fake.calls().iter().filter(|call| **call == "nvrtcCompileProgram").count()
    };
    assert_eq!((compiles(), compiles()), (1, 0));
    let files: Vec<_> = std::fs::read_dir(dir.path().join("kernels")).unwrap().collect();
    let file = files[0].as_ref().unwrap().path();
    assert_eq!(files.len(), 1);
    let whole = std::fs::read(&file).unwrap();
    let mut damaged = whole.clone();
    // A byte of the code, after the hash.
    damaged[40] ^= 1;
    std::fs::write(&file, &damaged).unwrap();
    assert_eq!(compiles(), 1, "the damaged file is not loaded");
    assert_eq!(std::fs::read(&file).unwrap(), whole, "and it is replaced");
    assert_eq!(compiles(), 0);
}
