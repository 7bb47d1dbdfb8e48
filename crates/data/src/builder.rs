//! Builds a prepared dataset file from documents.
//!
//! Tokens are written to disk as they arrive. Bounds, counts and rows, a few words per document, stay in
//! memory until the end. Documents are split or wrapped here, so that a stored document is exactly what the
//! model sees as one document.

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use crate::doc::{Doc, SUPERVISED};
use crate::stats::Lengths;
use crate::store::{Index, TokenFile};
use crate::{DataError, DataSpec, OnLongRow, Packing, RowFault, SkippedRow, Stats, Truncation, pack};

pub(crate) struct Builder<'a> {
    spec: &'a DataSpec,
    out: TokenFile,
    /// Stored document `d` is tokens `bounds[d]..bounds[d + 1]`.
    bounds: Vec<u64>,
    /// For every stored document, the number of targets that count in the loss.
    supervised: Vec<u32>,
    /// With `packing: wrapped`, the supervised targets in the row that is being filled.
    open_supervised: u32,
    skipped: Vec<SkippedRow>,
    stats: Stats,
    lengths: Lengths,
}

/// The result of adding a document.
pub(crate) enum Taken {
    /// Kept, or left out and counted.
    Yes,
    /// Longer than `max_length`, with `on_long_row: stop`.
    TooLong(RowFault),
}

impl<'a> Builder<'a> {
    /// The number of skipped rows that are listed; the rest are only counted.
    const MAX_LISTED: usize = 100;

    pub(crate) fn new(spec: &'a DataSpec, path: &Path, file: File) -> Self {
        Builder {
            spec,
            out: TokenFile::new(path, file),
            bounds: vec![0],
            supervised: Vec::new(),
            open_supervised: 0,
            skipped: Vec::new(),
            stats: Stats::default(),
            lengths: Lengths::default(),
        }
    }

    /// Adds a document, or leaves it out and counts the reason.
    pub(crate) fn push(&mut self, doc: &Doc) -> Result<Taken, DataError> {
        let (len, max) = (doc.tokens.len(), self.spec.max_length);
        self.stats.read += 1;
        self.stats.prefix_mismatches += u64::from(doc.prefix_mismatch);
        self.lengths.add(len);
        let mut kept = 0..len;
        if len > max && !self.spec.packing.keeps_all() {
            match self.spec.on_long_row {
                OnLongRow::Truncate => kept = truncated(len, max, self.spec.truncation),
                OnLongRow::Drop => {
                    self.stats.dropped_long += 1;
                    return Ok(Taken::Yes);
                }
                OnLongRow::Stop => {
                    return Ok(Taken::TooLong(RowFault::LongerThanContext { tokens: len, max_length: max }));
                }
            }
        }
        if self.spec.packing == Packing::Wrapped {
            return self.wrap(doc).map(|()| Taken::Yes);
        }
        if kept.len() < 2 {
            self.stats.dropped_short += 1;
            return Ok(Taken::Yes);
        }
        let pieces = || (kept.start..kept.end).step_by(max).map(|start| start..(start + max).min(kept.end));
        if pieces().all(|piece| targets(doc, piece) == 0) {
            self.stats.dropped_unsupervised += 1;
            return Ok(Taken::Yes);
        }
        self.stats.truncated += u64::from(kept.len() < len);
        self.stats.docs += 1;
        for piece in pieces() {
            self.supervised.push(targets(doc, piece.clone()));
            piece.clone().try_for_each(|t| self.out.push(word(doc, t)))?;
            self.bounds.push(self.out.len());
        }
        Ok(Taken::Yes)
    }

    /// Appends a document to the token stream and closes the rows that are full.
    fn wrap(&mut self, doc: &Doc) -> Result<(), DataError> {
        if doc.tokens.is_empty() {
            self.stats.dropped_short += 1;
            return Ok(());
        }
        self.stats.docs += 1;
        for t in 0..doc.tokens.len() {
            let at_start = self.out.len() == *self.bounds.last().expect("bounds start with 0");
            self.open_supervised += u32::from(!at_start && doc.mask.at(t));
            self.out.push(word(doc, t))?;
            if self.out.len().is_multiple_of(self.spec.max_length as u64) {
                self.close();
            }
        }
        Ok(())
    }

    fn close(&mut self) {
        self.bounds.push(self.out.len());
        self.supervised.push(std::mem::take(&mut self.open_supervised));
    }

    pub(crate) fn skip(&mut self, row: SkippedRow) {
        self.stats.read += 1;
        self.stats.skipped += 1;
        if self.skipped.len() < Self::MAX_LISTED {
            self.skipped.push(row);
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        self.stats
    }

    /// The number of stored documents with a supervised target.
    pub(crate) fn usable(&self) -> usize {
        self.supervised.iter().filter(|count| **count > 0).count() + usize::from(self.open_supervised > 0)
    }

    /// Packs the documents into rows and writes the index after the tokens.
    pub(crate) fn finish(mut self) -> Result<(), DataError> {
        if self.out.len() > *self.bounds.last().expect("bounds start with 0") {
            self.close();
        }
        let len = |doc: u32| (self.bounds[doc as usize + 1] - self.bounds[doc as usize]) as usize;
        // Documents without a supervised target are left out: a step of only such documents would have no loss.
        let docs = (0..self.supervised.len() as u32).filter(|doc| self.supervised[*doc as usize] > 0);
        let docs: Vec<u32> = docs.collect();
        let rows = pack(self.spec.packing, &docs, len, self.spec.max_length);
        let num_rows = rows.num_rows() as u64;
        let stats = Stats {
            rows: num_rows,
            capacity: num_rows.saturating_mul(self.spec.max_length as u64),
            tokens: docs.iter().map(|doc| len(*doc) as u64).sum(),
            supervised: self.supervised.iter().map(|count| u64::from(*count)).sum(),
            longest: docs.iter().map(|doc| len(*doc) as u64).max().unwrap_or(0),
            length_p50: self.lengths.percentile(0.5),
            length_p90: self.lengths.percentile(0.9),
            length_p99: self.lengths.percentile(0.99),
            length_max: self.lengths.percentile(1.0),
            ..self.stats
        };
        drop(docs);
        let (bounds, supervised, skipped) = (self.bounds, self.supervised, self.skipped);
        self.out.finish(Index { bounds, supervised, rows, skipped, stats, fingerprint: String::new() })
    }
}

fn truncated(len: usize, max: usize, truncation: Truncation) -> Range<usize> {
    match truncation {
        Truncation::KeepStart => 0..max,
        Truncation::KeepEnd => len - max..len,
    }
}

/// The number of supervised targets in a piece. Its first token is not a target: nothing comes before it.
fn targets(doc: &Doc, piece: Range<usize>) -> u32 {
    (piece.start + 1..piece.end).map(|t| u32::from(doc.mask.at(t))).sum()
}

fn word(doc: &Doc, t: usize) -> u32 {
    doc.tokens[t] | if doc.mask.at(t) { SUPERVISED } else { 0 }
}
