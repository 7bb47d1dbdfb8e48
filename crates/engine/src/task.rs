//! What each operation of the schedule comes to on this rank: places instead of names.

use lockstep_core::{Axis, Bytes, DType, Elems, Rank};
use lockstep_plan::{
    Axes, BufferId, End, ModelPlan, Moved, Op, OpKind, OptimizerSpec, OwnedPart, Phase, ReduceInto, RunPlan,
    SpanId, SpanPart, State, Tier,
};
use lockstep_shape::{FlatParam, UnitShape};

use crate::places::{Finder, Home, Place, Places, Spot, UnitPlaces, UnitStates};

/// An operation with its addresses.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// Computation of a unit, or the objective: run by kind.
    Compute,
    /// Releases say when bytes may be used again; at run time there is nothing to do.
    Nothing,
    /// Shards to wholes, among the ranks along an axis.
    Gather {
        axis: Axis,
        parts: Vec<Gather>,
    },
    Reduce(Reduce),
    Copy {
        pairs: Vec<(Spot, Spot)>,
        /// A state's home is where it goes, and a skipped step leaves it alone.
        writes_states: bool,
    },
    /// From the host's staging to what earlier micro-batches left.
    Add(Vec<(Place, Place)>),
    Squares(Vec<Squares>),
    ClipNorm(Axes),
    Update(Update),
}

/// A rank's piece and the whole it belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gather {
    pub(crate) own: Place,
    pub(crate) whole: Place,
}

/// A sum over ranks, in place; then what goes on from there.
#[derive(Clone, Debug)]
pub(crate) struct Reduce {
    pub(crate) axis: Axis,
    pub(crate) parts: Vec<Place>,
    /// Partial sums; `None` in a world of one.
    pub(crate) scratch: Option<Place>,
    /// Every rank gets the whole sum, not its share alone.
    pub(crate) to_all: bool,
    /// From where the sum is to the accumulator, which is overwritten if it is `fresh`.
    pub(crate) onward: Vec<(Place, Place)>,
    pub(crate) fresh: bool,
}

/// A range of gradients, and where its blocks' sums of squares go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Squares {
    pub(crate) grad: Place,
    pub(crate) leaves: Place,
    /// Where they are once they are with those of other units, if these are not.
    pub(crate) joined: Option<Place>,
    /// Its first block among all blocks of the model.
    pub(crate) first_block: u64,
}

/// An optimizer step on what this rank holds of a unit.
#[derive(Clone, Debug, Default)]
pub(crate) struct Update {
    /// Read first: parameters whose only copy is on a disk.
    pub(crate) before: Vec<(Spot, Spot)>,
    pub(crate) ranges: Vec<UpdateRange>,
    /// Written last: updated parameters whose home is a disk.
    pub(crate) after: Vec<(Spot, Spot)>,
}

/// A range with one rate of decay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdateRange {
    pub(crate) master: Place,
    pub(crate) working: Option<Place>,
    pub(crate) grad: Place,
    /// As many as the optimizer has.
    pub(crate) states: [Option<Place>; OptimizerSpec::MOST_STATES],
    pub(crate) decays: bool,
}

impl UpdateRange {
    fn slice(&self, start: usize, elems: usize, decays: bool) -> UpdateRange {
        UpdateRange {
            master: self.master.slice(start, elems),
            working: self.working.map(|place| place.slice(start, elems)),
            grad: self.grad.slice(start, elems),
            states: self.states.map(|state| state.map(|place| place.slice(start, elems))),
            decays,
        }
    }
}

/// The tasks of a phase, one for each operation.
pub(crate) fn tasks(
    plan: &RunPlan,
    phase: &Phase,
    places: &Places,
    residents: &[UnitStates],
    rank: Rank,
) -> Vec<Task> {
    let maker = Maker { plan, phase, places, residents, rank, finder: Finder { plan, phase } };
    phase.schedule.ops.iter().map(|op| maker.task(op)).collect()
}

struct Maker<'a> {
    plan: &'a RunPlan,
    phase: &'a Phase,
    places: &'a Places,
    /// Of the phase's model.
    residents: &'a [UnitStates],
    rank: Rank,
    finder: Finder<'a>,
}

impl Maker<'_> {
    fn task(&self, op: &Op) -> Task {
        match op.kind {
            OpKind::Feed { .. }
            | OpKind::Forward { .. }
            | OpKind::HeadForward { .. }
            | OpKind::Objective { .. }
            | OpKind::HeadBackward { .. }
            | OpKind::HeadStep { .. }
            | OpKind::Recompute { .. }
            | OpKind::Backward { .. }
            | OpKind::Generate => Task::Compute,
            OpKind::Release(_) => Task::Nothing,
            OpKind::Gather { span, from, axes } => self.gather(span, from, axes),
            OpKind::Publish { span, axes } => self.publish(span, axes),
            OpKind::Reduce { span, axis, into, scratch, .. } => {
                let scratch = scratch.map(|id| self.buffer(id));
                Task::Reduce(self.reduce(span, axis, into, scratch))
            }
            OpKind::Move { what, from, to, span } => Task::Copy {
                pairs: self.copies(what, from, to, span),
                writes_states: to == End::Resident && matches!(what, Moved::Params | Moved::OptimizerStates),
            },
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
    fn buffer(&self, id: BufferId) -> Place {
        self.finder.spot(id).expect("what an operation uses has a place").place()
    }

    fn only_part(&self, span: SpanId) -> SpanPart {
        let parts = &self.phase.schedule.span(span).parts;
        assert_eq!(parts.len(), 1, "units move one by one");
        parts[0]
    }

    fn unit(&self, unit: u32) -> (&UnitShape, &UnitPlaces, &UnitStates) {
        let index = unit as usize;
        (&self.model().units[index], &self.places.units[index], &self.residents[index])
    }

    fn grad(&self, unit: u32) -> &Home {
        self.residents[unit as usize].home(State::Grad).expect("a trained unit has a gradient")
    }

    /// What this rank holds of elements `[start, end)` of the longest share of a state.
    fn own(&self, unit: u32, state: State, (start, end): (usize, usize)) -> Vec<OwnRange> {
        let parts = self.plan.input.owned(self.phase.model, unit, state, self.rank);
        let within = |part: OwnedPart| {
            let (first, last) = (start.max(part.at), end.min(part.at + part.elems()));
            let skipped = first.saturating_sub(part.at);
            (first < last).then(|| OwnRange {
                start: part.start + skipped,
                elems: last - first,
                trained_at: part.trained_at.map_or(0, |at| at + skipped),
                at: first,
            })
        };
        parts.into_iter().filter_map(within).collect()
    }

    // ---- parameters -------------------------------------------------------------------------------------

    fn gather(&self, span: SpanId, from: End, axes: Axes) -> Task {
        let (shape, places, residents) = self.unit(self.only_part(span).unit);
        let home = residents.working();
        let from = match from {
            End::Resident => home.spot,
            End::Buffer(id) => Spot::Memory(self.buffer(id)),
        };
        let [axis] = axes else {
            let pairs = vec![(from, Spot::Memory(places.params))];
            return Task::Copy { pairs, writes_states: false };
        };
        let part = |(own, cut): (&OwnedPart, FlatParam)| Gather {
            own: from.place().slice(own.at, own.elems()),
            whole: places.params.slice(cut.start, cut.elems()),
        };
        Task::Gather { axis: *axis, parts: home.owned.iter().zip(shape.flat_params()).map(part).collect() }
    }

    /// The optimizer's share of whole parameters goes to everybody.
    fn publish(&self, span: SpanId, axes: Axes) -> Task {
        let [axis] = axes else { panic!("parameters are published along one axis, not {axes:?}") };
        let mut parts = Vec::new();
        for SpanPart { unit, .. } in &self.phase.schedule.span(span).parts {
            let (shape, _, residents) = self.unit(*unit);
            let owned = self.plan.input.owned(self.phase.model, *unit, State::Master, self.rank);
            let cuts = shape.flat_params().into_iter().filter(|cut| cut.trained_at.is_some());
            let all = residents.working().spot.place();
            parts.extend(owned.into_iter().zip(cuts).map(|(own, cut)| Gather {
                own: all.slice(own.start, own.elems()),
                whole: all.slice(cut.start, cut.elems()),
            }));
        }
        Task::Gather { axis: *axis, parts }
    }

    // ---- gradients --------------------------------------------------------------------------------------

    fn reduce(&self, span: SpanId, axis: Axis, into: ReduceInto, scratch: Option<Place>) -> Reduce {
        let sharded_over = self.plan.input.sharded_over(self.phase.model, State::Grad);
        let to_all = !sharded_over.contains(&axis);
        let (accumulates, fresh) = match into {
            ReduceInto::Place => (false, false),
            ReduceInto::Accumulator { fresh } => (true, fresh),
        };
        let mut reduce = Reduce { axis, parts: Vec::new(), scratch, to_all, onward: Vec::new(), fresh };
        for part in &self.phase.schedule.span(span).parts {
            let (shape, places, _) = self.unit(part.unit);
            let (target, grad) = (places.grad_target.expect("a trained unit's"), self.grad(part.unit));
            if sharded_over.is_empty() {
                let (start, elems) = (part.start, part.end - part.start);
                let from = target.slice(start, elems);
                reduce.parts.push(from);
                reduce.onward.extend(accumulates.then(|| (from, grad.spot.place().slice(start, elems))));
                continue;
            }
            let whole = (part.start, part.end) == (0, target.elems());
            assert!(whole, "sharded gradients are reduced unit by unit");
            let cuts = shape.flat_params().into_iter().filter_map(|cut| Some((cut.trained_at?, cut)));
            for (own, (trained_at, cut)) in grad.owned.iter().zip(cuts) {
                let mine = target.slice(trained_at + own.start - cut.start, own.elems());
                reduce.parts.push(if to_all { mine } else { target.slice(trained_at, cut.elems()) });
                reduce.onward.extend(accumulates.then(|| (mine, grad.part(own).place())));
            }
        }
        reduce
    }

    /// Staged gradients and the sums they are added to.
    fn additions(&self, span: SpanId, staging: Place) -> Vec<(Place, Place)> {
        let SpanPart { unit, start, end } = self.only_part(span);
        let own = self.own(unit, State::Grad, (start, end)).into_iter();
        let home = self.grad(unit).spot.place();
        own.map(|own| (staging.slice(own.at - start, own.elems), home.slice(own.at, own.elems))).collect()
    }

    /// Of some units, all of them in the order of the model: leaves lie in that order.
    fn squares(&self, span: SpanId, leaves: BufferId) -> Vec<Squares> {
        let block = lockstep_core::ALIGN_ELEMS;
        let wanted = &self.phase.schedule.span(span).parts;
        let (room, here) = (self.norm_leaves(), self.buffer(leaves));
        let (mut first, mut at) = (0, 0);
        let mut all = Vec::new();
        for (unit, shape) in (0..).zip(&self.model().units) {
            let home = self.residents[unit as usize].home(State::Grad);
            for part in home.iter().flat_map(|home| &home.owned) {
                let blocks = part.elems() / block;
                if wanted.iter().any(|one| one.unit == unit) {
                    let grad = self.grad(unit).part(part).place();
                    let trained_at = part.trained_at.expect("gradients are of what is trained");
                    all.push(Squares {
                        grad,
                        leaves: here.slice(at, blocks),
                        joined: (here != room).then(|| room.slice(at, blocks)),
                        first_block: ((first + trained_at) / block) as u64,
                    });
                }
                at += blocks;
            }
            first += shape.trained_elems;
        }
        all
    }

    fn norm_leaves(&self) -> Place {
        self.places.norm_leaves.expect("a phase with a norm has room for its leaves")
    }

    // ---- update -----------------------------------------------------------------------------------------

    fn update(&self, unit: u32, piece: (usize, usize), staging: Option<Place>) -> Update {
        let shape = &self.model().units[unit as usize];
        let mut update = Update::default();
        for own in self.own(unit, State::Master, piece) {
            let whole = match self.plan.input.optimizer_tier(self.phase.model, unit) {
                Tier::Device => self.update_on_device(unit, &own, staging),
                Tier::Host | Tier::Nvme => {
                    let room = staging.map(|staging| HostRoom::new(self, unit, staging, piece));
                    self.update_on_host(unit, &own, room.as_ref(), &mut update)
                }
            };
            for group in shape.groups.iter().filter(|group| group.trained_at.is_some()) {
                let (start, end) = (group.start.max(own.start), group.end.min(own.start + own.elems));
                if start < end {
                    update.ranges.push(whole.slice(start - own.start, end - start, group.decay));
                }
            }
        }
        update
    }

    /// The range of one optimizer step, `place` telling where this rank has a state of it.
    fn update_range(&self, unit: u32, working: Place, place: impl Fn(State) -> Option<Place>) -> UpdateRange {
        let master = place(State::Master);
        let mut states = [None; OptimizerSpec::MOST_STATES];
        for (to, state) in states.iter_mut().zip(self.model().optimizer.states()) {
            *to = place(state);
            assert!(to.is_some(), "unit {unit} has no {state:?}");
        }
        UpdateRange {
            master: master.unwrap_or(working),
            working: master.map(|_| working),
            grad: place(State::Grad).expect("a trained unit has a gradient"),
            states,
            decays: false,
        }
    }

    fn update_on_device(&self, unit: u32, own: &OwnRange, staging: Option<Place>) -> UpdateRange {
        let residents = &self.residents[unit as usize];
        // Parameters that live on the host leave through a staging buffer.
        let working = match staging {
            Some(staging) => staging.slice(own.at, own.elems),
            None => own.of(residents.working()).place(),
        };
        self.update_range(unit, working, |state| Some(own.of(residents.home(state)?).place()))
    }

    /// Without `room` everything it needs has its home on the host.
    fn update_on_host(
        &self,
        unit: u32,
        own: &OwnRange,
        room: Option<&HostRoom>,
        update: &mut Update,
    ) -> UpdateRange {
        let residents = &self.residents[unit as usize];
        let room = || room.expect("what has its home elsewhere is staged");
        let place = |state: State| {
            Some(match own.of(residents.home(state)?) {
                Spot::Memory(place) => place,
                Spot::File { .. } => room().state(state, own),
            })
        };
        // Where updated parameters go: their home on the host, or the staging's room, from where they are
        // moved to the device or written to a disk.
        let home = own.of(residents.working());
        let working = match self.model().placements.params_tier {
            Tier::Host => home.place(),
            Tier::Device => room().params(own),
            Tier::Nvme => {
                let through = room().params(own);
                update.after.push((Spot::Memory(through), home));
                if residents.home(State::Master).is_none() {
                    update.before.push((home, Spot::Memory(through)));
                }
                through
            }
        };
        self.update_range(unit, working, place)
    }

    // ---- copies between memories ------------------------------------------------------------------------

    fn copies(&self, what: Moved, from: End, to: End, span: SpanId) -> Vec<(Spot, Spot)> {
        let (to_home, buffer) = match (from, to) {
            (End::Resident, End::Buffer(id)) => (false, id),
            (End::Buffer(id), End::Resident) => (true, id),
            (End::Buffer(from), End::Buffer(to)) => return self.copies_between(what, from, to, span),
            (End::Resident, End::Resident) => unreachable!("a state has one home"),
        };
        let buffer = self.buffer(buffer);
        let pairs = match what {
            Moved::Params if to_home => self.updated_params(span, buffer),
            Moved::Params => {
                let home = self.residents[self.only_part(span).unit as usize].working().spot;
                vec![(home, Spot::Memory(buffer.slice(0, home.elems())))]
            }
            Moved::Grad => self.gradient(span, buffer),
            Moved::OptimizerStates => self.optimizer_states(span, buffer),
            Moved::Squares => unreachable!("squares have no home"),
        };
        if to_home { pairs.into_iter().map(|(home, other)| (other, home)).collect() } else { pairs }
    }

    fn copies_between(&self, what: Moved, from: BufferId, to: BufferId, span: SpanId) -> Vec<(Spot, Spot)> {
        let (from, to) = (self.buffer(from), self.buffer(to));
        match what {
            // Units that stay are the first, so their leaves are, in both places.
            Moved::Squares => {
                let units = self.phase.schedule.span(span).parts.iter();
                let own = units.flat_map(|part| &self.grad(part.unit).owned).map(OwnedPart::elems);
                let elems = own.sum::<usize>() / lockstep_core::ALIGN_ELEMS;
                vec![(Spot::Memory(from.slice(0, elems)), Spot::Memory(to.slice(0, elems)))]
            }
            // A whole gradient on the device, a piece of this rank's share on the host.
            Moved::Grad => {
                let SpanPart { unit, start, end } = self.only_part(span);
                let own = self.own(unit, State::Grad, (start, end)).into_iter();
                own.map(|own| {
                    let from = from.slice(own.trained_at, own.elems);
                    (Spot::Memory(from), Spot::Memory(to.slice(own.at - start, own.elems)))
                })
                .collect()
            }
            Moved::Params | Moved::OptimizerStates => unreachable!("{what:?} come from home, or go there"),
        }
    }

    /// Homes of a gradient's pieces, and where they are in the whole gradient on the device.
    fn gradient(&self, span: SpanId, whole: Place) -> Vec<(Spot, Spot)> {
        let SpanPart { unit, start, end } = self.only_part(span);
        let own = self.own(unit, State::Grad, (start, end)).into_iter();
        let home = self.grad(unit).spot;
        own.map(|own| (home.slice(own.at, own.elems), Spot::Memory(whole.slice(own.trained_at, own.elems))))
            .collect()
    }

    /// Homes of updated parameters, and where the update left them.
    fn updated_params(&self, span: SpanId, staging: Place) -> Vec<(Spot, Spot)> {
        let SpanPart { unit, start, end } = self.only_part(span);
        let home = self.residents[unit as usize].working();
        let on_host = self.plan.input.optimizer_tier(self.phase.model, unit) != Tier::Device;
        let room = on_host.then(|| HostRoom::new(self, unit, staging, (start, end)));
        let own = self.own(unit, State::Master, (start, end)).into_iter();
        own.map(|own| {
            let staged = match &room {
                Some(room) => room.params(&own),
                None => staging.slice(own.at - start, own.elems),
            };
            (own.of(home), Spot::Memory(staged))
        })
        .collect()
    }

    /// Homes of a piece's states, and where they are staged.
    fn optimizer_states(&self, span: SpanId, staging: Place) -> Vec<(Spot, Spot)> {
        let SpanPart { unit, start, end } = self.only_part(span);
        let (residents, room) =
            (&self.residents[unit as usize], HostRoom::new(self, unit, staging, (start, end)));
        let mut pairs = Vec::new();
        for own in self.own(unit, State::Master, (start, end)) {
            let states = self.plan.input.optimizer_states(self.phase.model, unit).into_iter();
            pairs.extend(states.map(|state| {
                let home = residents.home(state).expect("a state that is moved is there");
                (own.of(home), Spot::Memory(room.state(state, &own)))
            }));
        }
        pairs
    }
}

/// A part of a share that this rank holds, within one cut of the unit.
#[derive(Clone, Copy, Debug)]
struct OwnRange {
    /// First element in the unit, and among its trained ones.
    start: usize,
    trained_at: usize,
    elems: usize,
    /// First element in the rank's share.
    at: usize,
}

impl OwnRange {
    fn of(&self, home: &Home) -> Spot {
        home.range(self.start, self.start + self.elems)
    }
}

/// The parts of a [`What::HostStaging`](lockstep_plan::What::HostStaging): a piece's states, then its parameters.
struct HostRoom {
    staging: Place,
    /// Where each state begins, and its type.
    states: Vec<(State, Bytes, DType)>,
    params: Bytes,
    storage: DType,
    /// First element of the piece in the share.
    start: usize,
}

impl HostRoom {
    fn new(maker: &Maker, unit: u32, staging: Place, (start, end): (usize, usize)) -> HostRoom {
        let (input, model) = (&maker.plan.input, maker.phase.model);
        let on_disk = maker.model().placements.optimizer_tier == Tier::Nvme;
        let staged = if on_disk { input.optimizer_states(model, unit) } else { Vec::new() };
        let mut at = Bytes::ZERO;
        let states = staged.into_iter().map(|state| {
            let (begin, dtype) = (at, input.resident(model, unit, state).2);
            at += Elems((end - start) as u64).bytes(dtype);
            (state, begin, dtype)
        });
        let states = states.collect();
        HostRoom { staging, states, params: at, storage: input.storage, start }
    }

    fn state(&self, state: State, own: &OwnRange) -> Place {
        let found = self.states.iter().find(|(one, ..)| *one == state);
        let (_, begin, dtype) = found.expect("one of the optimizer's states");
        self.place(*begin, *dtype, own)
    }

    fn params(&self, own: &OwnRange) -> Place {
        self.place(self.params, self.storage, own)
    }

    fn place(&self, begin: Bytes, dtype: DType, own: &OwnRange) -> Place {
        let first = own.at - self.start;
        self.staging.at(begin, first + own.elems, dtype).slice(first, own.elems)
    }
}
