//! Writes a micro-batch to the inputs buffer: the rows to compute, the rows that the head runs on, and, if documents
//! share rows, the row of every position.

use lockstep_plan::InputsLayout;

use crate::driver::MicroBatch;
use crate::error::EngineError;
use crate::inputs::BatchSize;

/// A device with its own memory gets multiples of this many rows, so that there are few distinct shapes.
const BLOCK_ROWS: usize = 256;

pub(crate) struct BatchFill<'a> {
    pub(crate) batch: &'a MicroBatch<'a>,
    pub(crate) layout: InputsLayout,
    /// The largest number of tokens of the plan.
    pub(crate) max_tokens: usize,
    /// Whether the plan lets documents share rows.
    pub(crate) shares_rows: bool,
    /// Whether counts are padded to whole blocks.
    pub(crate) pads: bool,
    pub(crate) uses_samples: bool,
}

impl BatchFill<'_> {
    /// Fills the inputs buffer `all`.
    pub(crate) fn run(&self, all: &mut [u32]) -> Result<BatchSize, EngineError> {
        let batch = self.batch;
        let positions = batch.tokens.len();
        let shares_rows = self.shares_rows && batch.shared.iter().any(|shared| *shared > 0);
        let rows = match self.layout.shared_rows.filter(|_| shares_rows) {
            Some([source, ..]) => self.shared_rows(all, source)?,
            None => {
                all[self.layout.tokens..][..positions].copy_from_slice(batch.tokens);
                all[self.layout.positions..][..positions].copy_from_slice(batch.positions);
                positions
            }
        };
        let head_rows = self.head_rows(all, shares_rows);
        let size = BatchSize {
            tokens: self.padded(rows),
            positions: self.padded(positions),
            real_positions: positions,
            head_rows: self.padded(head_rows),
            real_head_rows: head_rows,
            shares_rows,
            ..BatchSize::default()
        };
        for (start, real, padded) in [
            (self.layout.tokens, rows, size.tokens),
            (self.layout.positions, rows, size.tokens),
            (self.layout.targets, head_rows, size.head_rows),
            // Padding of the head takes the first row; its coefficients are zero.
            (self.layout.head_rows[0], head_rows, size.head_rows),
        ] {
            all[start + real..start + padded].fill(0);
        }
        positions_of_rows(all, self.layout.head_rows, (head_rows, size.tokens));
        if let Some(at) = self.layout.shared_rows.filter(|_| shares_rows) {
            all[at[0] + positions..at[0] + size.positions].fill(0);
            positions_of_rows(all, at, (positions, size.tokens));
        }
        Ok(BatchSize { docs: self.documents(all, size.positions), ..size })
    }

    fn padded(&self, rows: usize) -> usize {
        if self.pads { rows.next_multiple_of(BLOCK_ROWS).min(self.max_tokens) } else { rows }
    }

    /// Writes the tokens of all rows, and the row of every position. Returns the number of rows.
    fn shared_rows(&self, all: &mut [u32], source: usize) -> Result<usize, EngineError> {
        let MicroBatch { tokens, positions, cu_seqlens, shared, .. } = *self.batch;
        let (mut rows, mut before) = (0, 0..0);
        for (doc, bounds) in cu_seqlens.windows(2).enumerate() {
            let own = bounds[0] as usize..bounds[1] as usize;
            let common = shared.get(doc).map_or(0, |shared| *shared as usize);
            let is_common = common <= before.len()
                && common <= own.len()
                && tokens[own.clone()][..common] == tokens[before.clone()][..common];
            if !is_common {
                return Err(EngineError::NotShared { doc, common });
            }
            all.copy_within(source + before.start..source + before.start + common, source + own.start);
            for position in own.start + common..own.end {
                all[source + position] = rows as u32;
                all[self.layout.tokens + rows] = tokens[position];
                all[self.layout.positions + rows] = positions[position];
                rows += 1;
            }
            before = own;
        }
        Ok(rows)
    }

    /// Writes the rows that the head runs on and their targets. Returns their number.
    fn head_rows(&self, all: &mut [u32], shares_rows: bool) -> usize {
        let row_of = self.layout.shared_rows.filter(|_| shares_rows).map(|[source, ..]| source);
        let mut count = 0;
        for position in (0..self.batch.tokens.len()).filter(|position| self.batch.needs_output(*position)) {
            let row = row_of.map_or(position as u32, |source| all[source + position]);
            all[self.layout.head_rows[0] + count] = row;
            all[self.layout.targets + count] = self.batch.targets[position];
            count += 1;
        }
        count
    }

    /// Writes the bounds of the documents, the last of which is padding up to `positions`. Returns their number.
    fn documents(&self, all: &mut [u32], positions: usize) -> usize {
        let (bounds, samples) = (self.batch.cu_seqlens, self.batch.samples);
        let docs = bounds.len().saturating_sub(1);
        let at = self.layout.cu_seqlens;
        all[at] = 0;
        all[at..][..bounds.len()].copy_from_slice(bounds);
        if self.uses_samples {
            assert_eq!(samples.len(), docs, "dropout needs a sample index per document");
            all[self.layout.samples..][..docs].copy_from_slice(samples);
        }
        let padding = positions > self.batch.tokens.len();
        if padding {
            all[at + docs + 1] = positions as u32;
            if self.uses_samples {
                all[self.layout.samples + docs] = 0;
            }
        }
        docs + usize::from(padding)
    }
}

/// Completes a row map of `count` positions and `rows` rows from the row of each position: where each row's positions
/// begin, and the positions, by counting.
fn positions_of_rows(all: &mut [u32], [source, offsets, entries]: [usize; 3], (count, rows): (usize, usize)) {
    all[offsets..=offsets + rows].fill(0);
    for position in 0..count {
        let row = all[source + position] as usize;
        all[offsets + row + 1] += 1;
    }
    for row in 0..rows {
        all[offsets + row + 1] += all[offsets + row];
    }
    for position in 0..count {
        let next = offsets + all[source + position] as usize;
        all[entries + all[next] as usize] = position as u32;
        all[next] += 1;
    }
    // Every offset is now that of the next row.
    all.copy_within(offsets..offsets + rows, offsets + 1);
    all[offsets] = 0;
}

#[cfg(test)]
mod tests {
    use lockstep_plan::InputsSize;

    use super::*;

    fn layout(tokens: usize, docs: usize) -> InputsLayout {
        // One more document for the padding.
        let docs = docs + 1;
        InputsLayout::of(InputsSize { tokens, docs, page_tables: 0, shares_rows: true, samples: docs })
    }

    /// Three documents: 1 2 3, 1 2 4 5, 1 6.
    fn batch<'a>(weights: &'a [f32], shared: &'a [u32]) -> MicroBatch<'a> {
        MicroBatch {
            tokens: &[1, 2, 3, 1, 2, 4, 5, 1, 6],
            targets: &[2, 3, 9, 2, 4, 5, 9, 6, 9],
            positions: &[0, 1, 2, 0, 1, 2, 3, 0, 1],
            cu_seqlens: &[0, 3, 7, 9],
            samples: &[],
            weights,
            shared,
        }
    }

    fn filled(batch: &MicroBatch, pads: bool) -> (BatchSize, Vec<u32>, InputsLayout) {
        let layout = layout(256, 4);
        let fill = BatchFill { batch, layout, max_tokens: 256, shares_rows: true, pads, uses_samples: false };
        // What is there from another batch must not matter.
        let mut all = vec![77; layout.end];
        (fill.run(&mut all).unwrap(), all, layout)
    }

    #[test]
    fn common_beginnings_are_computed_once() {
        for pads in [false, true] {
            let batch = batch(&[0., 1., 1., 0., 1., 1., 1., 1., 0.], &[0, 2, 1]);
            let (size, all, at) = filled(&batch, pads);
            let part = |start: usize, len: usize| &all[start..][..len];
            assert_eq!((size.real_positions, size.real_head_rows, size.shares_rows), (9, 6, true));
            assert_eq!((size.tokens, size.docs), if pads { (256, 4) } else { (6, 3) });
            assert_eq!(part(at.tokens, 6), [1, 2, 3, 4, 5, 6]);
            assert_eq!(part(at.positions, 6), [0, 1, 2, 2, 3, 1]);
            assert_eq!(part(at.cu_seqlens, 4), [0, 3, 7, 9]);
            let [source, offsets, entries] = at.shared_rows.unwrap();
            assert_eq!(part(source, 9), [0, 1, 2, 0, 1, 3, 4, 0, 5]);
            assert_eq!(part(offsets, 7), [0, 3, 5, 6, 7, 8, 9]);
            assert_eq!(part(entries, 9), [0, 3, 7, 1, 4, 2, 5, 6, 8]);
            // The second token predicts 3 in the first document and 4 in the second.
            let [source, offsets, entries] = at.head_rows;
            assert_eq!(part(source, 6), [1, 2, 1, 3, 4, 0]);
            assert_eq!(part(at.targets, 6), [3, 9, 4, 5, 9, 6]);
            assert_eq!(part(offsets, 7), [0, 1, 3, 4, 5, 6, 6]);
            assert_eq!(part(entries, 6), [5, 0, 2, 1, 3, 4]);
            if pads {
                assert!(part(at.tokens + 6, 250).iter().all(|token| *token == 0));
                assert_eq!((size.positions, size.head_rows, all[at.cu_seqlens + 4]), (256, 256, 256));
            }
        }
    }

    #[test]
    fn without_weights_and_common_tokens_rows_are_positions() {
        let batch = batch(&[], &[]);
        let (size, all, at) = filled(&batch, false);
        assert_eq!((size.tokens, size.head_rows, size.shares_rows), (9, 9, false));
        assert_eq!(all[at.tokens..][..9], *batch.tokens);
        assert_eq!(all[at.head_rows[0]..][..9], [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(all[at.head_rows[1]..][..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn tokens_that_are_not_common_are_an_error() {
        for shared in [[0, 3, 0], [1, 0, 0], [0, 0, 3]] {
            let batch = batch(&[], &shared);
            let fill = BatchFill {
                batch: &batch,
                layout: layout(256, 4),
                max_tokens: 256,
                shares_rows: true,
                pads: false,
                uses_samples: false,
            };
            let error = fill.run(&mut vec![0; layout(256, 4).end]).unwrap_err();
            assert!(matches!(error, EngineError::NotShared { .. }), "{error}");
        }
    }
}
