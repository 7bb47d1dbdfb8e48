//! A text file as a stream of bytes, whatever it is compressed with.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use crate::DataError;

/// Endings of compressed files.
pub(super) const COMPRESSED: [&str; 3] = [".gz", ".zst", ".zstd"];

const BUFFER_BYTES: usize = 1 << 18;

pub(super) type TextFile = Box<dyn BufRead + Send>;

/// That `path` is a file that can be opened: opening a pipe would wait for a writer.
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
        Box::new(BufReader::with_capacity(BUFFER_BYTES, Zstd::new(file)))
    } else {
        Box::new(file)
    })
}

/// All frames of a zstd file, one after the other.
struct Zstd<R> {
    source: R,
    decoder: FrameDecoder,
    inside: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        // What the `zstd` program accepts without being asked for more.
        decoder.set_max_window_size(128 << 20);
        Zstd { source, decoder, inside: false }
    }

    /// Begins the next frame; false at the end of the file.
    fn enter(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let skipped = io::copy(&mut (&mut self.source).take(u64::from(length)), &mut io::sink())?;
                    if skipped < u64::from(length) {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(_) => return Err(damaged()),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.inside {
                if !self.enter()? {
                    return Ok(0);
                }
                self.inside = true;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(|_| damaged())?;
            }
            match self.decoder.read(out)? {
                0 if !out.is_empty() => self.inside = false,
                count => return Ok(count),
            }
        }
    }
}

/// The decoder's own words are about its inside.
fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "this is no zstd data, or not all of it")
}
