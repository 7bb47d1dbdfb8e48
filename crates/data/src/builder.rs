//! Builds a prepared dataset file from documents.
//!
//! Tokens, and the columns of prompts, are written to disk as they arrive. Bounds, counts and rows, a few words per
//! document, stay in memory until the end. Documents are split or wrapped here, so that a stored document is exactly
//! what the model sees as one document. The two documents of a preference pair are kept or left out together.

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use crate::doc::{Doc, SUPERVISED, Sample};
use crate::stats::Lengths;
use crate::store::{Index, TokenFile, num_words};
use crate::{
    DataError, DataSpec, DataTask, OnLongRow, Packing, PreferenceLayout, RowFault, SkippedRow, Stats,
    Truncation, pack,
};

pub(crate) struct Builder<'a> {
    spec: &'a DataSpec,
    out: TokenFile,
    /// As in [`Index::bounds`].
    bounds: Vec<u64>,
    /// For every stored document, the number of targets that count in the loss.
    supervised: Vec<u32>,
    /// The margin of every stored pair; empty until a row has one.
    margins: Vec<f32>,
    /// With `packing: wrapped`, the supervised targets in the row that is being filled.
    open_supervised: u32,
    skipped: Vec<SkippedRow>,
    stats: Stats,
    lengths: Lengths,
}

/// The result of adding a sample.
pub(crate) enum Taken {
    /// Kept, or left out and counted.
    Yes,
    /// Too long, with `on_long_row: stop`.
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
            margins: Vec::new(),
            open_supervised: 0,
            skipped: Vec::new(),
            stats: Stats::default(),
            lengths: Lengths::default(),
        }
    }

    /// Adds a sample, or leaves it out and counts the reason.
    pub(crate) fn push(&mut self, sample: &Sample) -> Result<Taken, DataError> {
        match sample {
            Sample::Document(doc) => self.push_doc(doc),
            Sample::Pair { docs, margin } => self.push_pair(docs, *margin),
            Sample::Prompt { tokens, columns } => self.push_prompt(tokens, columns),
        }
    }

    pub(crate) fn push_doc(&mut self, doc: &Doc) -> Result<Taken, DataError> {
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
            self.store(doc, piece.clone(), targets(doc, piece))?;
        }
        Ok(Taken::Yes)
    }

    /// Writes `piece` of a document, with `supervised` targets, as a stored document.
    fn store(&mut self, doc: &Doc, mut piece: Range<usize>, supervised: u32) -> Result<(), DataError> {
        piece.try_for_each(|t| self.out.push(word(doc, t)))?;
        self.supervised.push(supervised);
        self.bounds.push(self.out.len());
        Ok(())
    }

    fn push_pair(&mut self, docs: &[Doc; 2], margin: Option<f32>) -> Result<Taken, DataError> {
        let max = self.spec.max_length;
        self.stats.read += 1;
        for doc in docs {
            self.stats.prefix_mismatches += u64::from(doc.prefix_mismatch);
            self.lengths.add(doc.tokens.len());
        }
        let longest = docs.iter().map(|doc| doc.tokens.len()).max().unwrap_or(0);
        let has_one_score = self.spec.task == DataTask::Preference(PreferenceLayout::Sequence);
        if longest > max && (has_one_score || self.spec.on_long_row != OnLongRow::Truncate) {
            if self.spec.on_long_row == OnLongRow::Stop {
                return Ok(Taken::TooLong(RowFault::LongPair { tokens: longest, max_length: max }));
            }
            self.stats.dropped_long += 1;
            return Ok(Taken::Yes);
        }
        if has_one_score && docs.iter().any(|doc| doc.tokens.is_empty()) {
            self.stats.dropped_short += 1;
            return Ok(Taken::Yes);
        }
        let kept = |doc: &Doc| truncated(doc.tokens.len(), max, self.spec.truncation);
        let kept = [kept(&docs[0]), kept(&docs[1])];
        let supervised = |side: usize| match has_one_score {
            true => 1,
            false => targets(&docs[side], kept[side].clone()),
        };
        let supervised = [supervised(0), supervised(1)];
        if supervised.contains(&0) {
            self.stats.dropped_unsupervised += 1;
            return Ok(Taken::Yes);
        }
        self.keep_margin(margin);
        for ((doc, kept), supervised) in docs.iter().zip(kept).zip(supervised) {
            self.stats.truncated += u64::from(kept.len() < doc.tokens.len());
            self.stats.docs += 1;
            self.store(doc, kept, supervised)?;
        }
        Ok(Taken::Yes)
    }

    /// Records the margin of the pair that is stored next. A pair without a margin has the margin 0.
    fn keep_margin(&mut self, margin: Option<f32>) {
        if margin.is_some() {
            self.margins.resize(self.supervised.len() / 2, 0.0);
        }
        if margin.is_some() || !self.margins.is_empty() {
            self.margins.push(margin.unwrap_or(0.0));
        }
    }

    fn push_prompt(&mut self, tokens: &[u32], columns: &str) -> Result<Taken, DataError> {
        let DataTask::Prompt { max_prompt_length } = self.spec.task else {
            unreachable!("only the prompt task has prompts");
        };
        self.stats.read += 1;
        self.lengths.add(tokens.len());
        if tokens.len() > max_prompt_length {
            if self.spec.on_long_row == OnLongRow::Stop {
                let fault = RowFault::LongPrompt { tokens: tokens.len(), max_prompt_length };
                return Ok(Taken::TooLong(fault));
            }
            self.stats.dropped_long += 1;
            return Ok(Taken::Yes);
        }
        if tokens.is_empty() {
            self.stats.dropped_short += 1;
            return Ok(Taken::Yes);
        }
        self.stats.docs += 1;
        tokens.iter().try_for_each(|token| self.out.push(*token))?;
        self.bounds.push(self.out.len());
        // The text is stored in whole words, so it is padded with spaces, which JSON allows.
        for chunk in columns.as_bytes().chunks(4) {
            let mut word = *b"    ";
            word[..chunk.len()].copy_from_slice(chunk);
            self.out.push(u32::from_le_bytes(word))?;
        }
        self.bounds.push(self.out.len());
        self.supervised.push(0);
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

    /// The number of stored documents that can be used: prompts, and documents with a supervised target.
    pub(crate) fn usable(&self) -> usize {
        if let DataTask::Prompt { .. } = self.spec.task {
            return self.supervised.len();
        }
        self.supervised.iter().filter(|count| **count > 0).count() + usize::from(self.open_supervised > 0)
    }

    /// Packs the documents into rows and writes the index after the tokens.
    pub(crate) fn finish(mut self) -> Result<(), DataError> {
        if self.out.len() > *self.bounds.last().expect("bounds start with 0") {
            self.close();
        }
        let DataSpec { task, packing, max_length, .. } = *self.spec;
        let len = |doc: u32| num_words(&Index::doc_span(task, &self.bounds, doc));
        // Documents without a supervised target are left out: a step of only such documents would have no loss.
        let is_prompt = matches!(task, DataTask::Prompt { .. });
        let usable = |doc: &u32| is_prompt || self.supervised[*doc as usize] > 0;
        let docs: Vec<u32> = (0..self.supervised.len() as u32).filter(usable).collect();
        let capacity = task.row_capacity(max_length);
        let rows = if task.is_preference() {
            let pairs: Vec<u32> = (0..docs.len() as u32 / 2).collect();
            pack(packing, &pairs, |pair| len(2 * pair) + len(2 * pair + 1), capacity).expanded(2)
        } else {
            pack(packing, &docs, len, capacity)
        };
        let num_rows = rows.num_rows() as u64;
        let stats = Stats {
            rows: num_rows,
            capacity: num_rows.saturating_mul(capacity as u64),
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
        let (bounds, supervised, margins) = (self.bounds, self.supervised, self.margins);
        let (skipped, fingerprint) = (self.skipped, String::new());
        self.out.finish(Index { task, bounds, supervised, margins, rows, skipped, stats, fingerprint })
    }
}

/// The tokens that remain of a document of `len` tokens.
fn truncated(len: usize, max: usize, truncation: Truncation) -> Range<usize> {
    match truncation {
        Truncation::KeepStart => 0..len.min(max),
        Truncation::KeepEnd => len.saturating_sub(max)..len,
    }
}

/// The number of supervised targets in a piece. Its first token is not a target: nothing comes before it.
fn targets(doc: &Doc, piece: Range<usize>) -> u32 {
    (piece.start + 1..piece.end).map(|t| u32::from(doc.mask.at(t))).sum()
}

fn word(doc: &Doc, t: usize) -> u32 {
    doc.tokens[t] | if doc.mask.at(t) { SUPERVISED } else { 0 }
}
