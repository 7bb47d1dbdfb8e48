//! Engines for inference: whole weights on one rank, for scoring and generation.

use lockstep_core::{Bytes, DType};
use lockstep_device::Machine;
use lockstep_engine::{Engine, EngineError, Resources};
use lockstep_model::KernelBackend;
use lockstep_plan::{
    BatchBounds, DeviceNeeds, GenerationBounds, ModelPlan, ModelRole, ModelSettings, OptimizerSpec,
    Placements, PlanError, PlanInput, RunPlan, build, default_head_chunk_tokens,
};
use lockstep_shape::{Channels, Freeze, ModelShape, Recompute};

use crate::error::TrainError;
use crate::setup::device_memory;

/// What an inference engine is built for.
pub(crate) struct Inference<'a> {
    pub(crate) shape: &'a ModelShape,
    pub(crate) storage: DType,
    pub(crate) bounds: BatchBounds,
    pub(crate) machine: Machine,
    pub(crate) scores: bool,
    /// For generation: the number of concurrent sequences, and the capacity of each in tokens.
    pub(crate) slots: Option<(usize, usize)>,
}

impl Inference<'_> {
    /// Creates the engine and allocates its memory. The weights are not loaded yet.
    pub(crate) fn engine(&self) -> Result<Engine, TrainError> {
        let plan = self.plan()?;
        let queue = self.machine.queue().map_err(EngineError::from)?;
        let resources = Resources::single_rank(&plan, queue)?;
        Ok(Engine::new(plan, resources)?)
    }

    fn plan(&self) -> Result<RunPlan, PlanError> {
        let Inference { shape, storage, bounds, machine, .. } = *self;
        let kernels = KernelBackend::from(machine);
        let slots = self.slots.map_or(0, |(slots, _)| slots);
        let chunk =
            default_head_chunk_tokens(shape.vocab, device_memory(kernels)).max(slots.next_multiple_of(256));
        let settings = ModelSettings {
            placements: Placements::REPLICATED,
            bounds,
            head_chunk_tokens: chunk.min(bounds.tokens),
            recompute: Recompute::Full.into(),
            channels: Channels::LOG_PROB,
            optimizer: OptimizerSpec::SGD,
            freeze: Freeze::All,
            decay_norms: false,
            scores: self.scores,
            generation: self.slots.map(|(docs, tokens_per_doc)| GenerationBounds {
                docs,
                tokens_per_doc,
                cache_elems: lockstep_model::kv_cache_elems(shape, docs, tokens_per_doc, storage, kernels),
            }),
        };
        let needs = DeviceNeeds {
            workspace_bytes: lockstep_model::workspace_bytes(shape, bounds.tokens, bounds.max_doc, kernels),
            overhead_bytes: Bytes::ZERO,
            host_overhead_bytes: matches!(kernels, KernelBackend::Cuda { .. }).then_some(Bytes::ZERO),
        };
        build(PlanInput::single_rank(
            vec![ModelPlan::new(ModelRole::Reference, shape, settings)],
            storage,
            needs,
        ))
    }
}
