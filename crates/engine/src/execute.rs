//! One step: every lane its operations, in order; here the compute lane, which computes units.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use lockstep_device::{Queue, View};
use lockstep_model::{Inputs, Tied, Unit};
use lockstep_plan::{Lane, OpKind};
use lockstep_shape::{Program, Slot, UnitShape};

use crate::driver::{Driver, StepReport, Updates};
use crate::engine::{Engine, Shared, StepState};
use crate::error::EngineError;
use crate::places::{Place, SlotPlaces};
use crate::task::Task;

/// The micro-batch that is being computed.
#[derive(Clone, Copy, Default)]
struct Batch {
    tokens: usize,
    docs: usize,
}

impl Engine {
    /// Runs the training phase once: every micro-batch, the norm, the update.
    pub fn train_step(
        &mut self,
        driver: &mut dyn Driver,
        updates: &Updates,
    ) -> Result<StepReport, EngineError> {
        let shared = &*self.shared;
        *shared.step_state() = StepState { updates: *updates, grad_norm: 0.0, clip: 1.0, skip: false };
        shared.lanes.begin(self.num_lane_threads());
        if let Err(cause) = shared.compute_lane(driver, &self.queue) {
            shared.lanes.stop(cause);
        }
        shared.lanes.end()?;
        let state = shared.step_state();
        Ok(StepReport { grad_norm: state.grad_norm, skipped: state.skip })
    }
}

impl Shared {
    /// A thread that runs one lane's part of every step.
    pub(crate) fn spawn(self: Arc<Self>, lane: Lane, queue: Queue) -> JoinHandle<()> {
        let name = format!("{lane}-lane");
        let run = move || {
            let mut seen = 0;
            while let Some(step) = self.lanes.next_step(seen) {
                seen = step;
                let outcome =
                    catch_unwind(AssertUnwindSafe(|| self.run_lane(lane, &mut |i, _| self.run(i, &queue))));
                match outcome {
                    Ok(Ok(())) => {}
                    Ok(Err(cause)) => self.lanes.stop(cause),
                    Err(_) => self.lanes.stop(EngineError::LanePanicked { lane: lane.to_string() }),
                }
                self.lanes.leave();
            }
        };
        std::thread::Builder::new().name(name).spawn(run).expect("the system can start a thread")
    }

    /// Runs one lane's operations, each when what it waits for is over.
    fn run_lane(
        &self,
        lane: Lane,
        each: &mut dyn FnMut(usize, OpKind) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let schedule = &self.schedule_phase().schedule;
        for (i, op) in schedule.ops.iter().enumerate().filter(|(_, op)| op.lane == lane) {
            if self.lanes.before(op, schedule).is_err() {
                return Ok(());
            }
            each(i, op.kind)?;
            self.lanes.after(lane, i);
        }
        Ok(())
    }

    fn compute_lane(&self, driver: &mut dyn Driver, queue: &Queue) -> Result<(), EngineError> {
        let mut batch = Batch::default();
        self.run_lane(Lane::Compute, &mut |i, kind| match self.tasks[i] {
            Task::Compute => self.compute(kind, driver, queue, &mut batch),
            _ => self.run(i, queue),
        })
    }

    fn compute(
        &self,
        kind: OpKind,
        driver: &mut dyn Driver,
        queue: &Queue,
        batch: &mut Batch,
    ) -> Result<(), EngineError> {
        if let OpKind::Forward { unit: 0, micro } = kind {
            let input = driver.batch(micro);
            self.feed(&input)?;
            *batch = Batch { tokens: input.tokens.len(), docs: input.cu_seqlens.len().saturating_sub(1) };
        }
        let run = |unit, which, fresh| self.run_unit(queue, unit, which, fresh, *batch);
        match kind {
            OpKind::Forward { unit, .. } => run(unit, Which::Forward, false),
            OpKind::Recompute { unit, .. } => run(unit, Which::Rebuild, false),
            OpKind::Backward { unit, fresh, .. } => run(unit, Which::Backward, fresh),
            OpKind::HeadForward { .. } => run(self.head_unit(), Which::Forward, false),
            OpKind::Objective { micro } => self.objective(driver, micro, *batch),
            OpKind::HeadStep { micro, fresh } => {
                run(self.head_unit(), Which::Fused, fresh);
                self.show_outputs(driver, micro, *batch);
            }
            OpKind::HeadBackward { micro, fresh } => {
                run(self.head_unit(), Which::Backward, fresh);
                self.show_outputs(driver, micro, *batch);
            }
            other => unreachable!("{other:?} is not computed unit by unit"),
        }
        Ok(())
    }

    fn head_unit(&self) -> u32 {
        self.model().units.len() as u32 - 1
    }

    fn run_unit(&self, queue: &Queue, index: u32, which: Which, fresh: bool, batch: Batch) {
        let model = self.model();
        let (shape, programs) = (&model.units[index as usize], model.programs(index as usize));
        let places = &self.places.units[index as usize];
        let (program, slots): (&Program, &SlotPlaces) = match which {
            Which::Forward => (&programs.forward, &places.forward),
            Which::Rebuild => (&programs.rebuild, &places.rebuild),
            Which::Backward => (&programs.backward, &places.backward),
            Which::Fused => (&programs.fused, &places.fused),
        };
        let [tokens, targets, positions, cu_seqlens] = self.input_views(batch.tokens, batch.docs);
        let view = |place: &Place| place.view(&self.memories);
        let writes_grads = matches!(which, Which::Backward | Which::Fused);
        let grads_of = |u: usize| self.places.units[u].grad_target.filter(|_| writes_grads);
        let tied = model.shape.tied && index == self.head_unit();
        if fresh {
            self.zero_padding(shape, grads_of(index as usize));
            if tied {
                self.zero_padding(&model.units[0], grads_of(0));
            }
        }
        let unit = Unit {
            queue,
            model: &model.shape,
            shape,
            programs,
            params: view(&places.params),
            grads: grads_of(index as usize).map(|p| view(&p)),
            fresh,
            tied: tied.then(|| Tied {
                unit: &model.units[0],
                params: view(&self.places.units[0].params),
                grads: grads_of(0).map(|p| view(&p)),
            }),
            slots: std::array::from_fn::<_, { Slot::COUNT }, _>(|i| slots[i].as_ref().map(view)),
            inputs: Inputs {
                tokens,
                targets,
                positions,
                cu_seqlens,
                log_probs: view(&self.places.log_probs).first(batch.tokens),
                coefficients: view(&self.places.coefficients).first(batch.tokens),
            },
            tables: view(&self.places.tables),
            workspace: view(&self.places.workspace),
            head_chunk: self.plan.input.head_chunk,
        };
        lockstep_model::run(program, &unit);
    }

    /// A buffer that other buffers shared has their bytes between its segments; norms and updates read
    /// those as gradients.
    fn zero_padding(&self, shape: &UnitShape, grads: Option<Place>) {
        let Some(grads) = grads.map(|p| p.view(&self.memories)) else { return };
        for segment in shape.segments.iter().filter(|s| s.trainable) {
            let end = segment.start + segment.elems();
            grads.slice(end, end.next_multiple_of(lockstep_core::ALIGN_ELEMS) - end).zero();
        }
    }

    fn objective(&self, driver: &mut dyn Driver, micro: u32, batch: Batch) {
        let host = |place: &Place| -> View<'_> { place.view(&self.memories).first(batch.tokens) };
        let (log_probs, coefficients) = (host(&self.places.log_probs), host(&self.places.coefficients));
        if self.plan.input.coefficients_ahead {
            lockstep_ops::host::with_mut(coefficients, |out| driver.coefficients(micro, None, out));
        } else {
            lockstep_ops::host::with(log_probs, |log_probs| {
                lockstep_ops::host::with_mut(coefficients, |out| {
                    driver.coefficients(micro, Some(log_probs), out)
                });
            });
        }
    }

    fn show_outputs(&self, driver: &mut dyn Driver, micro: u32, batch: Batch) {
        let log_probs = self.places.log_probs.view(&self.memories).first(batch.tokens);
        lockstep_ops::host::with(log_probs, |log_probs| driver.outputs(micro, log_probs));
    }
}

/// Which of a unit's programs.
#[derive(Clone, Copy)]
enum Which {
    Forward,
    Rebuild,
    Backward,
    Fused,
}
