//! Reads safetensors files without trusting them.
//!
//! Opening reads the header only and validates everything that follows from it: sizes match shapes (with checked
//! arithmetic), offsets cover the data exactly, names are unique, and the file has the right length. After that a
//! read is a `pread` of a known range. Files are not memory-mapped: if a mapped file shrinks, the process is killed;
//! with `pread` it is an error.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use lockstep_core::{Bytes, DType};
use serde::Deserialize;
use serde::de::value::{Error as ValueError, StrDeserializer};
use serde::de::{self, MapAccess, Visitor};

use crate::durable::{open_file, read_error};
use crate::{CkptError, SafetensorsFault, convert};

/// Size of the length field at the start of the file.
const PREFIX_BYTES: u64 = 8;
/// The largest header that the format allows.
const HEADER_CAP_BYTES: u64 = 100_000_000;
/// Values are converted in chunks of this many bytes.
const CHUNK_BYTES: usize = 1 << 18;
/// The largest number of dimensions of a tensor.
const MAX_DIMS: usize = 32;

/// An open file and the contents of its header.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: File,
    /// In file order.
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    bytes_read: AtomicU64,
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    /// The dtype, if it is a supported one.
    pub dtype: Option<DType>,
    /// The dtype as it is spelled in the header.
    pub dtype_name: String,
    pub shape: Vec<usize>,
    /// The position of its bytes, from the start of the file.
    pub bytes: Range<u64>,
    elem_bits: usize,
}

impl TensorInfo {
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }
}

impl SafetensorsFile {
    /// Opens a file and validates its header. Uses memory in proportion to the size of the header.
    pub fn open(path: &Path) -> Result<Self, CkptError> {
        let fault = |fault| CkptError::Safetensors { file: path.into(), fault: Box::new(fault) };
        let (file, len) = open_file(path)?;
        if len < PREFIX_BYTES {
            return Err(fault(SafetensorsFault::Truncated { expected: PREFIX_BYTES, found: len }));
        }
        let mut prefix = [0; PREFIX_BYTES as usize];
        file.read_exact_at(&mut prefix, 0).map_err(read_error(path))?;
        let header_len = u64::from_le_bytes(prefix);
        if header_len > HEADER_CAP_BYTES {
            if let Some(what) = other_kind(&prefix) {
                return Err(fault(SafetensorsFault::OtherKind { what }));
            }
            let (size, cap) = (header_len, HEADER_CAP_BYTES);
            return Err(fault(SafetensorsFault::HeaderTooLarge { size, cap }));
        }
        let data_start = PREFIX_BYTES + header_len;
        if data_start > len {
            return Err(fault(SafetensorsFault::Truncated { expected: data_start, found: len }));
        }
        let mut header = vec![0; header_len as usize];
        file.read_exact_at(&mut header, PREFIX_BYTES).map_err(read_error(path))?;
        let tensors = parse(&header, data_start, len).map_err(fault)?;
        let by_name = tensors.iter().enumerate().map(|(idx, t)| (t.name.clone(), idx)).collect();
        let bytes_read = AtomicU64::new(data_start);
        Ok(SafetensorsFile { path: path.into(), file, tensors, by_name, bytes_read })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes read so far, including the header.
    pub fn bytes_read(&self) -> Bytes {
        Bytes(self.bytes_read.load(Ordering::Relaxed))
    }

    /// The tensors in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|idx| &self.tensors[*idx])
    }

    /// Reads the elements `elems` of a tensor without converting them.
    ///
    /// # Panics
    /// If the range is outside the tensor, or `out` does not have its size.
    pub fn read_into(&self, name: &str, elems: Range<usize>, out: &mut [u8]) -> Result<(), CkptError> {
        let info = self.require(name)?;
        if !info.elem_bits.is_multiple_of(8) {
            return Err(self.unreadable(info));
        }
        self.read_raw(info, elems, out)
    }

    /// Reads the elements `elems` of a tensor and widens them to f32.
    ///
    /// # Panics
    /// If the range is outside the tensor, or `out` does not have its length.
    pub fn read_f32(&self, name: &str, elems: Range<usize>, out: &mut [f32]) -> Result<(), CkptError> {
        self.read_as_f32(name, elems, out, convert::is_float)
    }

    /// As [`SafetensorsFile::read_f32`]; the tensor may also be 8-bit codes, which become numbers from 0 to 255.
    pub(crate) fn read_numbers(
        &self,
        name: &str,
        elems: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CkptError> {
        self.read_as_f32(name, elems, out, convert::convertible)
    }

    fn read_as_f32(
        &self,
        name: &str,
        elems: Range<usize>,
        out: &mut [f32],
        is_readable: impl Fn(DType) -> bool,
    ) -> Result<(), CkptError> {
        let info = self.require(name)?;
        let dtype = info.dtype.filter(|dtype| is_readable(*dtype));
        let dtype = dtype.ok_or_else(|| self.unreadable(info))?;
        assert_eq!(elems.len(), out.len(), "{} elements of `{name}` into {}", elems.len(), out.len());
        let chunk_elems = CHUNK_BYTES / dtype.size();
        let mut bytes = vec![0; chunk_elems.min(out.len()) * dtype.size()];
        let mut at = elems.start;
        for part in out.chunks_mut(chunk_elems) {
            let bytes = &mut bytes[..part.len() * dtype.size()];
            self.read_raw(info, at..at + part.len(), bytes)?;
            convert::decode(dtype, bytes, part);
            at += part.len();
        }
        Ok(())
    }

    fn require(&self, name: &str) -> Result<&TensorInfo, CkptError> {
        self.tensor(name).ok_or_else(|| {
            CkptError::no_tensor(self.path.clone(), name, self.tensors.iter().map(|t| t.name.as_str()))
        })
    }

    fn unreadable(&self, info: &TensorInfo) -> CkptError {
        let (tensor, dtype) = (info.name.clone(), info.dtype_name.clone());
        CkptError::DtypeUnreadable { file: self.path.clone(), tensor, dtype }
    }

    fn read_raw(&self, info: &TensorInfo, elems: Range<usize>, out: &mut [u8]) -> Result<(), CkptError> {
        let size = info.elem_bits / 8;
        assert!(
            elems.start <= elems.end && elems.end <= info.elems(),
            "elements {elems:?} of `{}`, which has {}",
            info.name,
            info.elems()
        );
        assert_eq!(out.len(), elems.len() * size, "buffer for elements {elems:?} of `{}`", info.name);
        let start = info.bytes.start + (elems.start * size) as u64;
        self.bytes_read.fetch_add(out.len() as u64, Ordering::Relaxed);
        self.file.read_exact_at(out, start).map_err(|e| match e.kind() {
            // The length was right when the file was opened, so it has been truncated since.
            io::ErrorKind::UnexpectedEof => {
                let found = self.file.metadata().map_or(0, |m| m.len());
                let fault = SafetensorsFault::Truncated { expected: start + out.len() as u64, found };
                CkptError::Safetensors { file: self.path.clone(), fault: Box::new(fault) }
            }
            _ => read_error(&self.path)(e),
        })
    }
}

/// Recognizes other kinds of files that are often found under this name, by their first bytes.
fn other_kind(prefix: &[u8]) -> Option<&'static str> {
    match prefix {
        b"version " => Some("a Git LFS pointer, not the file itself"),
        [b'P', b'K', 3, 4, ..] => Some("a zip archive, as torch.save writes"),
        _ => None,
    }
}

/// One tensor of the header.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    #[serde(deserialize_with = "dims")]
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Parses a shape of at most [`MAX_DIMS`] dimensions, so that a hostile header cannot make us build a huge list.
fn dims<'de, D: de::Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    struct Dims;
    impl<'de> Visitor<'de> for Dims {
        type Value = Vec<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX_DIMS} sizes")
        }

        fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
            let mut shape = Vec::new();
            while let Some(dim) = seq.next_element()? {
                if shape.len() == MAX_DIMS {
                    return Err(de::Error::invalid_length(MAX_DIMS + 1, &self));
                }
                shape.push(dim);
            }
            Ok(shape)
        }
    }
    deserializer.deserialize_seq(Dims)
}

/// The entries of the header in order, including duplicates.
struct Header(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<HashMap<String, String>>()?;
                        continue;
                    }
                    let entry = map.next_value::<Entry>();
                    let entry = entry.map_err(|e| de::Error::custom(format!("tensor `{name}`: {e}")))?;
                    entries.push((name, entry));
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Parses a header. The data is at `data_start..len` of the file.
fn parse(header: &[u8], data_start: u64, len: u64) -> Result<Vec<TensorInfo>, SafetensorsFault> {
    if header.first() != Some(&b'{') {
        return Err(SafetensorsFault::Header { why: "it does not begin with `{`".into() });
    }
    let header: Header =
        serde_json::from_slice(header).map_err(|e| SafetensorsFault::Header { why: e.to_string() })?;
    let mut tensors = Vec::with_capacity(header.0.len());
    for (name, entry) in header.0 {
        tensors.push(check(name, entry, data_start)?);
    }
    tensors.sort_by_key(|t| (t.bytes.start, t.bytes.end));
    let mut names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(SafetensorsFault::Duplicate { tensor: pair[0].into() });
    }
    let mut end = data_start;
    let mut before = "";
    for tensor in &tensors {
        let start = tensor.bytes.start;
        if start < end {
            let (tensor, other) = (tensor.name.clone(), before.into());
            let (start, end) = (start - data_start, end - data_start);
            return Err(SafetensorsFault::Overlap { tensor, start, other, end });
        }
        if start > end {
            let (from, to) = (end - data_start, start - data_start);
            return Err(SafetensorsFault::Gap { tensor: tensor.name.clone(), from, to });
        }
        end = tensor.bytes.end;
        before = &tensor.name;
    }
    match end {
        end if end > len => Err(SafetensorsFault::Truncated { expected: end, found: len }),
        end if end < len => Err(SafetensorsFault::Trailing { expected: end, found: len, extra: len - end }),
        _ => Ok(tensors),
    }
}

fn check(name: String, entry: Entry, data_start: u64) -> Result<TensorInfo, SafetensorsFault> {
    let [start, end] = entry.data_offsets;
    let dtype: StrDeserializer<'_, ValueError> = StrDeserializer::new(&entry.dtype);
    let Ok(dtype) = safetensors::Dtype::deserialize(dtype) else {
        return Err(SafetensorsFault::UnknownDtype { tensor: name, dtype: entry.dtype });
    };
    if end < start {
        return Err(SafetensorsFault::Backwards { tensor: name, start, end });
    }
    let elem_bits = dtype.bitsize();
    let bits = entry.shape.iter().try_fold(elem_bits as u64, |bits, dim| bits.checked_mul(*dim));
    let shape: Option<Vec<usize>> = entry.shape.iter().map(|dim| usize::try_from(*dim).ok()).collect();
    // A zero dimension makes the product zero, but the other dimensions must not overflow either.
    let elems = entry.shape.iter().filter(|dim| **dim > 0).try_fold(1u64, |n, dim| n.checked_mul(*dim));
    let range = data_start.checked_add(start).zip(data_start.checked_add(end));
    let (Some(bits), Some(shape), Some(_), Some(range)) = (bits, shape, elems, range) else {
        return Err(SafetensorsFault::Overflow { tensor: name, shape: entry.shape });
    };
    let (needed, given) = (bits / 8, end - start);
    if bits % 8 != 0 {
        let (shape, dtype) = (entry.shape, entry.dtype);
        return Err(SafetensorsFault::PartByte { tensor: name, shape, dtype });
    }
    if needed != given {
        let (shape, dtype) = (entry.shape, entry.dtype);
        return Err(SafetensorsFault::Size { tensor: name, shape, dtype, needed, given });
    }
    let supported = [DType::F32, DType::BF16, DType::F16, DType::F64, DType::U32, DType::I16, DType::U8];
    let dtype = supported.into_iter().find(|dtype| dtype.safetensors_name() == entry.dtype);
    Ok(TensorInfo { name, dtype, dtype_name: entry.dtype, shape, bytes: range.0..range.1, elem_bits })
}
