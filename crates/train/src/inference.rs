//! Engines for inference: whole weights on one rank, for scoring and generation.

use lockstep_core::{Bytes, DType, Rank};
use lockstep_device::Machine;
use lockstep_engine::{Engine, EngineError, Resources};
use lockstep_model::KernelBackend;
use lockstep_plan::{
    BatchBounds, DeviceNeeds, GenerationBounds, KvPage, ModelPlan, ModelRole, ModelSettings, OptimizerSpec,
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
    /// For generation.
    pub(crate) slots: Option<Slots>,
}

/// The size of the generate phase.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slots {
    /// The number of concurrent sequences.
    pub(crate) docs: usize,
    /// The most tokens of a sequence.
    pub(crate) capacity: usize,
    /// Pages of the KV cache; `None`: enough for all sequences at their largest length.
    pub(crate) pages: Option<usize>,
}

impl Slots {
    fn bounds(&self, page: KvPage) -> GenerationBounds {
        let bounds = GenerationBounds::of_docs(self.docs, self.capacity, page);
        self.pages.map_or(bounds, |pages| bounds.with_pages(pages, page))
    }
}

/// A page of the KV cache in the layout of the kernels.
pub(crate) fn kv_page(shape: &ModelShape, storage: DType, kernels: KernelBackend) -> KvPage {
    let elems = lockstep_model::kv_page_elems(shape, storage, kernels);
    KvPage { tokens: lockstep_model::KV_PAGE_TOKENS, elems }
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
        let docs = self.slots.map_or(0, |slots| slots.docs);
        let chunk =
            default_head_chunk_tokens(shape.vocab, device_memory(kernels)).max(docs.next_multiple_of(256));
        let settings = ModelSettings {
            placements: Placements::REPLICATED,
            bounds,
            head_chunk_tokens: chunk.min(bounds.tokens),
            recompute: Recompute::Full.into(),
            channels: Channels::LOG_PROB,
            temperature: 1.0,
            optimizer: OptimizerSpec::SGD,
            freeze: Freeze::All,
            decay_norms: false,
            scores: self.scores,
            generation: self.slots.map(|slots| slots.bounds(kv_page(shape, storage, kernels))),
        };
        let needs = DeviceNeeds {
            workspace_bytes: lockstep_model::workspace_bytes(shape, bounds.tokens, bounds.max_doc, kernels),
            overhead_bytes: Bytes::ZERO,
            host_overhead_bytes: matches!(kernels, KernelBackend::Cuda { .. }).then_some(Bytes::ZERO),
        };
        let model = ModelPlan::new(ModelRole::Reference, shape, settings);
        build(PlanInput::single_rank(vec![model], storage, needs), Rank(0))
    }
}
