//! Files to a [`Dataset`]: read a chunk of lines, tokenise its rows on all cores, take the results in
//! the order of the file, repeat, pack.
//!
//! The order of work per row is the peers': append the end token, tokenise, mask, truncate, leave out
//! what has nothing to learn, pack. Results are taken in the order of the rows, so neither the data nor
//! the first error depends on the number of threads.

use std::num::NonZero;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::dataset::{Builder, Doc};
use crate::lines::{Line, Lines};
use crate::row::{Format, Row};
use crate::{DataError, DataSpec, Dataset, OnBadRow, RowFault, SkippedRow, Tokenizer};

/// Lines are handed to threads in chunks of about this many bytes for each, and not more than so many. A
/// chunk and its tokens, four bytes for each of text at worst, are the memory that preparing takes beyond
/// its result.
const CHUNK_BYTES: usize = 128 << 10;
const MAX_CHUNK_BYTES: usize = 2 << 20;
const CHUNK_LINES: usize = 1 << 16;
/// A thread takes this many rows at a time.
const TAKE_ROWS: usize = 32;

/// Reads, tokenises and packs what `spec` names.
pub fn prepare(spec: &DataSpec, tokenizer: &Tokenizer) -> Result<Dataset, DataError> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    prepare_on(threads, spec, tokenizer)
}

fn prepare_on(threads: usize, spec: &DataSpec, tokenizer: &Tokenizer) -> Result<Dataset, DataError> {
    if spec.files.is_empty() {
        return Err(DataError::NoFiles);
    }
    if spec.max_length < 2 {
        return Err(DataError::MaxLengthTooSmall { max_length: spec.max_length });
    }
    let mut builder = Builder::new(spec.max_length);
    for file in &spec.files {
        add_file(threads, spec, tokenizer, file, &mut builder)?;
    }
    let stats = builder.stats();
    if stats.read == 0 {
        return Err(DataError::Empty { files: spec.files.clone() });
    }
    if stats.docs == 0 {
        return Err(DataError::AllDropped {
            files: spec.files.clone(),
            read: stats.read,
            skipped: stats.skipped,
            too_short: stats.dropped_short,
            unsupervised: stats.dropped_unsupervised,
            max_length: spec.max_length,
        });
    }
    Ok(builder.finish(spec.packing))
}

fn add_file(
    threads: usize,
    spec: &DataSpec,
    tokenizer: &Tokenizer,
    file: &Path,
    builder: &mut Builder,
) -> Result<(), DataError> {
    let mut lines = Lines::open(file)?;
    // The format of the file's first good row, and that row's number.
    let mut first: Option<(Format, u64)> = None;
    loop {
        let chunk = read_chunk(&mut lines, file, (threads * CHUNK_BYTES).min(MAX_CHUNK_BYTES))?;
        if chunk.is_empty() {
            return Ok(());
        }
        let encode = |line: &Line| encode_line(spec, tokenizer, line);
        for (line, result) in chunk.iter().zip(map_ordered(threads, &chunk, encode)) {
            let result = result.and_then(|(format, doc)| {
                let (first, first_row) = *first.get_or_insert((format, line.row));
                if format == first {
                    Ok(doc)
                } else {
                    Err(RowFault::MixedFormats { format, first, first_row })
                }
            });
            if spec.completion_only_loss == Some(true) && matches!(first, Some((Format::Text, _))) {
                return Err(DataError::NoCompletion { file: file.into() });
            }
            match result {
                Ok(doc) => builder.push(doc),
                Err(fault) => match spec.on_bad_row {
                    // What this program cannot do yet is no fault of the row.
                    OnBadRow::Skip if !matches!(fault, RowFault::Conversational { .. }) => {
                        builder.skip(SkippedRow { file: file.into(), row: line.row, fault });
                    }
                    _ => return Err(DataError::BadRow { file: file.into(), row: line.row, fault }),
                },
            }
        }
    }
}

fn read_chunk<R: std::io::BufRead>(
    lines: &mut Lines<R>,
    file: &Path,
    chunk_bytes: usize,
) -> Result<Vec<Line>, DataError> {
    let mut chunk = Vec::new();
    let mut bytes = 0;
    while bytes < chunk_bytes && chunk.len() < CHUNK_LINES {
        let next = lines.next().map_err(|source| DataError::Read { path: file.into(), source })?;
        let Some(line) = next else { break };
        bytes += line.bytes.as_ref().map_or(0, Vec::len);
        chunk.push(line);
    }
    Ok(chunk)
}

fn encode_line(spec: &DataSpec, tokenizer: &Tokenizer, line: &Line) -> Result<(Format, Doc), RowFault> {
    let row = Row::parse(line.bytes.as_ref().map_err(Clone::clone)?)?;
    let encode = |text: &str| {
        tokenizer.encode(text).map_err(|e| match e {
            DataError::Tokenizer { why, .. } => RowFault::NotEncodable { why },
            other => RowFault::NotEncodable { why: other.to_string() },
        })
    };
    let format = row.format();
    let doc = match row {
        Row::Text(text) => {
            let tokens = encode(&with_eos(text, tokenizer))?;
            Doc { tokens, supervised_from: 0, prefix_mismatch: false }
        }
        Row::PromptCompletion { prompt, completion } => {
            let prompt_ids = encode(&prompt)?;
            let tokens = encode(&with_eos(prompt + &completion, tokenizer))?;
            let prefix_mismatch = !tokens.starts_with(&prompt_ids);
            let completion_only = spec.completion_only_loss.unwrap_or(true);
            let supervised_from = if completion_only { prompt_ids.len() } else { 0 };
            Doc { tokens, supervised_from, prefix_mismatch }
        }
    };
    Ok((format, doc))
}

fn with_eos(mut text: String, tokenizer: &Tokenizer) -> String {
    if let Some(eos) = tokenizer.eos_token().filter(|eos| !text.ends_with(eos)) {
        text.push_str(eos);
    }
    text
}

/// `f` of every item, in the items' order, computed on `threads` threads.
fn map_ordered<T: Sync, R: Send>(threads: usize, items: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = threads.min(items.len().div_ceil(TAKE_ROWS)).max(1);
    if threads == 1 {
        return items.iter().map(f).collect();
    }
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, Vec<R>)>> = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let start = next.fetch_add(TAKE_ROWS, Ordering::Relaxed);
                    let Some(rest) = items.get(start..).filter(|rest| !rest.is_empty()) else { break };
                    let part: Vec<R> = rest.iter().take(TAKE_ROWS).map(&f).collect();
                    done.lock().expect("threads do not panic while holding the lock").push((start, part));
                }
            });
        }
    });
    let mut parts = done.into_inner().expect("the scope would have propagated the panic");
    parts.sort_unstable_by_key(|(start, _)| *start);
    parts.into_iter().flat_map(|(_, part)| part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Packing, TokenizerSource};

    #[test]
    fn the_result_does_not_depend_on_the_threads() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.jsonl");
        let rows: String = (0..500).map(|i| format!("{{\"text\": \"{}\"}}\n", "x".repeat(i % 90))).collect();
        std::fs::write(&file, rows + "not json\n{\"text\": 1}\n").unwrap();
        let spec = DataSpec {
            files: vec![file],
            tokenizer: TokenizerSource::Byte,
            max_length: 64,
            packing: Packing::Bfd,
            completion_only_loss: None,
            on_bad_row: OnBadRow::Skip,
        };
        let tokenizer = Tokenizer::load(&spec.tokenizer).unwrap();
        let one = prepare_on(1, &spec, &tokenizer).unwrap();
        for threads in [2, 3, 8] {
            let many = prepare_on(threads, &spec, &tokenizer).unwrap();
            assert_eq!(many.fingerprint(), one.fingerprint());
            assert_eq!(many.stats(), one.stats());
            assert_eq!(many.skipped(), one.skipped());
        }
        let stop = DataSpec { on_bad_row: OnBadRow::Stop, ..spec };
        for threads in [1, 2, 8] {
            let error = prepare_on(threads, &stop, &tokenizer).unwrap_err();
            assert!(matches!(error, DataError::BadRow { row: 501, .. }), "{error}");
        }
    }
}
