//! The strategy, the ranks, memory, offload and recomputation.

use std::fmt;
use std::path::PathBuf;

use crate::error::Problem;
use crate::reader::{Later, Reader};
use crate::yaml::Value;

/// The strategy, the ranks, memory, offload and recomputation.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanConfig {
    /// With one rank, `auto` is already resolved to `Ddp`.
    pub strategy: StrategyName,
    pub recompute: Recompute,
    pub accumulation_order: AccumulationOrder,
    /// The number of units to gather ahead.
    pub prefetch: u32,
    /// MiB per gradient bucket.
    pub ddp_bucket_cap_mb: u32,
    /// Elements.
    pub reduce_bucket_size: u64,
    /// Elements.
    pub allgather_bucket_size: u64,
    pub offload_optimizer: Offload,
    /// The minimum fraction of the parameters whose optimizer state is offloaded. `None`: as few as the memory budget
    /// allows, or all without a budget.
    pub offload_ratio: Option<f64>,
    pub offload_param: Offload,
    /// The folder for NVMe offload.
    pub nvme_path: Option<PathBuf>,
    pub carrier: CarrierName,
    /// Seconds.
    pub collective_timeout: f64,
    pub nodes: u32,
    pub nproc_per_node: u32,
    /// GiB per rank.
    pub memory_budget_gib: Option<f64>,
    /// CPU threads per rank.
    pub threads: Option<u32>,
    pub head_chunk_tokens: Option<u32>,
}

impl PlanConfig {
    /// The number of ranks.
    pub fn world_size(&self) -> u32 {
        self.nodes * self.nproc_per_node
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StrategyName {
    Ddp,
    Zero1,
    Zero2,
    Zero3,
    ShardGradOp,
    FullShard,
    HybridShard,
    NoShard,
    /// The planner chooses.
    Auto,
}

impl fmt::Display for StrategyName {
    /// The name that configurations use.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            StrategyName::Ddp => "ddp",
            StrategyName::Zero1 => "zero1",
            StrategyName::Zero2 => "zero2",
            StrategyName::Zero3 => "zero3",
            StrategyName::ShardGradOp => "shard_grad_op",
            StrategyName::FullShard => "full_shard",
            StrategyName::HybridShard => "hybrid_shard",
            StrategyName::NoShard => "no_shard",
            StrategyName::Auto => "auto",
        })
    }
}

/// Which activations backward recomputes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    None,
    Selective,
    Full,
    /// As little as the memory budget allows.
    Auto,
}

/// The order in which gradients are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccumulationOrder {
    /// Over micro-batches, then over ranks.
    Local,
    /// Over ranks, then over micro-batches.
    Reduced,
    /// The strategy's default.
    Auto,
}

/// Where offloaded state is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// Not offloaded: on the device.
    None,
    Cpu,
    Nvme,
}

/// What carries the communication between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CarrierName {
    /// Shared memory on one host, TCP between hosts. Under mpiexec or srun, MPI where all ranks have it.
    Auto,
    Shm,
    Tcp,
    /// The MPI library of the cluster. Between steps as for `Auto`.
    Mpi,
}

const STRATEGIES: [(&str, StrategyName); 9] = [
    ("ddp", StrategyName::Ddp),
    ("zero1", StrategyName::Zero1),
    ("zero2", StrategyName::Zero2),
    ("zero3", StrategyName::Zero3),
    ("shard_grad_op", StrategyName::ShardGradOp),
    ("full_shard", StrategyName::FullShard),
    ("hybrid_shard", StrategyName::HybridShard),
    ("no_shard", StrategyName::NoShard),
    ("auto", StrategyName::Auto),
];

const OFFLOADS: [(&str, Offload); 3] =
    [("none", Offload::None), ("cpu", Offload::Cpu), ("nvme", Offload::Nvme)];

impl PlanConfig {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        let (nodes, nproc_per_node) = read_world(r);
        let orders = [
            ("local", AccumulationOrder::Local),
            ("reduced", AccumulationOrder::Reduced),
            ("auto", AccumulationOrder::Auto),
        ];
        let carriers = [
            ("auto", CarrierName::Auto),
            ("shm", CarrierName::Shm),
            ("tcp", CarrierName::Tcp),
            ("mpi", CarrierName::Mpi),
        ];
        let optimizer = read_offload(r, "offload_optimizer", true);
        let param = read_offload(r, "offload_param", false);
        let recompute = read_recompute(r);
        let memory_budget_gib = r.float("memory_budget_gib", "above 0", |x| x > 0.0);
        PlanConfig {
            strategy: match read_strategy(r) {
                StrategyName::Auto if nodes * nproc_per_node == 1 => StrategyName::Ddp,
                strategy => strategy,
            },
            recompute,
            accumulation_order: r
                .word("accumulation_order", &orders, Later::NONE)
                .unwrap_or(AccumulationOrder::Auto),
            prefetch: r.count("prefetch", 0).unwrap_or(0),
            ddp_bucket_cap_mb: r.count("ddp_bucket_cap_mb", 1).unwrap_or(1),
            reduce_bucket_size: r.count("reduce_bucket_size", 0).unwrap_or(0),
            allgather_bucket_size: r.count("allgather_bucket_size", 0).unwrap_or(0),
            offload_optimizer: optimizer.to,
            offload_ratio: optimizer.ratio,
            offload_param: param.to,
            nvme_path: r.text("nvme_path", "a folder").map(PathBuf::from).or(optimizer.path).or(param.path),
            carrier: r.word("carrier", &carriers, Later::NONE).unwrap_or(CarrierName::Auto),
            collective_timeout: r.float("collective_timeout", "above 0", |x| x > 0.0).unwrap_or(1800.0),
            nodes,
            nproc_per_node,
            memory_budget_gib,
            threads: r.count("threads", 1),
            head_chunk_tokens: r.count("head_chunk_tokens", 1),
        }
    }
}

fn read_world(r: &mut Reader<'_>) -> (u32, u32) {
    // 16 bits each, so that the product fits into 32.
    let nodes: u16 = r.count("nodes", 1).unwrap_or(1);
    let nproc: u16 = r.count("nproc_per_node", 1).unwrap_or(1);
    let world = u32::from(nodes) * u32::from(nproc);
    if let Some(given) = r.given("world_size")
        && let Some(asked) = r.count::<u32>("world_size", 1)
        && asked != world
    {
        let hint = format!(
            "{world} {} started: remove it, or start {asked}.",
            if world == 1 { "rank is" } else { "ranks are" }
        );
        r.out_of_range_with("world_size", "the product of `nodes` and `nproc_per_node`", hint, &given.node);
    }
    (nodes.into(), nproc.into())
}

fn read_strategy(r: &mut Reader<'_>) -> StrategyName {
    use StrategyName as S;
    let later = Later(
        &["deepspeed", "fsdp", "fsdp2", "hybrid_shard_zero2", "tp", "pp"],
        "use zero1, zero2, zero3, full_shard or shard_grad_op.",
    );
    let given = r.given("strategy");
    let strategy = r.word("strategy", &STRATEGIES, later);
    let fsdp_given = r.given("fsdp");
    let fsdp = r.bool("fsdp");
    match (strategy, fsdp) {
        (None, Some(true)) if given.is_none() => {
            r.derived("strategy", "fsdp");
            return S::FullShard;
        }
        (Some(S::Ddp | S::Zero1 | S::Zero2 | S::Zero3), Some(true))
        | (Some(S::FullShard | S::ShardGradOp | S::HybridShard), Some(false)) => {
            if let (Some(a), Some(b)) = (&given, &fsdp_given) {
                r.conflict(a, b, "keep `strategy` and remove `fsdp`.");
            }
        }
        _ => {}
    }
    strategy.unwrap_or(S::Ddp)
}

fn read_recompute(r: &mut Reader<'_>) -> Recompute {
    r.prefer_flags(&["recompute", "gradient_checkpointing"]);
    let words = [
        ("none", Recompute::None),
        ("selective", Recompute::Selective),
        ("full", Recompute::Full),
        ("auto", Recompute::Auto),
    ];
    let by_word = r.given("recompute").zip(r.word("recompute", &words, Later::NONE));
    let switch = r.given("gradient_checkpointing").zip(r.bool("gradient_checkpointing"));
    match (by_word, switch) {
        (Some((word, recompute)), Some((given, on))) => {
            // `gradient_checkpointing: true` is compatible with any recomputation.
            if (recompute != Recompute::None) != on {
                r.conflict(&word, &given, "keep `recompute` and remove `gradient_checkpointing`.");
            }
            recompute
        }
        (Some((_, recompute)), None) => recompute,
        (None, Some((_, on))) => {
            r.derived("recompute", "gradient_checkpointing");
            if on { Recompute::Full } else { Recompute::None }
        }
        (None, None) => Recompute::Selective,
    }
}

/// DeepSpeed's other offload settings. They control how copies are made, which the planner determines here.
const OFFLOAD_DETAILS: [&str; 7] = [
    "pin_memory",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
];

/// The value of `offload_optimizer` or `offload_param`.
struct OffloadSettings {
    to: Offload,
    path: Option<PathBuf>,
    ratio: Option<f64>,
}

/// Reads a word, or DeepSpeed's `{device: nvme, nvme_path: /local, pin_memory: true}`. `in_part`: whether `ratio` is
/// allowed.
fn read_offload(r: &mut Reader<'_>, key: &'static str, in_part: bool) -> OffloadSettings {
    let mut read = OffloadSettings { to: Offload::None, path: None, ratio: None };
    let Some(node) = r.node(key) else { return read };
    let Value::Map(entries) = &node.value else {
        read.to = r.word_of(key, &OFFLOADS, Later::NONE, &node).unwrap_or(Offload::None);
        return read;
    };
    let mut device = None;
    for entry in entries {
        match entry.key.as_str() {
            "device" => device = Some(r.word_of(key, &OFFLOADS, Later::NONE, &entry.node)),
            "nvme_path" => read.path = r.text_of(key, "a folder", &entry.node).map(PathBuf::from),
            "ratio" if in_part => {
                read.ratio = r.float_of(
                    "offload_optimizer.ratio",
                    "above 0 and at most 1",
                    |x| x > 0.0 && x <= 1.0,
                    &entry.node,
                );
            }
            "ratio" => {
                r.fail(Problem::KeyNotImplemented { key: format!("{key}.ratio"), instead: "" }, entry.key_at);
            }
            other if OFFLOAD_DETAILS.contains(&other) => {
                r.note(format!("`{key}.{other}` has no effect: the planner determines it"));
            }
            other => {
                let known = ["device", "nvme_path", "ratio"].into_iter().chain(OFFLOAD_DETAILS);
                let closest = lockstep_core::closest(other, known);
                r.fail(Problem::UnknownKey { key: format!("{key}.{other}"), closest }, entry.key_at);
            }
        }
    }
    if device.is_none() {
        r.wrong_type(key, "none, cpu, nvme or a map with `device`", &node);
    }
    read.to = device.flatten().unwrap_or(Offload::None);
    read
}
