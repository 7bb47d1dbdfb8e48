//! The settings that must not change a bit of a training run, and their combinations.

use std::fmt;

use lockstep_config::StrategyName;
use lockstep_core::{Bytes, DType, Mesh, Rank, Step};
use lockstep_engine::{Engine, UpdateRule, UpdateSettings};
use lockstep_plan::{AccumulationOrder, MasterFormat, MemoryTier, StateFormat};
use lockstep_shape::{ModelShape, Recompute};

use crate::setup::TestSetup;
use crate::test_objective::TestBatch;
use crate::world::{TrainingTrace, merged, run_in_world, run_rank};

/// How bytes are sent between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CarrierKind {
    Thread,
    Shm,
    Tcp,
}

/// Where optimizer states are, and for how many units they are on the device nevertheless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptimizerPlacement {
    pub tier: MemoryTier,
    pub optimizer_units_on_device: u32,
}

impl fmt::Display for OptimizerPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.optimizer_units_on_device {
            0 => write!(f, "{}", self.tier),
            stay => write!(f, "{}, of {stay} units device", self.tier),
        }
    }
}

/// One combination of settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The number of nodes, and of ranks per node.
    pub mesh: (u32, u32),
    pub accumulation: (u32, AccumulationOrder),
    pub storage: DType,
    pub strategy: StrategyName,
    pub optimizer: OptimizerPlacement,
    pub params: MemoryTier,
    pub recompute: Recompute,
    pub prefetch: u32,
    pub carrier: CarrierKind,
}

const MESHES: [(u32, u32); 5] = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2)];
const ACCUMULATIONS: [(u32, AccumulationOrder); 3] =
    [(1, AccumulationOrder::Local), (3, AccumulationOrder::Local), (3, AccumulationOrder::Reduced)];
const STORAGES: [DType; 2] = [DType::F32, DType::BF16];
const STRATEGIES: [StrategyName; 6] = [
    StrategyName::Ddp,
    StrategyName::Zero1,
    StrategyName::Zero2,
    StrategyName::ShardGradOp,
    StrategyName::Zero3,
    StrategyName::HybridShard,
];
const TIERS: [MemoryTier; 3] = [MemoryTier::Device, MemoryTier::Host, MemoryTier::Nvme];
/// Two units on the device are the embedding and one of three blocks.
const OPTIMIZERS: [OptimizerPlacement; 5] = [
    OptimizerPlacement { tier: MemoryTier::Device, optimizer_units_on_device: 0 },
    OptimizerPlacement { tier: MemoryTier::Host, optimizer_units_on_device: 0 },
    OptimizerPlacement { tier: MemoryTier::Nvme, optimizer_units_on_device: 0 },
    OptimizerPlacement { tier: MemoryTier::Host, optimizer_units_on_device: 2 },
    OptimizerPlacement { tier: MemoryTier::Nvme, optimizer_units_on_device: 2 },
];
const RECOMPUTES: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];
const PREFETCHES: [u32; 4] = [0, 1, 2, 3];
const CARRIERS: [CarrierKind; 3] = [CarrierKind::Thread, CarrierKind::Shm, CarrierKind::Tcp];

/// The number of values of each setting.
const LEVELS: [usize; 9] = [
    MESHES.len(),
    ACCUMULATIONS.len(),
    STORAGES.len(),
    STRATEGIES.len(),
    OPTIMIZERS.len(),
    TIERS.len(),
    RECOMPUTES.len(),
    PREFETCHES.len(),
    CARRIERS.len(),
];

type Levels = [usize; LEVELS.len()];

impl Case {
    /// The simplest case with the same mesh, micro-batches and storage type. This case must give the same bits.
    pub fn baseline(&self) -> Case {
        Case {
            strategy: StrategyName::Ddp,
            optimizer: OPTIMIZERS[0],
            params: MemoryTier::Device,
            recompute: Recompute::None,
            prefetch: 0,
            carrier: CarrierKind::Thread,
            ..*self
        }
    }

    fn of(levels: &Levels) -> Case {
        Case {
            mesh: MESHES[levels[0]],
            accumulation: ACCUMULATIONS[levels[1]],
            storage: STORAGES[levels[2]],
            strategy: STRATEGIES[levels[3]],
            optimizer: OPTIMIZERS[levels[4]],
            params: TIERS[levels[5]],
            recompute: RECOMPUTES[levels[6]],
            prefetch: PREFETCHES[levels[7]],
            carrier: CARRIERS[levels[8]],
        }
    }

    /// Whether the planner accepts the case, and it is not a duplicate of another one.
    fn is_possible(&self) -> bool {
        let whole_params =
            matches!(self.strategy, StrategyName::Ddp | StrategyName::Zero1 | StrategyName::Zero2);
        let hybrid = self.strategy == StrategyName::HybridShard;
        !(whole_params && self.params != MemoryTier::Device)
            && (!hybrid || self.mesh.0 > 1)
            && (self.mesh != (1, 1) || self.carrier == CarrierKind::Thread)
    }

    pub fn world(&self) -> u32 {
        self.mesh.0 * self.mesh.1
    }

    pub fn setup(&self) -> TestSetup {
        let (nodes, per_node) = self.mesh;
        let world = nodes * per_node;
        TestSetup {
            recompute: self.recompute,
            storage: self.storage,
            num_micro_batches: self.accumulation.0,
            order: self.accumulation.1,
            threads: 1,
            strategy: self.strategy,
            mesh: match self.strategy {
                StrategyName::Ddp => Mesh { replicate: world, shard: 1, per_node },
                StrategyName::HybridShard => Mesh { replicate: nodes, shard: per_node, per_node },
                _ => Mesh { replicate: 1, shard: world, per_node },
            },
            prefetch: self.prefetch,
            // Smaller than a unit, so that units are split over buckets and buckets hold several units.
            ddp_bucket_bytes: Bytes(100 << 10),
            params_tier: self.params,
            optimizer_tier: self.optimizer.tier,
            optimizer_units_on_device: self.optimizer.optimizer_units_on_device,
            ..TestSetup::default()
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { mesh, accumulation, storage, strategy, optimizer, params, recompute, prefetch, carrier } =
            self;
        write!(
            f,
            "{strategy:?} on {}x{}, {} micro-batches {:?}, {storage}, optimizer {optimizer}, parameters {params}, \
             recompute {recompute:?}, prefetch {prefetch}, {carrier:?}",
            mesh.0, mesh.1, accumulation.0, accumulation.1,
        )
    }
}

/// The optimizer of a case, and its frozen tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CaseTraining {
    pub rule: UpdateRule,
    /// Patterns of frozen tensors.
    pub frozen: &'static [&'static str],
    pub masters: MasterFormat,
    pub grad_dtype: DType,
    pub states: StateFormat,
}

impl CaseTraining {
    /// All tensors are trained, with AdamW.
    pub const ADAMW: CaseTraining = CaseTraining {
        rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
        frozen: &[],
        masters: MasterFormat::F32,
        grad_dtype: DType::F32,
        states: StateFormat::F32,
    };
}

/// Runs a case with AdamW. See [`run_case_with`].
pub fn run_case(case: &Case) -> TrainingTrace {
    run_case_with(case, CaseTraining::ADAMW)
}

/// Runs a case: three steps of a small model, of which two overlap. The batches are random and depend only on the mesh and
/// on the number of micro-batches.
pub fn run_case_with(case: &Case, trained: CaseTraining) -> TrainingTrace {
    let shape = ModelShape { vocab: 101, layers: 3, ..ModelShape::named("tiny", 101).expect("a named size") };
    run_case_of(&shape, case, trained)
}

/// Runs cases, each of which must have the bits of plain ddp on its mesh.
pub fn assert_same_as_plain_ddp(cases: impl IntoIterator<Item = Case>, trained: CaseTraining) {
    let mut plain: Vec<(Case, TrainingTrace)> = Vec::new();
    for case in cases {
        let base = case.baseline();
        if !plain.iter().any(|(known, _)| *known == base) {
            plain.push((base, run_case_with(&base, trained)));
        }
        let (_, want) = plain.iter().find(|(known, _)| *known == base).expect("just run");
        assert!(run_case_with(&case, trained) == *want, "{case}: {trained:?} differs from plain ddp");
    }
}

/// As [`run_case_with`], for another model with a vocabulary of 101 tokens.
pub fn run_case_of(shape: &ModelShape, case: &Case, trained: CaseTraining) -> TrainingTrace {
    run_case_from(shape, case, trained, &|_| {})
}

/// The same from other weights than random ones: `prepare` writes them on every rank.
pub fn run_case_from(
    shape: &ModelShape,
    case: &Case,
    trained: CaseTraining,
    prepare: &(dyn Fn(&mut Engine) + Sync),
) -> TrainingTrace {
    let world = case.world();
    let setup = TestSetup {
        optimizer: trained.rule.spec().in_format(trained.states),
        masters: trained.masters,
        grad_dtype: trained.grad_dtype,
        frozen: trained.frozen,
        ..case.setup()
    };
    let micro_batch = |s: Step, rank: Rank, m: u32| {
        let seed = s.0 * 1000 + u64::from(m * world + rank.0);
        // One rank has an empty last micro-batch, which it must run nevertheless.
        let idle = rank.0 + 1 == world
            && world > 1
            && m + 1 == setup.num_micro_batches
            && setup.num_micro_batches > 1;
        let lengths: &[usize] = if idle { &[] } else { &[20 + (seed % 7) as usize, 3, 30] };
        TestBatch::random(lengths, shape.vocab, seed)
    };
    let batches = |s: Step, rank: Rank| {
        let all = (0..world).flat_map(|r| (0..setup.num_micro_batches).map(move |m| (Rank(r), m)));
        let denominator = all.map(|(r, m)| micro_batch(s, r, m).tokens.len() as f64).sum();
        ((0..setup.num_micro_batches).map(|m| micro_batch(s, rank, m)).collect(), denominator)
    };
    let updates =
        UpdateSettings { t: 1, lr: 1e-2, rule: trained.rule, weight_decay: 0.1, max_norm: Some(1.0) };
    let nvme_dir = tempfile::tempdir().expect("a temporary folder");
    let run = |engine: &mut Engine| {
        prepare(engine);
        run_rank(engine, 3, updates, &batches)
    };
    let trace = merged(run_in_world(shape, &setup, case.carrier, Some(nvme_dir.path()), &run));
    assert!(trace.norms.iter().all(|norm| f64::from_bits(*norm) > 0.0), "{case}: nothing was trained");
    trace
}

/// All possible cases.
pub fn all_cases() -> Vec<Case> {
    let total: usize = LEVELS.iter().product();
    let nth = |n: usize| {
        let mut rest = n;
        let levels: Levels = std::array::from_fn(|i| {
            let level = rest % LEVELS[i];
            rest /= LEVELS[i];
            level
        });
        Case::of(&levels)
    };
    (0..total).map(nth).filter(Case::is_possible).collect()
}

/// A small set of cases, chosen greedily, in which every pair of values occurs that can occur.
pub fn pairwise_cases() -> Vec<Case> {
    let all = all_cases();
    let pairs_of = |case: &Case| {
        let levels = levels_of(case);
        let mut pairs = Vec::with_capacity(36);
        for i in 0..levels.len() {
            for j in i + 1..levels.len() {
                pairs.push((i, levels[i], j, levels[j]));
            }
        }
        pairs
    };
    let mut open: std::collections::HashSet<_> = all.iter().flat_map(pairs_of).collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        // Of cases with equally many new pairs the first one is chosen, so that the choice does not depend on hashing.
        let gain = |case: &Case| pairs_of(case).iter().filter(|pair| open.contains(*pair)).count();
        let mut best = (0, all[0]);
        for case in &all {
            let gained = gain(case);
            if gained > best.0 {
                best = (gained, *case);
            }
        }
        for pair in pairs_of(&best.1) {
            open.remove(&pair);
        }
        chosen.push(best.1);
    }
    chosen
}

fn levels_of(case: &Case) -> Levels {
    fn at<T: PartialEq>(list: &[T], value: &T) -> usize {
        list.iter().position(|v| v == value).expect("a value of the list")
    }
    [
        at(&MESHES, &case.mesh),
        at(&ACCUMULATIONS, &case.accumulation),
        at(&STORAGES, &case.storage),
        at(&STRATEGIES, &case.strategy),
        at(&OPTIMIZERS, &case.optimizer),
        at(&TIERS, &case.params),
        at(&RECOMPUTES, &case.recompute),
        at(&PREFETCHES, &case.prefetch),
        at(&CARRIERS, &case.carrier),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pairwise_cases_are_few_and_possible() {
        let cases = pairwise_cases();
        assert!(cases.len() <= 60, "{} cases", cases.len());
        assert!(cases.iter().all(Case::is_possible));
        assert!(all_cases().len() > 10_000);
    }
}
