//! The completions of preference pairs in a batch. Documents come in pairs: chosen, then rejected.

use std::ops::Range;

use lockstep_data::Batch;

/// The completion of one document: its supervised positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Completion {
    /// The document's index in the batch.
    pub(crate) doc: usize,
    /// Its positions that count in the loss. They are contiguous.
    pub(crate) tokens: Range<usize>,
    /// Their number.
    pub(crate) length: usize,
    /// The length of the shorter completion of the pair.
    shared: usize,
}

impl Completion {
    /// Calls `each` with every token of the completion and its weight: 1, or `ld_alpha` for tokens beyond the length
    /// of the shorter completion of the pair.
    pub(crate) fn each_weight(&self, ld_alpha: Option<f64>, mut each: impl FnMut(usize, f64)) {
        for (n, token) in self.tokens.clone().enumerate() {
            each(token, if n < self.shared { 1.0 } else { ld_alpha.unwrap_or(1.0) });
        }
    }

    /// The weighted sum of its tokens' log-probabilities, in token order.
    pub(crate) fn log_prob(&self, log_probs: &[f32], ld_alpha: Option<f64>) -> f64 {
        let mut sum = 0.0;
        self.each_weight(ld_alpha, |token, weight| sum += weight * f64::from(log_probs[token]));
        sum
    }
}

/// The completion of every document of a batch of pairs.
pub(crate) fn completions(batch: &Batch) -> Vec<Completion> {
    let supervised = |doc: usize| {
        let (start, end) = (batch.cu_seqlens[doc] as usize, batch.cu_seqlens[doc + 1] as usize);
        let first = batch.weights[start..end].iter().position(|w| *w != 0.0).map_or(end, |i| start + i);
        let last = batch.weights[start..end].iter().rposition(|w| *w != 0.0).map_or(first, |i| start + i + 1);
        first..last
    };
    let all: Vec<Range<usize>> = (0..batch.num_docs()).map(supervised).collect();
    assert!(all.len().is_multiple_of(2), "preference data comes in pairs");
    let completion = |(doc, tokens): (usize, &Range<usize>)| Completion {
        doc,
        tokens: tokens.clone(),
        length: tokens.len(),
        shared: tokens.len().min(all[doc ^ 1].len()),
    };
    all.iter().enumerate().map(completion).collect()
}
