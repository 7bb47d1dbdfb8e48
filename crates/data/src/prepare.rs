//! Files to a [`Dataset`]: read rows, tokenise them on all cores, take the results in the order of the
//! files, write them down, pack.
//!
//! The order of work per row is the peers': append the end token, tokenise, mask, truncate, leave out
//! what has nothing to learn, pack. Results are taken in the order of the rows, so neither the data nor
//! the first error depends on the number of threads. Rows travel in chunks, and only so many chunks are
//! under way at a time: what preparing holds does not depend on the size of the files.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::thread;

use lockstep_core::Bytes;

use crate::builder::{Builder, Taken};
use crate::cache::{self, CacheEntry, Lookup};
use crate::doc::Doc;
use crate::encode::Encoder;
use crate::pipeline::{self, Source};
use crate::read::{self, RawRow, Rows};
use crate::row::{self, Format};
use crate::{
    Columns, DataError, DataSpec, Dataset, EncodeChat, OnBadRow, Part, RowFault, SkippedRow, Tokenizer, files,
};

/// More would wait for the one that reads.
const MAX_THREADS: usize = 16;
/// About this much text is under way in all; it and its tokens, four bytes for each of text at worst, are
/// the memory that preparing takes beyond its result.
const UNDER_WAY_BYTES: usize = 2 << 20;
/// Chunks of at most so many bytes of text, and of so many rows, are handed to threads.
const CHUNK_BYTES: usize = 64 << 10;
const CHUNK_ROWS: usize = 1 << 12;

/// Finds what `spec` names in its cache, or reads, tokenises and packs it. Without `chat`, rows that are
/// conversations cannot be used.
pub fn prepare(
    spec: &DataSpec,
    tokenizer: &Tokenizer,
    chat: Option<&dyn EncodeChat>,
) -> Result<Dataset, DataError> {
    prepare_on(threads(), Encoder { spec, tokenizer, chat })
}

/// What the first row of the first file is; `None` if that is unknown.
pub fn first_format(spec: &DataSpec) -> Result<Option<Format>, DataError> {
    let files = files::expand(&spec.files)?;
    let Some(file) = files.first() else { return Ok(None) };
    read::check(file)?;
    let row = read::open(file, &spec.columns)?.next()?;
    let parsed = row.and_then(|raw| row::parse(raw.body.ok()?, &spec.columns, false).ok());
    Ok(parsed.map(|(format, _)| format))
}

/// What preparing takes while it runs, beyond what the tokenizer itself and the result take.
pub fn preparing_bytes(tokenizer: &Tokenizer) -> Bytes {
    Bytes(threads() as u64 * tokenizer.thread_bytes().0)
}

fn threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS)
}

fn prepare_on(threads: usize, encoder: Encoder<'_>) -> Result<Dataset, DataError> {
    let Encoder { spec, tokenizer, chat } = encoder;
    if spec.files.is_empty() {
        return Err(DataError::NoFiles);
    }
    if spec.max_length < 2 {
        return Err(DataError::MaxLengthTooSmall { max_length: spec.max_length });
    }
    let files = files::expand(&spec.files)?;
    // Told before anything is read: a list's last file may be the one that is misspelled.
    files.iter().try_for_each(|file| read::check(file))?;
    let key = cache::key(spec, &files, tokenizer, chat)?;
    let path = CacheEntry::path_of(&spec.cache_dir, &key);
    if let Lookup::Found(dataset) = cache::lookup(&path)? {
        return Ok(dataset.found_ready());
    }
    let entry = CacheEntry::take(&spec.cache_dir, &key)?;
    let mut notes = Vec::new();
    match cache::lookup(&path)? {
        Lookup::Found(dataset) => return Ok(dataset.found_ready()),
        Lookup::Damaged(why) => {
            notes.push(format!("{} is damaged ({why}); the data is prepared again", path.display()));
        }
        Lookup::Absent => {}
    }
    let (file, partial) = entry.create()?;
    let builder = Builder::new(spec, partial, file);
    fill(threads, encoder, &files, builder)?;
    let path = entry.keep()?;
    let mut dataset = Dataset::open(&path).map_err(|source| DataError::Read { path, source })?;
    dataset.notes = notes;
    Ok(dataset)
}

fn fill(
    threads: usize,
    encoder: Encoder<'_>,
    files: &[PathBuf],
    mut builder: Builder<'_>,
) -> Result<(), DataError> {
    let spec = encoder.spec;
    let chunk_bytes = (UNDER_WAY_BYTES / (threads * pipeline::AHEAD)).min(CHUNK_BYTES);
    let source = FileRows { files, at: 0, open: None, part: spec.part, columns: &spec.columns, chunk_bytes };
    let mut filter = RowFilter { spec, files, file: 0, first: None };
    let encode = |chunk: Chunk| -> Encoded {
        let rows = chunk.rows.into_iter();
        let rows = rows.map(|raw| (raw.row, encoder.encode(raw))).collect();
        Encoded { file: chunk.file, rows }
    };
    pipeline::run(threads, source, encode, |encoded| filter.take(encoded, &mut builder))?;
    let stats = builder.stats();
    if stats.read == 0 {
        return Err(DataError::Empty { files: files.to_vec() });
    }
    if builder.usable() == 0 {
        return Err(DataError::AllDropped {
            files: files.to_vec(),
            read: stats.read,
            skipped: stats.skipped,
            too_short: stats.dropped_short,
            too_long: stats.dropped_long,
            unsupervised: stats.read - stats.skipped - stats.dropped_short - stats.dropped_long,
            max_length: spec.max_length,
        });
    }
    builder.finish()
}

/// Rows of one file.
struct Chunk {
    /// Its index in the list.
    file: usize,
    rows: Vec<RawRow>,
}

/// A row's number, and what came of it.
type EncodedRow = (u64, Result<(Format, Doc), RowFault>);

/// The same rows, tokenised.
struct Encoded {
    file: usize,
    rows: Vec<EncodedRow>,
}

/// The rows of all files, a chunk at a time.
struct FileRows<'a> {
    files: &'a [PathBuf],
    at: usize,
    open: Option<Box<dyn Rows>>,
    part: Part,
    columns: &'a Columns,
    chunk_bytes: usize,
}

impl Source for FileRows<'_> {
    type Item = Chunk;

    fn next(&mut self) -> Result<Option<Chunk>, DataError> {
        while let Some(path) = self.files.get(self.at) {
            let reader = match &mut self.open {
                Some(reader) => reader,
                none => none.insert(read::open(path, self.columns)?),
            };
            let mut rows = Vec::new();
            let (mut bytes, mut ended) = (0, false);
            while bytes < self.chunk_bytes && rows.len() < CHUNK_ROWS {
                let Some(row) = reader.next()? else {
                    ended = true;
                    break;
                };
                if self.part.has(self.at, row.row) {
                    bytes += row.bytes();
                    rows.push(row);
                }
            }
            let file = self.at;
            if ended {
                (self.at, self.open) = (self.at + 1, None);
            }
            if !rows.is_empty() {
                return Ok(Some(Chunk { file, rows }));
            }
        }
        Ok(None)
    }
}

/// Takes rows in order and decides what becomes of bad ones.
struct RowFilter<'a> {
    spec: &'a DataSpec,
    files: &'a [PathBuf],
    file: usize,
    /// The format of the file's first good row, and that row's number.
    first: Option<(Format, u64)>,
}

impl RowFilter<'_> {
    fn take(&mut self, encoded: Encoded, builder: &mut Builder<'_>) -> Result<(), DataError> {
        if encoded.file != self.file {
            (self.file, self.first) = (encoded.file, None);
        }
        let file = &self.files[self.file];
        for (row, result) in encoded.rows {
            match result.and_then(|(format, doc)| self.same_format(format, row).map(|()| (format, doc))) {
                Ok((format, doc)) => {
                    if self.spec.completion_only_loss == Some(true) && !format.has_completion() {
                        return Err(DataError::NoCompletion { file: file.into() });
                    }
                    if let Taken::TooLong(fault) = builder.push(&doc)? {
                        return Err(DataError::BadRow { file: file.into(), row, fault });
                    }
                }
                Err(fault) => self.bad(file, row, fault, builder)?,
            }
        }
        Ok(())
    }

    fn same_format(&mut self, format: Format, row: u64) -> Result<(), RowFault> {
        let (first, first_row) = *self.first.get_or_insert((format, row));
        if format == first { Ok(()) } else { Err(RowFault::MixedFormats { format, first, first_row }) }
    }

    fn bad(
        &self,
        file: &Path,
        row: u64,
        fault: RowFault,
        builder: &mut Builder<'_>,
    ) -> Result<(), DataError> {
        match self.spec.on_bad_row {
            // That there is no template or tokenizer is no fault of the row.
            OnBadRow::Skip
                if !matches!(fault, RowFault::NoTemplate { .. } | RowFault::NoTokenizer { .. }) =>
            {
                builder.skip(SkippedRow { file: file.into(), row, why: fault.to_string() });
                Ok(())
            }
            _ => Err(DataError::BadRow { file: file.into(), row, fault }),
        }
    }
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
