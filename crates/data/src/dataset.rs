//! Tokenized documents and the rows they form: the tokens are in a file, the index is in memory.
//!
//! A document is a sequence of tokens that attend to each other. A row is the unit of sampling: one document,
//! or several packed together. Documents keep the order of the files; rows refer to documents by index.
//!
//! Tokens are read with `pread` and served by the page cache, so the memory of the process does not grow with
//! the number of tokens. The file may be removed while it is open.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::doc::SUPERVISED;
use crate::store::Index;
use crate::{DataError, SkippedRow, Stats};

/// Bytes of a stored token.
const WORD_BYTES: usize = 4;

/// A prepared dataset, opened for reading.
#[derive(Debug)]
pub struct Dataset {
    file: File,
    path: PathBuf,
    index: Index,
    max_row_tokens: usize,
    was_cached: bool,
    pub(crate) notes: Vec<String>,
}

impl Dataset {
    /// Opens a prepared file. The errors `InvalidData` and `UnexpectedEof` mean that the file is incomplete or corrupt.
    pub(crate) fn open(path: &Path) -> io::Result<Dataset> {
        let file = File::open(path)?;
        let index = Index::read(&file)?;
        let mut dataset = Dataset {
            file,
            path: path.into(),
            index,
            max_row_tokens: 0,
            was_cached: false,
            notes: Vec::new(),
        };
        dataset.max_row_tokens =
            (0..dataset.num_rows()).map(|row| dataset.row_tokens(row)).max().unwrap_or(0);
        Ok(dataset)
    }

    /// Marks the dataset as found in the cache.
    pub(crate) fn found_ready(mut self) -> Dataset {
        self.was_cached = true;
        self
    }

    pub fn num_rows(&self) -> usize {
        self.index.rows.num_rows()
    }

    pub fn num_docs(&self) -> usize {
        self.index.supervised.len()
    }

    /// Tokens in all rows. Batches have one position fewer per document.
    pub fn num_tokens(&self) -> u64 {
        self.index.stats.tokens
    }

    pub fn num_supervised(&self) -> u64 {
        self.index.stats.supervised
    }

    /// The first hundred of the rows that were skipped; [`Stats::skipped`] counts all of them.
    pub fn skipped(&self) -> &[SkippedRow] {
        &self.index.skipped
    }

    pub fn stats(&self) -> Stats {
        self.index.stats
    }

    /// The prepared file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the dataset was found in the cache, so that no data file had to be read.
    pub fn was_cached(&self) -> bool {
        self.was_cached
    }

    /// Notes for the user about how the dataset was prepared.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The positions that `row` takes in a batch: one fewer than its tokens per document.
    pub fn row_tokens(&self, row: usize) -> usize {
        self.row_docs(row).iter().map(|doc| self.doc_len(*doc) - 1).sum()
    }

    /// The number of targets of `row` that count in the loss.
    pub fn row_supervised(&self, row: usize) -> u64 {
        self.row_docs(row).iter().map(|doc| u64::from(self.index.supervised[*doc as usize])).sum()
    }

    /// The positions of the longest row.
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

    /// The tokens of a document, and for each whether it counts in the loss. The first never does.
    pub fn doc(&self, doc: u32) -> Result<(Vec<u32>, Vec<bool>), DataError> {
        let (tokens, mut supervised): (Vec<u32>, Vec<bool>) = self.masked(doc)?.into_iter().unzip();
        supervised[0] = false;
        Ok((tokens, supervised))
    }

    /// The tokens of a document with their loss mask as stored: the first token may be marked too, although
    /// nothing predicts it.
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
        bytes.resize(self.doc_len(doc) * WORD_BYTES, 0);
        read_at(&self.file, bytes, self.index.bounds[doc as usize] * WORD_BYTES as u64)
            .map_err(|source| DataError::Read { path: self.path.clone(), source })?;
        let word = |word: &[u8]| u32::from_le_bytes(word.try_into().expect("four bytes"));
        Ok(bytes.chunks_exact(WORD_BYTES).map(word))
    }

    /// BLAKE3, in hex, of the tokens, masks and rows. A resumed run must have the same fingerprint.
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
