//! All strategies for one run side by side, and the choice among them.

use lockstep_config::StrategyName;
use lockstep_core::Bytes;

use crate::cost::memory_kinds::MemoryByKind;
use crate::cost::prediction::Prediction;
use crate::cost::workload::{Machine, Workload};
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

/// Predicted times that differ by less than this are a tie, which the guides' rule decides.
const TIE: f64 = 0.01;

/// One strategy for a run.
#[derive(Clone, Debug, PartialEq)]
pub struct StrategyRow {
    pub strategy: StrategyName,
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
    StrategyTable { rows, choice, budget: machine.budget, world_size: machine.cluster.world_size() }
}

/// Resolves `distributed_strategy: auto`: the strategy with the shortest predicted step among those that fit.
pub fn choose_strategy(workload: &Workload<'_>, machine: &Machine) -> StrategyChoice {
    let auto = Workload { strategy: StrategyName::Auto, ..workload.clone() };
    strategy_table(&auto, machine).choice
}

/// One name for each strategy.
pub(crate) fn canonical(name: StrategyName) -> StrategyName {
    match name {
        StrategyName::NoShard => StrategyName::Ddp,
        StrategyName::FullShard => StrategyName::Zero3,
        other => other,
    }
}

fn row(workload: &Workload<'_>, machine: &Machine, name: StrategyName) -> Option<StrategyRow> {
    let plan = workload.with_strategy(name, &machine.cluster)?.lay_out(machine.budget);
    Some(StrategyRow {
        strategy: name,
        memory: MemoryByKind::of(&plan),
        host: host_bytes(&plan),
        fits: machine.fits(&plan),
        is_chosen: false,
        prediction: machine.predict(&plan),
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
    let fastest_of = match fitting.len() {
        1 => format!("{} is the only strategy that fits into {budget}", chosen.strategy),
        n if n == rows.len() => format!("{} has the shortest predicted step", chosen.strategy),
        n => {
            let of = format!("of the {n} strategies that fit into {budget}");
            format!("{} has the shortest predicted step {of}", chosen.strategy)
        }
    };
    let tied: Vec<String> = ties
        .iter()
        .filter(|row| row.strategy != chosen.strategy)
        .map(|row| row.strategy.to_string())
        .collect();
    let why_not_tied = match tied.is_empty() {
        true => String::new(),
        false if chosen.strategy == rule => {
            format!("; {} would take as long, and for this size the guides recommend {rule}", tied.join(", "))
        }
        false => format!("; {} would take as long, and {} shards least", tied.join(", "), chosen.strategy),
    };
    StrategyChoice { strategy: chosen.strategy, fits: true, reason: format!("{fastest_of}{why_not_tied}.") }
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
