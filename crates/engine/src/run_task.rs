//! Running what is not a unit's computation: collectives, copies, the norm, updates. Any lane may.

use lockstep_comm::{Gathered, MAX_OFFERS};
use lockstep_core::Axis;
use lockstep_device::{Queue, View};
use lockstep_ops::adamw::{self, Rates};
use lockstep_ops::reduce;
use lockstep_plan::operation_text;

use crate::engine::Shared;
use crate::error::EngineError;
use crate::places::Place;
use crate::task::{Gather, Reduce, Task, Update};

impl Shared {
    /// Runs the task of operation `i`.
    pub(crate) fn run(&self, i: usize, queue: &Queue) -> Result<(), EngineError> {
        let outcome = match &self.at().tasks[i] {
            Task::Compute => unreachable!("units are computed on the compute lane"),
            Task::Nothing => Ok(()),
            Task::Gather(parts) => self.gather(parts, i as u64),
            Task::Reduce(reduce) => self.reduce(reduce, i as u64, queue),
            Task::Copy { pairs, writes_states } => {
                // A skipped step leaves every state as it was.
                if *writes_states && self.step_state().skip {
                    return Ok(());
                }
                return Ok(pairs.iter().try_for_each(|(from, to)| from.copy_to(to, &self.memories))?);
            }
            Task::Squares(list) => {
                for one in list {
                    let (leaves, grad) = (one.leaves.view(&self.memories), one.grad.view(&self.memories));
                    reduce::square_leaves(queue, leaves, grad);
                }
                Ok(())
            }
            Task::ClipNorm => self.clip_norm(i as u64),
            Task::Update(update) => return self.update(update, queue),
        };
        outcome.map_err(|cause| EngineError::Comm {
            op: operation_text(&self.plan, self.schedule_phase(), i),
            cause,
        })
    }

    fn gather(&self, parts: &[Gather], tag: u64) -> Result<(), lockstep_comm::CommError> {
        let mut comm = self.comm();
        for parts in parts.chunks(MAX_OFFERS) {
            let mut views = [Gathered { own: View::empty(), whole: View::empty() }; MAX_OFFERS];
            for (view, part) in views.iter_mut().zip(parts) {
                *view =
                    Gathered { own: part.own.view(&self.memories), whole: part.whole.view(&self.memories) };
            }
            comm.all_gather(self.group(Axis::Shard), tag, &views[..parts.len()])?;
        }
        Ok(())
    }

    fn reduce(&self, task: &Reduce, tag: u64, queue: &Queue) -> Result<(), lockstep_comm::CommError> {
        if let Some(scratch) = task.scratch {
            let (mut comm, group) = (self.comm(), self.group(task.axis));
            let scratch = scratch.view(&self.memories);
            for parts in task.parts.chunks(MAX_OFFERS) {
                let mut views = [View::empty(); MAX_OFFERS];
                for (view, part) in views.iter_mut().zip(parts) {
                    *view = part.view(&self.memories);
                }
                let views = &views[..parts.len()];
                if task.to_all {
                    comm.all_reduce(group, tag, views, scratch)?;
                } else {
                    comm.reduce_scatter(group, tag, views, scratch)?;
                }
            }
        }
        for (from, to) in &task.onward {
            let (from, to) = (from.view(&self.memories), to.view(&self.memories));
            if task.fresh { reduce::copy(queue, to, from) } else { reduce::add(queue, to, from) }
        }
        Ok(())
    }

    fn update(&self, task: &Update, queue: &Queue) -> Result<(), EngineError> {
        let state = *self.step_state();
        if state.skip {
            return Ok(());
        }
        if let Some((from, to)) = &task.before {
            from.copy_to(to, &self.memories)?;
        }
        let updates = &state.updates;
        let rates = Rates::at(updates.t, updates.lr, updates.betas, updates.eps, state.clip);
        for range in &task.ranges {
            let view = |place: &Place| place.view(&self.memories);
            let weight_decay = if range.decays { updates.weight_decay as f32 } else { 0.0 };
            let range = adamw::Range {
                master: view(&range.master),
                working: range.working.as_ref().map(view),
                grad: view(&range.grad),
                m: view(&range.m),
                v: view(&range.v),
                weight_decay,
            };
            adamw::update(queue, range, &rates, None);
        }
        if let Some((from, to)) = &task.after {
            from.copy_to(to, &self.memories)?;
        }
        Ok(())
    }
}
