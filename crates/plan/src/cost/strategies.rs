//! All strategies for one run side by side, and the choice among them.

use lockstep_config::StrategyName;
use lockstep_core::Bytes;

use crate::budget::Candidate;
use crate::buffer::MemoryTier;
use crate::cost::memory_kinds::MemoryByKind;
use crate::cost::prediction::Prediction;
use crate::cost::workload::{Machine, Workload};
use crate::input::RecomputePolicy;
use crate::run_plan::PlanData;

/// The strategies, those that shard least first. `no_shard` is ddp and `full_shard` is zero3.
pub const STRATEGIES: [StrategyName; 6] = [
    StrategyName::Ddp,
    StrategyName::Zero1,
    StrategyName::Zero2,
    StrategyName::ShardGradOp,
    StrategyName::Zero3,
    StrategyName::HybridShard,
];

/// Predicted times that differ by less than this are a tie, which the guides' rule decides: the model is not more
/// exact than that.
const TIE: f64 = 0.05;

/// What a run does where its configuration leaves it open, and its predicted step.
#[derive(Clone, Debug, PartialEq)]
pub struct RunChoices {
    pub strategy: StrategyName,
    /// Rows of a micro-batch.
    pub rows: u32,
    pub num_micro_batches: u32,
    pub recompute: RecomputePolicy,
    pub layers: u32,
    /// Units whose optimizer states are on the device, of all, if states are offloaded.
    pub units_on_device: Option<(u32, u32)>,
    pub step_seconds: f64,
}

impl RunChoices {
    fn of(strategy: StrategyName, rows: u32, candidate: &Candidate) -> RunChoices {
        let input = &candidate.plan.input;
        let model = &input.models[0];
        let offloads = model.placements.optimizer_tier != MemoryTier::Device;
        RunChoices {
            strategy,
            rows,
            num_micro_batches: input.num_micro_batches,
            recompute: model.recompute,
            layers: model.shape.layers as u32,
            units_on_device: offloads
                .then_some((model.placements.optimizer_units_on_device, model.units.len() as u32)),
            step_seconds: candidate.seconds(),
        }
    }
}

/// One strategy for a run, with its fastest choices.
#[derive(Clone, Debug, PartialEq)]
pub struct StrategyRow {
    pub strategy: StrategyName,
    pub choices: RunChoices,
    /// The next best choices under this strategy, if any are open.
    pub next: Option<RunChoices>,
    pub memory: MemoryByKind,
    /// Host memory of a rank, in a run with a GPU.
    pub host: Bytes,
    pub fits: bool,
    pub is_chosen: bool,
    pub prediction: Prediction,
}

/// All strategies that apply to a run.
#[derive(Clone, Debug, PartialEq)]
pub struct StrategyTable {
    pub rows: Vec<StrategyRow>,
    pub choice: StrategyChoice,
    /// The best choices but the chosen ones, if the configuration leaves any open besides the strategy.
    pub next: Option<RunChoices>,
    pub budget: Bytes,
    pub world_size: u32,
}

/// A strategy, and why it was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StrategyChoice {
    pub strategy: StrategyName,
    /// Whether it fits. If not, nothing does, and it needs the least memory.
    pub fits: bool,
    /// A sentence.
    pub reason: String,
}

impl StrategyTable {
    pub fn chosen(&self) -> &StrategyRow {
        self.rows.iter().find(|row| row.is_chosen).expect("a table has a choice")
    }
}

/// Evaluates every strategy. The chosen row is the configured strategy, or with `auto` the cheapest one that fits.
pub fn strategy_table(workload: &Workload<'_>, machine: &Machine) -> StrategyTable {
    let mut rows: Vec<StrategyRow> =
        STRATEGIES.into_iter().filter_map(|name| row(workload, machine, name)).collect();
    if machine.cluster.world_size() == 1 {
        // On one rank all strategies are the same.
        rows.truncate(1);
    }
    let choice = match canonical(workload.strategy) {
        StrategyName::Auto => cheapest(&rows, machine.budget, workload.params()),
        named => configured(&rows, named, machine.budget, workload.params()),
    };
    for row in &mut rows {
        row.is_chosen = row.strategy == choice.strategy;
    }
    let next = next_best(&rows, workload);
    StrategyTable { rows, choice, next, budget: machine.budget, world_size: machine.cluster.world_size() }
}

/// Resolves `distributed_strategy: auto`: the strategy with the shortest predicted step among those that fit.
pub fn choose_strategy(workload: &Workload<'_>, machine: &Machine) -> StrategyChoice {
    let auto = Workload { strategy: StrategyName::Auto, ..workload.clone() };
    strategy_table(&auto, machine).choice
}

/// Resolves `per_device_train_batch_size: auto`: the rows of the fastest candidate that fits, under the strategy of the
/// configuration. `None`: that strategy does not apply.
pub fn choose_rows(workload: &Workload<'_>, machine: &Machine) -> Option<RunChoices> {
    Some(row(workload, machine, canonical(workload.strategy))?.choices)
}

/// One name for each strategy.
pub(crate) fn canonical(name: StrategyName) -> StrategyName {
    match name {
        StrategyName::NoShard => StrategyName::Ddp,
        StrategyName::FullShard => StrategyName::Zero3,
        other => other,
    }
}

/// The best choices besides the chosen row's: under its strategy, and, if that is open, under the others that fit.
fn next_best(rows: &[StrategyRow], workload: &Workload<'_>) -> Option<RunChoices> {
    if !workload.has_open_choices() {
        return None;
    }
    let strategy_is_open = workload.strategy == StrategyName::Auto;
    let others = rows.iter().filter(|row| strategy_is_open && !row.is_chosen && row.fits);
    let chosen = rows.iter().filter(|row| row.is_chosen);
    let all = others.map(|row| &row.choices).chain(chosen.filter_map(|row| row.next.as_ref()));
    all.min_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds)).cloned()
}

fn row(workload: &Workload<'_>, machine: &Machine, name: StrategyName) -> Option<StrategyRow> {
    let mut candidates = workload.with_strategy(name, &machine.cluster)?.candidates(machine);
    let fastest = Candidate::fastest(candidates.iter().map(|(_, candidate)| candidate));
    let (rows, candidate) = candidates.swap_remove(fastest);
    let next = candidates.iter().min_by(|(_, a), (_, b)| a.seconds().total_cmp(&b.seconds()));
    Some(StrategyRow {
        strategy: name,
        choices: RunChoices::of(name, rows, &candidate),
        next: next.map(|(rows, candidate)| RunChoices::of(name, *rows, candidate)),
        memory: MemoryByKind::of(&candidate.plan),
        host: host_bytes(&candidate.plan),
        fits: candidate.fits,
        is_chosen: false,
        prediction: candidate.prediction,
    })
}

/// Host memory besides the device's. A CPU's memory is the device's.
pub(crate) fn host_bytes(plan: &PlanData) -> Bytes {
    if plan.input.has_separate_memory() { plan.process_bytes() } else { plan.host_bytes }
}

/// What the guides recommend for a model of this size.
fn guides_rule(params: u64) -> StrategyName {
    const BILLION: u64 = 1_000_000_000;
    match params {
        n if n < BILLION => StrategyName::Ddp,
        n if n <= 7 * BILLION => StrategyName::Zero2,
        _ => StrategyName::Zero3,
    }
}

fn cheapest(rows: &[StrategyRow], budget: Bytes, params: u64) -> StrategyChoice {
    let seconds = |row: &StrategyRow| row.prediction.step_seconds;
    let fitting: Vec<&StrategyRow> = rows.iter().filter(|row| row.fits).collect();
    let Some(fastest) = fitting.iter().copied().min_by(|a, b| seconds(a).total_cmp(&seconds(b))) else {
        let smallest = rows.iter().min_by_key(|row| row.memory.total()).expect("ddp always applies");
        let needed = smallest.memory.total();
        return StrategyChoice {
            strategy: smallest.strategy,
            fits: false,
            reason: format!(
                "No strategy fits into {budget}; {} needs the least memory, {needed}.",
                smallest.strategy
            ),
        };
    };
    let ties: Vec<&StrategyRow> =
        fitting.iter().copied().filter(|row| seconds(row) <= (1.0 + TIE) * seconds(fastest)).collect();
    let rule = guides_rule(params);
    // Among equals: what the guides recommend, else what shards least.
    let chosen = ties.iter().copied().find(|row| row.strategy == rule).unwrap_or(ties[0]);
    let reason = reason(chosen, fastest, rule, fitting.len(), rows.len(), budget);
    StrategyChoice { strategy: chosen.strategy, fits: true, reason }
}

/// Why a strategy was chosen among those that fit, as a sentence.
fn reason(
    chosen: &StrategyRow,
    fastest: &StrategyRow,
    rule: StrategyName,
    num_fitting: usize,
    num_rows: usize,
    budget: Bytes,
) -> String {
    let among = match num_fitting {
        n if n == num_rows => String::new(),
        n => format!(" of the {n} strategies that fit into {budget}"),
    };
    match (num_fitting, num_rows) {
        (1, 1) => "There is one rank, so all strategies are the same.".into(),
        (1, _) => format!("It is the only strategy that fits into {budget}."),
        _ if chosen.strategy == fastest.strategy => format!("It has the shortest predicted step{among}."),
        _ => {
            let why = if chosen.strategy == rule {
                "the guides recommend it for this size"
            } else {
                "it shards less"
            };
            let percent = 100.0 * TIE;
            format!(
                "Its predicted step is within {percent:.0} % of the shortest{among}, that of {}, and {why}.",
                fastest.strategy
            )
        }
    }
}

/// The choice that the configuration has made, compared with what `auto` would choose.
fn configured(rows: &[StrategyRow], name: StrategyName, budget: Bytes, params: u64) -> StrategyChoice {
    let Some(row) = rows.iter().find(|row| row.strategy == name) else {
        return cheapest(rows, budget, params);
    };
    let auto = cheapest(rows, budget, params);
    let reason = match (row.fits, auto.fits) {
        (true, _) if auto.strategy == name => {
            "The configuration sets it, and `auto` would choose it too.".into()
        }
        (true, _) => format!("The configuration sets it. `auto` would choose {}.", auto.strategy),
        (false, true) => {
            format!("The configuration sets it, but it does not fit into {budget}. {} would.", auto.strategy)
        }
        (false, false) => format!("The configuration sets it. {}", auto.reason),
    };
    StrategyChoice { strategy: name, fits: row.fits, reason }
}
