//! Prepares a [`Dataset`] from files: reads rows, tokenizes them on all cores, stores the results in the order of the
//! files, and packs them.
//!
//! The steps for a row have the same order as in TRL: append the EOS token, tokenize, mask, truncate, drop rows without
//! a target, pack. Results are stored in the order of the rows, so neither the data nor the first error depends on the
//! number of threads. Rows are processed in chunks, and the number of chunks in flight is bounded, so memory does not
//! depend on the size of the files.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::thread;

use lockstep_core::Bytes;

use crate::builder::{Builder, Taken};
use crate::cache::{self, CacheEntry, Lookup};
use crate::doc::Sample;
use crate::encode::Encoder;
use crate::pipeline::{self, Source};
use crate::read::{self, RawRow, Rows, Wanted};
use crate::row::{self, Format};
use crate::{
    DataError, DataSpec, DataTask, Dataset, EncodeChat, OnBadRow, Packing, Part, RowFault, SkippedRow,
    Tokenizer, files,
};

/// More threads than this would wait for the single thread that reads.
const MAX_THREADS: usize = 16;
/// Approximate amount of text in flight, over all threads. This text and its tokens, at most four bytes per byte of
/// text, are the memory that preparing needs besides its result.
const IN_FLIGHT_BYTES: usize = 2 << 20;
/// The limits of a chunk of rows, which one thread tokenizes at a time.
const CHUNK_BYTES: usize = 64 << 10;
const CHUNK_ROWS: usize = 1 << 12;

/// Finds the dataset of `spec` in the cache, or reads, tokenizes and packs it. Without `chat`, rows that are
/// conversations cannot be used.
pub fn prepare(
    spec: &DataSpec,
    tokenizer: &Tokenizer,
    chat: Option<&dyn EncodeChat>,
) -> Result<Dataset, DataError> {
    prepare_on(threads(), Encoder { spec, tokenizer, chat })
}

/// The format of the first row of the first file; `None` if there is no row or its format is unknown.
pub fn first_format(spec: &DataSpec) -> Result<Option<Format>, DataError> {
    let files = files::expand(&spec.files)?;
    let Some(file) = files.first() else { return Ok(None) };
    read::check(file)?;
    let row = read::open(file, wanted(spec))?.next()?;
    let parsed = row.and_then(|raw| row::parse(raw.body.ok()?, &spec.columns, spec.task, false).ok());
    Ok(parsed.map(|(format, _)| format))
}

/// The memory that preparing needs while it runs, besides that of the tokenizer and the result.
pub fn preparing_bytes(tokenizer: &Tokenizer) -> Bytes {
    Bytes(threads() as u64 * tokenizer.thread_bytes().0)
}

fn threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS)
}

fn prepare_on(threads: usize, encoder: Encoder<'_>) -> Result<Dataset, DataError> {
    let Encoder { spec, tokenizer, chat } = encoder;
    check_settings(spec)?;
    let files = files::expand(&spec.files)?;
    // Check all files before reading any: the misspelled name may be the last one.
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

fn check_settings(spec: &DataSpec) -> Result<(), DataError> {
    let DataSpec { task, packing, max_length, .. } = *spec;
    if spec.files.is_empty() {
        return Err(DataError::NoFiles);
    }
    if max_length < 2 && !matches!(task, DataTask::Prompt { .. }) {
        return Err(DataError::MaxLengthTooSmall { max_length });
    }
    let allowed = match task {
        DataTask::Sft => true,
        DataTask::Preference(_) => !packing.keeps_all(),
        DataTask::Prompt { .. } => packing == Packing::None,
    };
    if allowed { Ok(()) } else { Err(DataError::Packing { packing, task }) }
}

fn wanted(spec: &DataSpec) -> Wanted<'_> {
    Wanted { columns: &spec.columns, task: spec.task }
}

fn fill(
    threads: usize,
    encoder: Encoder<'_>,
    files: &[PathBuf],
    mut builder: Builder<'_>,
) -> Result<(), DataError> {
    let spec = encoder.spec;
    let chunk_bytes = (IN_FLIGHT_BYTES / (threads * pipeline::AHEAD)).min(CHUNK_BYTES);
    let source = FileRows { files, at: 0, open: None, part: spec.part, wanted: wanted(spec), chunk_bytes };
    let mut filter = RowFilter { spec, files, file: 0, first: None, first_margin: None };
    let encode = |chunk: Chunk| -> Encoded {
        let rows = chunk.rows.into_iter();
        let rows = rows.map(|raw| (raw.row, encoder.encode(raw))).collect();
        Encoded { file: chunk.file, rows }
    };
    pipeline::run(threads, source, encode, |encoded| filter.take(encoded, &mut builder))?;
    let stats = builder.stats();
    if stats.read == 0 {
        return Err(DataError::Empty { files: files.to_vec(), task: spec.task });
    }
    if builder.usable() == 0 {
        return Err(DataError::AllDropped {
            files: files.to_vec(),
            task: spec.task,
            stats: Box::new(stats),
            max_length: spec.max_length,
        });
    }
    builder.finish()
}

/// Rows of one file.
struct Chunk {
    /// The file's index in the list.
    file: usize,
    rows: Vec<RawRow>,
}

/// A row's number, and its tokens or what is wrong with it.
type EncodedRow = (u64, Result<(Format, Sample), RowFault>);

/// The rows of a chunk, tokenized.
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
    wanted: Wanted<'a>,
    chunk_bytes: usize,
}

impl Source for FileRows<'_> {
    type Item = Chunk;

    fn next(&mut self) -> Result<Option<Chunk>, DataError> {
        while let Some(path) = self.files.get(self.at) {
            let reader = match &mut self.open {
                Some(reader) => reader,
                none => none.insert(read::open(path, self.wanted)?),
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

/// Passes rows to the builder in order, and skips bad ones or stops at them.
struct RowFilter<'a> {
    spec: &'a DataSpec,
    files: &'a [PathBuf],
    file: usize,
    /// The format of the file's first good row, and that row's number.
    first: Option<(Format, u64)>,
    /// Whether the file's first good pair has a margin, and its row number.
    first_margin: Option<(bool, u64)>,
}

impl RowFilter<'_> {
    fn take(&mut self, encoded: Encoded, builder: &mut Builder<'_>) -> Result<(), DataError> {
        if encoded.file != self.file {
            (self.file, self.first, self.first_margin) = (encoded.file, None, None);
        }
        let file = &self.files[self.file];
        for (row, result) in encoded.rows {
            let checked = result.and_then(|(format, sample)| {
                self.same_format(format, row)?;
                self.same_margin(&sample, row)?;
                Ok((format, sample))
            });
            match checked {
                Ok((format, sample)) => {
                    if self.spec.completion_only_loss == Some(true) && !format.has_completion() {
                        return Err(DataError::NoCompletion { file: file.into() });
                    }
                    if let Taken::TooLong(fault) = builder.push(&sample)? {
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

    /// Either all pairs of a file have a margin, or none.
    fn same_margin(&mut self, sample: &Sample, row: u64) -> Result<(), RowFault> {
        let Sample::Pair { margin, .. } = sample else { return Ok(()) };
        let present = margin.is_some();
        let (first, first_row) = *self.first_margin.get_or_insert((present, row));
        if present == first { Ok(()) } else { Err(RowFault::MixedMargins { present, first_row }) }
    }

    fn bad(
        &self,
        file: &Path,
        row: u64,
        fault: RowFault,
        builder: &mut Builder<'_>,
    ) -> Result<(), DataError> {
        match self.spec.on_bad_row {
            // A missing template or tokenizer concerns all rows, so skipping this one does not help.
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
