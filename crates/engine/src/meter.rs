//! Measures what the lanes of a rank do: seconds by activity in every step, and on request the time of every operation.
//!
//! On a CPU a lane reads the clock before and after each operation and when it has to wait; sums are kept in atomic
//! counters, so a step does not allocate. On a GPU lanes only issue work, so operations are measured with CUDA events,
//! and only while [`Engine::measure`] asks for it: the host then waits for the end of every phase.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use lockstep_device::Device;
use lockstep_device::cuda::{CudaQueue, Event, Gpu, GpuError};
use lockstep_plan::{Lane, LaneProcessor, Op, OpKind, Phase, Wait, operation_text};

use crate::engine::{Engine, Shared};
use crate::error::EngineError;

/// What an operation does, as metrics report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activity {
    Forward,
    /// Also recomputes activations.
    Backward,
    /// The head, forward and backward: often one operation.
    Head,
    Objective,
    Gather,
    Reduce,
    Copy,
    Norm,
    Update,
    Generate,
}

impl Activity {
    pub const COUNT: usize = 10;
    pub const ALL: [Activity; Activity::COUNT] = [
        Activity::Forward,
        Activity::Backward,
        Activity::Head,
        Activity::Objective,
        Activity::Gather,
        Activity::Reduce,
        Activity::Copy,
        Activity::Norm,
        Activity::Update,
        Activity::Generate,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Activity::Forward => "forward",
            Activity::Backward => "backward",
            Activity::Head => "head",
            Activity::Objective => "objective",
            Activity::Gather => "gather",
            Activity::Reduce => "reduce",
            Activity::Copy => "copy",
            Activity::Norm => "norm",
            Activity::Update => "update",
            Activity::Generate => "generate",
        }
    }

    pub(crate) fn of(kind: OpKind) -> Activity {
        match kind {
            // Without other ranks, gathering copies parameters from where they live.
            OpKind::Gather { axes: [], .. } | OpKind::Feed { .. } | OpKind::Copy { .. } => Activity::Copy,
            OpKind::Gather { .. }
            | OpKind::Release(_)
            | OpKind::Dequantise { .. }
            | OpKind::AllGatherUpdated { .. } => Activity::Gather,
            OpKind::Forward { .. } => Activity::Forward,
            OpKind::Recompute { .. } | OpKind::Backward { .. } => Activity::Backward,
            OpKind::HeadForward { .. } | OpKind::HeadBackward { .. } | OpKind::HeadStep { .. } => {
                Activity::Head
            }
            OpKind::Objective { .. } | OpKind::Deliver => Activity::Objective,
            OpKind::Reduce { .. } | OpKind::Round { .. } | OpKind::Add { .. } => Activity::Reduce,
            OpKind::Squares { .. } | OpKind::ClipNorm { .. } => Activity::Norm,
            OpKind::Update { .. } => Activity::Update,
            OpKind::Generate => Activity::Generate,
        }
    }
}

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Measurement {
    /// Seconds by activity on a CPU, nothing on a GPU.
    Lanes,
    /// Seconds by activity on a GPU, too. Phases on a GPU end with a wait for it.
    Operations,
    /// Also the time of every operation, for [`Engine::take_spans`].
    Timeline,
}

/// Seconds by activity.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaneSeconds {
    /// On any lane, so activities of several lanes overlap.
    pub busy: [f64; Activity::COUNT],
    /// How long the compute lane waited for operations of other lanes, by what these do.
    pub waiting: [f64; Activity::COUNT],
}

impl LaneSeconds {
    pub fn busy(&self, activity: Activity) -> f64 {
        self.busy[activity as usize]
    }

    pub fn waiting(&self, activity: Activity) -> f64 {
        self.waiting[activity as usize]
    }
}

/// When an operation ran.
#[derive(Clone, Debug)]
pub struct OpSpan {
    pub name: String,
    pub lane: Lane,
    pub activity: Activity,
    pub start: Instant,
    pub seconds: f64,
}

/// The time of an operation of a phase, by their indices.
#[derive(Clone, Copy, Debug)]
struct RawSpan {
    phase: usize,
    op: usize,
    start: Instant,
    end: Instant,
}

/// The counters of a rank.
#[derive(Default)]
pub(crate) struct Meter {
    busy_ns: [AtomicU64; Activity::COUNT],
    waiting_ns: [AtomicU64; Activity::COUNT],
    /// A [`Measurement`].
    measurement: AtomicU8,
    spans: Mutex<Vec<RawSpan>>,
    gpu: OnceLock<GpuClock>,
}

/// CUDA events around each operation, on the clock of the host.
struct GpuClock {
    /// Recorded while the GPU was idle, at a known time.
    base: Event,
    base_at: Mutex<Instant>,
    /// For each operation of each phase: before and after it.
    events: Vec<Vec<[Event; 2]>>,
}

impl GpuClock {
    fn new(gpu: &'static Gpu, phases: &[Phase]) -> Result<GpuClock, GpuError> {
        let pair = || Ok([Event::timed(gpu)?, Event::timed(gpu)?]);
        let of = |phase: &Phase| phase.schedule.ops.iter().map(|_| pair()).collect::<Result<_, GpuError>>();
        let events = phases.iter().map(of).collect::<Result<_, _>>()?;
        Ok(GpuClock { base: Event::timed(gpu)?, base_at: Mutex::new(Instant::now()), events })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Meter {
    /// Adds time that the compute lane waited for an operation.
    pub(crate) fn waited(&self, activity: Activity, time: Duration) {
        self.waiting_ns[activity as usize].fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    fn ran(&self, activity: Activity, span: RawSpan) {
        let time = span.end.saturating_duration_since(span.start);
        self.busy_ns[activity as usize].fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        if self.measures(Measurement::Timeline) {
            lock(&self.spans).push(span);
        }
    }

    fn measures(&self, what: Measurement) -> bool {
        self.measurement.load(Ordering::Relaxed) >= what as u8
    }

    /// The clock of the GPU, while its operations are measured.
    fn gpu_clock(&self) -> Option<&GpuClock> {
        self.gpu.get().filter(|_| self.measures(Measurement::Operations))
    }

    /// The events around an operation on a stream, while operations are measured.
    fn events(&self, phase: usize, op: usize) -> Option<&[Event; 2]> {
        self.gpu_clock().map(|clock| &clock.events[phase][op])
    }
}

impl Shared {
    /// Runs an operation of the current phase and measures it.
    pub(crate) fn measured(
        &self,
        (i, op): (usize, &Op),
        cuda: Option<&CudaQueue>,
        run: impl FnOnce() -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let phase = self.current_phase();
        let Some(cuda) = cuda else {
            let start = Instant::now();
            self.running.begin(op.lane, phase, i, start);
            let outcome = run();
            self.running.end(op.lane);
            self.meter.ran(Activity::of(op.kind), RawSpan { phase, op: i, start, end: Instant::now() });
            return outcome;
        };
        self.running.begin(op.lane, phase, i, Instant::now());
        let events = self.meter.events(phase, i);
        events.iter().for_each(|[before, _]| cuda.record(before));
        let outcome = run();
        events.iter().for_each(|[_, after]| cuda.record(after));
        outcome
    }

    /// Before a phase on a GPU whose operations are measured: relates the GPU's clock to the host's.
    pub(crate) fn begin_measuring(&self, cuda: Option<&CudaQueue>) -> Result<(), EngineError> {
        let (Some(clock), Some(cuda)) = (self.meter.gpu_clock(), cuda) else { return Ok(()) };
        cuda.record(&clock.base);
        clock.base.synchronize()?;
        *lock(&clock.base_at) = Instant::now();
        Ok(())
    }

    /// After a phase on a GPU whose operations are measured, with all lanes idle: reads the events.
    pub(crate) fn finish_measuring(&self) -> Result<(), EngineError> {
        let Some(clock) = self.meter.gpu_clock() else { return Ok(()) };
        let (phase, base_at) = (self.current_phase(), *lock(&clock.base_at));
        let ops = &self.schedule_phase().schedule.ops;
        let mut idle_since: Option<Instant> = None;
        for (i, op) in
            ops.iter().enumerate().filter(|(_, op)| op.lane.spec().processor == LaneProcessor::Device)
        {
            let [before, after] = &clock.events[phase][i];
            let at = |event: &Event| -> Result<Instant, EngineError> {
                let ms = event.milliseconds_since(&clock.base)?;
                Ok(base_at + Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
            };
            let (start, end) = (at(before)?, at(after)?);
            self.meter.ran(Activity::of(op.kind), RawSpan { phase, op: i, start, end });
            if op.lane == Lane::Compute {
                // A gap in the stream before an operation that waits for another lane.
                if let (Some(Wait::SameRun(id) | Wait::PreviousRun(id)), Some(since)) =
                    (op.waits.last(), idle_since)
                {
                    let awaited = Activity::of(ops[id.0 as usize].kind);
                    self.meter.waited(awaited, start.saturating_duration_since(since));
                }
                idle_since = Some(end);
            }
        }
        Ok(())
    }

    /// Whether the events of a GPU have to be read after a phase.
    pub(crate) fn measures_on_gpu(&self) -> bool {
        self.meter.gpu_clock().is_some()
    }
}

impl Engine {
    /// Whether [`Engine::take_lane_seconds`] has numbers: always on a CPU, on a GPU while operations are measured.
    pub fn measures_lanes(&self) -> bool {
        matches!(self.queue.device(), Device::Cpu) || self.shared.measures_on_gpu()
    }

    /// The seconds by activity since the last call. An operation that still runs counts when it ends.
    pub fn take_lane_seconds(&self) -> LaneSeconds {
        let take = |counters: &[AtomicU64; Activity::COUNT]| {
            std::array::from_fn(|i| counters[i].swap(0, Ordering::Relaxed) as f64 / 1e9)
        };
        LaneSeconds { busy: take(&self.shared.meter.busy_ns), waiting: take(&self.shared.meter.waiting_ns) }
    }

    /// Sets how much is measured from the next phase on.
    pub fn measure(&mut self, what: Measurement) -> Result<(), EngineError> {
        self.synchronize()?;
        let meter = &self.shared.meter;
        let needs_events = what >= Measurement::Operations && meter.gpu.get().is_none();
        if let (Device::Cuda(gpu), true) = (self.queue.device(), needs_events) {
            let _ = meter.gpu.set(GpuClock::new(gpu, &self.shared.plan.phases)?);
        }
        lock(&meter.spans).clear();
        meter.measurement.store(what as u8, Ordering::SeqCst);
        Ok(())
    }

    /// The operations that ran since the last call, with [`Measurement::Timeline`].
    pub fn take_spans(&self) -> Result<Vec<OpSpan>, EngineError> {
        self.synchronize()?;
        let raw = std::mem::take(&mut *lock(&self.shared.meter.spans));
        let plan = &self.shared.plan;
        let span = |span: RawSpan| {
            let phase = &plan.phases[span.phase];
            let op = &phase.schedule.ops[span.op];
            OpSpan {
                name: operation_text(plan, phase, span.op),
                lane: op.lane,
                activity: Activity::of(op.kind),
                start: span.start,
                seconds: span.end.saturating_duration_since(span.start).as_secs_f64(),
            }
        };
        Ok(raw.into_iter().map(span).collect())
    }

    /// Bytes sent to and received from other ranks since the start.
    pub fn traffic(&self) -> (u64, u64) {
        self.shared.transport.traffic()
    }
}
