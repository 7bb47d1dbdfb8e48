//! Follows every block of 256 gradient elements through a step on the first rank: which micro-batches have been added
//! to it, over which axes each addition has been reduced, and whether an offloaded gradient reaches the host. It uses
//! only the kinds of operations, not the builder.

use std::collections::HashMap;

use lockstep_core::{ALIGN_ELEMS, Axis};

use crate::{
    AccumulationOrder, Buffer, BufferKind, CopyEnd, CopyPayload, ModelId, Op, OpKind, ParamState, Phase,
    Placement, PlanInput, ReduceInto, RunPlan, Schedule, SpanId, SpanPart,
};

/// One addition: its micro-batch, whether it comes from a tied head, and the axes it has been reduced over.
type Term = (u32, bool, Vec<Axis>);
type Block = Vec<Term>;

pub(super) struct Gradients {
    input: PlanInput,
    model: ModelId,
    tied: bool,
    trains: bool,
    /// The buffers that backward writes and the accumulators that updates read; one and the same for units that are
    /// not `separate`.
    unsharded: Vec<Vec<Block>>,
    accumulated: Vec<Vec<Block>>,
    separate: Vec<bool>,
    /// Pieces staged on the host, not added yet.
    staged: HashMap<BufferKind, Vec<Block>>,
    /// Blocks read by reductions and copies that are running.
    in_transit: HashMap<usize, Vec<Block>>,
    buffers: Vec<Buffer>,
    /// Elements of each unit's shard on this rank.
    shard_elems: Vec<usize>,
    /// Units whose sums of squares are done.
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
        let is_sharded = model.placements.grads == Placement::Shard && input.mesh.shard > 1;
        Gradients {
            model: phase.model,
            tied: model.shape.head_is_tied(),
            trains: phase.name.starts_with("train"),
            separate: (0..empty.len())
                .map(|u| {
                    is_sharded
                        || input.order == AccumulationOrder::Reduced
                        || input.grads_offloaded(phase.model, u as u32)
                })
                .collect(),
            staged: HashMap::new(),
            buffers: plan.buffers.clone(),
            shard_elems: (0..empty.len())
                .map(|unit| input.resident(phase.model, unit as u32, ParamState::Grad).1)
                .collect(),
            unsharded: empty.clone(),
            updates: vec![0; empty.len()],
            accumulated: empty,
            in_transit: HashMap::new(),
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

    fn backward_blocks(&mut self, unit: u32) -> &mut Vec<Block> {
        let unit = unit as usize;
        if self.separate[unit] { &mut self.unsharded[unit] } else { &mut self.accumulated[unit] }
    }

    fn blocks(part: &SpanPart) -> std::ops::Range<usize> {
        assert!([part.start, part.end].iter().all(|at| at.is_multiple_of(ALIGN_ELEMS)));
        part.start / ALIGN_ELEMS..part.end / ALIGN_ELEMS
    }

    pub(super) fn start(&mut self, i: usize, op: &Op, schedule: &Schedule) {
        match op.kind {
            OpKind::Reduce { span, axis, micro_batch, .. } => {
                let is_last = micro_batch + 1 == self.input.num_micro_batches;
                assert!(is_last || self.input.order == AccumulationOrder::Reduced);
                let mut taken = Vec::new();
                for part in &schedule.span(span).parts {
                    for block in Self::blocks(part) {
                        let mut terms = self.backward_blocks(part.unit)[block].clone();
                        assert!(!terms.is_empty(), "#{i} reduces a gradient that does not exist");
                        for (_, _, axes) in &mut terms {
                            assert!(!axes.contains(&axis), "#{i} reduces twice over {axis}");
                            axes.push(axis);
                        }
                        taken.push(terms);
                    }
                }
                self.in_transit.insert(i, taken);
            }
            OpKind::Copy { payload: CopyPayload::Grad, from, span, .. } => {
                let taken = self.take(&self.end_of(from, schedule, span), schedule, span);
                assert!(
                    taken.iter().all(|terms| !terms.is_empty()),
                    "#{i} copies a gradient that does not exist"
                );
                self.in_transit.insert(i, taken);
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
                self.add(self.unsharded.len() as u32 - 1, micro_batch, false, fresh);
                if self.tied {
                    self.add(0, micro_batch, true, fresh);
                }
            }
            OpKind::Reduce { span, axis, into, .. } => {
                let mut taken = self.in_transit.remove(&i).unwrap().into_iter();
                for part in &schedule.span(span).parts {
                    let last = self.axes(part.unit).last() == Some(&axis);
                    for block in Self::blocks(part) {
                        self.put(part.unit, block, taken.next().unwrap(), last, into);
                    }
                }
            }
            OpKind::Copy { payload: CopyPayload::Grad, from, to, span } => {
                let taken = self.in_transit.remove(&i).unwrap();
                let [from, to] = [from, to].map(|end| self.end_of(end, schedule, span));
                self.give(&to, schedule, span, taken);
                if matches!(from, BufferKind::UnshardedGrad { .. }) {
                    // The source is invalid after the copy, as it is after a reduction.
                    self.part(&from, schedule, span).iter_mut().for_each(Vec::clear);
                }
            }
            OpKind::Add { span, from, .. } => {
                let resident = self.end_of(CopyEnd::Resident, schedule, span);
                let staging = self.buffers[from.0 as usize].kind;
                let terms = self.staged.remove(&staging).expect("what is added was moved");
                let to = self.part(&resident, schedule, span);
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

    /// The buffer at one end of a gradient's copy.
    fn end_of(&self, end: CopyEnd, schedule: &Schedule, span: SpanId) -> BufferKind {
        let unit = schedule.span(span).parts[0].unit;
        match end {
            CopyEnd::Resident => BufferKind::ParamState { model: self.model, unit, state: ParamState::Grad },
            CopyEnd::Buffer(id) => self.buffers[id.0 as usize].kind,
        }
    }

    /// The blocks of a span in a unit's buffer.
    fn part(&mut self, kind: &BufferKind, schedule: &Schedule, span: SpanId) -> &mut [Block] {
        let [part] = &schedule.span(span).parts[..] else { panic!("gradients are copied unit by unit") };
        let blocks = match kind {
            BufferKind::UnshardedGrad { unit, .. } if *unit == part.unit => &mut self.unsharded,
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

    /// The reduction over the last axis goes to the accumulator, the others are in place.
    fn put(&mut self, unit: u32, block: usize, terms: Block, last: bool, into: ReduceInto) {
        let in_place = !last || !self.separate[unit as usize] || self.input.grads_offloaded(self.model, unit);
        let fresh = match into {
            ReduceInto::InPlace => {
                assert!(in_place, "a reduction that belongs in the accumulator is in place");
                self.backward_blocks(unit)[block] = terms;
                return;
            }
            ReduceInto::Accumulator { fresh } => fresh,
        };
        assert!(!in_place, "a reduction goes to the accumulator before the last axis");
        let unit = unit as usize;
        // The source is invalid now: a second reduction would find nothing.
        self.unsharded[unit][block].clear();
        if fresh {
            self.accumulated[unit][block].clear();
        }
        self.accumulated[unit][block].extend(terms);
    }

    fn add(&mut self, unit: u32, micro_batch: u32, by_tied_head: bool, fresh: bool) {
        for block in self.backward_blocks(unit) {
            if fresh {
                block.clear();
            }
            block.push((micro_batch, by_tied_head, vec![]));
        }
    }

    /// Asserts that every micro-batch is there once, reduced once over every axis; in a tied table also from the head.
    fn assert_complete(&mut self, parts: &[SpanPart]) {
        for part in parts {
            let unit = part.unit as usize;
            assert!(!self.squared.contains(&unit), "squares of unit {unit} are summed twice");
            self.squared.push(unit);
            let blocks = &self.accumulated[unit];
            // Gradients on the device are followed whole, offloaded ones as far as this rank holds them.
            let held = if self.input.grads_offloaded(self.model, unit as u32) {
                self.shard_elems[unit] / ALIGN_ELEMS
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
        self.unsharded.iter().filter(|blocks| !blocks.is_empty()).count()
    }

    pub(super) fn finish(&self) {
        for (updates, blocks) in self.updates.iter().zip(&self.unsharded) {
            assert_eq!(*updates, u32::from(self.trains && !blocks.is_empty()));
        }
    }
}
