//! Runs a phase: every lane runs its operations in order. This file also has the compute lane, which runs units.

use std::sync::Arc;
use std::thread::JoinHandle;

use lockstep_core::failpoint;
use lockstep_device::Queue;
use lockstep_model::{DecodeInputs, DropoutKey, Inputs, TiedEmbedding, Unit};
use lockstep_ops::Mat;
use lockstep_ops::attention::KvCache;
use lockstep_plan::{Lane, Op, OpKind, PhaseKind};
use lockstep_shape::{Program, Slot, UnitKind, UnitShape};

use crate::addresses::{Address, SlotAddresses};
use crate::driver::{Coefficients, DecodeDriver, PhaseDriver, StepDriver};
use crate::engine::Shared;
use crate::error::EngineError;
use crate::inputs::BatchSize;
use crate::io_staging::compact;
use crate::lanes::ScheduleRun;
use crate::task::Task;

impl Shared {
    /// Starts the thread that runs one lane's part of every phase.
    pub(crate) fn spawn(self: Arc<Self>, lane: Lane, queue: Queue) -> JoinHandle<()> {
        let name = format!("{lane}-lane");
        let run = move || {
            let mut seen = 0;
            while let Some(run) = self.lanes.next_run(seen) {
                seen += 1;
                self.run_guarded(lane, || {
                    self.run_lane(lane, run, &queue, &mut |i, _| self.run(run, i, &queue))?;
                    self.finish_lane(lane, &queue)
                });
                self.running.end(lane);
                self.lanes.finish_run(lane, run);
            }
            self.lanes.end_thread();
        };
        std::thread::Builder::new().name(name).spawn(run).expect("the system can start a thread")
    }

    /// Runs one lane's operations, each after the operations it waits for. On a GPU this enqueues them on the lane's
    /// stream, behind the events of what they wait for.
    fn run_lane(
        &self,
        lane: Lane,
        run: ScheduleRun,
        queue: &Queue,
        each: &mut dyn FnMut(usize, OpKind) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let schedule = &self.schedule_phase().schedule;
        for (i, op) in schedule.ops.iter().enumerate().filter(|(_, op)| op.lane == lane) {
            if self.lanes.wait_for_ops(op, run, schedule, &self.meter).is_err() {
                return Ok(());
            }
            failpoint::pass(failpoint_of(lane));
            self.wait_for_events(op, run, queue)?;
            self.poison_before(i);
            self.measured((i, op), queue.cuda(), || each(i, op.kind))?;
            self.poison_after(i);
            if let (Some(event), Some(cuda)) = (&self.prepared_phase().events[run.parity()][i], queue.cuda())
            {
                cuda.record(event);
            }
            queue.check()?;
            self.lanes.finish_op(lane, run, i);
        }
        Ok(())
    }

    /// Makes the queue wait for the events of the operations that `op` waits for. They have been enqueued already.
    fn wait_for_events(&self, op: &Op, run: ScheduleRun, queue: &Queue) -> Result<(), EngineError> {
        for target in op.waits.iter().filter_map(|wait| run.wait_target(wait)) {
            if let Some(event) = &self.prepared_phase().events[target.parity][target.op] {
                match queue.cuda() {
                    Some(cuda) => cuda.wait_for(event),
                    None => event.synchronize()?,
                }
            }
        }
        Ok(())
    }

    /// Waits until all work of the lane has finished on the device.
    fn finish_lane(&self, lane: Lane, queue: &Queue) -> Result<(), EngineError> {
        match (self.transport.nccl(lane), queue.cuda()) {
            // Collectives depend on other ranks, which may fail or never arrive.
            (Some(nccl), Some(cuda)) => {
                let failed = |cause| EngineError::Comm { op: "the collectives of a phase".into(), cause };
                nccl.wait(cuda, "the collectives of a phase").map_err(failed)
            }
            _ => Ok(queue.synchronize()?),
        }
    }

    pub(crate) fn compute_lane(
        &self,
        run: ScheduleRun,
        caller: &mut PhaseDriver,
        queue: &Queue,
    ) -> Result<(), EngineError> {
        let mut batch = BatchSize::default();
        self.issue_compute(run, caller, queue, &mut batch)?;
        let finished = match caller {
            PhaseDriver::Step(driver) => self.deliver_outputs(*driver, queue),
            PhaseDriver::Decode(_) => Ok(queue.synchronize()?),
        };
        self.running.end(Lane::Compute);
        finished
    }

    fn issue_compute(
        &self,
        run: ScheduleRun,
        caller: &mut PhaseDriver,
        queue: &Queue,
        batch: &mut BatchSize,
    ) -> Result<(), EngineError> {
        self.run_lane(Lane::Compute, run, queue, &mut |i, kind| match (
            &self.prepared_phase().tasks[i],
            &mut *caller,
        ) {
            (Task::Compute, PhaseDriver::Step(driver)) => self.compute(run, kind, *driver, queue, batch),
            (Task::Compute, PhaseDriver::Decode(driver)) => self.decode(run, *driver, queue),
            _ => self.run(run, i, queue),
        })
    }

    fn compute(
        &self,
        run: ScheduleRun,
        kind: OpKind,
        driver: &mut dyn StepDriver,
        queue: &Queue,
        batch: &mut BatchSize,
    ) -> Result<(), EngineError> {
        if let OpKind::Feed { micro_batch } = kind {
            *batch = self.feed(&driver.batch(micro_batch), micro_batch, queue)?;
            return Ok(());
        }
        let program = |unit, which, fresh| self.run_unit(run, queue, unit, which, fresh, *batch);
        match kind {
            OpKind::Forward { unit, .. } => program(unit, ProgramKind::Forward, false),
            OpKind::Recompute { unit, .. } => program(unit, ProgramKind::Recompute, false),
            OpKind::Backward { unit, fresh, .. } => program(unit, ProgramKind::Backward, fresh),
            OpKind::HeadForward { .. } => {
                program(self.head_unit(), ProgramKind::Forward, false);
                if self.schedule_phase().kind == PhaseKind::Score {
                    self.note_outputs(*batch);
                }
            }
            OpKind::Objective { micro_batch } => self.objective(run, driver, queue, micro_batch, *batch)?,
            OpKind::HeadStep { fresh, .. } => {
                program(self.head_unit(), ProgramKind::Fused, fresh);
                self.note_outputs(*batch);
            }
            OpKind::HeadBackward { fresh, .. } => {
                program(self.head_unit(), ProgramKind::Backward, fresh);
                self.note_outputs(*batch);
            }
            OpKind::Deliver => self.collect_outputs(driver, queue)?,
            other => unreachable!("{other:?} is not computed unit by unit"),
        }
        Ok(())
    }

    /// Runs decode batches through all units; the driver samples the next tokens from the head's logits.
    fn decode(
        &self,
        run: ScheduleRun,
        driver: &mut dyn DecodeDriver,
        queue: &Queue,
    ) -> Result<(), EngineError> {
        let head = self.head_unit();
        while let Some(new) = driver.next_batch() {
            let batch = self.feed_decode_batch(&new, queue)?;
            for unit in 0..head {
                self.dequantise(unit, queue)?;
                self.run_unit(run, queue, unit, ProgramKind::Forward, false, batch);
            }
            self.run_unit(run, queue, head, ProgramKind::Decode, false, batch);
            let addresses = &self.prepared_phase().addresses;
            let logits =
                addresses.units[head as usize].decode[Slot::Logits.index()].expect("the head has logits");
            let vocab = self.model().shape.vocab;
            let logits = logits.view(&self.memories).first(batch.docs * vocab);
            let seen = self.logits_on_host(logits).unwrap_or(logits);
            self.transfer(queue, seen, logits);
            queue.synchronize()?;
            let (drawn, staging) =
                (self.input_views(batch).targets, self.parts_of(self.inputs_on_host(0), batch).targets);
            for doc in 0..batch.docs {
                let draw = |row: &[f32]| driver.sample(doc, row);
                let token = lockstep_ops::host::with_slice(seen.slice(doc * vocab, vocab), draw);
                assert!((token as usize) < vocab, "token {token} of a vocabulary of {vocab}");
                staging.slice(doc, 1).write_host(&[token]);
            }
            self.transfer(queue, drawn, staging);
            let log_probs = self.channel(self.outputs(0), 0, batch.docs);
            let rows = Mat::dense(logits, batch.docs, vocab);
            lockstep_ops::cross_entropy::forward(
                queue,
                log_probs,
                rows,
                drawn,
                self.model().inverse_temperature(),
            );
            self.transfer_channels(queue, self.outputs_on_host(0), self.outputs(0), batch.docs);
            queue.synchronize()?;
            self.with_outputs(0, batch.docs, |outputs| driver.sampled(outputs.log_probs()));
        }
        Ok(())
    }

    fn head_unit(&self) -> u32 {
        self.model().head()
    }

    fn run_unit(
        &self,
        run: ScheduleRun,
        queue: &Queue,
        index: u32,
        which: ProgramKind,
        fresh: bool,
        batch: BatchSize,
    ) {
        let model = self.model();
        let (shape, programs) = (&model.units[index as usize], model.programs(index));
        let all = &self.prepared_phase().addresses;
        let addresses = &all.units[index as usize];
        let (program, slots): (&Program, &SlotAddresses) = match which {
            ProgramKind::Forward => (&programs.forward, &addresses.forward),
            ProgramKind::Recompute => (&programs.recompute, &addresses.recompute),
            ProgramKind::Backward => (&programs.backward, &addresses.backward),
            ProgramKind::Fused => (&programs.fused, &addresses.fused),
            ProgramKind::Decode => (&programs.decode, &addresses.decode),
        };
        let inputs = self.input_views(batch);
        let view = |address: &Address| address.view(&self.memories);
        // The decode program computes logits only; there are no outputs per token.
        let outputs = if inputs.page_tables.is_some() { 0 } else { batch.head_rows };
        let coefficients = all.coefficients.is_some().then(|| self.coefficients(batch.micro_batch));
        let writes_grads = matches!(which, ProgramKind::Backward | ProgramKind::Fused);
        let grads_of = |u: usize| all.units[u].grad_target.filter(|_| writes_grads);
        let tied = (model.shape.head_is_tied() && index == self.head_unit()).then(|| model.embed() as usize);
        if fresh {
            self.zero_padding(queue, shape, grads_of(index as usize));
            if let Some(table) = tied {
                self.zero_padding(queue, &model.units[table], grads_of(table));
            }
        }
        let unit = Unit {
            queue,
            model: &model.shape,
            shape,
            programs,
            params: view(&addresses.params),
            grads: grads_of(index as usize).map(|p| view(&p)),
            overwrite_grads: fresh,
            tied: tied.map(|table| TiedEmbedding {
                unit: &model.units[table],
                params: view(&all.units[table].params),
                grads: grads_of(table).map(|p| view(&p)),
            }),
            slots: std::array::from_fn::<_, { Slot::COUNT }, _>(|i| slots[i].as_ref().map(view)),
            inputs: Inputs {
                tokens: inputs.tokens,
                targets: inputs.targets,
                positions: inputs.positions,
                cu_seqlens: inputs.cu_seqlens,
                head_rows: inputs.head_rows,
                shared_rows: inputs.shared_rows,
                outputs: self.per_channel(self.outputs(batch.micro_batch), outputs),
                coefficients: coefficients.map(|all| self.per_channel(all, batch.head_rows)),
                decode: inputs
                    .page_tables
                    .map(|page_tables| DecodeInputs { cache: self.cache(index), page_tables }),
            },
            tables: view(&all.rope_tables),
            workspace: view(&all.workspace),
            head_chunk: model.head_chunk_tokens,
            inverse_temperature: model.inverse_temperature(),
            dropout: inputs.samples.map(|samples| DropoutKey {
                seed: self.seed.load(std::sync::atomic::Ordering::Relaxed),
                step: self.steps.of(run).updates.t as u32,
                samples,
            }),
        };
        lockstep_model::run_program(program, &unit);
    }

    /// A block's part of the KV cache.
    pub(crate) fn cache(&self, unit: u32) -> Option<KvCache<'_>> {
        let (generation, all) = (self.model().generation?, self.prepared_phase().addresses.cache?);
        let UnitKind::Block(layer) = self.model().units[unit as usize].kind else { return None };
        let view =
            all.view(&self.memories).slice(layer as usize * generation.cache_elems, generation.cache_elems);
        Some(KvCache { view, pages: generation.pages, page_tokens: generation.page_tokens })
    }

    /// Zeroes the padding between segments: the buffer shares memory with others and may hold their bytes there, which
    /// the norm and the update would read as gradients.
    fn zero_padding(&self, queue: &Queue, shape: &UnitShape, grads: Option<Address>) {
        let Some(grads) = grads.map(|p| p.view(&self.memories)) else { return };
        for (start, segment) in shape.segments.iter().filter_map(|s| Some((s.trained_start?, s))) {
            let end = start + segment.elems();
            let padding = end.next_multiple_of(lockstep_core::ALIGN_ELEMS) - end;
            lockstep_ops::reduce::zero(queue, grads.slice(end, padding));
        }
    }

    fn objective(
        &self,
        run: ScheduleRun,
        driver: &mut dyn StepDriver,
        queue: &Queue,
        micro_batch: u32,
        batch: BatchSize,
    ) -> Result<(), EngineError> {
        let staging = self.coefficients_on_host(micro_batch);
        staging.zero_host();
        let scale = self.steps.of(run).loss_scale as f32;
        let ahead = self.plan.input.coefficients_ahead;
        let tokens = driver.batch(micro_batch).tokens.len();
        if !ahead {
            let on_host = self.outputs_on_host(micro_batch);
            self.transfer_channels(queue, on_host, self.outputs(micro_batch), batch.real_head_rows);
            // The objective reads them on the host.
            queue.synchronize()?;
            self.expand_outputs(micro_batch, &driver.batch(micro_batch));
        }
        let (channels, stride) = (self.model().channels, self.channel_stride());
        lockstep_ops::host::with_slice_mut(staging, |values| {
            let mut out = Coefficients { channels, stride, tokens, values };
            match ahead {
                true => driver.coefficients(micro_batch, None, &mut out),
                false => self.with_outputs(micro_batch, tokens, |outputs| {
                    driver.coefficients(micro_batch, Some(outputs), &mut out);
                }),
            }
            for channel in channels.iter() {
                let coefficients = out.get(channel);
                compact(coefficients, &driver.batch(micro_batch));
                if scale != 1.0 {
                    coefficients.iter_mut().for_each(|coefficient| *coefficient *= scale);
                }
            }
        });
        self.transfer_channels(queue, self.coefficients(micro_batch), staging, batch.head_rows);
        Ok(())
    }
}

/// The failpoint that is passed before each operation of a lane.
fn failpoint_of(lane: Lane) -> &'static str {
    match lane {
        Lane::Compute => "lane.compute",
        Lane::Comm => "lane.comm",
        Lane::Copy => "lane.copy",
        Lane::Host => "lane.host",
    }
}

/// Which of a unit's programs to run.
#[derive(Clone, Copy)]
enum ProgramKind {
    Forward,
    Recompute,
    Backward,
    Fused,
    Decode,
}
