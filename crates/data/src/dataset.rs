//! Tokenised documents and the rows they form, in a few flat arrays.
//!
//! A document is a run of tokens that attend to each other; a row is what the order deals out: one
//! document, or several packed together. Documents keep the order of the files, rows refer to them.

use std::ops::Range;
use std::path::PathBuf;

use crate::{Packing, RowFault, pack};

/// Everything there is to train on.
#[derive(Debug)]
pub struct Dataset {
    tokens: Vec<u32>,
    /// Per token: whether predicting it counts.
    supervised: Vec<bool>,
    /// Document `d` is `tokens[doc_bounds[d]..doc_bounds[d + 1]]`.
    doc_bounds: Vec<usize>,
    /// Row `r` holds documents `row_docs[row_bounds[r]..row_bounds[r + 1]]`.
    row_docs: Vec<u32>,
    row_bounds: Vec<usize>,
    skipped: Vec<SkippedRow>,
    stats: Stats,
}

/// A row left out because it is bad.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedRow {
    pub file: PathBuf,
    /// The line's number, from 1.
    pub row: u64,
    pub fault: RowFault,
}

/// What became of the rows that were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Rows in the files, blank lines not counted.
    pub read: u64,
    /// Bad rows left out.
    pub skipped: u64,
    /// Documents of fewer than two tokens left out.
    pub dropped_short: u64,
    /// Documents without a supervised target left out.
    pub dropped_unsupervised: u64,
    /// Documents cut to `max_length`.
    pub truncated: u64,
    /// Documents whose prompt, tokenised alone, is not how the whole begins: the mask's edge may be off
    /// by a token.
    pub prefix_mismatches: u64,
    pub docs: u64,
    pub rows: u64,
    /// Tokens in documents.
    pub tokens: u64,
    /// Tokens that are predicted and counted in the loss.
    pub supervised: u64,
    /// Tokens in the longest document.
    pub longest: u64,
    /// Tokens that rows of `max_length` could have held.
    pub capacity: u64,
}

impl Dataset {
    pub fn num_rows(&self) -> usize {
        self.row_bounds.len() - 1
    }

    pub fn num_docs(&self) -> usize {
        self.doc_bounds.len() - 1
    }

    /// Tokens in documents; batches have one position fewer per document.
    pub fn num_tokens(&self) -> u64 {
        self.stats.tokens
    }

    pub fn num_supervised(&self) -> u64 {
        self.stats.supervised
    }

    /// The bad rows left out, the first hundred of them; [`Stats::skipped`] counts all.
    pub fn skipped(&self) -> &[SkippedRow] {
        &self.skipped
    }

    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// The positions that `row` takes in a batch: one fewer than its tokens for every document.
    pub fn row_tokens(&self, row: usize) -> usize {
        self.row_docs(row).iter().map(|doc| self.doc_range(*doc).len() - 1).sum()
    }

    /// The targets of `row` that count in the loss.
    pub fn row_supervised(&self, row: usize) -> u64 {
        let counted = |doc: &u32| self.doc(*doc).1[1..].iter().filter(|s| **s).count() as u64;
        self.row_docs(row).iter().map(counted).sum()
    }

    /// The most positions that a row takes in a batch.
    pub fn max_row_tokens(&self) -> usize {
        (0..self.num_rows()).map(|row| self.row_tokens(row)).max().unwrap_or(0)
    }

    /// The documents in `row`.
    pub fn row_docs(&self, row: usize) -> &[u32] {
        &self.row_docs[self.row_bounds[row]..self.row_bounds[row + 1]]
    }

    /// Tokens of a document, and for each whether predicting it counts (of the first, never).
    pub fn doc(&self, doc: u32) -> (&[u32], &[bool]) {
        let range = self.doc_range(doc);
        (&self.tokens[range.clone()], &self.supervised[range])
    }

    /// BLAKE3, in hex, of the tokens, masks and rows: a resumed run must find the same.
    pub fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut number = |n: usize| {
            hasher.update(&(n as u64).to_le_bytes());
        };
        number(self.num_docs());
        self.doc_bounds.iter().chain(&self.row_bounds).for_each(|n| number(*n));
        let mut words = Vec::new();
        for chunk in self.tokens.chunks(1 << 14).chain(self.row_docs.chunks(1 << 14)) {
            words.clear();
            words.extend(chunk.iter().flat_map(|t| t.to_le_bytes()));
            hasher.update(&words);
        }
        for chunk in self.supervised.chunks(1 << 14) {
            words.clear();
            words.extend(chunk.iter().map(|s| u8::from(*s)));
            hasher.update(&words);
        }
        hasher.finalize().to_hex().to_string()
    }

    fn doc_range(&self, doc: u32) -> Range<usize> {
        self.doc_bounds[doc as usize]..self.doc_bounds[doc as usize + 1]
    }
}

/// One document on its way into a [`Dataset`].
#[derive(Debug)]
pub(crate) struct Doc {
    pub(crate) tokens: Vec<u32>,
    /// Index of the first supervised token; all after it are supervised too.
    pub(crate) supervised_from: usize,
    pub(crate) prefix_mismatch: bool,
}

/// Collects documents in order.
#[derive(Debug)]
pub(crate) struct Builder {
    max_length: usize,
    tokens: Vec<u32>,
    supervised: Vec<bool>,
    doc_bounds: Vec<usize>,
    skipped: Vec<SkippedRow>,
    stats: Stats,
}

impl Builder {
    /// Bad rows listed one by one; the rest are only counted.
    const LISTED: usize = 100;

    pub(crate) fn new(max_length: usize) -> Self {
        Builder {
            max_length,
            tokens: Vec::new(),
            supervised: Vec::new(),
            doc_bounds: vec![0],
            skipped: Vec::new(),
            stats: Stats::default(),
        }
    }

    /// Takes a document, or leaves it out and counts why.
    pub(crate) fn push(&mut self, doc: Doc) {
        let stats = &mut self.stats;
        stats.read += 1;
        stats.prefix_mismatches += u64::from(doc.prefix_mismatch);
        let len = doc.tokens.len().min(self.max_length);
        // The first token has nothing before it to be predicted from.
        let targets = len.saturating_sub(doc.supervised_from.max(1));
        if len < 2 {
            stats.dropped_short += 1;
            return;
        }
        if targets == 0 {
            stats.dropped_unsupervised += 1;
            return;
        }
        stats.truncated += u64::from(len < doc.tokens.len());
        stats.docs += 1;
        stats.tokens += len as u64;
        stats.supervised += targets as u64;
        stats.longest = stats.longest.max(len as u64);
        self.tokens.extend_from_slice(&doc.tokens[..len]);
        self.supervised.extend((0..len).map(|t| t > 0 && t >= doc.supervised_from));
        self.doc_bounds.push(self.tokens.len());
    }

    pub(crate) fn skip(&mut self, row: SkippedRow) {
        self.stats.read += 1;
        self.stats.skipped += 1;
        if self.skipped.len() < Self::LISTED {
            self.skipped.push(row);
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        self.stats
    }

    pub(crate) fn finish(self, packing: Packing) -> Dataset {
        let lengths: Vec<usize> = self.doc_bounds.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mut row_docs = Vec::with_capacity(lengths.len());
        let mut row_bounds = vec![0];
        for row in pack(packing, &lengths, self.max_length) {
            row_docs.extend(row);
            row_bounds.push(row_docs.len());
        }
        let rows = row_bounds.len() as u64 - 1;
        let stats = Stats { rows, capacity: rows.saturating_mul(self.max_length as u64), ..self.stats };
        Dataset {
            tokens: self.tokens,
            supervised: self.supervised,
            doc_bounds: self.doc_bounds,
            row_docs,
            row_bounds,
            skipped: self.skipped,
            stats,
        }
    }
}
