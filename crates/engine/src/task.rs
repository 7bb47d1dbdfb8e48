//! What each operation of the schedule comes to on this rank: places instead of names.

use lockstep_core::{Axis, Rank};
use lockstep_plan::{Access, BufferId, Op, OpKind, Phase, RunPlan, SpanId, SpanPart, State, Tier, What};

use crate::places::{Finder, Home, Place, Places, Spot, UnitPlaces};

/// An operation with its addresses.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// Computation of a unit, or the objective: run by kind.
    Compute,
    /// Releases say when bytes may be used again; at run time there is nothing to do.
    Nothing,
    /// Shards to wholes, over the shard axis.
    Gather(Vec<Gather>),
    Reduce(Reduce),
    Copy {
        pairs: Vec<(Spot, Spot)>,
        /// A state's home is where it goes, and a skipped step leaves it alone.
        writes_states: bool,
    },
    /// From the host's staging to what earlier micro-batches left.
    Add(Vec<(Place, Place)>),
    Squares(Vec<Squares>),
    ClipNorm,
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
    /// From where the sum is to the accumulator.
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
    pub(crate) before: Option<(Spot, Spot)>,
    pub(crate) ranges: Vec<UpdateRange>,
    /// Written last: updated parameters whose home is a disk.
    pub(crate) after: Option<(Spot, Spot)>,
}

/// A range with one rate of decay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdateRange {
    pub(crate) master: Place,
    pub(crate) working: Option<Place>,
    pub(crate) grad: Place,
    pub(crate) m: Place,
    pub(crate) v: Place,
    pub(crate) decays: bool,
}

/// The tasks of a phase, one for each operation.
pub(crate) fn tasks(plan: &RunPlan, phase: &Phase, places: &Places, rank: Rank) -> Vec<Task> {
    let finder = Finder { plan, phase, rank };
    let maker = Maker { plan, phase, places, finder };
    phase.schedule.ops.iter().map(|op| maker.task(op)).collect()
}

struct Maker<'a> {
    plan: &'a RunPlan,
    phase: &'a Phase,
    places: &'a Places,
    finder: Finder<'a>,
}

impl Maker<'_> {
    fn task(&self, op: &Op) -> Task {
        match op.kind {
            OpKind::Forward { .. }
            | OpKind::HeadForward { .. }
            | OpKind::Objective { .. }
            | OpKind::HeadBackward { .. }
            | OpKind::HeadStep { .. }
            | OpKind::Recompute { .. }
            | OpKind::Backward { .. }
            | OpKind::Generate => Task::Compute,
            OpKind::Release(_) => Task::Nothing,
            OpKind::Gather(span) => self.gather(op, span),
            OpKind::Publish(span) => {
                let parts = &self.phase.schedule.span(span).parts;
                Task::Gather(parts.iter().map(|part| self.publish(part)).collect())
            }
            OpKind::Reduce { span, axis, fresh, .. } => Task::Reduce(self.reduce(op, span, axis, fresh)),
            OpKind::Fetch(span) | OpKind::Spill(span) => {
                if self.accessed(op, |w| matches!(w, What::GradWhole { .. })).is_some() {
                    return Task::Copy { pairs: self.gradient_copies(op, span), writes_states: false };
                }
                let written = |(id, access): &(BufferId, Access)| {
                    matches!(self.what(*id), What::State { .. }) && *access != Access::Read
                };
                let writes_states = op.accesses.iter().any(written);
                Task::Copy { pairs: self.copies(op, span), writes_states }
            }
            OpKind::Add { span, .. } => Task::Add(self.additions(op, span)),
            OpKind::Squares => Task::Squares(self.squares(op)),
            OpKind::JoinSquares => Task::Copy { pairs: self.join_squares(), writes_states: false },
            OpKind::ClipNorm => Task::ClipNorm,
            OpKind::Update { unit, start, end } => Task::Update(self.update(op, unit, (start, end))),
        }
    }

    fn what(&self, id: BufferId) -> What {
        self.plan.buffers[id.0 as usize].what
    }

    fn unit(&self, unit: u32) -> &UnitPlaces {
        &self.places.units[unit as usize]
    }

    /// The buffer among an operation's accesses that `wanted` picks.
    fn accessed(&self, op: &Op, wanted: impl Fn(&What) -> bool) -> Option<Spot> {
        let found = op.accesses.iter().find(|(id, _)| wanted(&self.what(*id)));
        found.and_then(|(id, _)| self.finder.spot(*id))
    }

    fn only_part(&self, span: SpanId) -> SpanPart {
        let parts = &self.phase.schedule.span(span).parts;
        assert_eq!(parts.len(), 1, "units move one by one");
        parts[0]
    }

    // ---- parameters -------------------------------------------------------------------------------------

    fn gather(&self, op: &Op, span: SpanId) -> Task {
        let unit = self.unit(self.only_part(span).unit);
        let staging = self.accessed(op, |w| matches!(w, What::ParamStaging { .. }));
        let across = self.plan.input.mesh.shard > 1;
        if !across {
            let pairs = vec![(unit.working.spot, Spot::Memory(unit.params))];
            return Task::Copy { pairs, writes_states: false };
        }
        let from = staging.unwrap_or(unit.working.spot).place();
        let shape =
            &self.plan.input.models[self.phase.model.0 as usize].units[self.only_part(span).unit as usize];
        let bounds = [(0, shape.trainable_elems), (shape.trainable_elems, shape.elems)];
        let gathers = unit.working.owned.iter().zip(bounds).filter(|(_, (start, end))| start < end);
        Task::Gather(
            gathers
                .map(|(part, (start, end))| Gather {
                    own: from.slice(part.at, part.elems()),
                    whole: unit.params.slice(start, end - start),
                })
                .collect(),
        )
    }

    /// The optimizer's share of whole parameters goes to everybody.
    fn publish(&self, part: &SpanPart) -> Gather {
        let unit = self.unit(part.unit);
        let own = unit.exp_avg.expect("what is published was updated").owned[0];
        let whole = unit.working.spot.place().slice(part.start, part.end - part.start);
        Gather { own: whole.slice(own.start, own.elems()), whole }
    }

    // ---- gradients --------------------------------------------------------------------------------------

    fn reduce(&self, op: &Op, span: SpanId, axis: Axis, fresh: bool) -> Reduce {
        let input = &self.plan.input;
        let sharded = input.is_sharded(State::Grad);
        // On a mesh of two axes the first sum stays where backward wrote.
        let last_axis = if input.mesh.replicate > 1 && input.mesh.shard > 1 { Axis::Replicate } else { axis };
        // Where gradients leave the device the last one does too, until it is spilled.
        let parts = &self.phase.schedule.span(span).parts;
        let goes_on = axis == last_axis && !input.grads_leave(parts[0].unit);
        let mut reduce = Reduce {
            axis,
            parts: Vec::new(),
            scratch: self.accessed(op, |w| *w == What::Staging).map(|spot| spot.place()),
            to_all: !(sharded && axis == Axis::Shard),
            onward: Vec::new(),
            fresh,
        };
        for part in parts {
            let unit = self.unit(part.unit);
            let (Some(target), Some(grad)) = (unit.grad_target, &unit.grad) else { continue };
            let own = grad.owned[0];
            let in_target = target != grad.spot.place();
            if !sharded {
                let from = target.slice(part.start, part.end - part.start);
                reduce.parts.push(from);
                let to = grad.range(part.start, part.end).place();
                if goes_on && in_target {
                    reduce.onward.push((from, to));
                }
                continue;
            }
            let whole = (part.start, part.end) == (0, target.elems());
            assert!(whole, "sharded gradients are reduced unit by unit");
            let mine = target.slice(own.start, own.elems());
            reduce.parts.push(if axis == Axis::Shard { target } else { mine });
            if goes_on {
                reduce.onward.push((mine, grad.range(own.start, own.end).place()));
            }
        }
        reduce
    }

    /// A gradient between the device, where backward writes it, and the host, where it lives.
    fn gradient_copies(&self, op: &Op, span: SpanId) -> Vec<(Spot, Spot)> {
        let SpanPart { unit, start, end } = self.only_part(span);
        let unit = self.unit(unit);
        let (Some(home), Some(whole)) = (&unit.grad, unit.grad_target) else { return Vec::new() };
        let piece = OwnPiece::of(home, (start, end));
        let on_device = Spot::Memory(whole.slice(piece.start, piece.elems()));
        if let Some(staging) = self.accessed(op, |w| matches!(w, What::GradStaging { .. })) {
            return vec![(on_device, staging.slice(0, piece.elems()))];
        }
        let reads = |(id, access): &(BufferId, Access)| {
            matches!(self.what(*id), What::State { .. }) && *access == Access::Read
        };
        let on_host = piece.of_state(home);
        let comes_back = op.accesses.iter().any(reads);
        vec![if comes_back { (on_host, on_device) } else { (on_device, on_host) }]
    }

    /// Staged gradients and the sums they are added to.
    fn additions(&self, op: &Op, span: SpanId) -> Vec<(Place, Place)> {
        let SpanPart { unit, start, end } = self.only_part(span);
        let Some(home) = &self.unit(unit).grad else { return Vec::new() };
        let staging = self.accessed(op, |w| matches!(w, What::GradStaging { .. }));
        let staging = staging.expect("what is added was staged").place();
        let piece = OwnPiece::of(home, (start, end));
        vec![(staging.slice(0, piece.elems()), piece.of_state(home).place())]
    }

    /// Of the units whose gradients `op` reads.
    fn squares(&self, op: &Op) -> Vec<Squares> {
        let block = lockstep_core::ALIGN_ELEMS;
        let units = &self.plan.input.models[self.phase.model.0 as usize].units;
        let (mut first, mut at) = (0, 0);
        let mut all = Vec::new();
        let room = self.norm_leaves();
        let staying = self.accessed(op, |w| *w == What::StayingLeaves).map(|spot| spot.place());
        let read = |index: usize| {
            let grad = |w: &What| matches!(w, What::State { unit, state: State::Grad, .. } if *unit as usize == index);
            op.accesses.iter().any(|(id, _)| grad(&self.what(*id)))
        };
        for (index, (shape, unit)) in units.iter().zip(&self.places.units).enumerate() {
            if let Some(grad) = &unit.grad {
                let (own, spot) = grad.trained();
                let blocks = own.elems() / block;
                let (leaves, joined) = match staying {
                    Some(staying) if read(index) => (staying.slice(at, blocks), Some(room.slice(at, blocks))),
                    _ => (room.slice(at, blocks), None),
                };
                let first_block = (first + own.start / block) as u64;
                if read(index) {
                    all.push(Squares { grad: spot.place(), leaves, joined, first_block });
                }
                at += blocks;
            }
            first += shape.trainable_elems / block;
        }
        all
    }

    fn norm_leaves(&self) -> Place {
        self.places.norm_leaves.expect("a phase with a norm has room for its leaves")
    }

    /// Units that stay are the first, so their leaves are, in both places.
    fn join_squares(&self) -> Vec<(Spot, Spot)> {
        let staying = self.places.staying_leaves.expect("what is joined has a place");
        let units = (0..).zip(&self.places.units).filter(|(unit, _)| !self.plan.input.grads_leave(*unit));
        let grads = units.filter_map(|(_, unit)| unit.grad.as_ref());
        let elems = grads.map(|grad| grad.trained().0.elems()).sum::<usize>() / lockstep_core::ALIGN_ELEMS;
        vec![(Spot::Memory(staying.slice(0, elems)), Spot::Memory(self.norm_leaves().slice(0, elems)))]
    }

    // ---- update -----------------------------------------------------------------------------------------

    fn update(&self, op: &Op, unit: u32, piece: (usize, usize)) -> Update {
        let places = self.unit(unit);
        let Some(moments) = &places.exp_avg else { return Update::default() };
        let piece = OwnPiece::of(moments, piece);
        let update = match self.plan.input.optimizer_tier(unit) {
            Tier::Device => self.update_on_device(op, places, &piece),
            Tier::Host | Tier::Nvme => {
                let staging = self.accessed(op, |w| matches!(w, What::HostStaging { .. }));
                let room = staging.map(|staging| HostRoom::new(self.plan, unit, staging.place(), &piece));
                self.update_on_host(places, &piece, room.as_ref())
            }
        };
        let shape = &self.plan.input.models[self.phase.model.0 as usize].units[unit as usize];
        // Parameters that decay come first.
        let border = shape.decay_elems.clamp(piece.start, piece.end) - piece.start;
        let whole = update.ranges[0];
        let part = |start: usize, end: usize, decays: bool| UpdateRange {
            master: whole.master.slice(start, end - start),
            working: whole.working.map(|w| w.slice(start, end - start)),
            grad: whole.grad.slice(start, end - start),
            m: whole.m.slice(start, end - start),
            v: whole.v.slice(start, end - start),
            decays,
        };
        let ranges = vec![part(0, border, true), part(border, piece.elems(), false)];
        Update { ranges, ..update }
    }

    fn update_on_device(&self, op: &Op, places: &UnitPlaces, piece: &OwnPiece) -> Update {
        // Parameters that live on the host leave through a staging buffer.
        let staging = self.accessed(op, |w| matches!(w, What::ParamStaging { .. }));
        let working = match staging {
            Some(staging) => staging.place().slice(0, piece.elems()),
            None => piece.of_state(&places.working).place(),
        };
        let of = |home: Option<&Home>| home.map(|home| piece.of_state(home).place());
        let master = of(places.master.as_ref());
        let range = UpdateRange {
            master: master.unwrap_or(working),
            working: master.map(|_| working),
            grad: of(places.grad.as_ref()).expect("a trained unit has a gradient"),
            m: of(places.exp_avg.as_ref()).expect("a trained unit has moments"),
            v: of(places.exp_avg_sq.as_ref()).expect("a trained unit has moments"),
            decays: false,
        };
        Update { ranges: vec![range], ..Update::default() }
    }

    /// Without `room` everything it needs has its home on the host.
    fn update_on_host(&self, places: &UnitPlaces, piece: &OwnPiece, room: Option<&HostRoom>) -> Update {
        let room = || room.expect("what has its home elsewhere is staged");
        let staged = |state: State| {
            let home = places.home(state)?;
            match home.spot {
                Spot::Memory(_) => Some(piece.of_state(home).place()),
                Spot::File { .. } => Some(room().state(state)),
            }
        };
        let mut update = Update::default();
        // Where updated parameters go: their home on the host, or the staging's room, from where they are
        // fetched to the device or written to a disk.
        let working = match self.plan.input.placements.params_tier {
            Tier::Host => piece.of_state(&places.working).place(),
            Tier::Device => room().params,
            Tier::Nvme => {
                let (file, through) = (piece.of_state(&places.working), Spot::Memory(room().params));
                update.after = Some((through, file));
                if places.master.is_none() {
                    update.before = Some((file, through));
                }
                room().params
            }
        };
        let master = staged(State::Master);
        update.ranges = vec![UpdateRange {
            master: master.unwrap_or(working),
            working: master.map(|_| working),
            grad: staged(State::Grad).expect("a trained unit has a gradient"),
            m: staged(State::ExpAvg).expect("a trained unit has moments"),
            v: staged(State::ExpAvgSq).expect("a trained unit has moments"),
            decays: false,
        }];
        update
    }

    // ---- copies between tiers ---------------------------------------------------------------------------

    fn copies(&self, op: &Op, span: SpanId) -> Vec<(Spot, Spot)> {
        let SpanPart { unit, start, end } = self.only_part(span);
        let places = self.unit(unit);
        let residents = op.accesses.iter().filter_map(|(id, access)| match self.what(*id) {
            What::State { state, .. } => Some((state, *access)),
            _ => None,
        });
        let homes = residents.map(|(state, access)| {
            (state, access, places.home(state).expect("a copy of a state that is there"))
        });
        let Some(staging) = self.accessed(op, |w| matches!(w, What::HostStaging { .. })) else {
            let staging = self.accessed(op, |w| matches!(w, What::ParamStaging { .. }));
            let staging = staging.expect("a copy goes through a staging buffer");
            return homes
                .map(|(_, access, home)| {
                    // A fetch brings all parts; an update changes the trained one.
                    let elems = match access {
                        Access::Read => home.spot.elems().min(staging.elems()),
                        _ => home.trained().0.elems(),
                    };
                    ordered(access, home.spot.slice(0, elems), staging.slice(0, elems))
                })
                .collect();
        };
        let Some(moments) = &places.exp_avg else { return Vec::new() };
        let piece = OwnPiece::of(moments, (start, end));
        let room = HostRoom::new(self.plan, unit, staging.place(), &piece);
        homes
            .map(|(state, access, home)| {
                let staged = match state {
                    State::Working => room.params,
                    state => room.state(state),
                };
                ordered(access, piece.of_state(home), Spot::Memory(staged))
            })
            .collect()
    }
}

/// From the state where it is read, to it where it is written.
fn ordered(access: Access, state: Spot, other: Spot) -> (Spot, Spot) {
    if access == Access::Read { (state, other) } else { (other, state) }
}

/// The part of a piece that this rank has, in elements of the unit.
struct OwnPiece {
    start: usize,
    end: usize,
    /// Elements of the piece on the rank with the longest share.
    planned: usize,
}

impl OwnPiece {
    /// `piece` counts from the start of the share that a state's home holds.
    fn of(home: &Home, piece: (usize, usize)) -> OwnPiece {
        let own = home.owned[0];
        let [start, end] = [piece.0, piece.1].map(|at| own.start + at.min(own.elems()));
        OwnPiece { start, end, planned: piece.1 - piece.0 }
    }

    fn elems(&self) -> usize {
        self.end - self.start
    }

    fn of_state(&self, home: &Home) -> Spot {
        if self.elems() == 0 {
            return home.spot.slice(0, 0);
        }
        home.range(self.start, self.end)
    }
}

/// The parts of a [`What::HostStaging`], at this rank's own length.
struct HostRoom {
    states: &'static [State],
    own: usize,
    planned: usize,
    staging: Place,
    /// Empty where their home is the host.
    params: Place,
}

impl HostRoom {
    fn new(plan: &RunPlan, unit: u32, staging: Place, piece: &OwnPiece) -> HostRoom {
        let input = &plan.input;
        let (own, planned) = (piece.elems(), piece.planned);
        let nvme = input.placements.optimizer_tier == Tier::Nvme;
        let states = if nvme { input.optimizer_states(unit) } else { &[] };
        let params_at =
            lockstep_core::Elems((planned * states.len()) as u64).bytes(lockstep_core::DType::F32);
        let staged = if input.placements.params_tier == Tier::Host { 0 } else { own };
        let params = staging.at(params_at, staged, input.storage);
        HostRoom { states, own, planned, staging, params }
    }

    fn state(&self, state: State) -> Place {
        let i = self.states.iter().position(|s| *s == state).expect("one of the optimizer's states");
        self.staging.slice(i * self.planned, self.own)
    }
}
