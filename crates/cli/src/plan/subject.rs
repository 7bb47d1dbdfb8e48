//! What is planned: the models of a run, what its plan is built from, and the machine.

use lockstep_config::{DeviceKind, RunConfig, StrategyName};
use lockstep_core::Bytes;
use lockstep_data::Tokenizer;
use lockstep_launch::cores;
use lockstep_model::KernelBackend;
use lockstep_plan::cost::{
    Machine, PaperCluster, RunChoices, StrategyChoice, Workload, choose_rows, strategy_table,
};
use lockstep_plan::{BatchBounds, PlanInput, RunPlan};
use lockstep_shape::ModelShape;
use lockstep_train::{RunModels, TrainError};

use super::machine::{self, PlanMachine};
use super::{planned_device, rates_cache};
use crate::gpu;
use crate::report::Failure;
use crate::train::boxed;

/// A run to plan. Needs the model's configuration and the tokenizer, but no data.
pub(crate) struct PlanSubject {
    tokenizer: Tokenizer,
    models: RunModels,
    kernels: KernelBackend,
    input: PlanInput,
    pub(crate) machine: Machine,
    /// Where the machine's rates come from, as a sentence.
    pub(crate) basis: String,
    pub(crate) paper: Option<PaperCluster>,
}

/// What the cost model chose for keys that are `auto`.
#[derive(Default)]
pub(crate) struct AutoChoices {
    pub(crate) strategy: Option<StrategyChoice>,
    /// With the rows of a micro-batch.
    pub(crate) rows: Option<RunChoices>,
}

impl AutoChoices {
    /// Why the rows of a micro-batch were chosen.
    pub(crate) fn reason_for_rows(choices: &RunChoices) -> String {
        let RunChoices { num_micro_batches, step_seconds, .. } = choices;
        let milliseconds = 1000.0 * step_seconds;
        format!(
            "The shortest predicted step that fits, {milliseconds:.0} ms, has {num_micro_batches} micro-batch{}",
            if *num_micro_batches == 1 { "" } else { "es" }
        )
    }
}

impl PlanSubject {
    /// The run of a configuration, on this machine or on a cluster on paper.
    pub(crate) fn of(config: &RunConfig, paper: Option<PaperCluster>) -> Result<PlanSubject, Failure> {
        let tokenizer = lockstep_train::load_tokenizer(config).map_err(boxed)?;
        let models = RunModels::of(config, &tokenizer).map_err(boxed)?;
        let kernels = match (&paper, planned_device(config)) {
            (Some(paper), _) => {
                KernelBackend::Cuda { memory: Some(paper.chip.memory()), name: Some(paper.chip.name) }
            }
            (None, DeviceKind::Cuda) => {
                let (name, memory) = gpu::first().unzip();
                // Plans refer to the name until the process ends.
                KernelBackend::Cuda { memory, name: name.map(|name| &*name.leak()) }
            }
            _ => KernelBackend::Cpu { num_threads: threads_of_rank(config) },
        };
        let input = lockstep_train::plan_input_for(config, &models, &tokenizer, kernels).map_err(boxed)?;
        let PlanMachine { machine, basis } = machine::of(config, kernels, input.storage, paper.as_ref());
        Ok(PlanSubject { tokenizer, models, kernels, input, machine, basis, paper })
    }

    /// Replaces the generic rates of a CPU by measured ones, from the cache if they are there. With the strategy `auto`
    /// they stay generic: `train` chooses with generic rates, because all its ranks must choose the same, and a plan
    /// must choose what `train` does.
    pub(super) fn use_measured_rates(&mut self, config: &RunConfig) {
        let (KernelBackend::Cpu { num_threads }, true) =
            (self.kernels, config.plan.strategy != StrategyName::Auto)
        else {
            return;
        };
        let num_ranks = config.plan.nproc_per_node as usize;
        if let Some(rates) = rates_cache::of_cpu(num_threads, num_ranks, self.input.storage) {
            self.machine.rates = rates;
            self.basis =
                format!("Times are predictions from measured rates of {num_threads} cores of this CPU.");
        }
    }

    /// Sets the sizes that the configuration leaves to the model.
    pub(crate) fn resolve_auto_sizes(&self, config: &mut RunConfig) {
        config.resolve_auto_sizes(self.shape().dim as u64);
    }

    /// Resolves `strategy: auto` and `per_device_train_batch_size: auto` with the cost model.
    pub(crate) fn choose(&self, config: &mut RunConfig) -> Result<AutoChoices, Failure> {
        let (open_strategy, open_rows) =
            (config.plan.strategy == StrategyName::Auto, config.batch.chooses_rows);
        let mut chosen = AutoChoices::default();
        if open_strategy {
            let table = self.with_workload(config, strategy_table)?;
            chosen.rows = open_rows.then(|| table.chosen().choices.clone());
            config.plan.strategy = table.choice.strategy;
            chosen.strategy = Some(table.choice);
        } else if open_rows {
            chosen.rows = self.with_workload(config, choose_rows)?;
        }
        if let Some(choices) = &chosen.rows {
            config.batch.set_rows(choices.rows);
        }
        Ok(chosen)
    }

    /// The shape of the first model.
    pub(crate) fn shape(&self) -> &ModelShape {
        &self.input.models[0].shape
    }

    pub(crate) fn plan(&self, config: &RunConfig) -> Result<RunPlan, Box<TrainError>> {
        lockstep_train::plan_for(config, &self.models, &self.tokenizer, None, self.kernels).map_err(Box::new)
    }

    /// The run and its machine, for the cost model.
    pub(crate) fn with_workload<T>(
        &self,
        config: &RunConfig,
        work: impl FnOnce(&Workload<'_>, &Machine) -> T,
    ) -> Result<T, Failure> {
        let workspace = |shape: &ModelShape, bounds: &BatchBounds| -> Bytes {
            lockstep_model::workspace_bytes(shape, bounds.tokens, bounds.max_doc, self.kernels)
        };
        let input = lockstep_train::plan_input_for(config, &self.models, &self.tokenizer, self.kernels)
            .map_err(boxed)?;
        Ok(work(&Workload::of(config, input, &workspace), &self.machine))
    }
}

/// The CPU threads of a rank: those that are configured, or its share of the cores, which a launched rank gets.
fn threads_of_rank(config: &RunConfig) -> usize {
    match (config.plan.threads, config.plan.nproc_per_node) {
        (None, ranks @ 2..) => cores::threads(cores::available().len(), ranks),
        _ => lockstep_train::num_threads(config),
    }
}
