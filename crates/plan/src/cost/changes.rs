//! For a plan that does not fit: the changes that make it fit with the least predicted time lost.
//!
//! The guides' ladder has steps: a smaller micro-batch with more accumulation, recomputation, 16-bit storage, a strategy
//! that shards more, offload of the optimizer, offload of the parameters. A suggestion takes one step or several. All
//! suggestions keep the global batch.

use lockstep_config::StrategyName;
use lockstep_core::{Bytes, DType};
use lockstep_shape::Recompute;

use crate::buffer::MemoryTier;
use crate::cost::strategies::{STRATEGIES, canonical, choose_strategy, host_bytes};
use crate::cost::workload::{Machine, Workload};
use crate::input::RecomputePolicy;
use crate::run_plan::PlanData;

/// How many suggestions a refusal makes.
const SUGGESTIONS: usize = 3;

/// One change of a configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// `per_device_train_batch_size` and `gradient_accumulation_steps`.
    MicroBatch {
        rows: u32,
        num_micro_batches: u32,
    },
    Recompute(RecomputePolicy),
    /// bf16 storage instead of f32.
    Bf16,
    Strategy(StrategyName),
    OffloadOptimizer(MemoryTier),
    OffloadParams(MemoryTier),
}

/// The steps of the ladder, in the guides' order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LadderStep {
    MicroBatch,
    Recompute,
    Precision,
    Strategy,
    OffloadOptimizer,
    OffloadParams,
}

impl LadderStep {
    const ALL: [LadderStep; 6] = [
        LadderStep::MicroBatch,
        LadderStep::Recompute,
        LadderStep::Precision,
        LadderStep::Strategy,
        LadderStep::OffloadOptimizer,
        LadderStep::OffloadParams,
    ];
}

/// Changes that together make a plan fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Suggestion {
    /// In the order of the ladder.
    pub changes: Vec<Change>,
    pub device: Bytes,
    pub host: Bytes,
    pub step_seconds: f64,
    pub tokens_per_s: f64,
}

/// A plan that does not fit, and what would make it fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    pub needed: Bytes,
    pub budget: Bytes,
    /// The predicted step of the plan that was refused, if the memory were there.
    pub step_seconds: f64,
    /// At most three, in the order of the ladder. Empty: no combination of changes fits.
    pub suggestions: Vec<Suggestion>,
}

impl Suggestion {
    /// How much longer a step takes than the one that was refused, as a share.
    pub fn time_lost(&self, refusal: &Refusal) -> f64 {
        self.step_seconds / refusal.step_seconds - 1.0
    }
}

/// Finds what makes a run fit. `None`: it fits already, or its strategy does not apply to the machine's ranks, which
/// [`crate::resolve`] reports. With `auto` the changes start from the strategy that needs the least memory.
pub fn suggest_changes(workload: &Workload<'_>, machine: &Machine) -> Option<Refusal> {
    let current = match canonical(workload.strategy) {
        StrategyName::Auto => choose_strategy(workload, machine).strategy,
        named => named,
    };
    let workload = workload.with_strategy(current, &machine.cluster)?;
    let plan = workload.lay_out(machine);
    if machine.fits(&plan) {
        return None;
    }
    let search = Search { workload: &workload, machine };
    let step_seconds = machine.predict(&plan).step_seconds;
    Some(Refusal {
        needed: plan.device_bytes(),
        budget: machine.budget,
        step_seconds,
        suggestions: search.best(),
    })
}

struct Search<'a> {
    workload: &'a Workload<'a>,
    machine: &'a Machine,
}

/// Changes that fit, and the steps of the ladder that they take.
struct Fitting {
    steps: Vec<LadderStep>,
    changes: Vec<Change>,
    suggestion: Suggestion,
}

impl Search<'_> {
    /// The suggestions that lose the least time, first one for every set of steps. More than two steps are tried only if
    /// there are too few suggestions without them.
    fn best(&self) -> Vec<Suggestion> {
        let mut found: Vec<Fitting> = Vec::new();
        for num_steps in 1..=LadderStep::ALL.len() {
            for steps in sets_of(num_steps) {
                let variants = self.variants(&steps).into_iter();
                let fitting: Vec<Fitting> =
                    variants.filter_map(|variant| self.fitting(&steps, variant, &found)).collect();
                found.extend(fitting);
            }
            if num_steps >= 2 && fastest_of_each_set(&found).len() >= SUGGESTIONS {
                break;
            }
        }
        let by_time =
            |a: &&Fitting, b: &&Fitting| a.suggestion.step_seconds.total_cmp(&b.suggestion.step_seconds);
        let mut best = fastest_of_each_set(&found);
        best.sort_by(by_time);
        // If there are few sets of steps, one set may appear with several levels.
        let mut others: Vec<&Fitting> = found.iter().collect();
        others.retain(|other| !best.iter().any(|fitting| std::ptr::eq(*fitting, *other)));
        others.sort_by(by_time);
        best.extend(others);
        best.truncate(SUGGESTIONS);
        best.sort_by(|a, b| a.steps.cmp(&b.steps).then(by_time(a, b)));
        best.into_iter().map(|fitting| fitting.suggestion.clone()).collect()
    }

    /// All ways to take exactly these steps.
    fn variants(&self, steps: &[LadderStep]) -> Vec<(Vec<Change>, Workload<'_>)> {
        let mut variants = vec![(vec![], self.workload.clone())];
        for step in steps {
            let mut longer = Vec::new();
            for (changes, workload) in &variants {
                for (change, changed) in self.levels(*step, workload) {
                    longer.push((changes.iter().copied().chain([change]).collect(), changed));
                }
            }
            variants = longer;
        }
        variants
    }

    /// The variant as a suggestion, if it fits and would not fit without one of its changes.
    fn fitting(
        &self,
        steps: &[LadderStep],
        (changes, workload): (Vec<Change>, Workload<'_>),
        known: &[Fitting],
    ) -> Option<Fitting> {
        let has_needless = |known: &Fitting| known.changes.iter().all(|change| changes.contains(change));
        if known.iter().any(has_needless) {
            return None;
        }
        let plan = workload.lay_out(self.machine);
        let suggestion = self.machine.fits(&plan).then(|| self.suggestion(changes.clone(), &plan))?;
        Some(Fitting { steps: steps.to_vec(), changes, suggestion })
    }

    fn suggestion(&self, mut changes: Vec<Change>, plan: &PlanData) -> Suggestion {
        for change in &mut changes {
            if let Change::Recompute(policy) = change {
                // What the budget has chosen.
                *policy = plan.input.models[0].recompute;
            }
        }
        let prediction = self.machine.predict(plan);
        Suggestion {
            changes,
            device: plan.device_bytes(),
            host: host_bytes(plan),
            step_seconds: prediction.step_seconds,
            tokens_per_s: prediction.tokens_per_s,
        }
    }

    /// The ways to take one step of the ladder.
    fn levels<'w>(&self, step: LadderStep, workload: &Workload<'w>) -> Vec<(Change, Workload<'w>)> {
        let placements = workload.input.models[0].placements;
        let on_gpu = workload.input.has_separate_memory();
        match step {
            LadderStep::MicroBatch => {
                let divisors = (1..workload.rows).rev().filter(|rows| workload.rows.is_multiple_of(*rows));
                let level = |rows: u32| {
                    let changed = workload.with_rows(rows);
                    let num_micro_batches = changed.input.num_micro_batches;
                    (Change::MicroBatch { rows, num_micro_batches }, changed)
                };
                divisors.map(level).collect()
            }
            LadderStep::Recompute => {
                let full = RecomputePolicy::from(Recompute::Full);
                let recomputes_all = workload.input.models[0].recompute == full;
                let changed = Workload { auto_recompute: true, ..workload.clone() };
                let is_new = !recomputes_all && !workload.auto_recompute;
                is_new.then_some((Change::Recompute(full), changed)).into_iter().collect()
            }
            LadderStep::Precision => {
                let is_new = workload.input.storage == DType::F32;
                is_new.then(|| (Change::Bf16, workload.with_storage(DType::BF16))).into_iter().collect()
            }
            LadderStep::Strategy => self.further_sharding(workload),
            LadderStep::OffloadOptimizer if placements.optimizer_tier == MemoryTier::Device => {
                // On a CPU the device's memory is the host's.
                let tiers = [on_gpu.then_some(MemoryTier::Host), Some(MemoryTier::Nvme)];
                let level = |tier| (Change::OffloadOptimizer(tier), workload.with_optimizer_in(tier));
                tiers.into_iter().flatten().map(level).collect()
            }
            LadderStep::OffloadParams if on_gpu && self.can_offload_params(workload) => {
                vec![(Change::OffloadParams(MemoryTier::Host), workload.with_params_in(MemoryTier::Host))]
            }
            LadderStep::OffloadOptimizer | LadderStep::OffloadParams => vec![],
        }
    }

    fn can_offload_params(&self, workload: &Workload<'_>) -> bool {
        let placements = workload.input.models[0].placements;
        placements.params == crate::Placement::Shard && placements.params_tier == MemoryTier::Device
    }

    /// The strategies that come after the configured one and shard more.
    fn further_sharding<'w>(&self, workload: &Workload<'w>) -> Vec<(Change, Workload<'w>)> {
        if self.machine.cluster.world_size() == 1 {
            return vec![];
        }
        let position = |name: StrategyName| STRATEGIES.iter().position(|other| *other == name).unwrap_or(0);
        let current = position(canonical(workload.strategy));
        let further = STRATEGIES.into_iter().skip(current + 1);
        let level = |name: StrategyName| {
            let changed = workload.with_strategy(name, &self.machine.cluster)?;
            Some((Change::Strategy(name), changed))
        };
        further.filter_map(level).collect()
    }
}

/// Of every set of steps the fastest suggestion.
fn fastest_of_each_set(found: &[Fitting]) -> Vec<&Fitting> {
    let mut best: Vec<&Fitting> = Vec::new();
    for fitting in found {
        match best.iter_mut().find(|other| other.steps == fitting.steps) {
            Some(other) if fitting.suggestion.step_seconds < other.suggestion.step_seconds => {
                *other = fitting
            }
            Some(_) => {}
            None => best.push(fitting),
        }
    }
    best
}

/// All sets of `len` steps, each in the order of the ladder.
fn sets_of(len: usize) -> Vec<Vec<LadderStep>> {
    let all = 0..1u32 << LadderStep::ALL.len();
    let chosen = |set: u32| LadderStep::ALL.into_iter().filter(move |step| set & (1 << *step as u32) != 0);
    all.filter(|set| set.count_ones() as usize == len).map(|set| chosen(set).collect()).collect()
}
