//! One step: the schedule's operations, one after the other.

use lockstep_device::View;
use lockstep_model::{Inputs, Tied, Unit};
use lockstep_ops::adamw::{self, Rates};
use lockstep_ops::reduce;
use lockstep_plan::{OpKind, SpanId};
use lockstep_shape::{Program, Slot, UnitShape};

use crate::driver::{Driver, StepReport, Updates};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::norm::clip_factor;
use crate::places::{Place, SlotPlaces};

/// What one operation leaves for later ones of the same step.
struct Progress {
    tokens: usize,
    docs: usize,
    grad_norm: f64,
    clip: f32,
    skip: bool,
}

impl Engine {
    /// Runs the training phase once: every micro-batch, the norm, the update.
    pub fn train_step(
        &mut self,
        driver: &mut dyn Driver,
        updates: &Updates,
    ) -> Result<StepReport, EngineError> {
        let mut progress = Progress { tokens: 0, docs: 0, grad_norm: 0.0, clip: 1.0, skip: false };
        for i in 0..self.plan.phases[self.phase].schedule.ops.len() {
            let kind = self.plan.phases[self.phase].schedule.ops[i].kind;
            self.execute(kind, driver, updates, &mut progress)?;
        }
        Ok(StepReport { grad_norm: progress.grad_norm, skipped: progress.skip })
    }

    fn execute(
        &mut self,
        kind: OpKind,
        driver: &mut dyn Driver,
        updates: &Updates,
        progress: &mut Progress,
    ) -> Result<(), EngineError> {
        match kind {
            OpKind::Forward { unit, micro } => {
                if unit == 0 {
                    let batch = driver.batch(micro);
                    self.feed(&batch)?;
                    progress.tokens = batch.tokens.len();
                    progress.docs = batch.cu_seqlens.len().saturating_sub(1);
                }
                self.run_unit(unit, Which::Forward, false, progress);
            }
            OpKind::Recompute { unit, .. } => self.run_unit(unit, Which::Rebuild, false, progress),
            OpKind::Backward { unit, fresh, .. } => self.run_unit(unit, Which::Backward, fresh, progress),
            OpKind::HeadForward { .. } => self.run_unit(self.head_unit(), Which::Forward, false, progress),
            OpKind::Objective { micro } => self.objective(driver, micro, progress),
            OpKind::HeadStep { micro, fresh } => {
                self.run_unit(self.head_unit(), Which::Fused, fresh, progress);
                self.show_outputs(driver, micro, progress);
            }
            OpKind::HeadBackward { micro, fresh } => {
                self.run_unit(self.head_unit(), Which::Backward, fresh, progress);
                self.show_outputs(driver, micro, progress);
            }
            OpKind::Reduce { span, fresh, .. } => self.reduce_locally(span, fresh),
            OpKind::ClipNorm => {
                progress.grad_norm = self.grad_norm();
                progress.skip = !progress.grad_norm.is_finite();
                progress.clip = clip_factor(progress.grad_norm, updates.max_norm);
            }
            OpKind::Update { unit } => {
                if !progress.skip {
                    self.update(unit, updates, progress.clip);
                }
            }
            other => unreachable!("{other:?} is on a lane that `Engine::new` refuses"),
        }
        Ok(())
    }

    fn head_unit(&self) -> u32 {
        self.model().units.len() as u32 - 1
    }

    fn run_unit(&self, index: u32, which: Which, fresh: bool, progress: &Progress) {
        let model = self.model();
        let (shape, programs) = (&model.units[index as usize], model.programs(index as usize));
        let places = &self.places.units[index as usize];
        let (program, slots): (&Program, &SlotPlaces) = match which {
            Which::Forward => (&programs.forward, &places.forward),
            Which::Rebuild => (&programs.rebuild, &places.rebuild),
            Which::Backward => (&programs.backward, &places.backward),
            Which::Fused => (&programs.fused, &places.fused),
        };
        let [tokens, targets, positions, cu_seqlens] = self.input_views(progress.tokens, progress.docs);
        let view = |place: &Place| place.view(&self.memory);
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
            queue: &self.queue,
            model: &model.shape,
            shape,
            programs,
            params: view(&places.working),
            grads: grads_of(index as usize).map(|p| view(&p)),
            fresh,
            tied: tied.then(|| Tied {
                unit: &model.units[0],
                params: view(&self.places.units[0].working),
                grads: grads_of(0).map(|p| view(&p)),
            }),
            slots: std::array::from_fn::<_, { Slot::COUNT }, _>(|i| slots[i].as_ref().map(view)),
            inputs: Inputs {
                tokens,
                targets,
                positions,
                cu_seqlens,
                log_probs: view(&self.places.log_probs).first(progress.tokens),
                coefficients: view(&self.places.coefficients).first(progress.tokens),
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
        let Some(grads) = grads.map(|p| p.view(&self.memory)) else { return };
        for segment in shape.segments.iter().filter(|s| s.trainable) {
            let end = segment.start + segment.elems();
            grads.slice(end, end.next_multiple_of(lockstep_core::ALIGN_ELEMS) - end).zero();
        }
    }

    fn objective(&self, driver: &mut dyn Driver, micro: u32, progress: &Progress) {
        let host = |place: &Place| -> View<'_> { place.view(&self.memory).first(progress.tokens) };
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

    fn show_outputs(&self, driver: &mut dyn Driver, micro: u32, progress: &Progress) {
        let log_probs = self.places.log_probs.view(&self.memory).first(progress.tokens);
        lockstep_ops::host::with(log_probs, |log_probs| driver.outputs(micro, log_probs));
    }

    /// A reduction over a world of one: the micro-batch's gradient joins the accumulator.
    fn reduce_locally(&self, span: SpanId, fresh: bool) {
        for part in &self.plan.phases[self.phase].schedule.span(span).parts {
            let places = &self.places.units[part.unit as usize];
            let (Some(from), Some(to)) = (places.grad_target, places.grad) else { continue };
            let len = part.end - part.start;
            let (from, to) = (
                from.view(&self.memory).slice(part.start, len),
                to.view(&self.memory).slice(part.start, len),
            );
            if fresh {
                reduce::copy(&self.queue, to, from);
            } else {
                reduce::add(&self.queue, to, from);
            }
        }
    }

    fn update(&self, unit: u32, updates: &Updates, clip: f32) {
        let shape = &self.model().units[unit as usize];
        let places = &self.places.units[unit as usize];
        let (Some(grad), Some(m), Some(v)) = (places.grad, places.exp_avg, places.exp_avg_sq) else { return };
        let rates = Rates::at(updates.t, updates.lr, updates.betas, updates.eps, clip);
        let decay = (0, shape.decay_elems, updates.weight_decay as f32);
        let rest = (shape.decay_elems, shape.trainable_elems, 0.0);
        for (start, end, weight_decay) in [decay, rest] {
            let part = |place: &Place| place.view(&self.memory).slice(start, end - start);
            let range = adamw::Range {
                master: part(places.master.as_ref().unwrap_or(&places.working)),
                working: places.master.map(|_| part(&places.working)),
                grad: part(&grad),
                m: part(&m),
                v: part(&v),
                weight_decay,
            };
            adamw::update(&self.queue, range, &rates);
        }
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
