//! Turns each operation of a schedule into a task for this rank: addresses instead of buffer names.

use lockstep_core::{Axis, Bytes, DType, padded_elems};
use lockstep_plan::{
    Axes, BufferId, BufferKind, CopyEnd, CopyPayload, MemoryTier, ModelPlan, Op, OpKind, OptimizerSpec,
    OwnedPart, ParamState, Phase, ReduceInto, RunPlan, SpanId, SpanPart,
};
use lockstep_shape::{FlatParam, UnitShape};

use crate::addresses::{
    Address, Addresses, BufferLookup, Location, ResidentAddress, UnitAddresses, UnitResidents,
};
use crate::update_range::{ParamAddresses, StateAddress, TensorRange, UpdateRange};

/// An operation with resolved addresses.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// The computation of a unit, or the objective; the compute lane runs it by its kind.
    Compute,
    /// A release: it matters for the packing of memory only.
    NoOp,
    /// An all-gather among the ranks along an axis.
    Gather {
        axis: Axis,
        parts: Vec<Gather>,
    },
    Reduce(Reduce),
    Copy {
        pairs: Vec<(Location, Location)>,
        /// Whether the copy writes resident states, which a skipped update must not change.
        writes_states: bool,
    },
    /// Dequantises the unit with this index.
    Dequantise(u32),
    /// Rounds this rank's shard of a gradient into a buffer.
    Round(Vec<(Address, Address)>),
    /// Adds staged gradients to the sums of earlier micro-batches on the host.
    Add(Vec<(Address, Address)>),
    Squares(Vec<Squares>),
    ClipNorm(Axes),
    Update(Update),
}

/// A rank's shard, and the unsharded range it is part of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gather {
    pub(crate) own: Address,
    pub(crate) whole: Address,
}

/// A reduction over ranks, in place, followed by accumulation.
#[derive(Clone, Debug)]
pub(crate) struct Reduce {
    pub(crate) axis: Axis,
    pub(crate) parts: Vec<Address>,
    /// Space for partial sums; `None` for a single rank.
    pub(crate) scratch: Option<Address>,
    /// An all-reduce, not a reduce-scatter.
    pub(crate) to_all: bool,
    /// Pairs of a reduced range and its accumulator, which is overwritten if `fresh`.
    pub(crate) accumulate: Vec<(Address, Address)>,
    pub(crate) fresh: bool,
}

/// A range of gradients, and the destination of its blocks' sums of squares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Squares {
    pub(crate) grad: Address,
    pub(crate) leaves: Address,
    /// Where the sums are copied to, if the leaves of other units are on the host.
    pub(crate) joined: Option<Address>,
    /// The index of its first block among all blocks of the model.
    pub(crate) first_block: u64,
}

/// An optimizer step on this rank's shard of a unit.
#[derive(Clone, Debug, Default)]
pub(crate) struct Update {
    /// Copies before the update: parameters whose only copy is on NVMe.
    pub(crate) fetches: Vec<(Location, Location)>,
    pub(crate) ranges: Vec<UpdateRange>,
    /// Copies after the update: updated parameters that live on NVMe.
    pub(crate) write_backs: Vec<(Location, Location)>,
}

/// The tasks of a phase, one for each operation.
pub(crate) fn tasks(
    plan: &RunPlan,
    phase: &Phase,
    addresses: &Addresses,
    residents: &[UnitResidents],
) -> Vec<Task> {
    let builder = TaskBuilder { plan, phase, addresses, residents, lookup: BufferLookup { plan, phase } };
    phase.schedule.ops.iter().map(|op| builder.task(op)).collect()
}

struct TaskBuilder<'a> {
    plan: &'a RunPlan,
    phase: &'a Phase,
    addresses: &'a Addresses,
    /// The residents of the phase's model.
    residents: &'a [UnitResidents],
    lookup: BufferLookup<'a>,
}

impl TaskBuilder<'_> {
    fn task(&self, op: &Op) -> Task {
        match op.kind {
            OpKind::Feed { .. }
            | OpKind::Forward { .. }
            | OpKind::HeadForward { .. }
            | OpKind::Objective { .. }
            | OpKind::HeadBackward { .. }
            | OpKind::HeadStep { .. }
            | OpKind::Deliver
            | OpKind::Recompute { .. }
            | OpKind::Backward { .. }
            | OpKind::Generate => Task::Compute,
            OpKind::Release(_) => Task::NoOp,
            OpKind::Dequantise { unit } => Task::Dequantise(unit),
            OpKind::Gather { span, from, axes } => self.gather(span, from, axes),
            OpKind::AllGatherUpdated { span, axes } => self.all_gather_updated(span, axes),
            OpKind::Reduce { span, axis, into, scratch, .. } => {
                let scratch = scratch.map(|id| self.buffer(id));
                Task::Reduce(self.reduce(span, axis, into, scratch))
            }
            OpKind::Copy { payload, from, to, span } => Task::Copy {
                pairs: self.copies(payload, from, to, span),
                writes_states: to == CopyEnd::Resident
                    && matches!(payload, CopyPayload::Params | CopyPayload::OptimizerStates),
            },
            OpKind::Round { unit, into } => Task::Round(self.rounded(unit, self.buffer(into))),
            OpKind::Add { span, from, .. } => Task::Add(self.additions(span, self.buffer(from))),
            OpKind::Squares { span, leaves } => Task::Squares(self.squares(span, leaves)),
            OpKind::ClipNorm { axes } => Task::ClipNorm(axes),
            OpKind::Update { unit, start, end, staging } => {
                Task::Update(self.update(unit, (start, end), staging.map(|id| self.buffer(id))))
            }
        }
    }

    fn model(&self) -> &ModelPlan {
        self.plan.input.model(self.phase.model)
    }

    /// A buffer of the phase, in memory.
    fn buffer(&self, id: BufferId) -> Address {
        self.lookup.location(id).expect("a buffer in use has an address").address()
    }

    fn only_part(&self, span: SpanId) -> SpanPart {
        let parts = &self.phase.schedule.span(span).parts;
        assert_eq!(parts.len(), 1, "units are copied one by one");
        parts[0]
    }

    fn unit(&self, unit: u32) -> (&UnitShape, &UnitAddresses, &UnitResidents) {
        let index = unit as usize;
        (&self.model().units[index], &self.addresses.units[index], &self.residents[index])
    }

    fn grad(&self, unit: u32) -> &ResidentAddress {
        self.residents[unit as usize].resident(ParamState::Grad).expect("a trained unit has a gradient")
    }

    /// The part of elements `[start, end)` of the largest shard of a state that this rank holds.
    fn own(&self, unit: u32, state: ParamState, (start, end): (usize, usize)) -> Vec<OwnedRange> {
        let parts = self.plan.owned(self.phase.model, unit, state);
        let within = |part: OwnedPart| {
            let (first, last) = (start.max(part.local_start), end.min(part.local_start + part.elems()));
            let skipped = first.saturating_sub(part.local_start);
            (first < last).then(|| OwnedRange {
                start: part.start + skipped,
                elems: last - first,
                trained_start: part.trained_start.map_or(0, |at| at + skipped),
                local_start: first,
            })
        };
        parts.into_iter().filter_map(within).collect()
    }

    // ---- parameters -------------------------------------------------------------------------------------

    fn gather(&self, span: SpanId, from: CopyEnd, axes: Axes) -> Task {
        let unit = self.only_part(span).unit;
        if self.plan.input.has_quantised(self.phase.model, unit) {
            return self.gather_quantised(unit, axes);
        }
        let (shape, addresses, residents) = self.unit(unit);
        let resident = residents.working();
        let from = match from {
            CopyEnd::Resident => resident.location,
            CopyEnd::Buffer(id) => Location::Memory(self.buffer(id)),
        };
        let [axis] = axes else {
            let pairs = vec![(from, Location::Memory(addresses.params))];
            return Task::Copy { pairs, writes_states: false };
        };
        let part = |(own, flat): (&OwnedPart, FlatParam)| Gather {
            own: from.address().slice(own.local_start, own.elems()),
            whole: addresses.params.slice(flat.start, flat.elems()),
        };
        Task::Gather {
            axis: *axis,
            parts: resident.owned.iter().zip(shape.flat_params()).map(part).collect(),
        }
    }

    /// Gathers the states that a unit with 4-bit parameters is dequantised from.
    fn gather_quantised(&self, unit: u32, axes: Axes) -> Task {
        let [axis] = axes else { panic!("4-bit parameters are all-gathered along one axis, not {axes:?}") };
        let (model, mut parts) = (self.phase.model, Vec::new());
        for state in [ParamState::Codes, ParamState::ScaleCodes, ParamState::Working] {
            let gathered = self.lookup.find(BufferKind::GatheredState { model, unit, state });
            let gathered = gathered.expect("a gather defines its buffers").address();
            let resident =
                self.residents[unit as usize].resident(state).expect("a unit has what it is gathered from");
            let wholes = self.plan.input.whole(model, unit, state).into_iter();
            parts.extend(resident.owned.iter().zip(wholes).map(|(own, whole)| Gather {
                own: resident.part(own).address(),
                whole: gathered.slice(whole.local_start, whole.elems()),
            }));
        }
        Task::Gather { axis: *axis, parts }
    }

    /// All-gathers the parameters that each rank has updated.
    fn all_gather_updated(&self, span: SpanId, axes: Axes) -> Task {
        let [axis] = axes else { panic!("parameters are all-gathered along one axis, not {axes:?}") };
        let mut parts = Vec::new();
        for SpanPart { unit, .. } in &self.phase.schedule.span(span).parts {
            let (shape, _, residents) = self.unit(*unit);
            let owned = self.plan.owned(self.phase.model, *unit, ParamState::Master);
            let flat_params = shape.flat_params().into_iter().filter(|flat| flat.trained_start.is_some());
            let working = residents.working();
            parts.extend(owned.into_iter().zip(flat_params).map(|(own, flat)| Gather {
                own: working.range(own.start, own.end).address(),
                whole: working.range(flat.start, flat.end).address(),
            }));
        }
        Task::Gather { axis: *axis, parts }
    }

    // ---- gradients --------------------------------------------------------------------------------------

    fn reduce(&self, span: SpanId, axis: Axis, into: ReduceInto, scratch: Option<Address>) -> Reduce {
        let sharded_over = self.plan.input.sharded_over(self.phase.model, ParamState::Grad);
        let to_all = !sharded_over.contains(&axis);
        let (accumulates, fresh) = match into {
            ReduceInto::InPlace => (false, false),
            ReduceInto::Accumulator { fresh } => (true, fresh),
        };
        let mut reduce = Reduce { axis, parts: Vec::new(), scratch, to_all, accumulate: Vec::new(), fresh };
        for part in &self.phase.schedule.span(span).parts {
            let (shape, addresses, _) = self.unit(part.unit);
            let (target, grad) =
                (addresses.grad_target.expect("a trained unit has a gradient"), self.grad(part.unit));
            if sharded_over.is_empty() {
                let (start, elems) = (part.start, part.end - part.start);
                let from = target.slice(start, elems);
                reduce.parts.push(from);
                reduce
                    .accumulate
                    .extend(accumulates.then(|| (from, grad.location.address().slice(start, elems))));
                continue;
            }
            let whole = (part.start, part.end) == (0, target.elems());
            assert!(whole, "sharded gradients are reduced in whole units");
            let flat_params =
                shape.flat_params().into_iter().filter_map(|flat| Some((flat.trained_start?, flat)));
            for (own, (trained_start, flat)) in grad.owned.iter().zip(flat_params) {
                let mine = target.slice(trained_start + own.start - flat.start, own.elems());
                reduce.parts.push(if to_all { mine } else { target.slice(trained_start, flat.elems()) });
                reduce.accumulate.extend(accumulates.then(|| (mine, grad.part(own).address())));
            }
        }
        reduce
    }

    /// The parts of a unit's gradient that this rank updates, and their places in a buffer that holds only these.
    fn rounded(&self, unit: u32, into: Address) -> Vec<(Address, Address)> {
        let whole = self.addresses.units[unit as usize].grad_target.expect("a trained unit has a gradient");
        let own = self.grad(unit).owned.iter();
        own.map(|own| {
            let from = own.trained_start.expect("only trained parameters have gradients");
            (whole.slice(from, own.elems()), into.slice(own.local_start, own.elems()))
        })
        .collect()
    }

    /// Staged gradients and the sums they are added to.
    fn additions(&self, span: SpanId, staging: Address) -> Vec<(Address, Address)> {
        let SpanPart { unit, start, end } = self.only_part(span);
        let own = self.own(unit, ParamState::Grad, (start, end)).into_iter();
        let resident = self.grad(unit).location.address();
        own.map(|own| {
            (staging.slice(own.local_start - start, own.elems), resident.slice(own.local_start, own.elems))
        })
        .collect()
    }

    /// The sums of squares of some units. Leaves are stored in the order of the model's units.
    fn squares(&self, span: SpanId, leaves: BufferId) -> Vec<Squares> {
        let block = lockstep_core::ALIGN_ELEMS;
        let wanted = &self.phase.schedule.span(span).parts;
        let (norm_leaves, leaves) = (self.norm_leaves(), self.buffer(leaves));
        let (mut first, mut at) = (0, 0);
        let mut all = Vec::new();
        for (unit, shape) in (0..).zip(&self.model().units) {
            let resident = self.residents[unit as usize].resident(ParamState::Grad);
            for part in resident.iter().flat_map(|resident| &resident.owned) {
                let blocks = part.elems() / block;
                if wanted.iter().any(|one| one.unit == unit) {
                    let grad = self.grad(unit).part(part).address();
                    let trained_start = part.trained_start.expect("only trained parameters have gradients");
                    all.push(Squares {
                        grad,
                        leaves: leaves.slice(at, blocks),
                        joined: (leaves != norm_leaves).then(|| norm_leaves.slice(at, blocks)),
                        first_block: ((first + trained_start) / block) as u64,
                    });
                }
                at += blocks;
            }
            first += shape.trained_elems;
        }
        all
    }

    fn norm_leaves(&self) -> Address {
        self.addresses.norm_leaves.expect("a phase with a norm has leaves")
    }

    // ---- update -----------------------------------------------------------------------------------------

    fn update(&self, unit: u32, piece: (usize, usize), staging: Option<Address>) -> Update {
        let shape = &self.model().units[unit as usize];
        let mut update = Update::default();
        for own in self.own(unit, ParamState::Master, piece) {
            let whole = match self.plan.input.optimizer_tier(self.phase.model, unit) {
                MemoryTier::Device => self.update_on_device(unit, &own, staging),
                MemoryTier::Host | MemoryTier::Nvme => {
                    let staging = staging.map(|staging| HostStaging::new(self, unit, staging, piece));
                    self.update_on_host(unit, &own, staging.as_ref(), &mut update)
                }
            };
            for (start, end, decays, segment) in self.uniform_ranges(shape) {
                let (first, last) = (start.max(own.start), end.min(own.start + own.elems));
                if first < last {
                    let tensor =
                        segment.map(|segment| TensorRange { unit, segment, first_elem: first - start });
                    update.ranges.push(whole.slice(first - own.start, last - first, decays, tensor));
                }
            }
        }
        update
    }

    /// The trained ranges of a unit that one call of the optimizer can update: start, end, whether they decay, and, if
    /// something is rounded stochastically, the tensor.
    fn uniform_ranges(&self, shape: &UnitShape) -> Vec<(usize, usize, bool, Option<u32>)> {
        if self.plan.input.rounds_stochastically(self.phase.model) {
            let tensors = (0..).zip(&shape.segments).filter(|(_, segment)| segment.is_trained());
            let end = |start: usize, elems: usize| start + padded_elems(elems);
            return tensors.map(|(i, s)| (s.start, end(s.start, s.elems()), s.decay, Some(i))).collect();
        }
        let groups = shape.groups.iter().filter(|group| group.trained_start.is_some());
        groups.map(|group| (group.start, group.end, group.decay, None)).collect()
    }

    /// The operands of one optimizer step; `address` returns where this rank has a state of it.
    fn update_range(
        &self,
        unit: u32,
        working: Address,
        address: impl Fn(ParamState) -> Option<Address>,
    ) -> UpdateRange {
        let input = &self.plan.input;
        let master = address(ParamState::Master);
        let params = match (input.master_dtype(self.phase.model, unit), master) {
            (Some(DType::I16), Some(remainder)) => ParamAddresses::Split { weight: working, remainder },
            (Some(DType::BF16), Some(weight)) => ParamAddresses::Stochastic { weight, copy: Some(working) },
            (Some(_), Some(master)) => ParamAddresses::Master { master, working: Some(working) },
            (None, None) if input.storage == DType::BF16 => {
                ParamAddresses::Stochastic { weight: working, copy: None }
            }
            (None, None) => ParamAddresses::Master { master: working, working: None },
            (dtype, _) => panic!("unit {unit} has masters {dtype:?}, at {master:?}"),
        };
        let mut states = [None; OptimizerSpec::MAX_STATES];
        for (i, to) in (0..self.model().optimizer.states.len() as u8).zip(&mut states) {
            let values = address(ParamState::Optimizer(i));
            let values = values.unwrap_or_else(|| panic!("unit {unit} has no optimizer state {i}"));
            *to = Some(StateAddress { values, scales: address(ParamState::Scales(i)) });
        }
        UpdateRange {
            params,
            grad: address(ParamState::Grad).expect("a trained unit has a gradient"),
            states,
            decays: false,
            tensor: None,
        }
    }

    fn update_on_device(&self, unit: u32, own: &OwnedRange, staging: Option<Address>) -> UpdateRange {
        let residents = &self.residents[unit as usize];
        // Parameters that live on the host pass through a staging buffer.
        let working = match staging {
            Some(staging) => staging.slice(own.local_start, own.elems),
            None => own.of(residents.working()).address(),
        };
        self.update_range(unit, working, |state| Some(own.of(residents.resident(state)?).address()))
    }

    /// Without `staging` everything it needs lives on the host.
    fn update_on_host(
        &self,
        unit: u32,
        own: &OwnedRange,
        staging: Option<&HostStaging>,
        update: &mut Update,
    ) -> UpdateRange {
        let residents = &self.residents[unit as usize];
        let staging = || staging.expect("a state that lives elsewhere is staged");
        let address = |state: ParamState| {
            Some(match own.of(residents.resident(state)?) {
                Location::Memory(address) => address,
                Location::File { .. } => staging().state(state, own),
            })
        };
        // Updated parameters are written to their resident copy on the host, or to staging, from where they are copied
        // to the device or written to NVMe.
        let resident = own.of(residents.working());
        let working = match self.model().placements.params_tier {
            MemoryTier::Host => resident.address(),
            MemoryTier::Device => staging().params(own),
            MemoryTier::Nvme => {
                let staged = staging().params(own);
                update.write_backs.push((Location::Memory(staged), resident));
                if self.plan.input.updates_read_working(self.phase.model, unit) {
                    update.fetches.push((resident, Location::Memory(staged)));
                }
                staged
            }
        };
        self.update_range(unit, working, address)
    }

    // ---- copies between memories ------------------------------------------------------------------------

    fn copies(
        &self,
        payload: CopyPayload,
        from: CopyEnd,
        to: CopyEnd,
        span: SpanId,
    ) -> Vec<(Location, Location)> {
        let (to_resident, buffer) = match (from, to) {
            (CopyEnd::Resident, CopyEnd::Buffer(id)) => (false, id),
            (CopyEnd::Buffer(id), CopyEnd::Resident) => (true, id),
            (CopyEnd::Buffer(from), CopyEnd::Buffer(to)) => {
                return self.copies_between(payload, from, to, span);
            }
            (CopyEnd::Resident, CopyEnd::Resident) => unreachable!("a state has one resident copy"),
        };
        let buffer = self.buffer(buffer);
        let pairs = match payload {
            CopyPayload::Params if to_resident => self.updated_params(span, buffer),
            CopyPayload::Params => {
                let resident = self.residents[self.only_part(span).unit as usize].working().location;
                vec![(resident, Location::Memory(buffer.slice(0, resident.elems())))]
            }
            CopyPayload::Grad => self.gradient(span, buffer),
            CopyPayload::RoundedGrad => {
                let resident = self.grad(self.only_part(span).unit).location;
                vec![(resident, Location::Memory(buffer.slice(0, resident.elems())))]
            }
            CopyPayload::OptimizerStates => self.optimizer_states(span, buffer),
            CopyPayload::NormLeaves => unreachable!("norm leaves are not resident"),
        };
        if to_resident {
            pairs.into_iter().map(|(resident, other)| (other, resident)).collect()
        } else {
            pairs
        }
    }

    fn copies_between(
        &self,
        payload: CopyPayload,
        from: BufferId,
        to: BufferId,
        span: SpanId,
    ) -> Vec<(Location, Location)> {
        let (from, to) = (self.buffer(from), self.buffer(to));
        match payload {
            // Units on the device are the first ones, so their leaves come first in both buffers.
            CopyPayload::NormLeaves => {
                let units = self.phase.schedule.span(span).parts.iter();
                let own = units.flat_map(|part| &self.grad(part.unit).owned).map(OwnedPart::elems);
                let elems = own.sum::<usize>() / lockstep_core::ALIGN_ELEMS;
                vec![(Location::Memory(from.slice(0, elems)), Location::Memory(to.slice(0, elems)))]
            }
            // From the unsharded gradient on the device to a piece of this rank's shard on the host.
            CopyPayload::Grad => {
                let SpanPart { unit, start, end } = self.only_part(span);
                let own = self.own(unit, ParamState::Grad, (start, end)).into_iter();
                own.map(|own| {
                    let from = from.slice(own.trained_start, own.elems);
                    (Location::Memory(from), Location::Memory(to.slice(own.local_start - start, own.elems)))
                })
                .collect()
            }
            CopyPayload::Params | CopyPayload::RoundedGrad | CopyPayload::OptimizerStates => {
                unreachable!("{payload:?} are copied from or to the resident copy")
            }
        }
    }

    /// Pairs of the resident parts of a gradient and their ranges in the unsharded gradient on the device.
    fn gradient(&self, span: SpanId, whole: Address) -> Vec<(Location, Location)> {
        let SpanPart { unit, start, end } = self.only_part(span);
        let own = self.own(unit, ParamState::Grad, (start, end)).into_iter();
        let resident = self.grad(unit).location;
        own.map(|own| {
            (
                resident.slice(own.local_start, own.elems),
                Location::Memory(whole.slice(own.trained_start, own.elems)),
            )
        })
        .collect()
    }

    /// Pairs of resident parameters and the staging memory that the update wrote.
    fn updated_params(&self, span: SpanId, staging: Address) -> Vec<(Location, Location)> {
        let SpanPart { unit, start, end } = self.only_part(span);
        let resident = self.residents[unit as usize].working();
        let on_host = self.plan.input.optimizer_tier(self.phase.model, unit) != MemoryTier::Device;
        let host_staging = on_host.then(|| HostStaging::new(self, unit, staging, (start, end)));
        let own = self.own(unit, ParamState::Master, (start, end)).into_iter();
        own.map(|own| {
            let staged = match &host_staging {
                Some(staging) => staging.params(&own),
                None => staging.slice(own.local_start - start, own.elems),
            };
            (own.of(resident), Location::Memory(staged))
        })
        .collect()
    }

    /// Pairs of a piece's resident states and their staging memory.
    fn optimizer_states(&self, span: SpanId, staging: Address) -> Vec<(Location, Location)> {
        let SpanPart { unit, start, end } = self.only_part(span);
        let (residents, staging) =
            (&self.residents[unit as usize], HostStaging::new(self, unit, staging, (start, end)));
        let mut pairs = Vec::new();
        for own in self.own(unit, ParamState::Master, (start, end)) {
            let states = self.plan.input.optimizer_states(self.phase.model, unit).into_iter();
            pairs.extend(states.map(|state| {
                let resident = residents.resident(state).expect("a state that is copied is resident");
                (own.of(resident), Location::Memory(staging.state(state, &own)))
            }));
        }
        pairs
    }
}

/// A part of a shard that this rank holds, within one flat parameter of the unit.
#[derive(Clone, Copy, Debug)]
struct OwnedRange {
    /// The index of its first element in the unit.
    start: usize,
    /// The index of its first element among the unit's trained elements.
    trained_start: usize,
    elems: usize,
    /// The index of its first element in the rank's shard.
    local_start: usize,
}

impl OwnedRange {
    fn of(&self, resident: &ResidentAddress) -> Location {
        resident.range(self.start, self.start + self.elems)
    }
}

/// The parts of a [`BufferKind::HostStaging`](lockstep_plan::BufferKind::HostStaging): a piece's states, then its parameters.
struct HostStaging {
    staging: Address,
    /// The offset and type of each state.
    states: Vec<(ParamState, Bytes, DType)>,
    params: Bytes,
    storage: DType,
    /// The index of the piece's first element in the shard.
    start: usize,
    elems: usize,
}

impl HostStaging {
    fn new(builder: &TaskBuilder, unit: u32, staging: Address, (start, end): (usize, usize)) -> HostStaging {
        let (input, model) = (&builder.plan.input, builder.phase.model);
        let on_disk = builder.model().placements.optimizer_tier == MemoryTier::Nvme;
        let (staged, params) = match on_disk {
            true => input.staged_states(model, unit, end - start),
            false => (Vec::new(), Bytes::ZERO),
        };
        let states = staged.into_iter().map(|(state, at)| (state, at, input.resident(model, unit, state).2));
        let states = states.collect();
        HostStaging { staging, states, params, storage: input.storage, start, elems: end - start }
    }

    fn state(&self, state: ParamState, own: &OwnedRange) -> Address {
        let found = self.states.iter().find(|(one, ..)| *one == state);
        let (_, begin, dtype) = found.expect("one of the optimizer's states");
        self.address(*begin, *dtype, own, state.params_per_number())
    }

    fn params(&self, own: &OwnedRange) -> Address {
        self.address(self.params, self.storage, own, 1)
    }

    fn address(&self, begin: Bytes, dtype: DType, own: &OwnedRange, params_per_number: usize) -> Address {
        let (first, elems) =
            ((own.local_start - self.start) / params_per_number, own.elems / params_per_number);
        self.staging.at(begin, self.elems / params_per_number, dtype).slice(first, elems)
    }
}
