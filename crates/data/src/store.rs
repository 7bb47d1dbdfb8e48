//! The file format of a prepared dataset.
//!
//! The file starts with all tokens, as little-endian words of four bytes whose top bit marks supervised
//! tokens. After the tokens of a prompt comes the JSON text of its columns, padded with spaces to whole words. Then comes
//! the index: a JSON header with counts and names, and the arrays. A footer of fixed size holds the offset and BLAKE3 hash of the index. The footer is written last and the file is renamed after
//! that, so a truncated file has no footer and a changed index has the wrong hash. A change to the tokens
//! alone is not detected.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::packing::Rows;
use crate::{DataError, DataTask, SkippedRow, Stats};

/// The format version. Increase it whenever the format or the content for the same input changes.
pub(crate) const VERSION: u32 = 2;

const MAGIC: &[u8; 8] = b"LSTOKENS";
/// The magic number, the offset, length and hash of the index.
const FOOTER_BYTES: u64 = 8 + 8 + 8 + 32;
const WORD_BYTES: u64 = 4;
const CHUNK_BYTES: usize = 1 << 16;

/// Everything but the tokens.
#[derive(Debug, PartialEq)]
pub(crate) struct Index {
    pub(crate) task: DataTask,
    /// Document `d` is the words `bounds[d]..bounds[d + 1]`. A dataset of prompts has two entries per document: the
    /// prompt's tokens are `bounds[2 * d]..bounds[2 * d + 1]`, and its columns end at `bounds[2 * d + 2]`.
    pub(crate) bounds: Vec<u64>,
    /// For every document, the number of targets that count in the loss.
    pub(crate) supervised: Vec<u32>,
    /// The margin of every pair; empty if no row has one.
    pub(crate) margins: Vec<f32>,
    pub(crate) rows: Rows,
    pub(crate) skipped: Vec<SkippedRow>,
    pub(crate) stats: Stats,
    /// BLAKE3, in hex, of tokens, masks, columns, bounds, rows and margins.
    pub(crate) fingerprint: String,
}

/// A prepared file that is being written.
pub(crate) struct TokenFile {
    path: PathBuf,
    out: BufWriter<File>,
    chunk: Vec<u8>,
    content: blake3::Hasher,
    words: u64,
}

impl TokenFile {
    /// Starts with an empty `file`; `path` is for error messages.
    pub(crate) fn new(path: &Path, file: File) -> Self {
        let out = BufWriter::with_capacity(CHUNK_BYTES, file);
        let chunk = Vec::with_capacity(CHUNK_BYTES);
        TokenFile { path: path.into(), out, chunk, content: blake3::Hasher::new(), words: 0 }
    }

    /// The number of tokens so far.
    pub(crate) fn len(&self) -> u64 {
        self.words
    }

    pub(crate) fn push(&mut self, word: u32) -> Result<(), DataError> {
        self.chunk.extend_from_slice(&word.to_le_bytes());
        self.words += 1;
        if self.chunk.len() == CHUNK_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), DataError> {
        self.content.update(&self.chunk);
        let written = self.out.write_all(&self.chunk);
        self.chunk.clear();
        written.map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> DataError {
        DataError::Write { path: self.path.clone(), source }
    }

    /// Writes the index and the footer, and syncs the file to disk.
    pub(crate) fn finish(mut self, index: Index) -> Result<(), DataError> {
        self.flush()?;
        let path = self.path.clone();
        self.write_index(index).map_err(|source| DataError::Write { path, source })
    }

    fn write_index(mut self, mut index: Index) -> io::Result<()> {
        for number in index.bounds.iter().copied().chain(index.rows.bounds.iter().map(|n| u64::from(*n))) {
            self.content.update(&number.to_le_bytes());
        }
        for doc in &index.rows.docs {
            self.content.update(&doc.to_le_bytes());
        }
        for margin in &index.margins {
            self.content.update(&margin.to_le_bytes());
        }
        index.fingerprint = self.content.finalize().to_hex().to_string();
        let header = index.header().to_string();
        let mut out = Hashing { inner: &mut self.out, hasher: blake3::Hasher::new(), bytes: 0 };
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        for number in &index.bounds {
            out.write_all(&number.to_le_bytes())?;
        }
        for number in index.supervised.iter().chain(&index.rows.docs).chain(&index.rows.bounds) {
            out.write_all(&number.to_le_bytes())?;
        }
        for margin in &index.margins {
            out.write_all(&margin.to_le_bytes())?;
        }
        let (hash, bytes) = (out.hasher.finalize(), out.bytes);
        self.out.write_all(MAGIC)?;
        self.out.write_all(&(self.words * WORD_BYTES).to_le_bytes())?;
        self.out.write_all(&bytes.to_le_bytes())?;
        self.out.write_all(hash.as_bytes())?;
        self.out.flush()?;
        self.out.get_ref().sync_all()
    }
}

impl Index {
    /// The words of the tokens of a document.
    pub(crate) fn doc_span(task: DataTask, bounds: &[u64], doc: u32) -> Range<u64> {
        let at = doc as usize * segments_per_doc(task);
        bounds[at]..bounds[at + 1]
    }

    /// The words of the columns of a prompt.
    pub(crate) fn columns_span(&self, doc: u32) -> Range<u64> {
        assert!(matches!(self.task, DataTask::Prompt { .. }), "only prompts have columns");
        let at = 2 * doc as usize + 1;
        self.bounds[at]..self.bounds[at + 1]
    }

    fn header(&self) -> Value {
        let max_prompt_length = match self.task {
            DataTask::Prompt { max_prompt_length } => max_prompt_length,
            _ => 0,
        };
        let skipped = |row: &SkippedRow| json!([row.file.to_string_lossy(), row.row, row.why]);
        json!({
            "version": VERSION,
            "task": self.task.stored_name(),
            "max_prompt_length": max_prompt_length,
            "docs": self.supervised.len(),
            "row_docs": self.rows.docs.len(),
            "rows": self.rows.num_rows(),
            "margins": self.margins.len(),
            "fingerprint": self.fingerprint,
            "stats": self.stats.to_json(),
            "skipped": self.skipped.iter().map(skipped).collect::<Vec<_>>(),
        })
    }

    /// Reads the index of a file. The errors `InvalidData` and `UnexpectedEof` mean that the file is incomplete or
    /// corrupt.
    pub(crate) fn read(file: &File) -> io::Result<Index> {
        let size = file.metadata()?.len();
        let mut reader = BufReader::with_capacity(CHUNK_BYTES, file);
        let footer_at = size.checked_sub(FOOTER_BYTES).ok_or_else(|| corrupt("the file is too short"))?;
        reader.seek(SeekFrom::Start(footer_at))?;
        let mut footer = [0; FOOTER_BYTES as usize];
        reader.read_exact(&mut footer)?;
        let number = |at: usize| u64::from_le_bytes(footer[at..at + 8].try_into().expect("eight bytes"));
        let (index_at, index_bytes) = (number(8), number(16));
        if footer[..8] != *MAGIC || index_at.checked_add(index_bytes) != Some(footer_at) {
            return Err(corrupt("the footer is missing"));
        }
        reader.seek(SeekFrom::Start(index_at))?;
        let mut reader = Hashing { inner: reader.take(index_bytes), hasher: blake3::Hasher::new(), bytes: 0 };
        let index = Index::read_from(&mut reader, index_bytes)?;
        if reader.bytes != index_bytes || reader.hasher.finalize().as_bytes()[..] != footer[24..] {
            return Err(corrupt("the hash of the index does not match"));
        }
        if index.bounds.last().copied().and_then(|words| words.checked_mul(WORD_BYTES)) != Some(index_at) {
            return Err(corrupt("the number of tokens does not match the index"));
        }
        Ok(index)
    }

    fn read_from(reader: &mut impl Read, limit: u64) -> io::Result<Index> {
        let mut bytes = [0; 8];
        reader.read_exact(&mut bytes)?;
        let header_bytes = u64::from_le_bytes(bytes);
        if header_bytes > limit {
            return Err(corrupt("the header length is invalid"));
        }
        let mut header = vec![0; header_bytes as usize];
        reader.read_exact(&mut header)?;
        let header: Value = serde_json::from_slice(&header).map_err(|_| corrupt("the header is not JSON"))?;
        let missing = || corrupt("the header is incomplete");
        let count = |name: &str| header[name].as_u64().filter(|n| *n <= limit).ok_or_else(missing);
        if header["version"] != VERSION {
            return Err(corrupt("the file has another format version"));
        }
        let (docs, row_docs, rows) = (count("docs")?, count("row_docs")?, count("rows")?);
        let max_prompt_length = header["max_prompt_length"].as_u64().ok_or_else(missing)? as usize;
        let task = header["task"].as_str().and_then(|name| DataTask::from_stored(name, max_prompt_length));
        let task = task.ok_or_else(missing)?;
        let bounds = array(reader, docs * segments_per_doc(task) as u64 + 1, u64::from_le_bytes)?;
        let supervised = array(reader, docs, u32::from_le_bytes)?;
        let row_docs = array(reader, row_docs, u32::from_le_bytes)?;
        let row_bounds = array(reader, rows + 1, u32::from_le_bytes)?;
        let margins = array(reader, count("margins")?, f32::from_le_bytes)?;
        let skipped = header["skipped"].as_array().ok_or_else(missing)?;
        let skipped = skipped.iter().filter_map(|row| {
            let (file, why) = (row[0].as_str()?.into(), row[2].as_str()?.into());
            Some(SkippedRow { file, row: row[1].as_u64()?, why })
        });
        Ok(Index {
            task,
            bounds,
            supervised,
            margins,
            rows: Rows { docs: row_docs, bounds: row_bounds },
            skipped: skipped.collect(),
            stats: Stats::from_json(&header["stats"]).ok_or_else(missing)?,
            fingerprint: header["fingerprint"].as_str().ok_or_else(missing)?.into(),
        })
    }
}

pub(crate) fn num_words(span: &Range<u64>) -> usize {
    (span.end - span.start) as usize
}

/// The number of entries in [`Index::bounds`] per document.
fn segments_per_doc(task: DataTask) -> usize {
    if let DataTask::Prompt { .. } = task { 2 } else { 1 }
}

fn array<T, const N: usize>(
    reader: &mut impl Read,
    count: u64,
    from: impl Fn([u8; N]) -> T,
) -> io::Result<Vec<T>> {
    let mut out = Vec::with_capacity(count as usize);
    let mut bytes = [0; N];
    for _ in 0..count {
        reader.read_exact(&mut bytes)?;
        out.push(from(bytes));
    }
    Ok(out)
}

fn corrupt(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Forwards bytes to `inner` and hashes them.
struct Hashing<T> {
    inner: T,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..count]);
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(out)?;
        self.hasher.update(&out[..count]);
        self.bytes += count as u64;
        Ok(count)
    }
}
