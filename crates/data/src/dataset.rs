//! Tokenized documents and the rows they form: the tokens are in a file, the index is in memory.
//!
//! A document is a sequence of tokens that attend to each other. A row is the unit of sampling: one document, one
//! preference pair, or several packed together. Documents keep the order of the files; rows refer to documents by
//! index. Documents `2 * p` and `2 * p + 1` are the chosen and the rejected one of pair `p`, and a row has them next to
//! each other.
//!
//! Tokens are read with `pread` and served by the page cache, so the memory of the process does not grow with
//! the number of tokens. The file may be removed while it is open.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::doc::SUPERVISED;
use crate::store::{Index, num_words};
use crate::{DataError, DataTask, PreferenceLayout, SkippedRow, Stats};

/// Bytes of a stored token.
const WORD_BYTES: usize = 4;

/// A prepared dataset, opened for reading.
#[derive(Debug)]
pub struct Dataset {
    file: File,
    path: PathBuf,
    index: Index,
    max_doc_len: usize,
    was_cached: bool,
    pub(crate) notes: Vec<String>,
}

impl Dataset {
    /// Opens a prepared file. The errors `InvalidData` and `UnexpectedEof` mean that the file is incomplete or corrupt.
    pub(crate) fn open(path: &Path) -> io::Result<Dataset> {
        let file = File::open(path)?;
        let index = Index::read(&file)?;
        let mut dataset =
            Dataset { file, path: path.into(), index, max_doc_len: 0, was_cached: false, notes: Vec::new() };
        let docs = 0..dataset.num_docs() as u32;
        dataset.max_doc_len = docs.map(|doc| dataset.doc_len(doc)).max().unwrap_or(0);
        Ok(dataset)
    }

    /// Marks the dataset as found in the cache.
    pub(crate) fn found_ready(mut self) -> Dataset {
        self.was_cached = true;
        self
    }

    /// The task that the dataset was prepared for.
    pub fn task(&self) -> DataTask {
        self.index.task
    }

    /// Whether the documents are preference pairs.
    pub fn is_preference(&self) -> bool {
        self.index.task.is_preference()
    }

    /// Whether a document gets one score at its last token, rather than a loss at its targets.
    pub(crate) fn has_sequences(&self) -> bool {
        self.index.task == DataTask::Preference(PreferenceLayout::Sequence)
    }

    /// The number of preference pairs; 0 for other tasks.
    pub fn num_pairs(&self) -> usize {
        if self.is_preference() { self.num_docs() / 2 } else { 0 }
    }

    /// Whether rows have a `margin`.
    pub fn has_margins(&self) -> bool {
        !self.index.margins.is_empty()
    }

    /// The margin of a pair. `None` if no row of the dataset has one; 0 if only rows of other files do.
    pub fn margin(&self, pair: u32) -> Option<f32> {
        self.index.margins.get(pair as usize).copied()
    }

    /// All columns of the row that a prompt comes from, as the text of a JSON object, with the file's names.
    ///
    /// # Panics
    /// If the dataset has no prompts.
    pub fn columns_json(&self, doc: u32) -> Result<String, DataError> {
        let mut bytes = Vec::new();
        self.read_words(self.index.columns_span(doc), &mut bytes)?;
        let why = "the columns of a prompt are not UTF-8";
        let text = String::from_utf8(bytes)
            .map_err(|_| DataError::Damaged { path: self.path.clone(), why: why.into() })?;
        Ok(text.trim_end().into())
    }

    pub fn num_rows(&self) -> usize {
        self.index.rows.num_rows()
    }

    pub fn num_docs(&self) -> usize {
        self.index.supervised.len()
    }

    /// Tokens in all rows. Batches have one position fewer per document, except for sequences with one score.
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

    /// The positions that `row` takes in a batch: one fewer than its tokens per document, or as many if a document
    /// gets one score. For a prompt, the tokens that the model reads before it generates.
    pub fn row_tokens(&self, row: usize) -> usize {
        let positions = |doc: &u32| self.index.task.positions(self.doc_len(*doc));
        self.row_docs(row).iter().map(positions).sum()
    }

    /// The number of preference pairs in `row`; 0 for other tasks.
    pub fn row_pairs(&self, row: usize) -> u64 {
        if self.is_preference() { self.row_docs(row).len() as u64 / 2 } else { 0 }
    }

    /// The number of targets of `row` that count in the loss, or of its documents if each gets one score.
    pub fn row_supervised(&self, row: usize) -> u64 {
        self.row_docs(row).iter().map(|doc| u64::from(self.index.supervised[*doc as usize])).sum()
    }

    /// The number of targets of the chosen documents of `row` that count in the loss; 0 without preference pairs.
    pub fn row_supervised_chosen(&self, row: usize) -> u64 {
        let chosen = self.row_docs(row).iter().filter(|doc| self.is_preference() && *doc % 2 == 0);
        chosen.map(|doc| u64::from(self.index.supervised[*doc as usize])).sum()
    }

    /// Tokens in the longest document.
    pub fn max_doc_len(&self) -> usize {
        self.max_doc_len
    }

    /// The documents in `row`.
    pub fn row_docs(&self, row: usize) -> &[u32] {
        self.index.rows.row(row)
    }

    /// Tokens in a document.
    pub fn doc_len(&self, doc: u32) -> usize {
        num_words(&self.span(doc))
    }

    /// The tokens of a document, and for each whether it counts in the loss. The first never does as a target. If the
    /// document gets one score, only the last token is marked.
    pub fn doc(&self, doc: u32) -> Result<(Vec<u32>, Vec<bool>), DataError> {
        let (tokens, mut supervised): (Vec<u32>, Vec<bool>) = self.masked(doc)?.into_iter().unzip();
        supervised[0] &= self.has_sequences();
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
        self.read_words(self.span(doc), bytes)?;
        let word = |word: &[u8]| u32::from_le_bytes(word.try_into().expect("four bytes"));
        Ok(bytes.chunks_exact(WORD_BYTES).map(word))
    }

    /// The words of a document in the file.
    fn span(&self, doc: u32) -> Range<u64> {
        Index::doc_span(self.index.task, &self.index.bounds, doc)
    }

    fn read_words(&self, words: Range<u64>, bytes: &mut Vec<u8>) -> Result<(), DataError> {
        let start = words.start * WORD_BYTES as u64;
        bytes.resize(num_words(&words) * WORD_BYTES, 0);
        let read = read_at(&self.file, bytes, start);
        read.map_err(|source| DataError::Read { path: self.path.clone(), source })
    }

    /// BLAKE3, in hex, of the tokens, masks, rows, margins and columns. A resumed run must have the same fingerprint.
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
