//! Follows every block of 256 gradient elements through a step: which micro-batches have added to it,
//! and over which axes each addition has been summed. Knows what operations mean, not how they are made.

use std::collections::HashMap;

use lockstep_core::{ALIGN_ELEMS, Axis};

use crate::{AccumulationOrder, Op, OpKind, Phase, Placement, PlanInput, RunPlan, Schedule, SpanPart};

/// One addition: its micro-batch, whether a tied head made it, the axes it has been summed over.
type Term = (u32, bool, Vec<Axis>);
type Block = Vec<Term>;

pub(super) struct Gradients {
    input: PlanInput,
    tied: bool,
    trains: bool,
    /// What backward writes, and the accumulator the update reads; one buffer where `separate` is false.
    whole: Vec<Vec<Block>>,
    accumulated: Vec<Vec<Block>>,
    separate: bool,
    /// Blocks read by reductions under way.
    moving: HashMap<usize, Vec<Block>>,
    clipped: bool,
    updates: Vec<u32>,
}

impl Gradients {
    pub(super) fn new(plan: &RunPlan, phase: &Phase) -> Gradients {
        let input = plan.input.clone();
        let model = &input.models[phase.model.0 as usize];
        let empty: Vec<Vec<Block>> =
            model.units.iter().map(|u| vec![Block::new(); u.trainable_elems / ALIGN_ELEMS]).collect();
        let cut = input.placements.grads == Placement::Shard && input.mesh.shard > 1;
        Gradients {
            tied: model.shape.tied,
            trains: phase.name.starts_with("train"),
            separate: cut || input.order == AccumulationOrder::Reduced,
            whole: empty.clone(),
            updates: vec![0; empty.len()],
            accumulated: empty,
            moving: HashMap::new(),
            clipped: false,
            input,
        }
    }

    fn axes(&self) -> Vec<Axis> {
        let mesh = self.input.mesh;
        let mut axes = Vec::new();
        axes.extend((mesh.shard > 1).then_some(Axis::Shard));
        axes.extend((mesh.replicate > 1).then_some(Axis::Replicate));
        if axes.is_empty() && self.input.order == AccumulationOrder::Reduced {
            axes.push(Axis::World);
        }
        axes
    }

    fn made_by_backward(&mut self) -> &mut Vec<Vec<Block>> {
        if self.separate { &mut self.whole } else { &mut self.accumulated }
    }

    fn blocks(part: &SpanPart) -> std::ops::Range<usize> {
        assert!([part.start, part.end].iter().all(|at| at.is_multiple_of(ALIGN_ELEMS)));
        part.start / ALIGN_ELEMS..part.end / ALIGN_ELEMS
    }

    pub(super) fn start(&mut self, i: usize, op: &Op, schedule: &Schedule) {
        match op.kind {
            OpKind::Reduce { span, axis, micro, .. } => {
                let window_over = micro + 1 == self.input.micros;
                assert!(window_over || self.input.order == AccumulationOrder::Reduced);
                let mut taken = Vec::new();
                for part in &schedule.span(span).parts {
                    for block in Self::blocks(part) {
                        let mut terms = self.made_by_backward()[part.unit as usize][block].clone();
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
            OpKind::ClipNorm => self.assert_complete(),
            OpKind::Update { unit, start, .. } => {
                assert!(self.clipped, "unit {unit} is updated before the norm is known");
                self.updates[unit as usize] += u32::from(start == 0);
            }
            _ => {}
        }
    }

    pub(super) fn end(&mut self, i: usize, op: &Op, schedule: &Schedule) {
        match op.kind {
            OpKind::Backward { unit, micro, fresh } => self.add(unit, micro, false, fresh),
            OpKind::HeadBackward { micro, fresh } | OpKind::HeadStep { micro, fresh } => {
                self.add(self.whole.len() as u32 - 1, micro, false, fresh);
                if self.tied {
                    self.add(0, micro, true, fresh);
                }
            }
            OpKind::Reduce { span, axis, fresh, .. } => {
                let last = self.axes().last() == Some(&axis);
                let mut taken = self.moving.remove(&i).unwrap().into_iter();
                for part in &schedule.span(span).parts {
                    for block in Self::blocks(part) {
                        self.put(part.unit as usize, block, taken.next().unwrap(), last, fresh);
                    }
                }
            }
            OpKind::ClipNorm => self.clipped = true,
            _ => {}
        }
    }

    /// The last axis moves the sum into the accumulator, others leave it in place.
    fn put(&mut self, unit: usize, block: usize, terms: Block, last: bool, fresh: bool) {
        if !last || !self.separate {
            assert!(fresh, "a sum in place overwrites");
            self.made_by_backward()[unit][block] = terms;
            return;
        }
        // Gone once moved: a second reduction would find nothing.
        self.whole[unit][block].clear();
        if fresh {
            self.accumulated[unit][block].clear();
        }
        self.accumulated[unit][block].extend(terms);
    }

    fn add(&mut self, unit: u32, micro: u32, by_tied_head: bool, fresh: bool) {
        for block in &mut self.made_by_backward()[unit as usize] {
            if fresh {
                block.clear();
            }
            block.push((micro, by_tied_head, vec![]));
        }
    }

    /// Every micro-batch once, summed once over every axis; a tied table also by the head.
    fn assert_complete(&self) {
        for (unit, blocks) in self.accumulated.iter().enumerate() {
            let mut expected: Block = Vec::new();
            for micro in 0..self.input.micros {
                expected.push((micro, false, self.axes()));
                if self.tied && unit == 0 {
                    expected.push((micro, true, self.axes()));
                }
            }
            for (b, block) in blocks.iter().enumerate() {
                let mut found = block.clone();
                found.sort();
                assert_eq!(found, expected, "unit {unit}, block {b}");
            }
        }
    }

    pub(super) fn finish(&self) {
        for (updates, blocks) in self.updates.iter().zip(&self.whole) {
            assert_eq!(*updates, u32::from(self.trains && !blocks.is_empty()));
        }
    }
}
