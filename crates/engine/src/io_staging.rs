//! Between the host and a device with memory of its own: batches go out, the head's outputs come back.
//!
//! Every micro-batch has a part of the port, so nothing is written twice in a step and no copy is waited for
//! inside one. On the CPU the port is the device's memory itself, and crossing over is nothing.

use lockstep_core::DType;
use lockstep_device::{Queue, View};
use lockstep_model::PerChannel;
use lockstep_shape::Channel;

use crate::driver::{Outputs, StepDriver};
use crate::engine::Shared;
use crate::error::EngineError;
use crate::inputs::BatchSize;

/// Which part of a micro-batch's share of the port.
#[derive(Clone, Copy)]
enum Part {
    Inputs,
    Coefficients,
    Outputs,
}

impl Shared {
    /// Where the host writes a micro-batch's inputs.
    pub(crate) fn inputs_on_host(&self, micro_batch: u32) -> View<'_> {
        self.io_staging(micro_batch, Part::Inputs)
            .unwrap_or_else(|| self.prepared_phase().addresses.inputs.view(&self.memories))
    }

    /// Where the host writes coefficients.
    pub(crate) fn coefficients_on_host(&self, micro_batch: u32) -> View<'_> {
        self.io_staging(micro_batch, Part::Coefficients).unwrap_or_else(|| self.coefficients())
    }

    /// Where the host reads outputs, once they were brought.
    pub(crate) fn outputs_on_host(&self, micro_batch: u32) -> View<'_> {
        self.io_staging(micro_batch, Part::Outputs).unwrap_or_else(|| self.outputs())
    }

    pub(crate) fn coefficients(&self) -> View<'_> {
        let address = self.prepared_phase().addresses.coefficients.as_ref();
        address.expect("a phase with an objective has coefficients").view(&self.memories)
    }

    pub(crate) fn outputs(&self) -> View<'_> {
        self.prepared_phase().addresses.outputs.view(&self.memories)
    }

    /// Elements from one channel to the next, on the device and on the host.
    pub(crate) fn channel_stride(&self) -> usize {
        self.model().bounds.tokens
    }

    /// The first tokens of a channel of outputs or coefficients.
    pub(crate) fn channel<'m>(&self, of: View<'m>, index: usize, tokens: usize) -> View<'m> {
        of.slice(index * self.channel_stride(), tokens)
    }

    /// The channels that the model has, each at the batch's length.
    pub(crate) fn per_channel<'m>(&self, of: View<'m>, tokens: usize) -> PerChannel<'m> {
        let channels = self.model().channels;
        Channel::ALL.map(|channel| Some(self.channel(of, channels.index(channel)?, tokens)))
    }

    /// Brings the first tokens of every channel from one memory to the other.
    pub(crate) fn transfer_channels(&self, queue: &Queue, to: View<'_>, from: View<'_>, tokens: usize) {
        for index in 0..self.model().channels.count() {
            self.transfer(queue, self.channel(to, index, tokens), self.channel(from, index, tokens));
        }
    }

    fn io_staging(&self, micro_batch: u32, part: Part) -> Option<View<'_>> {
        let (staging, model) = (self.prepared_phase().addresses.io_staging?, self.model());
        let (inputs, tokens) = (model.inputs_elems(true), model.channels.count() * model.bounds.tokens);
        let behind = inputs.next_multiple_of(256);
        let (start, elems, dtype) = match part {
            Part::Inputs => (0, inputs, DType::U32),
            Part::Coefficients => (behind, tokens, DType::F32),
            Part::Outputs => (behind + tokens.next_multiple_of(256), tokens, DType::F32),
        };
        let start = micro_batch as usize * model.io_staging_stride_elems() + start;
        Some(staging.slice(start, elems).view(&self.memories).cast(dtype))
    }

    /// Where the host reads the logits that tokens are drawn from.
    pub(crate) fn logits_on_host(&self, logits: View<'_>) -> Option<View<'_>> {
        let staging = self.prepared_phase().addresses.io_staging?;
        let start = self.plan.input.num_micro_batches as usize * self.model().io_staging_stride_elems();
        Some(staging.slice(start, logits.len()).view(&self.memories).cast(DType::F32))
    }

    /// Crosses over, in the queue's order. Where both are one memory there is nothing to do.
    pub(crate) fn transfer(&self, queue: &Queue, to: View<'_>, from: View<'_>) {
        match queue.cuda() {
            Some(cuda) => cuda.copy(to, from),
            None if self.prepared_phase().addresses.io_staging.is_some() => to.copy_from_host(&from),
            None => {}
        }
    }

    /// Shows the driver what came out of the head: now, or on a device with memory of its own when the phase
    /// ends ([`Shared::deliver`]).
    pub(crate) fn deliver_outputs(
        &self,
        driver: &mut dyn StepDriver,
        queue: &Queue,
        micro_batch: u32,
        batch: BatchSize,
    ) {
        if self.prepared_phase().addresses.io_staging.is_none() {
            return self
                .with_outputs(micro_batch, batch.given, |outputs| driver.outputs(micro_batch, outputs));
        }
        self.transfer_channels(queue, self.outputs_on_host(micro_batch), self.outputs(), batch.given);
        self.pending_outputs.lock().unwrap_or_else(|e| e.into_inner()).push((micro_batch, batch.given));
    }

    /// Outputs that are on the host.
    pub(crate) fn with_outputs<R>(
        &self,
        micro_batch: u32,
        tokens: usize,
        look: impl FnOnce(Outputs<'_>) -> R,
    ) -> R {
        let (channels, stride) = (self.model().channels, self.channel_stride());
        lockstep_ops::host::with_slice(self.outputs_on_host(micro_batch), |values| {
            look(Outputs { channels, stride, tokens, values })
        })
    }

    /// Waits for the lane, and shows what is still to be shown.
    pub(crate) fn deliver_pending_outputs(
        &self,
        driver: &mut dyn StepDriver,
        queue: &Queue,
    ) -> Result<(), EngineError> {
        queue.synchronize()?;
        for (micro_batch, tokens) in self.pending_outputs.lock().unwrap_or_else(|e| e.into_inner()).drain(..)
        {
            self.with_outputs(micro_batch, tokens, |outputs| driver.outputs(micro_batch, outputs));
        }
        Ok(())
    }
}
