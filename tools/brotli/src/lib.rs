//! The part of the crate `brotli` that parquet needs to read files: the decoder. The encoder refuses to write.

#![forbid(unsafe_code)]

use std::io;
use std::marker::PhantomData;

pub use brotli_decompressor::Decompressor;

/// Every write is an error.
#[derive(Debug)]
pub struct CompressorWriter<W>(PhantomData<W>);

impl<W> CompressorWriter<W> {
    pub fn new(_to: W, _buffer_bytes: usize, _quality: u32, _lg_window: u32) -> CompressorWriter<W> {
        CompressorWriter(PhantomData)
    }
}

impl<W> io::Write for CompressorWriter<W> {
    fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "this build reads brotli and does not write it"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    #[test]
    fn nothing_is_written() {
        let error = super::CompressorWriter::new(Vec::<u8>::new(), 1, 1, 1).write_all(b"text").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
    }
}
