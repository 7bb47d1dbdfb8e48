//! The size of the generate phase: how many sequences decode at once, and how many pages their KV cache has.

use lockstep_core::Bytes;

use crate::buffer::MemoryTier;
use crate::input::PlanInput;
use crate::run_plan::{PhaseKind, PlanData, PlanError, lay_out};
use crate::schedule::ModelId;

/// The bounds of a generate phase. A layer's KV cache is a pool of pages. Sequences share the pages of a common prompt
/// and are of different lengths, so there may be fewer pages than `docs` sequences of `tokens_per_doc` tokens need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GenerationBounds {
    /// The most sequences that decode at once.
    pub docs: usize,
    /// The most tokens of a sequence.
    pub tokens_per_doc: usize,
    /// Pages of each layer's KV cache: enough for at least one sequence.
    pub pages: usize,
    pub page_tokens: usize,
    /// Elements (f32) of one layer's KV cache: all pages, in the layout of the kernels.
    pub cache_elems: usize,
}

/// One layer's page in the layout of the kernels: the tokens it holds, and its elements (f32).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPage {
    pub tokens: usize,
    pub elems: usize,
}

impl GenerationBounds {
    /// Bounds with as many pages as `docs` sequences of the largest length need.
    pub fn of_docs(docs: usize, tokens_per_doc: usize, page: KvPage) -> GenerationBounds {
        let bounds =
            GenerationBounds { docs, tokens_per_doc, pages: 0, page_tokens: page.tokens, cache_elems: 0 };
        bounds.with_pages(docs * bounds.pages_per_doc(), page)
    }

    /// The same sequences with another number of pages.
    pub fn with_pages(self, pages: usize, page: KvPage) -> GenerationBounds {
        assert!(pages >= self.pages_per_doc(), "{pages} pages do not hold a sequence");
        GenerationBounds { pages, cache_elems: pages * page.elems, ..self }
    }

    /// The length of a page table: the pages of a sequence of the largest length.
    pub fn pages_per_doc(&self) -> usize {
        self.tokens_per_doc.div_ceil(self.page_tokens)
    }
}

/// The sequences that a run would generate at once if there were memory for all of them.
#[derive(Clone, Copy, Debug)]
pub struct WantedGeneration {
    pub docs: usize,
    pub tokens_per_doc: usize,
    pub page: KvPage,
}

impl PlanInput {
    /// The largest bounds of a generate phase of `model` for which the plan fits into `budget`, up to `wanted`. Without
    /// a budget, into the memory that the other phases need anyway, because phases share one region; then at least one
    /// sequence is planned, even if the arena grows for it.
    pub fn generation_bounds(
        &self,
        model: ModelId,
        wanted: WantedGeneration,
        budget: Option<Bytes>,
    ) -> Result<GenerationBounds, PlanError> {
        let WantedGeneration { docs, tokens_per_doc, page } = wanted;
        let plan = self.model(model);
        // One chunk of the head has the logits of all sequences, and one pass a token of each.
        let docs = docs.min(plan.head_chunk_tokens).min(plan.bounds.tokens).max(1);
        let most = GenerationBounds::of_docs(docs, tokens_per_doc, page);
        let least = most.with_pages(most.pages_per_doc(), page);
        let smallest = lay_out(self.with_generation(model, least));
        if let Some(budget) = budget {
            smallest.check_budget(budget)?;
        }
        let limit = budget.unwrap_or(smallest.device_bytes());
        let needed = generate_bytes(&smallest, model);
        // Nothing shares memory with the cache, so every page adds its own size, up to the alignment of the buffer.
        let page_bytes = (plan.shape.layers * page.elems * 4) as u64;
        let more = ((limit.0 - needed.0) / page_bytes.max(1)) as usize;
        let mut bounds = most.with_pages(most.pages.min(least.pages + more), page);
        while bounds.pages > least.pages
            && generate_bytes(&lay_out(self.with_generation(model, bounds)), model) > limit
        {
            bounds = bounds.with_pages(bounds.pages - 1, page);
        }
        // A sequence has at least one page.
        Ok(GenerationBounds { docs: docs.min(bounds.pages), ..bounds })
    }

    fn with_generation(&self, model: ModelId, generation: GenerationBounds) -> PlanInput {
        let mut input = self.clone();
        input.models[model.0 as usize].generation = Some(generation);
        input
    }
}

/// The memory on the device in the generate phase of a model.
fn generate_bytes(plan: &PlanData, model: ModelId) -> Bytes {
    let phase = plan.phase(PhaseKind::Generate, model).expect("the model generates");
    plan.residents[MemoryTier::Device as usize].bytes
        + plan.phases[phase].memory.bytes
        + plan.input.needs.overhead_bytes
}
