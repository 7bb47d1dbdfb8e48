//! Follows every block of 256 gradient elements through a step: which micro-batches have added to it,
//! over which axes each addition has been summed, and whether it reached the host where gradients live
//! there. Knows what operations mean, not how they are made. Shares are those of the first rank.

use std::collections::HashMap;

use lockstep_core::{ALIGN_ELEMS, Axis};

use crate::{
    AccumulationOrder, Buffer, BufferKind, CopyEnd, CopyPayload, ModelId, Op, OpKind, ParamState, Phase,
    Placement, PlanInput, ReduceInto, RunPlan, Schedule, SpanId, SpanPart,
};

/// One addition: its micro-batch, whether a tied head made it, the axes it has been summed over.
type Term = (u32, bool, Vec<Axis>);
type Block = Vec<Term>;

pub(super) struct Gradients {
    input: PlanInput,
    model: ModelId,
    tied: bool,
    trains: bool,
    /// What backward writes, and the accumulator the update reads; one buffer for units not `separate`.
    whole: Vec<Vec<Block>>,
    accumulated: Vec<Vec<Block>>,
    separate: Vec<bool>,
    /// Pieces on the host that wait to be added.
    staged: HashMap<BufferKind, Vec<Block>>,
    /// Blocks read by reductions and copies under way.
    moving: HashMap<usize, Vec<Block>>,
    buffers: Vec<Buffer>,
    /// Elements of each unit that this rank holds, counted from the first.
    shares: Vec<usize>,
    /// Units whose squares are summed.
    squared: Vec<usize>,
    clipped: bool,
    updates: Vec<u32>,
}

impl Gradients {
    pub(super) fn new(plan: &RunPlan, phase: &Phase) -> Gradients {
        let input = plan.input.clone();
        let model = input.model(phase.model);
        let empty: Vec<Vec<Block>> =
            model.units.iter().map(|u| vec![Block::new(); u.trained_elems / ALIGN_ELEMS]).collect();
        let cut = model.placements.grads == Placement::Shard && input.mesh.shard > 1;
        Gradients {
            model: phase.model,
            tied: model.shape.head_is_tied(),
            trains: phase.name.starts_with("train"),
            separate: (0..empty.len())
                .map(|u| {
                    cut || input.order == AccumulationOrder::Reduced
                        || input.grads_offloaded(phase.model, u as u32)
                })
                .collect(),
            staged: HashMap::new(),
            buffers: plan.buffers.clone(),
            shares: (0..empty.len())
                .map(|unit| input.resident(phase.model, unit as u32, ParamState::Grad).1)
                .collect(),
            whole: empty.clone(),
            updates: vec![0; empty.len()],
            accumulated: empty,
            moving: HashMap::new(),
            squared: Vec::new(),
            clipped: false,
            input,
        }
    }

    fn axes(&self, unit: u32) -> Vec<Axis> {
        let mesh = self.input.mesh;
        let mut axes = Vec::new();
        axes.extend((mesh.shard > 1).then_some(Axis::Shard));
        axes.extend((mesh.replicate > 1).then_some(Axis::Replicate));
        let summed_here =
            self.input.order == AccumulationOrder::Reduced && !self.input.grads_offloaded(self.model, unit);
        if axes.is_empty() && summed_here {
            axes.push(Axis::World);
        }
        axes
    }

    fn made_by_backward(&mut self, unit: u32) -> &mut Vec<Block> {
        let unit = unit as usize;
        if self.separate[unit] { &mut self.whole[unit] } else { &mut self.accumulated[unit] }
    }

    fn blocks(part: &SpanPart) -> std::ops::Range<usize> {
        assert!([part.start, part.end].iter().all(|at| at.is_multiple_of(ALIGN_ELEMS)));
        part.start / ALIGN_ELEMS..part.end / ALIGN_ELEMS
    }

    pub(super) fn start(&mut self, i: usize, op: &Op, schedule: &Schedule) {
        match op.kind {
            OpKind::Reduce { span, axis, micro_batch, .. } => {
                let window_over = micro_batch + 1 == self.input.num_micro_batches;
                assert!(window_over || self.input.order == AccumulationOrder::Reduced);
                let mut taken = Vec::new();
                for part in &schedule.span(span).parts {
                    for block in Self::blocks(part) {
                        let mut terms = self.made_by_backward(part.unit)[block].clone();
                        assert!(!terms.is_empty(), "#{i} reduces a gradient that is not there");
                        for (_, _, axes) in &mut terms {
                            assert!(!axes.contains(&axis), "#{i} sums twice over {axis}");
                            axes.push(axis);
                        }
                        taken.push(terms);
                    }
                }
                self.moving.insert(i, taken);
            }
            OpKind::Copy { payload: CopyPayload::Grad, from, span, .. } => {
                let taken = self.take(&self.end_of(from, schedule, span), schedule, span);
                assert!(taken.iter().all(|terms| !terms.is_empty()), "#{i} moves what is not there");
                self.moving.insert(i, taken);
            }
            OpKind::Squares { span, .. } => self.assert_complete(&schedule.span(span).parts),
            OpKind::ClipNorm { .. } => assert_eq!(self.squared.len(), self.trained()),
            OpKind::Update { unit, start, .. } => {
                assert!(self.clipped, "unit {unit} is updated before the norm is known");
                self.updates[unit as usize] += u32::from(start == 0);
            }
            _ => {}
        }
    }

    pub(super) fn end(&mut self, i: usize, op: &Op, schedule: &Schedule) {
        match op.kind {
            OpKind::Backward { unit, micro_batch, fresh } => self.add(unit, micro_batch, false, fresh),
            OpKind::HeadBackward { micro_batch, fresh } | OpKind::HeadStep { micro_batch, fresh } => {
                self.add(self.whole.len() as u32 - 1, micro_batch, false, fresh);
                if self.tied {
                    self.add(0, micro_batch, true, fresh);
                }
            }
            OpKind::Reduce { span, axis, into, .. } => {
                let mut taken = self.moving.remove(&i).unwrap().into_iter();
                for part in &schedule.span(span).parts {
                    let last = self.axes(part.unit).last() == Some(&axis);
                    for block in Self::blocks(part) {
                        self.put(part.unit, block, taken.next().unwrap(), last, into);
                    }
                }
            }
            OpKind::Copy { payload: CopyPayload::Grad, from, to, span } => {
                let taken = self.moving.remove(&i).unwrap();
                let [from, to] = [from, to].map(|end| self.end_of(end, schedule, span));
                self.give(&to, schedule, span, taken);
                if matches!(from, BufferKind::UnshardedGrad { .. }) {
                    // Gone once moved, as after a reduction.
                    self.part(&from, schedule, span).iter_mut().for_each(Vec::clear);
                }
            }
            OpKind::Add { span, from, .. } => {
                let home = self.end_of(CopyEnd::Resident, schedule, span);
                let staging = self.buffers[from.0 as usize].kind;
                let terms = self.staged.remove(&staging).expect("what is added was moved");
                let to = self.part(&home, schedule, span);
                assert_eq!(to.len(), terms.len());
                for (block, terms) in to.iter_mut().zip(terms) {
                    assert!(!block.is_empty(), "#{i} adds to nothing");
                    block.extend(terms);
                }
            }
            OpKind::ClipNorm { .. } => self.clipped = true,
            _ => {}
        }
    }

    /// The buffer that one end of a move of a gradient is.
    fn end_of(&self, end: CopyEnd, schedule: &Schedule, span: SpanId) -> BufferKind {
        let unit = schedule.span(span).parts[0].unit;
        match end {
            CopyEnd::Resident => BufferKind::ParamState { model: self.model, unit, state: ParamState::Grad },
            CopyEnd::Buffer(id) => self.buffers[id.0 as usize].kind,
        }
    }

    /// The blocks of a span in a unit's buffer.
    fn part(&mut self, what: &BufferKind, schedule: &Schedule, span: SpanId) -> &mut [Block] {
        let [part] = &schedule.span(span).parts[..] else { panic!("gradients move unit by unit") };
        let blocks = match what {
            BufferKind::UnshardedGrad { unit, .. } if *unit == part.unit => &mut self.whole,
            BufferKind::ParamState { unit, state: ParamState::Grad, .. } if *unit == part.unit => {
                &mut self.accumulated
            }
            other => panic!("{other:?} in a copy of unit {}", part.unit),
        };
        &mut blocks[part.unit as usize][Self::blocks(part)]
    }

    fn take(&mut self, from: &BufferKind, schedule: &Schedule, span: SpanId) -> Vec<Block> {
        self.part(from, schedule, span).to_vec()
    }

    fn give(&mut self, to: &BufferKind, schedule: &Schedule, span: SpanId, taken: Vec<Block>) {
        match to {
            BufferKind::GradStaging { .. } => {
                assert!(self.staged.insert(*to, taken).is_none(), "two pieces in {to:?}");
            }
            _ => self.part(to, schedule, span).clone_from_slice(&taken),
        }
    }

    /// The last axis moves the sum into the accumulator, others leave it in place.
    fn put(&mut self, unit: u32, block: usize, terms: Block, last: bool, into: ReduceInto) {
        let stays = !last || !self.separate[unit as usize] || self.input.grads_offloaded(self.model, unit);
        let fresh = match into {
            ReduceInto::InPlace => {
                assert!(stays, "a sum that belongs to the accumulator stays in its place");
                self.made_by_backward(unit)[block] = terms;
                return;
            }
            ReduceInto::Accumulator { fresh } => fresh,
        };
        assert!(!stays, "a sum goes to the accumulator too early");
        let unit = unit as usize;
        // Gone once moved: a second reduction would find nothing.
        self.whole[unit][block].clear();
        if fresh {
            self.accumulated[unit][block].clear();
        }
        self.accumulated[unit][block].extend(terms);
    }

    fn add(&mut self, unit: u32, micro_batch: u32, by_tied_head: bool, fresh: bool) {
        for block in self.made_by_backward(unit) {
            if fresh {
                block.clear();
            }
            block.push((micro_batch, by_tied_head, vec![]));
        }
    }

    /// Every micro-batch once, summed once over every axis; a tied table also by the head.
    fn assert_complete(&mut self, parts: &[SpanPart]) {
        for part in parts {
            let unit = part.unit as usize;
            assert!(!self.squared.contains(&unit), "squares of unit {unit} twice");
            self.squared.push(unit);
            let blocks = &self.accumulated[unit];
            // What stays is followed as if whole; what leaves, as far as it is this rank's.
            let held = if self.input.grads_offloaded(self.model, unit as u32) {
                self.shares[unit] / ALIGN_ELEMS
            } else {
                blocks.len()
            };
            let mut expected: Block = Vec::new();
            for micro_batch in 0..self.input.num_micro_batches {
                expected.push((micro_batch, false, self.axes(unit as u32)));
                if self.tied && unit == 0 {
                    expected.push((micro_batch, true, self.axes(unit as u32)));
                }
            }
            for (b, block) in blocks[..held].iter().enumerate() {
                let mut found = block.clone();
                found.sort();
                assert_eq!(found, expected, "unit {unit}, block {b}");
            }
        }
    }

    fn trained(&self) -> usize {
        self.whole.iter().filter(|blocks| !blocks.is_empty()).count()
    }

    pub(super) fn finish(&self) {
        for (updates, blocks) in self.updates.iter().zip(&self.whole) {
            assert_eq!(*updates, u32::from(self.trains && !blocks.is_empty()));
        }
    }
}
