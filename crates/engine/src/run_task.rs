//! Runs tasks other than the computation of units, on any lane: collectives, copies, the norm, updates.

use std::sync::atomic::Ordering;

use lockstep_comm::{CommError, GatherPart, MAX_OFFERS};
use lockstep_core::Axis;
use lockstep_core::rounding::RoundingBits;
use lockstep_device::{Queue, View};
use lockstep_ops::optimizer::{Params, RangeRounding, State};
use lockstep_ops::{adamw, lion, reduce, sgd};
use lockstep_plan::{Lane, operation_text};

use crate::addresses::Address;
use crate::driver::UpdateRule;
use crate::engine::Shared;
use crate::error::EngineError;
use crate::lanes::ScheduleRun;
use crate::step::StepState;
use crate::task::{Gather, Reduce, Task, Update};
use crate::update_range::{ParamAddresses, StateAddress, TensorRange, UpdateRange};

impl Shared {
    /// Runs the task of operation `i`.
    pub(crate) fn run(&self, run: ScheduleRun, i: usize, queue: &Queue) -> Result<(), EngineError> {
        let outcome = match &self.prepared_phase().tasks[i] {
            Task::Compute => unreachable!("units are computed on the compute lane"),
            Task::NoOp => Ok(()),
            Task::Gather { axis, parts } => self.gather(*axis, parts, i, queue),
            Task::Reduce(reduce) => self.reduce(reduce, i, queue),
            Task::Copy { pairs, writes_states } => {
                // A skipped update changes no state.
                if *writes_states && self.skips(run, queue)? {
                    return Ok(());
                }
                return pairs.iter().try_for_each(|(from, to)| from.copy_to(to, &self.memories, queue));
            }
            Task::Dequantise(unit) => return self.dequantise(*unit, queue),
            Task::Round(pairs) => {
                for (from, to) in pairs {
                    reduce::copy(queue, to.view(&self.memories), from.view(&self.memories));
                }
                Ok(())
            }
            Task::Add(pairs) => {
                for (from, to) in pairs {
                    reduce::add(queue, to.view(&self.memories), from.view(&self.memories));
                }
                Ok(())
            }
            Task::Squares(list) => {
                for one in list {
                    let (leaves, grad) = (one.leaves.view(&self.memories), one.grad.view(&self.memories));
                    reduce::squared_sum_leaves(queue, leaves, grad);
                    self.fold_squares(one);
                }
                Ok(())
            }
            Task::ClipNorm(axes) => return self.clip_norm(run, i, axes, queue),
            Task::Update(update) => return self.update(run, update, queue),
        };
        outcome.map_err(|cause| self.comm_failed(i, cause))
    }

    pub(crate) fn comm_failed(&self, i: usize, cause: CommError) -> EngineError {
        EngineError::Comm { op: operation_text(&self.plan, self.schedule_phase(), i), cause }
    }

    /// Whether the update is skipped. If the device decides that, this waits for it.
    fn skips(&self, run: ScheduleRun, queue: &Queue) -> Result<bool, EngineError> {
        self.read_update_decision(run, queue)?;
        Ok(self.steps.of(run).skip)
    }

    /// The lane of operation `i`.
    pub(crate) fn lane_of(&self, i: usize) -> Lane {
        self.schedule_phase().schedule.ops[i].lane
    }

    fn gather(&self, axis: Axis, parts: &[Gather], i: usize, queue: &Queue) -> Result<(), CommError> {
        let (group, lane, tag) = (self.transport.group(axis), self.lane_of(i), i as u64);
        for parts in parts.chunks(MAX_OFFERS) {
            let mut views = [GatherPart { own: View::empty(), whole: View::empty() }; MAX_OFFERS];
            for (view, part) in views.iter_mut().zip(parts) {
                *view =
                    GatherPart { own: part.own.view(&self.memories), whole: part.whole.view(&self.memories) };
            }
            let views = &views[..parts.len()];
            match self.transport.nccl(lane).zip(queue.cuda()) {
                Some((nccl, cuda)) => {
                    let bytes = views.iter().map(|part| part.whole.bytes()).sum();
                    self.transport.count_nccl(axis, bytes, 1);
                    nccl.of(group).all_gather(cuda, views)?;
                }
                None => self.transport.lane(lane).all_gather(group, tag, views)?,
            }
        }
        Ok(())
    }

    fn reduce(&self, task: &Reduce, i: usize, queue: &Queue) -> Result<(), CommError> {
        if let Some(scratch) = task.scratch {
            let (group, lane, tag) = (self.transport.group(task.axis), self.lane_of(i), i as u64);
            let nccl = self.transport.nccl(lane).zip(queue.cuda());
            for parts in task.parts.chunks(MAX_OFFERS) {
                let mut views = [View::empty(); MAX_OFFERS];
                for (view, part) in views.iter_mut().zip(parts) {
                    *view = part.view(&self.memories);
                }
                let views = &views[..parts.len()];
                if nccl.is_some() {
                    let bytes = views.iter().map(View::bytes).sum();
                    self.transport.count_nccl(task.axis, bytes, 1 + u64::from(task.to_all));
                }
                match (nccl, task.to_all) {
                    (Some((nccl, cuda)), true) => nccl.of(group).all_reduce(cuda, views)?,
                    (Some((nccl, cuda)), false) => nccl.of(group).reduce_scatter(cuda, views)?,
                    (None, true) => self.transport.lane(lane).all_reduce(
                        group,
                        tag,
                        views,
                        scratch.view(&self.memories),
                    )?,
                    (None, false) => self.transport.lane(lane).reduce_scatter(
                        group,
                        tag,
                        views,
                        scratch.view(&self.memories),
                    )?,
                }
            }
        }
        for (from, to) in &task.accumulate {
            let (from, to) = (from.view(&self.memories), to.view(&self.memories));
            if task.fresh { reduce::copy(queue, to, from) } else { reduce::add(queue, to, from) }
        }
        Ok(())
    }

    fn update(&self, run: ScheduleRun, task: &Update, queue: &Queue) -> Result<(), EngineError> {
        let state = *self.steps.of(run);
        if state.skip {
            return Ok(());
        }
        for (from, to) in &task.fetches {
            from.copy_to(to, &self.memories, queue)?;
        }
        for range in &task.ranges {
            self.update_range(&state, range, queue);
        }
        for (from, to) in &task.write_backs {
            from.copy_to(to, &self.memories, queue)?;
        }
        Ok(())
    }

    fn update_range(&self, step: &StepState, range: &UpdateRange, queue: &Queue) {
        let updates = &step.updates;
        // Updates on a stream read the decision on the device, without the host.
        let decision = self.update_decision().filter(|_| queue.cuda().is_some());
        let weight_decay = if range.decays { updates.weight_decay as f32 } else { 0.0 };
        let view = |address: &Address| address.view(&self.memories);
        let state = |i: usize| {
            range.states[i].as_ref().map(|StateAddress { values, scales }| match scales {
                Some(scales) => State::Blockwise { codes: view(values), absmax: view(scales) },
                None => State::Float(view(values)),
            })
        };
        let must = |i: usize| state(i).expect("the plan has the states of this rule");
        let params = match &range.params {
            ParamAddresses::Master { master, working } => {
                Params::Master { master: view(master), working: working.as_ref().map(view) }
            }
            ParamAddresses::Split { weight, remainder } => {
                Params::Split { weight: view(weight), remainder: view(remainder) }
            }
            ParamAddresses::Stochastic { weight, .. } => Params::Stochastic { weight: view(weight) },
        };
        let rounding = range.tensor.map(|tensor| self.range_rounding(tensor, updates.t));
        let grad = view(&range.grad);
        match updates.rule {
            UpdateRule::AdamW { betas, eps } => {
                let rates = adamw::Hyperparams::at(updates.t, updates.lr, betas, eps, step.clip);
                let range =
                    adamw::ParamRange { params, grad, m: must(0), v: must(1), rounding, weight_decay };
                adamw::update(queue, range, &rates, decision);
            }
            UpdateRule::Sgd { momentum, nesterov } => {
                let (lr, momentum) = (updates.lr as f32, momentum as f32);
                let rates = sgd::Hyperparams { lr, momentum, nesterov, clip: step.clip };
                let range = sgd::ParamRange { params, grad, momentum: state(0), rounding, weight_decay };
                sgd::update(queue, range, &rates, decision);
            }
            UpdateRule::Lion { betas } => {
                let rates = lion::Hyperparams::new(updates.lr, betas, step.clip);
                let range = lion::ParamRange { params, grad, m: must(0), rounding, weight_decay };
                lion::update(queue, range, &rates, decision);
            }
        }
        if let ParamAddresses::Stochastic { weight, copy: Some(copy) } = &range.params {
            reduce::copy(queue, view(copy), view(weight));
        }
    }

    /// The random bits of a range in update `t`.
    fn range_rounding(&self, tensor: TensorRange, t: u64) -> RangeRounding {
        let name = &self.model().units[tensor.unit as usize].segments[tensor.segment as usize].name;
        let seed = self.seed.load(Ordering::Relaxed);
        RangeRounding { bits: RoundingBits::new(seed, t, name), first_elem: tensor.first_elem }
    }
}
