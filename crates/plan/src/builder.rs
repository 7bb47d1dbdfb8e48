//! What strategies are written with: each method emits operations with their accesses; waits between
//! lanes follow from the accesses.

use std::collections::HashMap;

use lockstep_core::{Axis, DType, shard_range};

use crate::buffer::{Access, Buffer, BufferId, State, Tier, What};
use crate::input::{AccumulationOrder, ModelPlan, Placement, PlanInput};
use crate::order::Order;
use crate::schedule::{Lane, ModelId, Op, OpId, OpKind, Schedule, Span, SpanId, SpanPart, Wait};
use crate::scratch::{Sizes, UnitLayout};

/// Reductions of whole gradients that may be under way while backward goes on.
const REDUCES_IN_FLIGHT: usize = 2;

/// The buffers of a plan, shared by its phases.
#[derive(Clone, Debug, Default)]
pub(crate) struct BufferTable {
    pub(crate) buffers: Vec<Buffer>,
    ids: HashMap<What, BufferId>,
}

impl BufferTable {
    /// The buffer for `what`, made on first use and grown to the largest size asked for.
    pub(crate) fn get(&mut self, what: What, tier: Tier, elems: usize, dtype: DType) -> BufferId {
        let id = *self.ids.entry(what).or_insert_with(|| {
            self.buffers.push(Buffer { what, tier, elems: 0, dtype });
            BufferId(self.buffers.len() as u32 - 1)
        });
        let buffer = &mut self.buffers[id.0 as usize];
        buffer.elems = buffer.elems.max(elems);
        id
    }

    pub(crate) fn find(&self, what: What) -> Option<BufferId> {
        self.ids.get(&what).copied()
    }
}

/// A use of one unit's parameters in the course of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Forward(u32),
    Head,
    Backward(u32),
}

/// Work and the units whose parameters it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    pub work: Work,
    pub units: Vec<u32>,
}

/// Emits the operations of one phase of one model.
pub struct StepBuilder<'a> {
    input: &'a PlanInput,
    model: ModelId,
    table: &'a mut BufferTable,
    schedule: Schedule,
    order: Order,
    history: HashMap<BufferId, Vec<(OpId, Access)>>,
    /// Operations that hold each gathered unit.
    held: HashMap<u32, u32>,
    gather_spans: HashMap<u32, SpanId>,
    /// Parts of a reduction bucket that is not full yet.
    pending: Vec<SpanPart>,
    reduces: Vec<OpId>,
    layouts: [UnitLayout; 3],
}

impl<'a> StepBuilder<'a> {
    pub(crate) fn new(input: &'a PlanInput, model: ModelId, table: &'a mut BufferTable) -> StepBuilder<'a> {
        let plan = &input.models[model.0 as usize];
        let sizes = Sizes { tokens: input.bounds.tokens, chunk: input.head_chunk, storage: input.storage };
        let layouts = [&plan.embed, &plan.block, &plan.head].map(|p| UnitLayout::new(p, sizes));
        StepBuilder {
            input,
            model,
            table,
            schedule: Schedule::default(),
            order: Order::default(),
            history: HashMap::new(),
            held: HashMap::new(),
            gather_spans: HashMap::new(),
            pending: Vec::new(),
            reduces: Vec::new(),
            layouts,
        }
    }

    pub(crate) fn finish(self) -> Schedule {
        assert!(self.pending.is_empty(), "a reduction bucket was never flushed");
        self.schedule
    }

    pub fn input(&self) -> &PlanInput {
        self.input
    }

    fn plan(&self) -> &'a ModelPlan {
        &self.input.models[self.model.0 as usize]
    }

    pub fn num_micros(&self) -> u32 {
        self.input.micros
    }

    /// Units that run forward before the head: embed and blocks.
    pub fn body(&self) -> std::ops::Range<u32> {
        0..self.plan().units.len() as u32 - 1
    }

    pub fn head_unit(&self) -> u32 {
        self.plan().units.len() as u32 - 1
    }

    fn tied(&self) -> bool {
        self.plan().shape.tied
    }

    /// Forward through the body, the head, backward through the body: a micro-batch's uses of
    /// parameters, in order. A tied head also uses the embedding.
    pub fn uses_of_micro(&self) -> Vec<Use> {
        let one = |work, unit| Use { work, units: vec![unit] };
        let mut uses: Vec<Use> = self.body().map(|u| one(Work::Forward(u), u)).collect();
        let mut head = one(Work::Head, self.head_unit());
        head.units.extend(self.tied().then_some(0));
        uses.push(head);
        uses.extend(self.body().rev().map(|u| one(Work::Backward(u), u)));
        uses
    }

    /// Runs one use.
    pub fn run(&mut self, work: Work, micro: u32) -> OpId {
        match work {
            Work::Forward(unit) => self.forward(unit, micro),
            Work::Head => self.head(micro),
            Work::Backward(unit) => self.backward(unit, micro),
        }
    }

    /// Parameters are cut over more than one rank, or live away from the device: they must be gathered.
    pub fn gathers(&self) -> bool {
        let p = &self.input.placements;
        (p.params == Placement::Shard && self.input.mesh.shard > 1) || p.params_tier != Tier::Device
    }

    // ---- emission -----------------------------------------------------------------------------------

    /// Appends an operation. For every earlier access that conflicts and is not certain to be over, a wait.
    fn emit(&mut self, kind: OpKind, lane: Lane, accesses: Vec<(BufferId, Access)>, after: &[OpId]) -> OpId {
        let mut waits: Vec<Wait> = Vec::new();
        let conflicts = accesses.iter().flat_map(|(buffer, access)| {
            let past = self.history.get(buffer).map_or(&[][..], |p| &p[..]);
            past.iter()
                .filter(|(_, theirs)| *access != Access::Read || *theirs != Access::Read)
                .map(|(op, _)| *op)
        });
        let mut needed: Vec<OpId> = after.iter().copied().chain(conflicts).collect();
        // Latest first: a later operation's wait usually covers the earlier ones.
        needed.sort_unstable_by(|a, b| b.cmp(a));
        for op in needed {
            if !self.order.before_next(op, lane, &waits) {
                waits.push(Wait::This(op));
            }
        }
        let id = self.order.push(lane, &waits);
        for (buffer, access) in &accesses {
            let past = self.history.entry(*buffer).or_default();
            if *access != Access::Read {
                // Whoever waits for this write waits for all before it.
                past.clear();
            }
            past.push((id, *access));
        }
        self.schedule.ops.push(Op { kind, model: self.model, lane, waits, accesses });
        id
    }

    fn span(&mut self, parts: Vec<SpanPart>) -> SpanId {
        self.schedule.spans.push(Span { model: self.model, parts });
        SpanId(self.schedule.spans.len() as u32 - 1)
    }

    /// The span that gathers a whole unit.
    fn gather_span(&mut self, unit: u32) -> SpanId {
        if let Some(span) = self.gather_spans.get(&unit) {
            return *span;
        }
        let end = self.plan().units[unit as usize].elems;
        let span = self.span(vec![SpanPart { unit, start: 0, end }]);
        self.gather_spans.insert(unit, span);
        span
    }

    // ---- buffers ------------------------------------------------------------------------------------

    fn state(&mut self, unit: u32, state: State) -> BufferId {
        let (tier, elems, dtype) = self.input.resident(self.model, unit, state);
        self.table.get(What::State { model: self.model, unit, state }, tier, elems, dtype)
    }

    fn device(&mut self, what: What, elems: usize, dtype: DType) -> BufferId {
        self.table.get(what, Tier::Device, elems, dtype)
    }

    /// What forward and backward read a unit's parameters from.
    fn params(&mut self, unit: u32) -> BufferId {
        if !self.gathers() {
            return self.state(unit, State::Working);
        }
        assert!(self.held.contains_key(&unit), "unit {unit} is used before it is gathered");
        self.whole(unit)
    }

    fn whole(&mut self, unit: u32) -> BufferId {
        let elems = self.plan().units[unit as usize].elems;
        self.device(What::Whole { model: self.model, unit }, elems, self.input.storage)
    }

    /// Where backward puts a unit's gradient.
    fn grad_target(&mut self, unit: u32) -> BufferId {
        if self.grads_go_to_state() {
            return self.state(unit, State::Grad);
        }
        let elems = self.plan().units[unit as usize].trainable_elems;
        self.device(What::GradWhole { model: self.model, unit }, elems, DType::F32)
    }

    /// Whole gradients summed locally need no buffer of their own.
    fn grads_go_to_state(&self) -> bool {
        let whole = self.input.placements.grads == Placement::Whole || self.input.mesh.shard == 1;
        whole && self.input.order == AccumulationOrder::Local
    }

    fn stream(&mut self, index: u32) -> BufferId {
        let elems = self.input.bounds.tokens * self.plan().shape.dim;
        self.device(What::Stream { model: self.model, index }, elems, self.input.storage)
    }

    fn grad_stream(&mut self) -> BufferId {
        let elems = self.input.bounds.tokens * self.plan().shape.dim;
        self.device(What::GradStream { model: self.model }, elems, self.input.storage)
    }

    /// A byte buffer, counted in f32 elements.
    fn bytes(&mut self, what: What, bytes: lockstep_core::Bytes) -> BufferId {
        self.device(what, bytes.0.div_ceil(4) as usize, DType::F32)
    }

    fn scratch(&mut self) -> BufferId {
        let slots = self.layouts.iter().map(UnitLayout::scratch).max().expect("three kinds of unit");
        self.bytes(What::Scratch, slots.align_to(4096) + self.input.needs.workspace)
    }

    fn inputs(&mut self) -> [BufferId; 2] {
        let bounds = self.input.bounds;
        // Tokens, targets, positions and document bounds.
        let elems = 3 * bounds.tokens + bounds.docs + 1;
        let tables = self.plan().shape.head_dim * bounds.max_doc;
        [self.device(What::Inputs, elems, DType::U32), self.device(What::Tables, tables, DType::F32)]
    }

    fn per_token(&mut self, what: What) -> BufferId {
        self.device(what, self.input.bounds.tokens, DType::F32)
    }

    fn layout(&self, unit: u32) -> &UnitLayout {
        match unit {
            0 => &self.layouts[0],
            u if u == self.head_unit() => &self.layouts[2],
            _ => &self.layouts[1],
        }
    }

    fn reads(&mut self, unit: u32) -> Vec<(BufferId, Access)> {
        let [inputs, tables] = self.inputs();
        vec![
            (self.params(unit), Access::Read),
            (inputs, Access::Read),
            (tables, Access::Read),
            (self.scratch(), Access::Define),
        ]
    }

    // ---- computation --------------------------------------------------------------------------------

    /// The batch of this micro is copied in by the host before its first operation.
    pub fn forward(&mut self, unit: u32, micro: u32) -> OpId {
        let mut accesses = self.reads(unit);
        if unit == 0 {
            let [inputs, _] = self.inputs();
            accesses.retain(|(id, _)| *id != inputs);
            accesses.push((inputs, Access::Define));
        } else {
            accesses.push((self.stream(unit), Access::Read));
        }
        accesses.push((self.stream(unit + 1), Access::Define));
        let saved = self.layout(unit).saved;
        if saved.0 > 0 {
            accesses.push((self.bytes(What::Saved { model: self.model, unit }, saved), Access::Define));
        }
        self.emit(OpKind::Forward { unit, micro }, Lane::Compute, accesses, &[])
    }

    fn head_accesses(&mut self) -> Vec<(BufferId, Access)> {
        let head = self.head_unit();
        let mut accesses = self.reads(head);
        if self.tied() {
            accesses.push((self.params(0), Access::Read));
        }
        accesses.push((self.stream(head), Access::Read));
        accesses
    }

    /// The head and the objective, in one pass where the objective allows it.
    pub fn head(&mut self, micro: u32) -> OpId {
        let [inputs, _] = self.inputs();
        let (log_probs, coefficients) = (self.per_token(What::LogProbs), self.per_token(What::Coefficients));
        let ahead = self.input.coefficients_ahead;
        if !ahead {
            let mut accesses = self.head_accesses();
            accesses.push((log_probs, Access::Define));
            self.emit(OpKind::HeadForward { micro }, Lane::Compute, accesses, &[]);
        }
        let mut accesses = vec![(inputs, Access::Read), (coefficients, Access::Define)];
        accesses.extend((!ahead).then_some((log_probs, Access::Read)));
        self.emit(OpKind::Objective { micro }, Lane::Compute, accesses, &[]);

        let fresh = self.fresh(micro);
        let mut accesses = self.head_accesses();
        accesses.push((coefficients, Access::Read));
        accesses.push((log_probs, if ahead { Access::Define } else { Access::Update }));
        accesses.push((self.grad_stream(), Access::Define));
        let mut trained = vec![self.head_unit()];
        trained.extend(self.tied().then_some(0));
        for unit in trained {
            if self.plan().units[unit as usize].trainable_elems > 0 {
                let access = if fresh { Access::Define } else { Access::Update };
                accesses.push((self.grad_target(unit), access));
            }
        }
        let kind =
            if ahead { OpKind::HeadStep { micro, fresh } } else { OpKind::HeadBackward { micro, fresh } };
        self.emit(kind, Lane::Compute, accesses, &[])
    }

    /// Whether a gradient written for `micro` starts a new sum.
    fn fresh(&self, micro: u32) -> bool {
        micro == 0 || self.input.order == AccumulationOrder::Reduced
    }

    /// Backward of a unit of the body, after its recomputation where there is one.
    pub fn backward(&mut self, unit: u32, micro: u32) -> OpId {
        let layout = self.layout(unit);
        let (saved, rebuilt) = (layout.saved, layout.rebuilt);
        if rebuilt.0 > 0 {
            let mut accesses = self.reads(unit);
            accesses.push((self.stream(unit), Access::Read));
            accesses.push((self.bytes(What::Rebuilt { model: self.model, unit }, rebuilt), Access::Define));
            self.emit(OpKind::Recompute { unit, micro }, Lane::Compute, accesses, &[]);
        }
        let mut accesses = self.reads(unit);
        if unit > 0 {
            accesses.push((self.stream(unit), Access::Read));
        }
        for (what, bytes) in [
            (What::Saved { model: self.model, unit }, saved),
            (What::Rebuilt { model: self.model, unit }, rebuilt),
        ] {
            if bytes.0 > 0 {
                // Updated: the gated unit's gradients take the place of its values.
                accesses.push((self.bytes(what, bytes), Access::Update));
            }
        }
        accesses.push((self.grad_stream(), Access::Update));
        // A tied table already holds the head's part.
        let fresh = self.fresh(micro) && !(unit == 0 && self.tied());
        let trains = self.plan().units[unit as usize].trainable_elems > 0;
        if trains {
            accesses.push((self.grad_target(unit), if fresh { Access::Define } else { Access::Update }));
        }
        // Whole gradients in flight are bounded, or sharding them would save nothing.
        let oldest = self.reduces.len().checked_sub(REDUCES_IN_FLIGHT).map(|i| self.reduces[i]);
        let after: Vec<OpId> = oldest.filter(|_| trains && !self.grads_go_to_state()).into_iter().collect();
        self.emit(OpKind::Backward { unit, micro, fresh }, Lane::Compute, accesses, &after)
    }

    // ---- parameters on the move ---------------------------------------------------------------------

    /// Brings a unit's whole parameters to the device, unless they are there. `after`: what must have been
    /// released first.
    pub fn gather(&mut self, unit: u32, after: Option<OpId>) {
        let held = self.held.entry(unit).or_insert(0);
        *held += 1;
        if *held > 1 {
            return;
        }
        let span = self.gather_span(unit);
        let across = self.input.mesh.shard > 1 && self.input.placements.params == Placement::Shard;
        let home = self.state(unit, State::Working);
        let after: Vec<OpId> = after.into_iter().collect();
        let mut from = home;
        if across && self.input.placements.params_tier != Tier::Device {
            let elems = self.input.resident(self.model, unit, State::Working).1;
            let staging = self.device(What::Staging, elems, self.input.storage);
            self.emit(
                OpKind::Fetch(span),
                Lane::Copy,
                vec![(home, Access::Read), (staging, Access::Define)],
                &after,
            );
            from = staging;
        }
        let accesses = vec![(from, Access::Read), (self.whole(unit), Access::Define)];
        let lane = if across { Lane::Comm } else { Lane::Copy };
        self.emit(OpKind::Gather(span), lane, accesses, &after);
    }

    /// Ends a use of gathered parameters; the last one frees them.
    pub fn release(&mut self, unit: u32, last_use: OpId) -> OpId {
        let held = self.held.get_mut(&unit).expect("a unit is released after it was gathered");
        *held -= 1;
        if *held > 0 {
            return last_use;
        }
        self.held.remove(&unit);
        let span = self.gather_span(unit);
        let whole = self.whole(unit);
        self.emit(OpKind::Release(span), Lane::Compute, vec![(whole, Access::Read)], &[])
    }

    /// Runs uses in order, gathering up to `prefetch` of them ahead and releasing each when it is done.
    /// At most `prefetch + 1` uses' parameters are whole at a time.
    pub fn run_windowed(&mut self, uses: &[Use], micro: u32, after_each: &mut dyn FnMut(&mut Self, Work)) {
        if !self.gathers() {
            for one in uses {
                self.run(one.work, micro);
                after_each(self, one.work);
            }
            return;
        }
        let depth = self.input.prefetch as usize;
        let mut released: Vec<OpId> = Vec::new();
        let mut next = 0;
        for (i, one) in uses.iter().enumerate() {
            while next < uses.len() && next <= i + depth {
                let after = next.checked_sub(depth + 1).map(|j| released[j]);
                for unit in uses[next].units.clone() {
                    self.gather(unit, after);
                }
                next += 1;
            }
            let mut last = self.run(one.work, micro);
            for unit in one.units.clone() {
                last = self.release(unit, last);
            }
            released.push(last);
            after_each(self, one.work);
        }
    }

    // ---- gradients ----------------------------------------------------------------------------------

    /// Whether gradients of `micro` are summed over ranks.
    pub fn reduces_after(&self, micro: u32) -> bool {
        match self.input.order {
            AccumulationOrder::Local => self.input.mesh.world() > 1 && micro + 1 == self.input.micros,
            AccumulationOrder::Reduced => true,
        }
    }

    /// Reduces a unit's gradient as one span.
    pub fn reduce_unit(&mut self, unit: u32, micro: u32) {
        let end = self.plan().units[unit as usize].trainable_elems;
        if end > 0 {
            self.reduce(vec![SpanPart { unit, start: 0, end }], micro);
        }
    }

    /// Adds a unit's gradient to the bucket, and reduces buckets as they fill.
    pub fn bucket_unit(&mut self, unit: u32, micro: u32) {
        let end = self.plan().units[unit as usize].trainable_elems;
        let cap = (self.input.bucket.0 as usize / 4 / 256).max(1) * 256;
        let mut start = 0;
        while start < end {
            let filled: usize = self.pending.iter().map(|p| p.end - p.start).sum();
            let take = (cap - filled).min(end - start);
            self.pending.push(SpanPart { unit, start, end: start + take });
            start += take;
            if filled + take == cap {
                self.flush_bucket(micro);
            }
        }
    }

    /// Reduces what is left in the bucket.
    pub fn flush_bucket(&mut self, micro: u32) {
        let parts = std::mem::take(&mut self.pending);
        if !parts.is_empty() {
            self.reduce(parts, micro);
        }
    }

    fn reduce(&mut self, parts: Vec<SpanPart>, micro: u32) {
        let mesh = self.input.mesh;
        let axes: Vec<Axis> = match (mesh.shard > 1, mesh.replicate > 1) {
            (false, false) => vec![Axis::World],
            (true, true) => vec![Axis::Shard, Axis::Replicate],
            (true, false) => vec![Axis::Shard],
            (false, true) => vec![Axis::Replicate],
        };
        let fresh = micro == 0 || self.input.order == AccumulationOrder::Local;
        let mut units: Vec<u32> = parts.iter().map(|p| p.unit).collect();
        units.dedup();
        let elems: usize = parts.iter().map(|p| p.end - p.start).sum();
        let span = self.span(parts);
        let mut last = None;
        for (i, axis) in axes.iter().enumerate() {
            let mut accesses = Vec::new();
            for unit in &units {
                let (from, to) = (self.grad_target(*unit), self.state(*unit, State::Grad));
                if from == to {
                    accesses.push((to, Access::Update));
                } else {
                    accesses.extend((i == 0).then_some((from, Access::Read)));
                    accesses.push((to, Access::Update));
                }
            }
            if mesh.world() > 1 {
                // The owner receives every member's contribution and folds them in the mesh's order.
                accesses.push((self.device(What::Staging, elems, DType::F32), Access::Define));
            }
            let lane = if mesh.world() > 1 { Lane::Comm } else { Lane::Compute };
            let kind = OpKind::Reduce { span, micro, axis: *axis, fresh };
            last = Some(self.emit(kind, lane, accesses, &[]));
        }
        self.reduces.extend(last);
    }

    // ---- the end of the step ------------------------------------------------------------------------

    /// Norm, clip factor, updates, and whatever brings updated parameters to where forward reads them.
    pub fn clip_and_update(&mut self) {
        let trained: Vec<u32> =
            (0..=self.head_unit()).filter(|u| self.plan().units[*u as usize].trainable_elems > 0).collect();
        let mut accesses = Vec::new();
        let mut blocks = 0;
        for unit in &trained {
            let grad = self.state(*unit, State::Grad);
            blocks += self.input.resident(self.model, *unit, State::Grad).1 / lockstep_core::ALIGN_ELEMS;
            accesses.push((grad, Access::Read));
        }
        accesses.push((self.device(What::NormLeaves, blocks, DType::F64), Access::Define));
        self.emit(OpKind::ClipNorm, Lane::Compute, accesses, &[]);
        for (i, unit) in trained.iter().enumerate() {
            match self.input.placements.optimizer_tier {
                Tier::Device => self.update_on_device(*unit),
                _ => self.update_on_host(*unit, i as u32 % 2),
            }
        }
    }

    /// The states an update writes, besides the working copy.
    fn optimizer_states(&self) -> Vec<State> {
        let mut states = vec![State::ExpAvg, State::ExpAvgSq];
        states.extend((self.input.storage != DType::F32).then_some(State::Master));
        states
    }

    fn update_on_device(&mut self, unit: u32) {
        let mut accesses = vec![(self.state(unit, State::Grad), Access::Read)];
        for state in self.optimizer_states() {
            accesses.push((self.state(unit, state), Access::Update));
        }
        accesses.push((self.state(unit, State::Working), Access::Update));
        self.emit(OpKind::Update { unit }, Lane::Compute, accesses, &[]);
        self.publish(unit);
    }

    /// Optimizer sharded, parameters whole: everyone gets everyone's updates.
    fn publish(&mut self, unit: u32) {
        let p = &self.input.placements;
        if p.optimizer == Placement::Shard && p.params == Placement::Whole && self.input.mesh.shard > 1 {
            let span = self.gather_span(unit);
            let working = self.state(unit, State::Working);
            self.emit(OpKind::Publish(span), Lane::Comm, vec![(working, Access::Update)], &[]);
        }
    }

    /// Gradient to the host, states from their home, update on the host's cores, states and parameters
    /// back. Two staging buffers take turns, so copies overlap the neighbour's update.
    fn update_on_host(&mut self, unit: u32, turn: u32) {
        let nvme = self.input.placements.optimizer_tier == Tier::Nvme;
        let elems = self.input.resident(self.model, unit, State::Grad).1;
        let states = self.optimizer_states();
        let staged = elems * (1 + if nvme { states.len() } else { 0 });
        let staging = self.table.get(What::HostStaging { turn }, Tier::Host, staged, DType::F32);
        let span = self.gather_span(unit);
        let homes: Vec<BufferId> = states.iter().map(|state| self.state(unit, *state)).collect();
        let (grad, working) = (self.state(unit, State::Grad), self.state(unit, State::Working));

        self.emit(
            OpKind::Spill(span),
            Lane::Copy,
            vec![(grad, Access::Read), (staging, Access::Define)],
            &[],
        );
        let all = |access| homes.iter().map(move |home| (*home, access));
        if nvme {
            let accesses = all(Access::Read).chain([(staging, Access::Update)]).collect();
            self.emit(OpKind::Fetch(span), Lane::Copy, accesses, &[]);
        }
        let mut accesses = vec![(staging, if nvme { Access::Update } else { Access::Read })];
        if !nvme {
            accesses.extend(all(Access::Update));
        }
        self.emit(OpKind::Update { unit }, Lane::Host, accesses, &[]);
        if nvme {
            let accesses = all(Access::Update).chain([(staging, Access::Read)]).collect();
            self.emit(OpKind::Spill(span), Lane::Copy, accesses, &[]);
        }
        let source = if nvme { staging } else { homes[homes.len() - 1] };
        self.emit(
            OpKind::Fetch(span),
            Lane::Copy,
            vec![(source, Access::Read), (working, Access::Update)],
            &[],
        );
        self.publish(unit);
    }

    // ---- phases without training --------------------------------------------------------------------

    /// Forward through the body and the head's log-probabilities: a score or evaluation phase.
    pub fn score(&mut self) {
        let uses: Vec<Use> = self.uses_of_micro().into_iter().take_while(|u| u.work != Work::Head).collect();
        self.run_windowed(&uses, 0, &mut |_, _| {});
        let mut units = vec![self.head_unit()];
        units.extend(self.tied().then_some(0));
        if self.gathers() {
            units.iter().for_each(|u| self.gather(*u, None));
        }
        let mut accesses = self.head_accesses();
        accesses.push((self.per_token(What::LogProbs), Access::Define));
        let last = self.emit(OpKind::HeadForward { micro: 0 }, Lane::Compute, accesses, &[]);
        if self.gathers() {
            units.iter().for_each(|u| {
                self.release(*u, last);
            });
        }
    }

    /// Prefill and decode with a key-value cache. Parameters stay whole for the whole phase.
    pub fn rollout(&mut self) {
        let rollout = self.input.rollout.expect("a rollout phase has bounds");
        let shape = &self.plan().shape;
        let cache = 2 * shape.layers * shape.kv_width() * rollout.docs * rollout.tokens_per_doc;
        let cache = self.device(What::KvCache { model: self.model }, cache, self.input.storage);
        let units: Vec<u32> = (0..=self.head_unit()).collect();
        if self.gathers() {
            units.iter().for_each(|u| self.gather(*u, None));
        }
        let mut last = None;
        for (kind, access) in [(OpKind::Prefill, Access::Define), (OpKind::Decode, Access::Update)] {
            let mut accesses = vec![(cache, access), (self.scratch(), Access::Define)];
            let [inputs, tables] = self.inputs();
            accesses.extend([(inputs, Access::Define), (tables, Access::Read)]);
            for unit in &units {
                accesses.push((self.params(*unit), Access::Read));
            }
            accesses.push((self.stream(0), Access::Define));
            last = Some(self.emit(kind, Lane::Compute, accesses, &[]));
        }
        if self.gathers() {
            units.iter().for_each(|u| {
                self.release(*u, last.expect("two operations were emitted"));
            });
        }
    }
}

impl PlanInput {
    /// Tier, elements and type of a resident state on the rank that holds most. The trainable and the
    /// frozen part of a unit are cut over the shard axis separately, so that every rank has its share of
    /// both.
    pub fn resident(&self, model: ModelId, unit: u32, state: State) -> (Tier, usize, DType) {
        let shape = &self.models[model.0 as usize].units[unit as usize];
        let p = &self.placements;
        let share = |elems: usize, placement: Placement| match placement {
            Placement::Whole => elems,
            Placement::Shard => shard_range(elems, self.mesh.shard, 0).elems(),
        };
        let (trained, frozen) = (shape.trainable_elems, shape.elems - shape.trainable_elems);
        match state {
            State::Working => {
                (p.params_tier, share(trained, p.params) + share(frozen, p.params), self.storage)
            }
            State::Grad => (Tier::Device, share(trained, p.grads), DType::F32),
            State::Master | State::ExpAvg | State::ExpAvgSq => {
                (p.optimizer_tier, share(trained, p.optimizer), DType::F32)
            }
        }
    }
}
