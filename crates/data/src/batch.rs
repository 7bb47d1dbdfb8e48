//! Rows laid out for the model: documents are concatenated without padding, and `cu_seqlens` holds their bounds.
//!
//! In the next-token layout, position t of a document has token t as input and token t+1 as target, so a document of n
//! tokens takes n-1 positions. Its last token is only a target: as an input it would predict nothing.
//!
//! In the layout of scalar heads (reward and value models) a document of n tokens takes n positions, and the model's
//! output at the last one is the score of the document.

use std::ops::Range;

use crate::doc::SUPERVISED;
use crate::{DataError, DataTask, Dataset};

/// One micro-batch. `tokens`, `targets`, `weights` and `positions` all have the same length T.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub tokens: Vec<u32>,
    pub targets: Vec<u32>,
    /// 1 where the target counts in the loss, or where the score is read; otherwise 0.
    pub weights: Vec<f32>,
    /// The position within the document, from 0.
    pub positions: Vec<u32>,
    /// 0, then the end of every document: `num_docs` + 1 entries, the last of which is T.
    pub cu_seqlens: Vec<u32>,
    /// The index of each document in the dataset, or the number that the caller gave it. In a dataset of preference
    /// pairs, documents `2 * p` and `2 * p + 1` are the chosen and the rejected one of pair `p`.
    pub samples: Vec<u32>,
    /// For each document, how many of its first tokens are also those of the document before it. Models compute them
    /// once where the plan allows it.
    pub shared: Vec<u32>,
    /// The number of ones in `weights`.
    pub supervised: u64,
    /// Read buffer for one document; empty between calls.
    bytes: Vec<u8>,
}

impl Batch {
    /// Empties the batch but keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.targets.clear();
        self.weights.clear();
        self.positions.clear();
        self.cu_seqlens.clear();
        self.cu_seqlens.push(0);
        self.samples.clear();
        self.shared.clear();
        self.supervised = 0;
    }

    /// Replaces the content with `rows` of `dataset`, in that order and in the layout of the dataset's task: that of
    /// scalar heads for [`PreferenceLayout::Sequence`](crate::PreferenceLayout), otherwise the next-token layout.
    /// Without rows the batch is empty; a rank without work still runs it, so that all ranks make the same collective
    /// calls.
    ///
    /// # Panics
    /// If the dataset has prompts, which are read with [`Dataset::doc`].
    pub fn fill(&mut self, dataset: &Dataset, rows: &[u32]) -> Result<(), DataError> {
        if dataset.has_sequences() {
            return self.fill_sequences(dataset, rows);
        }
        assert!(!matches!(dataset.task(), DataTask::Prompt { .. }), "prompts have no targets");
        self.fill_with(dataset, rows, |batch, words, doc| {
            let target = |word: u32| (word & !SUPERVISED, word & SUPERVISED != 0);
            batch.push_next_tokens(words.map(target), doc);
        })
    }

    /// Replaces the content with `rows` of `dataset` in the layout of scalar heads.
    pub fn fill_sequences(&mut self, dataset: &Dataset, rows: &[u32]) -> Result<(), DataError> {
        self.fill_with(dataset, rows, |batch, words, doc| {
            batch.push_scored(words.map(|word| word & !SUPERVISED), None, doc);
        })
    }

    fn fill_with(
        &mut self,
        dataset: &Dataset,
        rows: &[u32],
        push: impl Fn(&mut Batch, &mut dyn Iterator<Item = u32>, u32),
    ) -> Result<(), DataError> {
        self.clear();
        let mut bytes = std::mem::take(&mut self.bytes);
        let mut docs = rows.iter().flat_map(|row| dataset.row_docs(*row as usize));
        let filled = docs.try_for_each(|doc| {
            push(self, &mut dataset.read(*doc, &mut bytes)?, *doc);
            Ok(())
        });
        bytes.clear();
        self.bytes = bytes;
        filled
    }

    /// Appends a document of two or more tokens in the next-token layout. The targets from index `supervised_from` of
    /// `tokens` on count in the loss. `sample` identifies the document in [`Batch::samples`].
    ///
    /// # Panics
    /// If there are fewer than two tokens.
    pub fn push_document(&mut self, tokens: &[u32], supervised_from: usize, sample: u32) {
        let target = |(idx, token): (usize, &u32)| (*token, idx >= supervised_from);
        self.push_next_tokens(tokens.iter().enumerate().map(target), sample);
    }

    /// Appends a document in the layout of scalar heads: the targets repeat the next tokens (0 at the last position),
    /// and the positions `scored` of the document have the weight 1.
    ///
    /// # Panics
    /// If there are no tokens.
    pub fn push_sequence(&mut self, tokens: &[u32], scored: Range<usize>, sample: u32) {
        self.push_scored(tokens.iter().copied(), Some(scored), sample);
    }

    /// Appends tokens, each with whether it counts in the loss as a target.
    fn push_next_tokens(&mut self, mut tokens: impl Iterator<Item = (u32, bool)>, sample: u32) {
        let start = self.tokens.len();
        let (mut token, _) = tokens.next().expect("a document has two tokens or more");
        for (target, counts) in tokens {
            self.tokens.push(token);
            self.targets.push(target);
            self.weights.push(if counts { 1.0 } else { 0.0 });
            self.supervised += u64::from(counts);
            token = target;
        }
        self.end_document(start, sample);
    }

    /// `scored` is the last position if it is `None`.
    fn push_scored(&mut self, tokens: impl Iterator<Item = u32>, scored: Option<Range<usize>>, sample: u32) {
        let start = self.tokens.len();
        self.tokens.extend(tokens);
        self.targets.extend_from_slice(self.tokens.get(start + 1..).unwrap_or(&[]));
        self.targets.push(0);
        self.weights.resize(self.tokens.len(), 0.0);
        let len = self.tokens.len() - start;
        let scored = scored.unwrap_or(len.saturating_sub(1)..len);
        self.weights[start..][scored.clone()].fill(1.0);
        self.supervised += scored.len() as u64;
        self.end_document(start, sample);
    }

    /// Adds the positions and the bound of the document that begins at `start`.
    fn end_document(&mut self, start: usize, sample: u32) {
        assert!(self.tokens.len() > start, "a document takes at least one position");
        let len = u32::try_from(self.tokens.len() - start).expect("a document has fewer than 2^32 tokens");
        self.positions.extend(0..len);
        let end = u32::try_from(self.tokens.len()).expect("a batch has fewer than 2^32 tokens");
        if self.cu_seqlens.is_empty() {
            self.cu_seqlens.push(0);
        }
        let before = self.cu_seqlens.len().checked_sub(2).map_or(start, |doc| self.cu_seqlens[doc] as usize);
        let same = self.tokens[before..start].iter().zip(&self.tokens[start..]).take_while(|(a, b)| a == b);
        self.shared.push(same.count() as u32);
        self.cu_seqlens.push(end);
        self.samples.push(sample);
    }

    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    pub fn num_docs(&self) -> usize {
        self.cu_seqlens.len().saturating_sub(1)
    }
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
