//! Measures what a step costs: time by phase, arithmetic, bytes between ranks, memory and energy. Ranks exchange their
//! numbers together with the losses.

use std::time::{Duration, Instant};

use lockstep_core::{Bytes, DType};
use lockstep_device::cuda::{Gpu, GpuReading, GpuSensors, LibrarySearch};
use lockstep_device::{Device, Isa, Machine, ProcessMemory, fma_peak_gflops};
use lockstep_engine::{Activity, Engine, LaneSeconds};
use lockstep_observe::{NamedMetric, StepCost};
use lockstep_plan::ModelId;
use lockstep_plan::cost::{Chip, model_flops_per_token};

/// How often memory and sensors are read. Reading them takes tens of microseconds.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// How long the peak of a CPU is measured.
const PEAK_MILLIS: u64 = 10;
/// Worlds up to this size have the busy seconds of every rank in each line.
const MAX_LISTED_RANKS: usize = 64;

/// Activities and the keys of their seconds; `None` for those that an algorithm reports itself.
const BUSY: [(Activity, &str); 9] = [
    (Activity::Forward, "forward_seconds"),
    (Activity::Backward, "backward_seconds"),
    (Activity::Head, "head_seconds"),
    (Activity::Objective, "objective_seconds"),
    (Activity::Norm, "norm_seconds"),
    (Activity::Update, "update_seconds"),
    (Activity::Gather, "gather_seconds"),
    (Activity::Reduce, "reduce_seconds"),
    (Activity::Copy, "copy_seconds"),
];
const WAITING: [(Activity, &str); 5] = [
    (Activity::Gather, "gather_wait_seconds"),
    (Activity::Reduce, "reduce_wait_seconds"),
    (Activity::Copy, "copy_wait_seconds"),
    (Activity::Norm, "norm_wait_seconds"),
    (Activity::Update, "update_wait_seconds"),
];
/// What the compute lane waits for because of other ranks.
const OTHERS: [Activity; 3] = [Activity::Gather, Activity::Reduce, Activity::Norm];

/// The numbers of one rank that all ranks get. NaN: not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct RankCost {
    /// From the start of the step until the exchange.
    elapsed_seconds: f64,
    data_wait_seconds: f64,
    lanes: LaneSeconds,
    sent_bytes: f64,
    received_bytes: f64,
    memory_bytes: f64,
    memory_peak_bytes: f64,
    energy_joules: f64,
    power_watts: f64,
}

impl RankCost {
    fn to_numbers(self) -> Vec<f64> {
        let first = [
            self.elapsed_seconds,
            self.data_wait_seconds,
            self.sent_bytes,
            self.received_bytes,
            self.memory_bytes,
            self.memory_peak_bytes,
            self.energy_joules,
            self.power_watts,
        ];
        first.into_iter().chain(self.lanes.busy).chain(self.lanes.waiting).collect()
    }

    fn from_numbers(numbers: &[f64]) -> RankCost {
        let (first, lanes) = numbers.split_at(8);
        let (busy, waiting) = lanes.split_at(Activity::COUNT);
        let all = |part: &[f64]| std::array::from_fn(|i| part[i]);
        RankCost {
            elapsed_seconds: first[0],
            data_wait_seconds: first[1],
            sent_bytes: first[2],
            received_bytes: first[3],
            memory_bytes: first[4],
            memory_peak_bytes: first[5],
            energy_joules: first[6],
            power_watts: first[7],
            lanes: LaneSeconds { busy: all(busy), waiting: all(waiting) },
        }
    }

    /// The seconds in which this rank did not wait for others.
    fn busy_seconds(&self) -> f64 {
        self.elapsed_seconds - OTHERS.iter().map(|activity| self.lanes.waiting(*activity)).sum::<f64>()
    }
}

/// Measures the steps of a run on this rank.
pub(crate) struct StepMeter {
    pub(crate) times: StepTimes,
    own: RankCost,
    of_ranks: Vec<RankCost>,
    measures_lanes: bool,
    traffic: (u64, u64),
    probe: MemoryProbe,
    flops_per_token: f64,
    /// Of all ranks. `None` where it is not known.
    peak_flops: Option<f64>,
    /// Spent on a checkpoint since the last step.
    checkpoint_seconds: f64,
}

/// When the parts of a step began and ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepTimes {
    pub(crate) start: Instant,
    pub(crate) ready: Instant,
    pub(crate) exchange: Instant,
    pub(crate) exchanged: Instant,
}

impl StepMeter {
    /// `trained`: the models whose arithmetic counts.
    pub(crate) fn new(engine: &Engine, machine: Machine, tf32: bool, trained: &[ModelId]) -> StepMeter {
        let now = Instant::now();
        let input = &engine.plan().input;
        let ranks = f64::from(input.mesh.world_size());
        let flops = trained.iter().map(|id| model_flops_per_token(input.model(*id))).sum();
        // Only rank 0 needs the peak, for the log.
        let peak = (engine.rank().0 == 0).then(|| peak_flops(machine, input.storage, tf32)).flatten();
        StepMeter {
            times: StepTimes { start: now, ready: now, exchange: now, exchanged: now },
            own: RankCost::default(),
            of_ranks: Vec::new(),
            measures_lanes: false,
            traffic: (0, 0),
            probe: MemoryProbe::new(machine.device),
            flops_per_token: flops,
            peak_flops: peak.map(|peak| peak * ranks),
            checkpoint_seconds: 0.0,
        }
    }

    /// A step begins.
    pub(crate) fn begin(&mut self, engine: &Engine) {
        // What evaluations and checkpoints between steps did is not part of the step.
        engine.take_lane_seconds();
        self.own = RankCost::default();
        self.traffic = engine.traffic();
        self.measures_lanes = engine.measures_lanes();
        self.times.start = Instant::now();
    }

    /// The batches of the step are there. `work_seconds`: what the learner did to make them, besides waiting.
    pub(crate) fn ready(&mut self, work_seconds: &[NamedMetric]) {
        self.times.ready = Instant::now();
        let worked: f64 = work_seconds.iter().map(|(_, seconds)| seconds).sum();
        let elapsed = self.times.ready.duration_since(self.times.start).as_secs_f64();
        self.own.data_wait_seconds = (elapsed - worked).max(0.0);
    }

    /// The numbers of this rank for the exchange at the end of a model's step.
    pub(crate) fn rank_numbers(&mut self, engine: &Engine) -> Vec<f64> {
        self.times.exchange = Instant::now();
        let lanes = engine.take_lane_seconds();
        for i in 0..Activity::COUNT {
            self.own.lanes.busy[i] += lanes.busy[i];
            self.own.lanes.waiting[i] += lanes.waiting[i];
        }
        let (sent, received) = engine.traffic();
        let sample = self.probe.sample();
        let own = RankCost {
            elapsed_seconds: self.times.exchange.duration_since(self.times.start).as_secs_f64(),
            sent_bytes: (sent - self.traffic.0) as f64,
            received_bytes: (received - self.traffic.1) as f64,
            memory_bytes: sample.memory.unwrap_or(f64::NAN),
            memory_peak_bytes: sample.memory_peak.unwrap_or(f64::NAN),
            energy_joules: sample.energy_joules.unwrap_or(f64::NAN),
            power_watts: sample.power_watts.unwrap_or(f64::NAN),
            ..self.own
        };
        own.to_numbers()
    }

    /// The numbers of all ranks have arrived.
    pub(crate) fn exchanged(&mut self, of_ranks: &[Vec<f64>]) {
        self.times.exchanged = Instant::now();
        self.of_ranks = of_ranks.iter().map(|numbers| RankCost::from_numbers(numbers)).collect();
    }

    /// Counts the time of a checkpoint with the next step.
    pub(crate) fn saved(&mut self, seconds: f64) {
        self.checkpoint_seconds += seconds;
    }

    /// What a step of so many tokens and seconds has cost.
    pub(crate) fn cost(&mut self, tokens: u64, seconds: f64) -> StepCost {
        let mut numbers = Vec::new();
        let flops_per_s = self.flops_per_token * tokens as f64 / seconds;
        numbers.push(("tflops", flops_per_s / 1e12));
        numbers.extend(self.peak_flops.map(|peak| ("mfu", flops_per_s / peak)));
        let ranks = self.of_ranks.len().max(1) as f64;
        let mean = |of: &dyn Fn(&RankCost) -> f64| self.of_ranks.iter().map(of).sum::<f64>() / ranks;
        numbers.push(("data_wait_seconds", mean(&|rank| rank.data_wait_seconds)));
        for (activity, key) in BUSY {
            numbers.push((key, mean(&|rank| rank.lanes.busy(activity))));
        }
        for (activity, key) in WAITING {
            numbers.push((key, mean(&|rank| rank.lanes.waiting(activity))));
        }
        let exchange = self.times.exchanged.duration_since(self.times.exchange).as_secs_f64();
        numbers.push(("exchange_wait_seconds", if ranks > 1.0 { exchange } else { 0.0 }));
        numbers.push(("checkpoint_seconds", std::mem::take(&mut self.checkpoint_seconds)));
        numbers.push(("sent_bytes", mean(&|rank| rank.sent_bytes)));
        numbers.push(("received_bytes", mean(&|rank| rank.received_bytes)));
        // Seconds and bytes of what this run does not do are left out.
        numbers.retain(|(key, value)| *value > 0.0 || *key == "data_wait_seconds");
        let largest = |of: &dyn Fn(&RankCost) -> f64| self.of_ranks.iter().map(of).fold(f64::NAN, f64::max);
        let total = |of: &dyn Fn(&RankCost) -> f64| self.of_ranks.iter().map(of).sum::<f64>();
        numbers.push(("memory_bytes", largest(&|rank| rank.memory_bytes)));
        numbers.push(("memory_peak_bytes", largest(&|rank| rank.memory_peak_bytes)));
        numbers.push(("energy_joules", total(&|rank| rank.energy_joules)));
        numbers.push(("power_watts", total(&|rank| rank.power_watts)));
        let mut rank_busy_seconds = Vec::new();
        if self.measures_lanes && self.of_ranks.len() > 1 {
            let busy: Vec<f64> = self.of_ranks.iter().map(RankCost::busy_seconds).collect();
            let slowest = busy.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            numbers.extend(slowest.map(|(rank, _)| ("slowest_rank", rank as f64)));
            if busy.len() <= MAX_LISTED_RANKS {
                rank_busy_seconds = busy;
            }
        }
        numbers.retain(|(_, value)| value.is_finite());
        StepCost { numbers, rank_busy_seconds }
    }
}

/// The arithmetic per second that the device of a rank attains at most: on a GPU by its data sheet, on a CPU as measured
/// now with fused multiply-adds on one thread, times the threads.
fn peak_flops(machine: Machine, storage: DType, tf32: bool) -> Option<f64> {
    match machine.device {
        Device::Cpu => {
            let of_thread = fma_peak_gflops(Isa::detect(), PEAK_MILLIS) * 1e9;
            Some(of_thread * machine.num_threads as f64)
        }
        Device::Cuda(gpu) => {
            let chip = Chip::reported_as(&gpu.name, gpu.total)?;
            let tflops = match (storage, tf32) {
                // Tensor cores multiply tf32 half as fast as bf16.
                (DType::F32, true) => chip.bf16_tflops / 2.0,
                (DType::F32, false) => chip.f32_tflops,
                _ => chip.bf16_tflops,
            };
            Some(tflops * 1e12)
        }
    }
}

/// What [`MemoryProbe`] has read last.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    memory: Option<f64>,
    memory_peak: Option<f64>,
    /// Since the run has started.
    energy_joules: Option<f64>,
    power_watts: Option<f64>,
}

/// Reads memory and sensors now and then.
struct MemoryProbe {
    gpu: Option<&'static Gpu>,
    sensors: Option<GpuSensors>,
    energy_at_start: Option<f64>,
    last: Sample,
    read_at: Option<Instant>,
}

impl MemoryProbe {
    fn new(device: Device) -> MemoryProbe {
        let gpu = match device {
            Device::Cpu => None,
            Device::Cuda(gpu) => Some(gpu),
        };
        // The library comes with the driver; without it there are no sensors.
        let sensors = gpu.and_then(|gpu| GpuSensors::open(gpu, &LibrarySearch::default()).ok());
        let energy_at_start = sensors.as_ref().and_then(|sensors| sensors.read().energy_joules);
        MemoryProbe { gpu, sensors, energy_at_start, last: Sample::default(), read_at: None }
    }

    fn sample(&mut self) -> Sample {
        if self.read_at.is_some_and(|at| at.elapsed() < SAMPLE_EVERY) {
            return self.last;
        }
        self.read_at = Some(Instant::now());
        let bytes = |bytes: Bytes| bytes.0 as f64;
        match self.gpu {
            None => {
                let memory = ProcessMemory::read();
                self.last.memory = memory.map(|memory| bytes(memory.resident));
                self.last.memory_peak = memory.map(|memory| bytes(memory.peak));
            }
            Some(gpu) => {
                let used = gpu.free_bytes().ok().map(|free| bytes(gpu.total) - bytes(free));
                self.last.memory = used;
                self.last.memory_peak = used.map(|used| used.max(self.last.memory_peak.unwrap_or(0.0)));
            }
        }
        let reading = self.sensors.as_ref().map_or_else(GpuReading::default, GpuSensors::read);
        self.last.power_watts = reading.power_watts;
        self.last.energy_joules =
            reading.energy_joules.zip(self.energy_at_start).map(|(now, then)| now - then);
        self.last
    }
}

#[cfg(test)]
mod tests {
    use lockstep_device::Queue;
    use lockstep_device::cuda::CudaQueue;
    use lockstep_device::cuda::fake::FakeGpu;
    use lockstep_engine::{Measurement, Resources, UpdateRule, UpdateSettings};
    use lockstep_shape::ModelShape;
    use lockstep_testkit::{TestBatch, TestObjective, TestSetup, plan};

    use super::*;

    #[test]
    fn operations_on_a_gpu_are_measured_on_request() {
        let (gpu, _fake) = FakeGpu::make(None);
        let shape = ModelShape::named("tiny", 101).unwrap();
        let plan = plan(&shape, &TestSetup { separate_memory: true, ..TestSetup::default() });
        let resources = Resources::single_rank(&plan, Queue::Cuda(CudaQueue::new(gpu, 1).unwrap())).unwrap();
        let mut engine = Engine::new(plan, resources).unwrap();
        let rule = UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 };
        let updates = UpdateSettings { t: 1, lr: 1e-3, rule, weight_decay: 0.0, max_norm: Some(1.0) };
        let step = |engine: &mut Engine| {
            let mut window = TestObjective::new(vec![TestBatch::random(&[20, 3], 101, 1)]);
            engine.model_mut(ModelId::FIRST).train_step(&mut window, &updates).unwrap();
            engine.take_spans().unwrap().len()
        };
        assert!(!engine.measures_lanes());
        assert_eq!(step(&mut engine), 0);
        engine.measure(Measurement::Operations).unwrap();
        assert!(engine.measures_lanes());
        assert_eq!(step(&mut engine), 0);
        engine.measure(Measurement::Timeline).unwrap();
        assert_eq!(step(&mut engine), engine.plan().phases[0].schedule.ops.len());
        // A GPU without sensors has costs, too.
        let machine = Machine { device: Device::Cuda(gpu), num_threads: 1 };
        let mut meter = StepMeter::new(&engine, machine, false, &[ModelId::FIRST]);
        meter.begin(&engine);
        meter.ready(&[]);
        let numbers = meter.rank_numbers(&engine);
        meter.exchanged(&[numbers.clone(), numbers]);
        let cost = meter.cost(100, 0.5);
        assert!(cost.get("memory_bytes").is_some() && cost.get("energy_joules").is_none(), "{cost:?}");
        assert_eq!(cost.rank_busy_seconds.len(), 2);
    }

    #[test]
    fn the_numbers_of_a_rank_survive_the_exchange() {
        let mut cost =
            RankCost { elapsed_seconds: 3.0, power_watts: 2.5, received_bytes: 9.0, ..RankCost::default() };
        cost.lanes.busy[1] = 0.5;
        cost.lanes.waiting[Activity::Reduce as usize] = 0.75;
        cost.lanes.waiting[Activity::Update as usize] = 0.25;
        assert_eq!(RankCost::from_numbers(&cost.to_numbers()), cost);
        assert_eq!(cost.busy_seconds(), 2.25, "waiting for an update is not waiting for others");
    }
}
