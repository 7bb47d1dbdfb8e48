//! What happens when the driver fails, on a GPU that is told to.

use lockstep_core::{Bytes, DType};

use super::fake::FakeGpu;
use super::{CudaQueue, Event, Factor, Gemm, Gpu, Launch, Source};
use crate::{Memory, View, args};

static SOURCE: Source = Source { name: "test", text: "" };

fn memory(gpu: &'static Gpu) -> Memory {
    Memory::take_on(gpu, Bytes(1 << 16)).unwrap()
}

/// Issues one of everything that a stream takes.
fn issue_everything(queue: &CudaQueue, event: &Event, view: View<'_>) {
    let kernel = queue.kernel(&SOURCE, DType::F32, "kernel");
    // SAFETY: this GPU's kernels do nothing.
    unsafe { queue.launch(kernel, Launch::each(64), args![view, 64usize]) };
    queue.zero(view.first(64));
    queue.copy(view.slice(64, 64), view.first(64));
    queue.record(event);
    queue.wait_for(event);
    let factor = |at| Factor { view: view.slice(at, 64), stride: 8, transposed: false };
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
fn after_a_failure_a_stream_is_given_nothing_more() {
    let (gpu, fake) = FakeGpu::make(None);
    let (memory, event) = (memory(gpu), Event::new(gpu).unwrap());
    let view = memory.view(0, 1024, DType::F32);
    // As often as it takes to let every call fail once. The driver itself would go on after it.
    for failing in 0.. {
        let queue = CudaQueue::new(gpu, 1).unwrap();
        queue.kernel(&SOURCE, DType::F32, "kernel").unwrap();
        fake.forget_calls();
        fake.fail(failing..failing + 1);
        issue_everything(&queue, &event, view);
        let calls = fake.calls();
        if calls.len() <= failing {
            assert!(failing >= 6 && queue.check().is_ok(), "{calls:?}");
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
