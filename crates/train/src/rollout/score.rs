//! Scores generated sequences with the models of the run, in micro-batches of the plan's size.

use lockstep_data::Batch;
use lockstep_engine::{Engine, Outputs};
use lockstep_plan::ModelId;
use lockstep_shape::Channel;

use super::completion_range;
use super::sequence::Sequence;
use crate::error::TrainError;
use crate::objective::micro_batch;

/// How many sequences a micro-batch has, and how many micro-batches all ranks run: a rank with fewer sequences runs empty
/// ones, because the others may need its parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoreRounds {
    pub(crate) rows: usize,
    pub(crate) largest_share: usize,
}

impl ScoreRounds {
    fn batches<'s>(&self, sequences: &'s [Sequence]) -> impl Iterator<Item = &'s [Sequence]> {
        let mut parts = sequences.chunks(self.rows);
        (0..self.largest_share.div_ceil(self.rows)).map(move |_| parts.next().unwrap_or(&[]))
    }
}

/// The log-probability of every token of every completion.
pub(crate) fn log_probs(
    engine: &mut Engine,
    model: ModelId,
    sequences: &[Sequence],
    rounds: ScoreRounds,
) -> Result<Vec<Vec<f32>>, TrainError> {
    let mut all = Vec::new();
    let mut batch = Batch::default();
    for part in rounds.batches(sequences) {
        batch.clear();
        for (i, sequence) in part.iter().enumerate() {
            batch.push_document(&sequence.tokens, sequence.prompt_len as usize, i as u32);
        }
        engine.model_mut(model).score(micro_batch(&batch), &mut |outputs: Outputs<'_>| {
            for (doc, sequence) in part.iter().enumerate() {
                all.push(outputs.log_probs()[completion_range(&batch, doc, sequence)].to_vec());
            }
        })?;
    }
    Ok(all)
}

/// The outputs of a scalar head at some positions of every sequence.
pub(crate) fn values_at(
    engine: &mut Engine,
    model: ModelId,
    sequences: &[Sequence],
    rounds: ScoreRounds,
    positions: &dyn Fn(&Sequence) -> std::ops::Range<usize>,
) -> Result<Vec<Vec<f32>>, TrainError> {
    let mut all = Vec::new();
    let mut batch = Batch::default();
    for part in rounds.batches(sequences) {
        batch.clear();
        for (i, sequence) in part.iter().enumerate() {
            batch.push_sequence(&sequence.tokens, positions(sequence), i as u32);
        }
        engine.model_mut(model).score(micro_batch(&batch), &mut |outputs: Outputs<'_>| {
            let values = outputs.get(Channel::Value);
            for (doc, sequence) in part.iter().enumerate() {
                let start = batch.cu_seqlens[doc] as usize;
                let positions = positions(sequence);
                all.push(values[start + positions.start..start + positions.end].to_vec());
            }
        })?;
    }
    Ok(all)
}
