//! The numerics fingerprint: everything besides a run's inputs that determines the bits of its results.
//!
//! Two runs with equal fingerprints and equal inputs give bit-identical results. The inputs are the data, the initial
//! weights and the settings that define what to compute: batch size, lengths, seeds, optimizer, schedule, dropout. The
//! fingerprint covers how it is computed: the order of summation and the code that runs.
//!
//! Left out because they change no bits: threads, instruction sets other than AMX, recomputation, prefetch, and on CPUs
//! the strategy, offload and the carrier, unless it is MPI. Left out although they may change bits, because they are not known here:
//! environment variables that configure NCCL, MPI or cuBLAS, and the commit that `lockstep` was built from.

use lockstep_ckpt::NumbersRecord;
use lockstep_config::{Offload, Precision, RunConfig};
use lockstep_core::{DType, Mesh};
use lockstep_device::cuda::Gpu;
use lockstep_device::{Amx, c_library};
use lockstep_engine::Engine;
use lockstep_plan::{
    AccumulationOrder, DeviceMemory, MasterFormat, ModelId, ModelPlan, OptimizerSpec, PlanInput, RunPlan,
    StateFormat, bounds, chosen_strategy, default_head_chunk_tokens,
};
use lockstep_shape::{ModelShape, UnitShape};

use crate::error::TrainError;

/// The value of a field that is not known on this machine.
const UNKNOWN: &str = "unknown here";

/// The number of hex digits of the hash that are shown and stored.
const HASH_DIGITS: usize = 12;

/// The fields of the fingerprint, in a fixed order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumericsFingerprint {
    fields: Vec<(String, String)>,
}

/// A field in which two fingerprints differ. `None`: the fingerprint does not have the field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FingerprintDifference {
    pub field: String,
    pub then: Option<String>,
    pub now: Option<String>,
}

impl std::fmt::Display for FingerprintDifference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".into());
        write!(f, "{}: {} -> {}", self.field, text(&self.then), text(&self.now))
    }
}

/// A GPU and the versions of the libraries that run on it. `None`: not known here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaVersions {
    /// Name and compute capability: 90 is 9.0.
    pub gpu: Option<(String, u32)>,
    /// The driver's CUDA version: 13000 is 13.0.
    pub driver: Option<u32>,
    pub nvrtc: Option<(u32, u32)>,
    /// cuBLASLt's version number: 130100 is 13.1.0.
    pub cublas_lt: Option<usize>,
    pub nccl: Option<String>,
}

/// The MPI that sums over ranks: its name and version. `None`: not known here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpiVersion(pub Option<String>);

impl CudaVersions {
    /// The versions for a GPU that was opened. `nccl`: the version of NCCL, if the ranks use it.
    pub fn of(gpu: &Gpu, nccl: Option<String>) -> CudaVersions {
        CudaVersions {
            gpu: Some((gpu.name.clone(), gpu.sm)),
            driver: Some(gpu.driver_version),
            nvrtc: Some(gpu.nvrtc().version),
            cublas_lt: Some(gpu.cublas_lt().version()),
            nccl,
        }
    }
}

impl NumericsFingerprint {
    /// The fingerprint of a plan on this machine. `cuda` is set if the run uses GPUs, `mpi` if its ranks use MPI.
    pub fn of(
        config: &RunConfig,
        plan: &RunPlan,
        cuda: Option<&CudaVersions>,
        mpi: Option<&MpiVersion>,
    ) -> NumericsFingerprint {
        let (input, mut fingerprint) = (&plan.input, NumericsFingerprint::default());
        let model = input.model(ModelId::FIRST);
        fingerprint.add("lockstep", env!("CARGO_PKG_VERSION"));
        fingerprint.add("device", if cuda.is_some() { "GPU" } else { "CPU" });
        fingerprint.add("math library", c_library());
        fingerprint.add("storage", input.storage.to_string());
        if let Some(frozen) = frozen_weights(plan) {
            fingerprint.add("frozen weights", frozen);
        }
        fingerprint.add("gradients", gradients(input));
        fingerprint.add("optimizer", optimizer(&model.optimizer));
        if input.masters == MasterFormat::None {
            fingerprint.add("masters", "none, bf16 weights are rounded stochastically");
        }
        fingerprint.add("matmul", matmul(config, input.storage, cuda.is_some()));
        fingerprint.add("head chunk", head_chunk_text(config, &model.shape, cuda.is_some()));
        fingerprint.add("gradient scaling", gradient_scaling(config.precision));
        fingerprint.add("micro-batches", input.num_micro_batches.to_string());
        fingerprint.add("accumulation order", accumulation_order(input.order, input.num_micro_batches));
        let mpi = mpi.filter(|_| input.mesh.world_size() > 1);
        let sum = match (cuda, mpi) {
            (Some(_), _) if input.mesh.world_size() > 1 => library_sum("NCCL", config, plan),
            (None, Some(_)) => library_sum("MPI", config, plan),
            _ => fixed_tree(&input.mesh),
        };
        fingerprint.add("sum over ranks", sum);
        if let Some(MpiVersion(version)) = mpi {
            fingerprint.add("MPI", version.clone().unwrap_or_else(|| UNKNOWN.into()));
        }
        if let Some(cuda) = cuda {
            fingerprint
                .add("optimizer step", optimizer_step(config, model.placements.optimizer_units_on_device));
            fingerprint.add_versions(cuda, input.mesh.world_size() > 1);
        }
        fingerprint
    }

    fn add_versions(&mut self, cuda: &CudaVersions, with_nccl: bool) {
        let known = |text: Option<String>| text.unwrap_or_else(|| UNKNOWN.into());
        let gpu = cuda.gpu.as_ref().map(|(name, sm)| format!("{name}, sm {sm}"));
        self.add("GPU", known(gpu));
        let driver = cuda.driver.map(|version| format!("CUDA {}.{}", version / 1000, version % 1000 / 10));
        self.add("driver", known(driver));
        self.add("NVRTC", known(cuda.nvrtc.map(|(major, minor)| format!("{major}.{minor}"))));
        let lt = cuda.cublas_lt.map(|v| format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100));
        self.add("cuBLASLt", known(lt));
        if with_nccl {
            self.add("NCCL", known(cuda.nccl.clone()));
        }
    }

    /// A fingerprint from the fields of a checkpoint or of another rank.
    pub(crate) fn from_fields(fields: Vec<(String, String)>) -> NumericsFingerprint {
        NumericsFingerprint { fields }
    }

    /// Compares the fingerprints of all ranks. Returns a note if a rank differs from rank 0, whose fingerprint is that
    /// of the run. A collective call.
    pub(crate) fn differing_ranks(&self, engine: &Engine) -> Result<Option<String>, TrainError> {
        let mine = self.lines().collect::<Vec<_>>().join("\n");
        let all = engine.all_gather_bytes("the numerics fingerprint", mine.as_bytes())?;
        let all: Vec<NumericsFingerprint> =
            all.iter().map(|bytes| NumericsFingerprint::from_lines(bytes)).collect();
        let mut others = all.iter().enumerate().filter(|(_, fingerprint)| **fingerprint != all[0]);
        let Some((rank, fingerprint)) = others.next() else { return Ok(None) };
        let differences: Vec<String> =
            fingerprint.differences(&all[0]).iter().map(ToString::to_string).collect();
        let more = match others.count() {
            0 => String::new(),
            more => format!(" ({more} more ranks differ)"),
        };
        let differences = differences.join("; ");
        Ok(Some(format!("the numerics fingerprint of rank {rank} differs from rank 0: {differences}{more}")))
    }

    fn from_lines(text: &[u8]) -> NumericsFingerprint {
        let text = String::from_utf8_lossy(text);
        let field = |line: &str| line.split_once(": ").map(|(name, value)| (name.into(), value.into()));
        NumericsFingerprint { fields: text.lines().filter_map(field).collect() }
    }

    /// The form that checkpoints store.
    pub(crate) fn record(&self) -> NumbersRecord {
        NumbersRecord { fingerprint: self.hash(), fields: self.fields.clone() }
    }

    fn add(&mut self, name: &str, value: impl Into<String>) {
        self.fields.push((name.into(), value.into()));
    }

    pub fn fields(&self) -> &[(String, String)] {
        &self.fields
    }

    /// One line per field: `field: value`.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.fields.iter().map(|(name, value)| format!("{name}: {value}"))
    }

    /// The first 12 hex digits of BLAKE3 over the lines, each with a line feed.
    pub fn hash(&self) -> String {
        let text: String = self.lines().map(|line| line + "\n").collect();
        blake3::hash(text.as_bytes()).to_hex()[..HASH_DIGITS].to_string()
    }

    /// Whether every field is known on this machine.
    pub fn is_complete(&self) -> bool {
        self.fields.iter().all(|(_, value)| value != UNKNOWN)
    }

    /// The fields that differ from an earlier fingerprint, in order.
    pub fn differences(&self, then: &NumericsFingerprint) -> Vec<FingerprintDifference> {
        let value = |of: &NumericsFingerprint, name: &str| {
            of.fields.iter().find(|(field, _)| field == name).map(|(_, value)| value.clone())
        };
        let gone = then.fields.iter().filter(|(name, _)| value(self, name).is_none());
        let names = self.fields.iter().chain(gone).map(|(name, _)| name);
        names
            .map(|name| FingerprintDifference {
                field: name.clone(),
                then: value(then, name),
                now: value(self, name),
            })
            .filter(|difference| difference.then != difference.now)
            .collect()
    }
}

fn gradients(input: &PlanInput) -> String {
    match input.rounds_grads() {
        true => format!("f32, rounded to {} once summed", input.grad_dtype),
        false => "f32".into(),
    }
}

fn optimizer(spec: &OptimizerSpec) -> String {
    let states = match spec.format {
        StateFormat::F32 => "f32 states",
        StateFormat::Bf16 => "bf16 states, rounded stochastically",
        StateFormat::Int8 => "8-bit states in blocks of 256",
    };
    format!("{}, {states}", spec.name)
}

/// The format of frozen weights that do not have the storage type.
fn frozen_weights(plan: &RunPlan) -> Option<String> {
    let has_quantised = |model: &ModelPlan| model.units.iter().any(UnitShape::has_quantised);
    let models = &plan.input.models;
    let quantised: Vec<String> =
        models.iter().filter(|m| has_quantised(m)).map(|m| format!("{:?}", m.role).to_lowercase()).collect();
    let format = "nf4, double quantised";
    match quantised.len() {
        0 => None,
        count if count == models.len() => Some(format.into()),
        _ => Some(format!("{format} ({})", quantised.join(", "))),
    }
}

fn matmul(config: &RunConfig, storage: DType, on_gpu: bool) -> &'static str {
    match (on_gpu, storage) {
        (true, _) if config.device.tf32 => "cuBLASLt, tf32 on",
        (true, _) => "cuBLASLt, tf32 off",
        (false, DType::BF16) if Amx::detect().is_some() => "AMX tiles",
        // AVX-512, AVX2 and portable code give the same bits.
        (false, _) => "vector instructions",
    }
}

/// The chunk size matters because the gradient of the head's weight is summed chunk by chunk. It follows from the
/// configuration: rows that are shorter than `max_length` leave it as it is.
fn head_chunk_text(config: &RunConfig, shape: &ModelShape, is_gpu: bool) -> String {
    let device = if is_gpu { DeviceMemory::Gpu(None) } else { DeviceMemory::Host(None) };
    let default_chunk = || default_head_chunk_tokens(shape.vocab, device);
    let chunk = config.plan.head_chunk_tokens.map_or_else(default_chunk, |tokens| tokens as usize);
    if chunk < bounds(config).tokens { format!("{chunk} tokens") } else { "whole micro-batch".into() }
}

fn gradient_scaling(precision: Precision) -> String {
    match precision {
        Precision::Auto | Precision::F32 | Precision::Bf16 => "none".into(),
        Precision::F16(scaling) => match scaling.loss_scale {
            Some(scale) => format!("static {scale}"),
            None => format!(
                "dynamic from 2^{}, window {}, hysteresis {}, at least {}",
                scaling.initial_scale_power,
                scaling.loss_scale_window,
                scaling.hysteresis,
                scaling.min_loss_scale
            ),
        },
    }
}

fn accumulation_order(order: AccumulationOrder, micros: u32) -> &'static str {
    match order {
        _ if micros == 1 => "none",
        AccumulationOrder::Local => "local",
        AccumulationOrder::Reduced => "reduced",
    }
}

/// The tree by which [`lockstep_core::fold`] sums over ranks. It depends on the nodes only if the number of ranks per
/// node is not a power of two.
fn fixed_tree(mesh: &Mesh) -> String {
    let (world, per_node) = (mesh.world_size(), mesh.per_node);
    match world {
        1 => "one rank".into(),
        _ if per_node >= world || per_node.is_power_of_two() => format!("fixed tree over {world} ranks"),
        _ => format!("fixed tree over {world} ranks, in nodes of {per_node} first"),
    }
}

/// A library's order of summation depends on the ranks of a collective and on the sizes of the buckets.
fn library_sum(library: &str, config: &RunConfig, plan: &RunPlan) -> String {
    let input = &plan.input;
    let Mesh { replicate, shard, per_node } = input.mesh;
    let strategy = chosen_strategy(config, &input.models[0].shape);
    format!(
        "{library}, {strategy}, {replicate} x {shard} ranks (replicate x shard), {per_node} per node, buckets of {} bytes \
         and {} elements",
        input.ddp_bucket_bytes.0, input.reduce_bucket_elems
    )
}

/// The optimizer step and the gradient norm have different code on the host and on the GPU.
fn optimizer_step(config: &RunConfig, units_on_gpu: u32) -> String {
    match (config.plan.offload_optimizer, units_on_gpu) {
        (Offload::None, _) => "on the GPU".into(),
        (Offload::Cpu | Offload::Nvme, 0) => "on the host".into(),
        (Offload::Cpu | Offload::Nvme, units) => {
            format!("first {units} units on the GPU, the rest on the host")
        }
    }
}

#[cfg(test)]
mod tests;
