//! The time of calls: by events on a GPU, by the clock on a CPU.

use std::time::Instant;

use lockstep_device::cuda::{CudaQueue, Event, GpuError};
use lockstep_device::{Memory, Queue};

/// Warm-up calls: the first one compiles kernels and chooses algorithms.
const WARM: usize = 3;
/// Timed calls on a GPU.
const TIMED: usize = 15;
/// On a CPU, as many calls as fit into this time, but at least three.
const CPU_SECONDS: f64 = 0.3;

/// Memsets that keep the GPU busy while calls are issued, so that it never waits for the host between two of them.
const BALLAST_ROUNDS: usize = 8;

pub(super) struct Timer {
    /// Recorded before and after every timed call; empty on a CPU.
    events: Vec<[Event; 2]>,
}

impl Timer {
    pub(super) fn new(queue: &Queue) -> Result<Timer, GpuError> {
        let Some(cuda) = queue.cuda() else { return Ok(Timer { events: Vec::new() }) };
        let pair = |_| Ok([Event::timed(cuda.gpu)?, Event::timed(cuda.gpu)?]);
        Ok(Timer { events: (0..TIMED).map(pair).collect::<Result<_, GpuError>>()? })
    }

    /// Seconds of each timed call, sorted. The argument of `call` is its number.
    pub(super) fn measure(
        &self,
        queue: &Queue,
        ballast: &Memory,
        call: &dyn Fn(usize),
    ) -> Result<Vec<f64>, GpuError> {
        let mut seconds = match queue {
            Queue::Cpu(_) => by_clock(call),
            Queue::Cuda(cuda) => self.by_events(cuda, ballast, call)?,
        };
        seconds.sort_by(f64::total_cmp);
        Ok(seconds)
    }

    fn by_events(
        &self,
        cuda: &CudaQueue,
        ballast: &Memory,
        call: &dyn Fn(usize),
    ) -> Result<Vec<f64>, GpuError> {
        (0..WARM).for_each(call);
        cuda.synchronize()?;
        cuda.check()?;
        let ballast = ballast.view(0, ballast.bytes().0 as usize / 4, lockstep_core::DType::U32);
        (0..BALLAST_ROUNDS).for_each(|_| cuda.zero(ballast));
        for (i, [start, end]) in self.events.iter().enumerate() {
            cuda.record(start);
            call(WARM + i);
            cuda.record(end);
        }
        cuda.synchronize()?;
        cuda.check()?;
        let between = |[start, end]: &[Event; 2]| Ok(f64::from(end.milliseconds_since(start)?) / 1e3);
        self.events.iter().map(between).collect()
    }
}

fn by_clock(call: &dyn Fn(usize)) -> Vec<f64> {
    let timed = |i| {
        let start = Instant::now();
        call(i);
        // A coarse clock shows no time at all for the shortest calls.
        start.elapsed().as_secs_f64().max(1e-9)
    };
    let first: f64 = timed(0);
    let calls = ((CPU_SECONDS / first) as usize).clamp(3, TIMED);
    (1..=calls).map(timed).collect()
}
