//! Pinned staging memory between the host and a device with its own memory: batches and coefficients go out, the head's
//! outputs come back.
//!
//! Every micro-batch has its own part, so nothing is written twice in a step and no copy has to be waited for. On the CPU
//! there is no staging: the host uses the device's buffers directly.

use std::sync::MutexGuard;

use lockstep_core::DType;
use lockstep_device::{Queue, View};
use lockstep_model::PerChannel;
use lockstep_shape::Channel;

use crate::addresses::Address;
use crate::driver::{MicroBatch, Outputs, StepDriver};
use crate::engine::Shared;
use crate::error::EngineError;
use crate::inputs::BatchSize;

/// Which part of a micro-batch's staging memory.
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
        self.io_staging(micro_batch, Part::Coefficients).unwrap_or_else(|| self.coefficients(micro_batch))
    }

    /// Where the host reads outputs, after they were copied.
    pub(crate) fn outputs_on_host(&self, micro_batch: u32) -> View<'_> {
        self.io_staging(micro_batch, Part::Outputs).unwrap_or_else(|| self.outputs(micro_batch))
    }

    /// A micro-batch's coefficients on the device.
    pub(crate) fn coefficients(&self, micro_batch: u32) -> View<'_> {
        let window = self.prepared_phase().addresses.coefficients;
        self.of_window(window.expect("a phase with an objective has coefficients"), micro_batch)
    }

    /// A micro-batch's outputs on the device.
    pub(crate) fn outputs(&self, micro_batch: u32) -> View<'_> {
        self.of_window(self.prepared_phase().addresses.outputs, micro_batch)
    }

    fn of_window(&self, window: Address, micro_batch: u32) -> View<'_> {
        let elems = self.model().per_token_elems();
        window.slice(micro_batch as usize * elems, elems).view(&self.memories)
    }

    /// The distance from one channel to the next, in elements, on the device and on the host.
    pub(crate) fn channel_stride(&self) -> usize {
        self.model().bounds.tokens
    }

    /// The first rows of a channel of outputs or coefficients.
    pub(crate) fn channel<'m>(&self, of: View<'m>, index: usize, rows: usize) -> View<'m> {
        of.slice(index * self.channel_stride(), rows)
    }

    /// The model's channels, each with the head's rows.
    pub(crate) fn per_channel<'m>(&self, of: View<'m>, rows: usize) -> PerChannel<'m> {
        let channels = self.model().channels;
        Channel::ALL.map(|channel| Some(self.channel(of, channels.index(channel)?, rows)))
    }

    /// Copies the first rows of every channel between staging and the device.
    pub(crate) fn transfer_channels(&self, queue: &Queue, to: View<'_>, from: View<'_>, rows: usize) {
        for index in 0..self.model().channels.count() {
            self.transfer(queue, self.channel(to, index, rows), self.channel(from, index, rows));
        }
    }

    fn io_staging(&self, micro_batch: u32, part: Part) -> Option<View<'_>> {
        let (staging, model) = (self.prepared_phase().addresses.io_staging?, self.model());
        let (inputs, tokens) = (model.inputs_elems(true), model.per_token_elems());
        let after_inputs = inputs.next_multiple_of(256);
        let (start, elems, dtype) = match part {
            Part::Inputs => (0, inputs, DType::U32),
            Part::Coefficients => (after_inputs, tokens, DType::F32),
            Part::Outputs => (after_inputs + tokens.next_multiple_of(256), tokens, DType::F32),
        };
        let start = micro_batch as usize * model.io_staging_stride_elems() + start;
        Some(staging.slice(start, elems).view(&self.memories).cast(dtype))
    }

    /// Where the host reads the logits that tokens are sampled from.
    pub(crate) fn logits_on_host(&self, logits: View<'_>) -> Option<View<'_>> {
        let staging = self.prepared_phase().addresses.io_staging?;
        let start = self.plan.input.num_micro_batches as usize * self.model().io_staging_stride_elems();
        Some(staging.slice(start, logits.len()).view(&self.memories).cast(DType::F32))
    }

    /// Copies between staging and the device, in the order of the queue. Does nothing if there is no staging.
    pub(crate) fn transfer(&self, queue: &Queue, to: View<'_>, from: View<'_>) {
        match queue.cuda() {
            Some(cuda) => cuda.copy(to, from),
            None if self.prepared_phase().addresses.io_staging.is_some() => to.copy_from_host(&from),
            None => {}
        }
    }

    /// The head has computed the outputs of a micro-batch.
    pub(crate) fn note_outputs(&self, batch: BatchSize) {
        self.pending_outputs().push(batch);
    }

    /// Copies the outputs of the window to where the host reads them. On a CPU that is the plan's buffer, which ends with
    /// this operation, so the driver sees them now; on a GPU the copies only begin here.
    pub(crate) fn collect_outputs(
        &self,
        driver: &mut dyn StepDriver,
        queue: &Queue,
    ) -> Result<(), EngineError> {
        for batch in self.pending_outputs().iter() {
            let (staging, outputs) =
                (self.outputs_on_host(batch.micro_batch), self.outputs(batch.micro_batch));
            self.transfer_channels(queue, staging, outputs, batch.real_head_rows);
        }
        match queue.cuda() {
            Some(_) => Ok(()),
            None => self.deliver_outputs(driver, queue),
        }
    }

    fn pending_outputs(&self) -> MutexGuard<'_, Vec<BatchSize>> {
        self.pending_outputs.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Moves the outputs on the host from the head's rows to the positions of the batch, in place. Positions without an
    /// output get zero. Returns the number of positions.
    pub(crate) fn expand_outputs(&self, micro_batch: u32, batch: &MicroBatch) -> usize {
        let tokens = batch.tokens.len();
        if !batch.weights.is_empty() {
            let (channels, stride) = (self.model().channels.count(), self.channel_stride());
            lockstep_ops::host::with_slice_mut(self.outputs_on_host(micro_batch), |values: &mut [f32]| {
                (0..channels).for_each(|channel| expand(&mut values[channel * stride..][..tokens], batch));
            });
        }
        tokens
    }

    /// Calls `look` with the outputs on the host.
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

    /// Waits for the lane, then passes the outputs that the driver has not seen to it.
    pub(crate) fn deliver_outputs(
        &self,
        driver: &mut dyn StepDriver,
        queue: &Queue,
    ) -> Result<(), EngineError> {
        queue.synchronize()?;
        for BatchSize { micro_batch, .. } in self.pending_outputs().drain(..) {
            let tokens = self.expand_outputs(micro_batch, &driver.batch(micro_batch));
            self.with_outputs(micro_batch, tokens, |outputs| driver.outputs(micro_batch, outputs));
        }
        Ok(())
    }
}

/// Moves the values of the positions that need one from the front to their positions.
fn expand(values: &mut [f32], batch: &MicroBatch) {
    let needed = |position: &usize| batch.needs_output(*position);
    let mut next = (0..values.len()).filter(needed).count();
    // From the end, so that no value is overwritten before it is moved.
    for position in (0..values.len()).rev() {
        values[position] = if batch.needs_output(position) {
            next -= 1;
            values[next]
        } else {
            0.0
        };
    }
}

/// The opposite: moves the values of the positions that need one to the front, and zeroes the rest.
pub(crate) fn compact(values: &mut [f32], batch: &MicroBatch) {
    let mut next = 0;
    for position in (0..batch.tokens.len()).filter(|position| batch.needs_output(*position)) {
        values[next] = values[position];
        next += 1;
    }
    values[next..].fill(0.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_move_between_rows_and_positions() {
        let weights = [0.0, 1.0, 1.0, 0.0, 0.5, 0.0];
        let batch = MicroBatch {
            tokens: &[0; 6],
            targets: &[],
            positions: &[],
            cu_seqlens: &[],
            samples: &[],
            weights: &weights,
            shared: &[],
        };
        let mut values = [1.0, 2.0, 3.0, 9.0, 9.0, 9.0];
        expand(&mut values, &batch);
        assert_eq!(values, [0.0, 1.0, 2.0, 0.0, 3.0, 0.0]);
        compact(&mut values, &batch);
        assert_eq!(values, [1.0, 2.0, 3.0, 0.0, 0.0, 0.0]);
        compact(&mut values, &MicroBatch { weights: &[], ..batch });
        assert_eq!(values, [1.0, 2.0, 3.0, 0.0, 0.0, 0.0]);
    }
}
