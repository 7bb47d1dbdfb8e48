//! Opens text files as byte streams, decompressing gzip and zstd.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use zstd::stream::read::Decoder;

use crate::DataError;

/// Extensions of compressed files.
pub(super) const COMPRESSED: [&str; 3] = [".gz", ".zst", ".zstd"];

/// The extension by which the content of a file is decompressed.
pub(crate) fn compression(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
    COMPRESSED.into_iter().find(|ending| name.ends_with(ending))
}

const BUFFER_BYTES: usize = 1 << 18;

pub(super) type TextFile = Box<dyn BufRead + Send>;

/// Checks that `path` is a regular file: opening a pipe would block until something writes to it.
pub(crate) fn check(path: &Path) -> Result<(), DataError> {
    match path.metadata() {
        Ok(found) if found.is_file() => Ok(()),
        Ok(_) => Err(DataError::NotAFile { path: path.into() }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(DataError::FileMissing { path: path.into() }),
        Err(source) => Err(DataError::Read { path: path.into(), source }),
    }
}

pub(super) fn open(path: &Path) -> Result<TextFile, DataError> {
    let file = File::open(path).map_err(|source| DataError::Read { path: path.into(), source })?;
    let file = BufReader::with_capacity(BUFFER_BYTES, file);
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    Ok(if name.ends_with(".gz") {
        Box::new(BufReader::with_capacity(BUFFER_BYTES, MultiGzDecoder::new(file)))
    } else if COMPRESSED.iter().any(|ending| name.ends_with(ending)) {
        let decoder =
            Decoder::with_buffer(file).map_err(|source| DataError::Read { path: path.into(), source })?;
        Box::new(BufReader::with_capacity(BUFFER_BYTES, Zstd(decoder)))
    } else {
        Box::new(file)
    })
}

/// Decompresses all frames of a zstd file.
struct Zstd<R: BufRead>(Decoder<'static, R>);

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        // Errors of the system are passed on; those of the decoder describe its internals.
        self.0.read(out).map_err(|e| if e.raw_os_error().is_some() { e } else { damaged() })
    }
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "not zstd data, or truncated")
}
