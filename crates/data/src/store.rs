//! The file of a prepared data set.
//!
//! First all tokens, a word of four bytes each, little-endian, the top bit set where the token is
//! supervised. Then the index: a JSON header with counts and names, and the arrays. Last a footer of fixed
//! size with the index's place and BLAKE3 hash. The footer is written last and the file renamed after that,
//! so a file that is cut short has no footer, and one that is changed has another hash; a changed token
//! alone would not be seen.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::packing::Rows;
use crate::{DataError, SkippedRow, Stats};

/// Raised whenever the file or what goes into it changes.
pub(crate) const VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"LSTOKENS";
/// Magic, place and length of the index, its hash.
const FOOTER_BYTES: u64 = 8 + 8 + 8 + 32;
const WORD: u64 = 4;
const CHUNK_BYTES: usize = 1 << 16;

/// All but the tokens.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Index {
    pub(crate) bounds: Vec<u64>,
    pub(crate) supervised: Vec<u32>,
    pub(crate) rows: Rows,
    pub(crate) skipped: Vec<SkippedRow>,
    pub(crate) stats: Stats,
    /// BLAKE3, in hex, of tokens, masks, bounds and rows.
    pub(crate) fingerprint: String,
}

/// The file while tokens are added.
pub(crate) struct TokenFile {
    path: PathBuf,
    out: BufWriter<File>,
    chunk: Vec<u8>,
    content: blake3::Hasher,
    words: u64,
}

impl TokenFile {
    /// `file` is empty; `path` is what messages call it.
    pub(crate) fn new(path: &Path, file: File) -> Self {
        let out = BufWriter::with_capacity(CHUNK_BYTES, file);
        let chunk = Vec::with_capacity(CHUNK_BYTES);
        TokenFile { path: path.into(), out, chunk, content: blake3::Hasher::new(), words: 0 }
    }

    /// Words so far.
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

    /// Adds index and footer, and waits until the disk has it all.
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
        let (hash, bytes) = (out.hasher.finalize(), out.bytes);
        self.out.write_all(MAGIC)?;
        self.out.write_all(&(self.words * WORD).to_le_bytes())?;
        self.out.write_all(&bytes.to_le_bytes())?;
        self.out.write_all(hash.as_bytes())?;
        self.out.flush()?;
        self.out.get_ref().sync_all()
    }
}

impl Index {
    fn header(&self) -> Value {
        let skipped = |row: &SkippedRow| json!([row.file.to_string_lossy(), row.row, row.why]);
        json!({
            "version": VERSION,
            "docs": self.supervised.len(),
            "row_docs": self.rows.docs.len(),
            "rows": self.rows.num_rows(),
            "fingerprint": self.fingerprint,
            "stats": self.stats.to_json(),
            "skipped": self.skipped.iter().map(skipped).collect::<Vec<_>>(),
        })
    }

    /// Reads the index of a file. `InvalidData` and `UnexpectedEof` mean that the file is not whole.
    pub(crate) fn read(file: &File) -> io::Result<Index> {
        let size = file.metadata()?.len();
        let mut reader = BufReader::with_capacity(CHUNK_BYTES, file);
        let footer_at = size.checked_sub(FOOTER_BYTES).ok_or_else(|| torn("it is too short"))?;
        reader.seek(SeekFrom::Start(footer_at))?;
        let mut footer = [0; FOOTER_BYTES as usize];
        reader.read_exact(&mut footer)?;
        let number = |at: usize| u64::from_le_bytes(footer[at..at + 8].try_into().expect("eight bytes"));
        let (index_at, index_bytes) = (number(8), number(16));
        if footer[..8] != *MAGIC || index_at.checked_add(index_bytes) != Some(footer_at) {
            return Err(torn("its end is missing"));
        }
        reader.seek(SeekFrom::Start(index_at))?;
        let mut reader = Hashing { inner: reader.take(index_bytes), hasher: blake3::Hasher::new(), bytes: 0 };
        let index = Index::read_from(&mut reader, index_bytes)?;
        if reader.bytes != index_bytes || reader.hasher.finalize().as_bytes()[..] != footer[24..] {
            return Err(torn("its index is not what was written"));
        }
        if index.bounds.last().copied().and_then(|words| words.checked_mul(WORD)) != Some(index_at) {
            return Err(torn("its tokens are not all there"));
        }
        Ok(index)
    }

    fn read_from(reader: &mut impl Read, limit: u64) -> io::Result<Index> {
        let mut bytes = [0; 8];
        reader.read_exact(&mut bytes)?;
        let header_bytes = u64::from_le_bytes(bytes);
        if header_bytes > limit {
            return Err(torn("its header is not what was written"));
        }
        let mut header = vec![0; header_bytes as usize];
        reader.read_exact(&mut header)?;
        let header: Value = serde_json::from_slice(&header).map_err(|_| torn("its header is no JSON"))?;
        let missing = || torn("its header is not complete");
        let count = |name: &str| header[name].as_u64().filter(|n| *n <= limit).ok_or_else(missing);
        if header["version"] != VERSION {
            return Err(torn("it is of another version"));
        }
        let (docs, row_docs, rows) = (count("docs")?, count("row_docs")?, count("rows")?);
        let bounds = array(reader, docs + 1, u64::from_le_bytes)?;
        let supervised = array(reader, docs, u32::from_le_bytes)?;
        let row_docs = array(reader, row_docs, u32::from_le_bytes)?;
        let row_bounds = array(reader, rows + 1, u32::from_le_bytes)?;
        let skipped = header["skipped"].as_array().ok_or_else(missing)?;
        let skipped = skipped.iter().filter_map(|row| {
            let (file, why) = (row[0].as_str()?.into(), row[2].as_str()?.into());
            Some(SkippedRow { file, row: row[1].as_u64()?, why })
        });
        Ok(Index {
            bounds,
            supervised,
            rows: Rows { docs: row_docs, bounds: row_bounds },
            skipped: skipped.collect(),
            stats: Stats::from_json(&header["stats"]).ok_or_else(missing)?,
            fingerprint: header["fingerprint"].as_str().ok_or_else(missing)?.into(),
        })
    }
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

fn torn(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Passes bytes on and hashes them.
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
