//! Writes safetensors files as a stream: the header is computed from names and shapes, then the values follow, tensor
//! by tensor, through a buffer of fixed size. The hash is computed while writing, so that the file need not be read
//! again.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use lockstep_core::{Bytes, DType};
use serde_json::Value;

use crate::durable::write_error;
use crate::{CkptError, Source, TensorSpec, convert};

/// Values are written in chunks of this many elements.
const CHUNK_ELEMS: usize = 1 << 18;

/// A file that has been written and synced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenFile {
    pub path: PathBuf,
    pub bytes: Bytes,
    /// The hash in hexadecimal.
    pub blake3: String,
}

/// A safetensors file that is being written.
#[derive(Debug)]
pub struct SafetensorsWriter {
    path: PathBuf,
    out: BufWriter<File>,
    hasher: blake3::Hasher,
    dtype: DType,
    written: u64,
    expected: u64,
    encoded: Vec<u8>,
}

impl SafetensorsWriter {
    /// Creates the file and writes its header. The values of `tensors` must follow in this order, all in `dtype`.
    pub fn create(path: &Path, tensors: &[TensorSpec], dtype: DType) -> Result<Self, CkptError> {
        if !convert::convertible(dtype) {
            return Err(CkptError::DtypeUnwritable { dtype });
        }
        let (header, data_bytes) = header(tensors, dtype);
        let file = File::create(path).map_err(write_error(path))?;
        let mut writer = SafetensorsWriter {
            path: path.into(),
            out: BufWriter::with_capacity(1 << 20, file),
            hasher: blake3::Hasher::new(),
            dtype,
            written: 0,
            expected: header.len() as u64 + data_bytes,
            encoded: Vec::new(),
        };
        writer.put(&header)?;
        Ok(writer)
    }

    /// Appends values. The tensors follow each other without any separator.
    pub fn append(&mut self, values: &[f32]) -> Result<(), CkptError> {
        let mut encoded = std::mem::take(&mut self.encoded);
        for chunk in values.chunks(CHUNK_ELEMS) {
            encoded.clear();
            convert::encode(self.dtype, chunk, &mut encoded);
            self.put(&encoded)?;
        }
        self.encoded = encoded;
        Ok(())
    }

    /// Flushes and syncs the file.
    ///
    /// # Panics
    /// If too few or too many values were appended.
    pub fn finish(self) -> Result<WrittenFile, CkptError> {
        assert_eq!(self.written, self.expected, "bytes written to {}", self.path.display());
        let file = self.out.into_inner().map_err(|e| write_error(&self.path)(e.into_error()))?;
        file.sync_all().map_err(write_error(&self.path))?;
        let (bytes, blake3) = (Bytes(self.written), self.hasher.finalize().to_hex().to_string());
        Ok(WrittenFile { path: self.path, bytes, blake3 })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), CkptError> {
        self.hasher.update(bytes);
        self.written += bytes.len() as u64;
        self.out.write_all(bytes).map_err(write_error(&self.path))
    }
}

/// Writes a whole file with the values from `source`.
pub(crate) fn write_file(
    path: &Path,
    tensors: &[TensorSpec],
    dtype: DType,
    source: &mut Source<'_>,
) -> Result<WrittenFile, CkptError> {
    let mut writer = SafetensorsWriter::create(path, tensors, dtype)?;
    let mut values = Vec::new();
    for tensor in tensors {
        let elems = tensor.elems();
        for start in (0..elems).step_by(CHUNK_ELEMS) {
            let end = (start + CHUNK_ELEMS).min(elems);
            values.resize(end - start, 0.0);
            source(&tensor.name, start..end, &mut values)?;
            writer.append(&values)?;
        }
    }
    writer.finish()
}

/// The length prefix and the header, padded with spaces so that the data is aligned to 8 bytes; and the size of the
/// data.
fn header(tensors: &[TensorSpec], dtype: DType) -> (Vec<u8>, u64) {
    // Formatted by hand and not through a map: the bytes are hashed, so they must not depend on a map's order.
    let mut text = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    let mut names = HashSet::new();
    let mut at = 0u64;
    for tensor in tensors {
        let end = at + (tensor.elems() * dtype.size()) as u64;
        assert!(names.insert(&tensor.name), "tensor `{}` is listed twice", tensor.name);
        let (name, dtype) = (Value::from(tensor.name.as_str()), dtype.safetensors_name());
        let shape = Value::from(tensor.shape.as_slice());
        text.push_str(&format!(
            r#",{name}:{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{at},{end}]}}"#
        ));
        at = end;
    }
    text.push('}');
    let mut text = text.into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.append(&mut text);
    (out, at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SafetensorsFile;

    #[test]
    fn files_are_compatible_with_the_safetensors_crate_in_both_directions() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        let tensors =
            [TensorSpec::new("w", [3, 2]), TensorSpec::new("empty", [0, 4]), TensorSpec::new("b", [])];
        let mut value = 0.0;
        let mut source = |_: &str, _: std::ops::Range<usize>, out: &mut [f32]| {
            for v in out {
                value += 1.5;
                *v = value;
            }
            Ok(())
        };
        let written = write_file(&path, &tensors, DType::BF16, &mut source).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(written.bytes, Bytes(bytes.len() as u64));
        assert_eq!(written.blake3, blake3::hash(&bytes).to_hex().to_string());
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(theirs.tensor("w").unwrap().shape(), [3, 2]);
        let (len, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert!(len.is_multiple_of(8));
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        let views: Vec<(String, _)> = theirs.tensors();
        let reserialized = safetensors::serialize(views, None).unwrap();
        std::fs::write(&path, reserialized).unwrap();
        let file = SafetensorsFile::open(&path).unwrap();
        let mut out = [0.0; 4];
        file.read_f32("w", 2..6, &mut out).unwrap();
        assert_eq!(out, [4.5, 6.0, 7.5, 9.0]);
        let mut raw = [0; 2];
        file.read_into("b", 0..1, &mut raw).unwrap();
        assert_eq!(half::bf16::from_le_bytes(raw).to_f32(), 10.5);
        file.read_into("empty", 0..0, &mut []).unwrap();
    }
}
