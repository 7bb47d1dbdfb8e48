//! The methods that strategies are written with. Each emits operations with their accesses; the waits between lanes
//! follow from the accesses.
//!
//! This file emits operations and names buffers. Its submodules hold what units compute (`compute`), gathering of
//! parameters (`params`) and their dequantisation (`quantised`), reduction of gradients (`gradients`) and their offload
//! (`offload`), the optimizer (`update`), and the phases that do not train (`phases`).

mod compute;
mod gradients;
mod offload;
mod params;
mod phases;
mod quantised;
mod update;

use std::collections::HashMap;

use lockstep_core::DType;

use crate::buffer::{Access, Buffer, BufferId, BufferKind, InFlight, MemoryTier, ParamState};
use crate::happens_before::{HappensBefore, waits_in_run};
use crate::input::{AccumulationOrder, ModelPlan, PlanInput};
use crate::lane::Lane;
use crate::schedule::{ModelId, Op, OpId, OpKind, Schedule, Span, SpanId, SpanPart, Wait};
use crate::unit_layout::UnitLayout;

/// One micro-batch is in flight at a time.
const IN_FLIGHT: InFlight = InFlight::ONLY;

/// The buffers of a plan, shared by its phases.
#[derive(Clone, Debug, Default)]
pub(crate) struct BufferTable {
    pub(crate) buffers: Vec<Buffer>,
    ids: HashMap<BufferKind, BufferId>,
}

impl BufferTable {
    /// The buffer of a kind. The first call creates it; later calls enlarge it to the largest size requested.
    pub(crate) fn get(&mut self, kind: BufferKind, tier: MemoryTier, elems: usize, dtype: DType) -> BufferId {
        let id = *self.ids.entry(kind).or_insert_with(|| {
            self.buffers.push(Buffer { kind, tier, elems: 0, dtype });
            BufferId(self.buffers.len() as u32 - 1)
        });
        let buffer = &mut self.buffers[id.0 as usize];
        assert_eq!((buffer.tier, buffer.dtype), (tier, dtype), "{kind:?} has one tier and one type");
        buffer.elems = buffer.elems.max(elems);
        id
    }
}

/// Which computation a pass is, and of which unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassKind {
    Forward(u32),
    /// The head's forward, the objective and the head's backward.
    Head,
    /// The head's forward only.
    Score,
    Backward(u32),
}

/// The computation of one unit for one micro-batch, and the units whose parameters it reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitPass {
    pub kind: PassKind,
    pub micro_batch: u32,
    pub units: Vec<u32>,
}

/// Emits the operations of one phase of one model.
pub struct StepBuilder<'a> {
    input: &'a PlanInput,
    model: ModelId,
    table: &'a mut BufferTable,
    schedule: Schedule,
    order: HappensBefore,
    history: HashMap<BufferId, Vec<(OpId, Access)>>,
    /// For each gathered unit, how many passes still use it.
    gather_counts: HashMap<u32, u32>,
    prefix_spans: HashMap<(u32, usize), SpanId>,
    /// Parameter shards fetched from the host so far; two staging buffers alternate.
    num_fetches: u32,
    /// The bucket being filled, of gradients to reduce or of updated parameters to all-gather.
    bucket: Vec<SpanPart>,
    /// The operations, reductions or copies to the host, that were the last to read some unit's unsharded gradient.
    grad_buffer_frees: Vec<OpId>,
    /// Pieces of gradients staged on the host so far; two staging buffers alternate.
    num_staged_pieces: u32,
    /// Units on the host whose squares have been summed.
    num_squared_units: usize,
    layouts: Vec<UnitLayout>,
}

impl<'a> StepBuilder<'a> {
    pub(crate) fn new(input: &'a PlanInput, model: ModelId, table: &'a mut BufferTable) -> StepBuilder<'a> {
        let layouts = input.model(model).layouts(input.storage);
        StepBuilder {
            input,
            model,
            table,
            schedule: Schedule::default(),
            order: HappensBefore::default(),
            history: HashMap::new(),
            gather_counts: HashMap::new(),
            prefix_spans: HashMap::new(),
            num_fetches: 0,
            bucket: Vec::new(),
            grad_buffer_frees: Vec::new(),
            num_staged_pieces: 0,
            num_squared_units: 0,
            layouts,
        }
    }

    pub(crate) fn finish(mut self) -> Schedule {
        assert!(self.bucket.is_empty(), "a reduction bucket was never flushed");
        let ops = &self.schedule.ops;
        if let Some(norm) = ops.iter().position(|op| matches!(op.kind, OpKind::ClipNorm { .. })) {
            // A step returns when its losses and its norm are known. The norm implies that all gradients are summed.
            let computed = ops.iter().rposition(|op| op.lane == Lane::Compute).expect("a step computes");
            let finished = [norm, computed].map(|i| OpId(i as u32));
            self.add_waits_for_previous_run(&finished);
            self.schedule.returns_after = Some(finished.into());
        }
        self.schedule
    }

    pub fn input(&self) -> &PlanInput {
        self.input
    }

    fn plan(&self) -> &'a ModelPlan {
        self.input.model(self.model)
    }

    pub fn num_micro_batches(&self) -> u32 {
        self.input.num_micro_batches
    }

    /// The units before the head: embed and blocks, in order.
    pub fn body(&self) -> std::ops::Range<u32> {
        self.embed_unit()..self.head_unit()
    }

    pub fn embed_unit(&self) -> u32 {
        self.plan().embed()
    }

    pub fn head_unit(&self) -> u32 {
        self.plan().head()
    }

    fn is_tied(&self) -> bool {
        self.plan().shape.head_is_tied()
    }

    fn trained_elems(&self, unit: u32) -> usize {
        self.plan().units[unit as usize].trained_elems
    }

    /// The passes of a micro-batch in order: forward through the body, the head, backward through the body. A tied head
    /// also reads the embedding; the embedding's backward reads no parameters. Backward stops at the lowest trained
    /// unit.
    pub fn micro_batch_passes(&self, micro_batch: u32) -> Vec<UnitPass> {
        let mut passes = self.forward_passes(micro_batch, PassKind::Head);
        let lowest = (0..=self.head_unit()).find(|u| self.trained_elems(*u) > 0).unwrap_or(self.head_unit());
        for unit in (lowest..self.head_unit()).rev() {
            let units = if unit == self.embed_unit() { vec![] } else { vec![unit] };
            passes.push(UnitPass { kind: PassKind::Backward(unit), micro_batch, units });
        }
        passes
    }

    /// The passes of all micro-batches, one after another.
    pub fn step_passes(&self) -> Vec<UnitPass> {
        (0..self.num_micro_batches()).flat_map(|micro_batch| self.micro_batch_passes(micro_batch)).collect()
    }

    fn forward_passes(&self, micro_batch: u32, head: PassKind) -> Vec<UnitPass> {
        let mut passes: Vec<UnitPass> = self
            .body()
            .map(|u| UnitPass { kind: PassKind::Forward(u), micro_batch, units: vec![u] })
            .collect();
        let mut units = vec![self.head_unit()];
        units.extend(self.is_tied().then_some(self.embed_unit()));
        passes.push(UnitPass { kind: head, micro_batch, units });
        passes
    }

    /// Emits the computation of one pass.
    pub fn run(&mut self, kind: PassKind, micro_batch: u32) -> OpId {
        match kind {
            PassKind::Forward(unit) => self.forward(unit, micro_batch),
            PassKind::Head => self.head(micro_batch),
            PassKind::Score => {
                let head = self.head_score(micro_batch, 1);
                let outputs = self.per_token(BufferKind::Outputs, 1);
                self.deliver(outputs);
                head
            }
            PassKind::Backward(unit) => self.backward(unit, micro_batch),
        }
    }

    /// Whether parameters must be gathered before use: they are sharded, or not on the device.
    pub fn needs_gather(&self) -> bool {
        self.input.is_sharded(self.model, ParamState::Working)
            || self.plan().placements.params_tier != MemoryTier::Device
    }

    // ---- emission -----------------------------------------------------------------------------------

    /// Appends an operation. It waits for every earlier conflicting access that is not known to have finished.
    fn emit(&mut self, kind: OpKind, lane: Lane, accesses: Vec<(BufferId, Access)>, after: &[OpId]) -> OpId {
        let waits = self.waits_for(lane, &accesses, after, &[]);
        let id = self.order.push(lane, &waits);
        self.record_accesses(id, &accesses);
        let waits = waits.into_iter().map(Wait::SameRun).collect();
        self.schedule.ops.push(Op { kind, model: self.model, lane, waits, accesses });
        id
    }

    /// What the next operation of a lane has to wait for, in addition to the waits `already`.
    fn waits_for(
        &self,
        lane: Lane,
        accesses: &[(BufferId, Access)],
        after: &[OpId],
        already: &[OpId],
    ) -> Vec<OpId> {
        let conflicts = accesses.iter().flat_map(|(buffer, access)| {
            let past = self.history.get(buffer).map_or(&[][..], |p| &p[..]);
            past.iter()
                .filter(|(_, theirs)| *access != Access::Read || *theirs != Access::Read)
                .map(|(op, _)| *op)
        });
        let mut needed: Vec<OpId> = after.iter().copied().chain(conflicts).collect();
        // Latest first: a wait for a later operation usually covers the earlier ones.
        needed.sort_unstable_by(|a, b| b.cmp(a));
        let mut waits = already.to_vec();
        for op in needed {
            if !self.order.before_next(op, lane, &waits) {
                waits.push(op);
            }
        }
        waits.split_off(already.len())
    }

    fn record_accesses(&mut self, id: OpId, accesses: &[(BufferId, Access)]) {
        for (buffer, access) in accesses {
            let past = self.history.entry(*buffer).or_default();
            if *access != Access::Read {
                // A wait for this write covers everything before it.
                past.clear();
            }
            past.push((id, *access));
        }
    }

    /// Adds the waits of a second run, which begins after `finished`, for operations of the first run.
    fn add_waits_for_previous_run(&mut self, finished: &[OpId]) {
        let mut ops = std::mem::take(&mut self.schedule.ops);
        let len = ops.len() as u32;
        self.order.begin_run(finished);
        for op in &mut ops {
            let mut waits = waits_in_run(&op.waits, 1, len);
            let before = self.waits_for(op.lane, &op.accesses, &[], &waits);
            // The waits for its own run are there already.
            debug_assert!(before.iter().all(|id| id.0 < len), "{:?} waits for too little", op.kind);
            op.waits.extend(before.iter().map(|id| Wait::PreviousRun(*id)));
            waits.extend(before);
            let id = self.order.push(op.lane, &waits);
            self.record_accesses(id, &op.accesses);
        }
        self.schedule.ops = ops;
    }

    fn span(&mut self, parts: Vec<SpanPart>) -> SpanId {
        self.schedule.spans.push(Span { model: self.model, parts });
        SpanId(self.schedule.spans.len() as u32 - 1)
    }

    /// The span of a whole unit, for gathering.
    fn gather_span(&mut self, unit: u32) -> SpanId {
        self.prefix_span(unit, self.plan().units[unit as usize].elems)
    }

    /// The span of a unit's trained part, for updates, offload and the all-gather of updated parameters.
    fn trained_span(&mut self, unit: u32) -> SpanId {
        self.prefix_span(unit, self.trained_elems(unit))
    }

    fn prefix_span(&mut self, unit: u32, end: usize) -> SpanId {
        if let Some(span) = self.prefix_spans.get(&(unit, end)) {
            return *span;
        }
        let span = self.span(vec![SpanPart { unit, start: 0, end }]);
        self.prefix_spans.insert((unit, end), span);
        span
    }

    // ---- buffers ------------------------------------------------------------------------------------

    fn state(&mut self, unit: u32, state: ParamState) -> BufferId {
        let (tier, elems, dtype) = self.input.resident(self.model, unit, state);
        let model = self.input.weights_of(self.model);
        self.table.get(BufferKind::ParamState { model, unit, state }, tier, elems, dtype)
    }

    fn device(&mut self, kind: BufferKind, elems: usize, dtype: DType) -> BufferId {
        self.table.get(kind, MemoryTier::Device, elems, dtype)
    }

    /// The buffer that forward and backward read a unit's parameters from.
    fn params(&mut self, unit: u32) -> BufferId {
        if self.has_quantised(unit) {
            return self.unsharded_params(unit);
        }
        if !self.needs_gather() {
            return self.state(unit, ParamState::Working);
        }
        assert!(self.gather_counts.contains_key(&unit), "unit {unit} is used before it is gathered");
        self.unsharded_params(unit)
    }

    fn unsharded_params(&mut self, unit: u32) -> BufferId {
        let elems = self.plan().units[unit as usize].elems;
        self.device(BufferKind::UnshardedParams { model: self.model, unit }, elems, self.input.storage)
    }

    /// The buffer that backward writes a unit's gradient to.
    fn grad_target(&mut self, unit: u32) -> BufferId {
        if self.accumulates_in_place(unit) {
            return self.state(unit, ParamState::Grad);
        }
        let elems = self.trained_elems(unit);
        self.device(BufferKind::UnshardedGrad { model: self.model, unit }, elems, DType::F32)
    }

    /// Whether backward writes the accumulator itself: the gradient is replicated, on the device, and summed locally.
    fn accumulates_in_place(&self, unit: u32) -> bool {
        let sums_in_f32 = !self.input.is_sharded(self.model, ParamState::Grad)
            && !self.grads_offloaded(unit)
            && self.input.order == AccumulationOrder::Local
            && !self.input.rounds_grads();
        sums_in_f32 || self.input.backward_rounds(self.model, unit)
    }

    fn grads_offloaded(&self, unit: u32) -> bool {
        self.input.grads_offloaded(self.model, unit)
    }

    fn residual(&mut self, index: u32) -> BufferId {
        let elems = self.plan().bounds.tokens * self.plan().shape.dim;
        self.device(
            BufferKind::Residual { model: self.model, index, in_flight: IN_FLIGHT },
            elems,
            self.input.storage,
        )
    }

    fn residual_grad(&mut self) -> BufferId {
        let elems = self.plan().bounds.tokens * self.plan().shape.dim;
        self.device(
            BufferKind::ResidualGrad { model: self.model, in_flight: IN_FLIGHT },
            elems,
            self.input.storage,
        )
    }

    /// A buffer of so many bytes, counted in f32 elements.
    fn bytes(&mut self, kind: BufferKind, bytes: lockstep_core::Bytes) -> BufferId {
        self.device(kind, bytes.0.div_ceil(4) as usize, DType::F32)
    }

    fn scratch(&mut self) -> BufferId {
        let slots = self.layouts.iter().map(UnitLayout::scratch).max().expect("a model has units");
        self.bytes(BufferKind::Scratch, slots.align_to(4096) + self.input.needs.workspace_bytes)
    }

    fn inputs(&mut self) -> [BufferId; 2] {
        let plan = self.plan();
        let elems = plan.inputs_elems(self.input.has_separate_memory());
        let positions = plan.bounds.max_doc.max(plan.generation.map_or(0, |r| r.tokens_per_doc));
        let tables = plan.shape.head_dim * positions;
        let kind = BufferKind::RopeTables { model: self.model };
        [
            self.device(BufferKind::Inputs { in_flight: IN_FLIGHT }, elems, DType::U32),
            self.device(kind, tables, DType::F32),
        ]
    }

    /// A buffer of one number per token and channel of `micro_batches`.
    fn per_token(&mut self, kind: BufferKind, micro_batches: u32) -> BufferId {
        let elems = micro_batches as usize * self.plan().per_token_elems();
        self.device(kind, elems, DType::F32)
    }

    /// How the first operation of a micro-batch accesses a buffer over the window: the first one defines it.
    fn writes_window(micro_batch: u32) -> Access {
        if micro_batch == 0 { Access::Define } else { Access::Update }
    }

    fn layout(&self, unit: u32) -> &UnitLayout {
        &self.layouts[self.plan().layout_of(unit)]
    }
}
