//! What strategies are written with: each method emits operations with their accesses; waits between
//! lanes follow from the accesses.
//!
//! Here: emission and buffers. Beside it: what units compute, parameters on the move, gradients on their
//! way to their owners and to the host, the update, and the phases that do not train.

mod compute;
mod gradients;
mod offload;
mod params;
mod phases;
mod update;

use std::collections::HashMap;

use lockstep_core::DType;

use crate::buffer::{Access, Buffer, BufferId, BufferKind, InFlight, MemoryTier, ParamState};
use crate::happens_before::{HappensBefore, waits_in_run};
use crate::input::{AccumulationOrder, ModelPlan, PlanInput};
use crate::schedule::{Lane, ModelId, Op, OpId, OpKind, Schedule, Span, SpanId, SpanPart, Wait};
use crate::unit_layout::UnitLayout;

/// One micro-batch is in flight at a time.
const FLIGHT: InFlight = InFlight::ONLY;

/// The buffers of a plan, shared by its phases.
#[derive(Clone, Debug, Default)]
pub(crate) struct BufferTable {
    pub(crate) buffers: Vec<Buffer>,
    ids: HashMap<BufferKind, BufferId>,
}

impl BufferTable {
    /// The buffer for `what`, made on first use and grown to the largest size asked for.
    pub(crate) fn get(&mut self, kind: BufferKind, tier: MemoryTier, elems: usize, dtype: DType) -> BufferId {
        let id = *self.ids.entry(kind).or_insert_with(|| {
            self.buffers.push(Buffer { kind, tier, elems: 0, dtype });
            BufferId(self.buffers.len() as u32 - 1)
        });
        let buffer = &mut self.buffers[id.0 as usize];
        assert_eq!((buffer.tier, buffer.dtype), (tier, dtype), "two users of {kind:?} disagree");
        buffer.elems = buffer.elems.max(elems);
        id
    }
}

/// A unit's turn in the course of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassKind {
    Forward(u32),
    /// The head, the objective and the head's backward.
    Head,
    /// The head's outputs alone.
    Score,
    Backward(u32),
}

/// Work on a micro-batch and the units whose parameters it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitPass {
    pub work: PassKind,
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
    /// Operations that hold each gathered unit.
    held: HashMap<u32, u32>,
    front_spans: HashMap<(u32, usize), SpanId>,
    /// Shards fetched from the host so far; staging buffers take turns.
    fetches: u32,
    /// Parts of a bucket, to be reduced or published, that is not full yet.
    pending: Vec<SpanPart>,
    /// Reductions, or spills where gradients leave the device, that were the last of some unit's whole
    /// gradient.
    reduced: Vec<OpId>,
    /// Pieces of gradients spilled to be added; staging buffers take turns.
    spills: u32,
    /// Units of whose gradients the squares are summed.
    squared: usize,
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
            held: HashMap::new(),
            front_spans: HashMap::new(),
            fetches: 0,
            pending: Vec::new(),
            reduced: Vec::new(),
            spills: 0,
            squared: 0,
            layouts,
        }
    }

    pub(crate) fn finish(mut self) -> Schedule {
        assert!(self.pending.is_empty(), "a reduction bucket was never flushed");
        let ops = &self.schedule.ops;
        if let Some(norm) = ops.iter().position(|op| matches!(op.kind, OpKind::ClipNorm { .. })) {
            // What a step says of itself: its losses and its norm. With the norm every gradient has been summed.
            let computed = ops.iter().rposition(|op| op.lane == Lane::Compute).expect("a step computes");
            let over = [norm, computed].map(|i| OpId(i as u32));
            self.wait_for_the_run_before(&over);
            self.schedule.returns_after = Some(over.into());
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

    /// Units that run forward before the head: embed and blocks, in order.
    pub fn body(&self) -> std::ops::Range<u32> {
        self.embed_unit()..self.head_unit()
    }

    pub fn embed_unit(&self) -> u32 {
        self.plan().embed()
    }

    pub fn head_unit(&self) -> u32 {
        self.plan().head()
    }

    fn tied(&self) -> bool {
        self.plan().shape.head_is_tied()
    }

    fn trained_elems(&self, unit: u32) -> usize {
        self.plan().units[unit as usize].trained_elems
    }

    /// Forward through the body, the head, backward through the body: a micro-batch's uses of
    /// parameters, in order. A tied head also uses the embedding; the embedding's backward only adds to
    /// its gradient and needs no parameters. Below the lowest unit that is trained there is no backward.
    pub fn micro_batch_passes(&self, micro_batch: u32) -> Vec<UnitPass> {
        let mut uses = self.forward_passes(micro_batch, PassKind::Head);
        let lowest = (0..=self.head_unit()).find(|u| self.trained_elems(*u) > 0).unwrap_or(self.head_unit());
        for unit in (lowest..self.head_unit()).rev() {
            let units = if unit == self.embed_unit() { vec![] } else { vec![unit] };
            uses.push(UnitPass { work: PassKind::Backward(unit), micro_batch, units });
        }
        uses
    }

    /// The uses of all micro-batches, one after another.
    pub fn step_passes(&self) -> Vec<UnitPass> {
        (0..self.num_micro_batches()).flat_map(|micro_batch| self.micro_batch_passes(micro_batch)).collect()
    }

    fn forward_passes(&self, micro_batch: u32, head: PassKind) -> Vec<UnitPass> {
        let mut uses: Vec<UnitPass> = self
            .body()
            .map(|u| UnitPass { work: PassKind::Forward(u), micro_batch, units: vec![u] })
            .collect();
        let mut units = vec![self.head_unit()];
        units.extend(self.tied().then_some(self.embed_unit()));
        uses.push(UnitPass { work: head, micro_batch, units });
        uses
    }

    /// Runs one use, emitting its computation.
    pub fn run(&mut self, work: PassKind, micro_batch: u32) -> OpId {
        match work {
            PassKind::Forward(unit) => self.forward(unit, micro_batch),
            PassKind::Head => self.head(micro_batch),
            PassKind::Score => self.head_score(micro_batch),
            PassKind::Backward(unit) => self.backward(unit, micro_batch),
        }
    }

    /// Parameters are sharded over more than one rank, or live away from the device: they must be gathered.
    pub fn needs_gather(&self) -> bool {
        self.input.is_sharded(self.model, ParamState::Working)
            || self.plan().placements.params_tier != MemoryTier::Device
    }

    // ---- emission -----------------------------------------------------------------------------------

    /// Appends an operation. For every earlier access that conflicts and is not certain to be over, a wait.
    fn emit(&mut self, kind: OpKind, lane: Lane, accesses: Vec<(BufferId, Access)>, after: &[OpId]) -> OpId {
        let waits = self.waits_for(lane, &accesses, after, &[]);
        let id = self.order.push(lane, &waits);
        self.remember(id, &accesses);
        let waits = waits.into_iter().map(Wait::SameRun).collect();
        self.schedule.ops.push(Op { kind, model: self.model, lane, waits, accesses });
        id
    }

    /// What the next operation of a lane has to wait for, besides what it waits for already.
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
        // Latest first: a later operation's wait usually covers the earlier ones.
        needed.sort_unstable_by(|a, b| b.cmp(a));
        let mut waits = already.to_vec();
        for op in needed {
            if !self.order.before_next(op, lane, &waits) {
                waits.push(op);
            }
        }
        waits.split_off(already.len())
    }

    fn remember(&mut self, id: OpId, accesses: &[(BufferId, Access)]) {
        for (buffer, access) in accesses {
            let past = self.history.entry(*buffer).or_default();
            if *access != Access::Read {
                // Whoever waits for this write waits for all before it.
                past.clear();
            }
            past.push((id, *access));
        }
    }

    /// A second run that begins when `over` are: what its operations have to wait for in the first.
    fn wait_for_the_run_before(&mut self, over: &[OpId]) {
        let mut ops = std::mem::take(&mut self.schedule.ops);
        let len = ops.len() as u32;
        self.order.begin_run(over);
        for op in &mut ops {
            let mut waits = waits_in_run(&op.waits, 1, len);
            let before = self.waits_for(op.lane, &op.accesses, &[], &waits);
            // Those of its own run it has.
            debug_assert!(before.iter().all(|id| id.0 < len), "{:?} waits for too little", op.kind);
            op.waits.extend(before.iter().map(|id| Wait::PreviousRun(*id)));
            waits.extend(before);
            let id = self.order.push(op.lane, &waits);
            self.remember(id, &op.accesses);
        }
        self.schedule.ops = ops;
    }

    fn span(&mut self, parts: Vec<SpanPart>) -> SpanId {
        self.schedule.spans.push(Span { model: self.model, parts });
        SpanId(self.schedule.spans.len() as u32 - 1)
    }

    /// The span of a whole unit: what is gathered.
    fn gather_span(&mut self, unit: u32) -> SpanId {
        self.front_span(unit, self.plan().units[unit as usize].elems)
    }

    /// The span of a unit's trained part: what is updated, spilled and published.
    fn trained_span(&mut self, unit: u32) -> SpanId {
        self.front_span(unit, self.trained_elems(unit))
    }

    fn front_span(&mut self, unit: u32, end: usize) -> SpanId {
        if let Some(span) = self.front_spans.get(&(unit, end)) {
            return *span;
        }
        let span = self.span(vec![SpanPart { unit, start: 0, end }]);
        self.front_spans.insert((unit, end), span);
        span
    }

    // ---- buffers ------------------------------------------------------------------------------------

    fn state(&mut self, unit: u32, state: ParamState) -> BufferId {
        let (tier, elems, dtype) = self.input.resident(self.model, unit, state);
        self.table.get(BufferKind::ParamState { model: self.model, unit, state }, tier, elems, dtype)
    }

    fn device(&mut self, what: BufferKind, elems: usize, dtype: DType) -> BufferId {
        self.table.get(what, MemoryTier::Device, elems, dtype)
    }

    /// What forward and backward read a unit's parameters from.
    fn params(&mut self, unit: u32) -> BufferId {
        if !self.needs_gather() {
            return self.state(unit, ParamState::Working);
        }
        assert!(self.held.contains_key(&unit), "unit {unit} is used before it is gathered");
        self.whole(unit)
    }

    fn whole(&mut self, unit: u32) -> BufferId {
        let elems = self.plan().units[unit as usize].elems;
        self.device(BufferKind::UnshardedParams { model: self.model, unit }, elems, self.input.storage)
    }

    /// Where backward puts a unit's gradient.
    fn grad_target(&mut self, unit: u32) -> BufferId {
        if self.grad_goes_to_state(unit) {
            return self.state(unit, ParamState::Grad);
        }
        let elems = self.trained_elems(unit);
        self.device(BufferKind::UnshardedGrad { model: self.model, unit }, elems, DType::F32)
    }

    /// A whole gradient summed locally needs no buffer of its own, as long as it stays.
    fn grad_goes_to_state(&self, unit: u32) -> bool {
        let stay = !self.input.is_sharded(self.model, ParamState::Grad) && !self.grads_offloaded(unit);
        stay && self.input.order == AccumulationOrder::Local
    }

    fn grads_offloaded(&self, unit: u32) -> bool {
        self.input.grads_offloaded(self.model, unit)
    }

    fn stream(&mut self, index: u32) -> BufferId {
        let elems = self.plan().bounds.tokens * self.plan().shape.dim;
        self.device(
            BufferKind::Residual { model: self.model, index, in_flight: FLIGHT },
            elems,
            self.input.storage,
        )
    }

    fn grad_stream(&mut self) -> BufferId {
        let elems = self.plan().bounds.tokens * self.plan().shape.dim;
        self.device(
            BufferKind::ResidualGrad { model: self.model, in_flight: FLIGHT },
            elems,
            self.input.storage,
        )
    }

    /// A byte buffer, counted in f32 elements.
    fn bytes(&mut self, what: BufferKind, bytes: lockstep_core::Bytes) -> BufferId {
        self.device(what, bytes.0.div_ceil(4) as usize, DType::F32)
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
        let what = BufferKind::RopeTables { model: self.model };
        [
            self.device(BufferKind::Inputs { in_flight: FLIGHT }, elems, DType::U32),
            self.device(what, tables, DType::F32),
        ]
    }

    /// A number per token and channel.
    fn per_token(&mut self, what: BufferKind) -> BufferId {
        let plan = self.plan();
        self.device(what, plan.channels.count() * plan.bounds.tokens, DType::F32)
    }

    fn layout(&self, unit: u32) -> &UnitLayout {
        &self.layouts[self.plan().layout_of(unit)]
    }
}
