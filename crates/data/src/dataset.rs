//! Tokenised documents and the rows they form: tokens in a file, everything about them in memory.
//!
//! A document is a run of tokens that attend to each other; a row is what the order deals out: one
//! document, or several packed together. Documents keep the order of the files, rows refer to them.
//!
//! Tokens are read by position, which the page cache serves: what the process itself holds does not grow
//! with them. The file may be removed meanwhile; it stays until it is closed.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::doc::SUPERVISED;
use crate::store::Index;
use crate::{DataError, SkippedRow, Stats};

/// Bytes of a stored token.
const WORD: usize = 4;

/// Everything there is to train on.
#[derive(Debug)]
pub struct Dataset {
    file: File,
    path: PathBuf,
    index: Index,
    max_row_tokens: usize,
    found: bool,
    pub(crate) notes: Vec<String>,
}

impl Dataset {
    /// Opens a prepared file. `InvalidData` and `UnexpectedEof` mean that it is not whole.
    pub(crate) fn open(path: &Path) -> io::Result<Dataset> {
        let file = File::open(path)?;
        let index = Index::read(&file)?;
        let mut dataset =
            Dataset { file, path: path.into(), index, max_row_tokens: 0, found: false, notes: Vec::new() };
        dataset.max_row_tokens =
            (0..dataset.num_rows()).map(|row| dataset.row_tokens(row)).max().unwrap_or(0);
        Ok(dataset)
    }

    /// The same, marked as one that was there already.
    pub(crate) fn found_ready(mut self) -> Dataset {
        self.found = true;
        self
    }

    pub fn num_rows(&self) -> usize {
        self.index.rows.num_rows()
    }

    pub fn num_docs(&self) -> usize {
        self.index.supervised.len()
    }

    /// Tokens in rows; batches have one position fewer per document.
    pub fn num_tokens(&self) -> u64 {
        self.index.stats.tokens
    }

    pub fn num_supervised(&self) -> u64 {
        self.index.stats.supervised
    }

    /// The bad rows left out, the first hundred of them; [`Stats::skipped`] counts all.
    pub fn skipped(&self) -> &[SkippedRow] {
        &self.index.skipped
    }

    pub fn stats(&self) -> Stats {
        self.index.stats
    }

    /// The file that holds it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it was there already and nothing had to be read.
    pub fn was_cached(&self) -> bool {
        self.found
    }

    /// What is worth telling about how it came about.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The positions that `row` takes in a batch: one fewer than its tokens for every document.
    pub fn row_tokens(&self, row: usize) -> usize {
        self.row_docs(row).iter().map(|doc| self.doc_len(*doc) - 1).sum()
    }

    /// The targets of `row` that count in the loss.
    pub fn row_supervised(&self, row: usize) -> u64 {
        self.row_docs(row).iter().map(|doc| u64::from(self.index.supervised[*doc as usize])).sum()
    }

    /// The most positions that a row takes in a batch.
    pub fn max_row_tokens(&self) -> usize {
        self.max_row_tokens
    }

    /// The documents in `row`.
    pub fn row_docs(&self, row: usize) -> &[u32] {
        self.index.rows.row(row)
    }

    /// Tokens in a document.
    pub fn doc_len(&self, doc: u32) -> usize {
        (self.index.bounds[doc as usize + 1] - self.index.bounds[doc as usize]) as usize
    }

    /// Tokens of a document, and for each whether predicting it counts (of the first, never).
    pub fn doc(&self, doc: u32) -> Result<(Vec<u32>, Vec<bool>), DataError> {
        let (tokens, mut supervised): (Vec<u32>, Vec<bool>) = self.masked(doc)?.into_iter().unzip();
        supervised[0] = false;
        Ok((tokens, supervised))
    }

    /// Tokens of a document, and for each whether its mask says that it is learned: also of the first, which
    /// nothing predicts.
    pub fn masked(&self, doc: u32) -> Result<Vec<(u32, bool)>, DataError> {
        let mut bytes = Vec::new();
        Ok(self.read(doc, &mut bytes)?.map(|word| (word & !SUPERVISED, word & SUPERVISED != 0)).collect())
    }

    /// The stored words of a document, read into `bytes`.
    pub(crate) fn read<'a>(
        &self,
        doc: u32,
        bytes: &'a mut Vec<u8>,
    ) -> Result<impl Iterator<Item = u32> + use<'a>, DataError> {
        bytes.resize(self.doc_len(doc) * WORD, 0);
        read_at(&self.file, bytes, self.index.bounds[doc as usize] * WORD as u64)
            .map_err(|source| DataError::Read { path: self.path.clone(), source })?;
        let word = |word: &[u8]| u32::from_le_bytes(word.try_into().expect("four bytes"));
        Ok(bytes.chunks_exact(WORD).map(word))
    }

    /// BLAKE3, in hex, of the tokens, masks and rows: a resumed run must find the same.
    pub fn fingerprint(&self) -> String {
        self.index.fingerprint.clone()
    }
}

#[cfg(unix)]
fn read_at(file: &File, out: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, at)
}

#[cfg(windows)]
fn read_at(file: &File, mut out: &mut [u8], mut at: u64) -> io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, at)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => (out, at) = (&mut out[count..], at + count as u64),
        }
    }
    Ok(())
}
