//! Hostile files. Each must be refused with a message, without a panic and without using much memory.

use std::fs;
use std::path::Path;

use insta::assert_snapshot;
use lockstep_ckpt::{CkptError, SafetensorsFile};
use lockstep_core::{Fault, FaultClass};
use proptest::prelude::*;

/// A file with this header and this many bytes of data.
fn file(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 1);
    bytes
}

fn tensor(name: &str, dtype: &str, shape: &str, from: u64, to: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}"#)
}

fn one(dtype: &str, shape: &str, from: u64, to: u64) -> String {
    format!("{{{}}}", tensor("w", dtype, shape, from, to))
}

fn two(a: String, b: String) -> String {
    format!("{{{a},{b}}}")
}

/// The kind and content of every hostile file.
fn corpus() -> Vec<(&'static str, Vec<u8>)> {
    let good = one("F32", "[2]", 0, 8);
    let huge_dims = format!("[{}]", vec!["1"; 100_000].join(","));
    let nested = format!("{{\"w\":{}1{}}}", "[".repeat(50_000), "]".repeat(50_000));
    let a = |from, to| tensor("a", "F32", "[2]", from, to);
    let b = |from, to| tensor("b", "F32", "[2]", from, to);
    let mut huge_length = file(&good, 8);
    huge_length[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut beyond_cap = file(&good, 8);
    beyond_cap[..8].copy_from_slice(&100_000_001u64.to_le_bytes());
    let mut beyond_file = file(&good, 8);
    beyond_file[..8].copy_from_slice(&1000u64.to_le_bytes());
    let not_utf8 = file(&good, 8).iter().map(|b| if *b == b'w' { 0xFF } else { *b }).collect();
    vec![
        ("empty file", vec![]),
        ("truncated length", vec![1, 0, 0]),
        ("no header", 0u64.to_le_bytes().to_vec()),
        ("huge header length", huge_length),
        ("header above the cap", beyond_cap),
        ("header beyond the file", beyond_file),
        ("truncated header", file(&good, 0)[..30].to_vec()),
        ("truncated data", file(&good, 7)),
        ("trailing data", file(&good, 9)),
        ("not UTF-8", not_utf8),
        ("not JSON", file("{not json}", 0)),
        ("not an object", file("[1,2,3]", 0)),
        ("leading space", file(&format!(" {good}"), 8)),
        ("two objects", file("{}{}", 0)),
        ("deep nesting", file(&nested, 0)),
        ("duplicate names", file(&two(a(0, 8), a(8, 16)), 16)),
        (
            "duplicate fields",
            file(r#"{"w":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}"#, 8),
        ),
        ("missing field", file(r#"{"w":{"dtype":"F32","shape":[2]}}"#, 8)),
        ("overlapping offsets", file(&two(a(0, 8), b(4, 12)), 12)),
        ("same offsets", file(&two(a(0, 8), b(0, 8)), 8)),
        ("gap", file(&two(a(0, 8), b(12, 20)), 20)),
        ("gap at the start", file(&one("F32", "[2]", 8, 16), 16)),
        ("backwards offsets", file(&one("F32", "[2]", 8, 0), 8)),
        ("offsets beyond the file", file(&one("F32", "[1000]", 0, 4000), 8)),
        ("offsets beyond addressing", file(&one("U8", "[0]", u64::MAX, u64::MAX), 0)),
        ("three offsets", file(r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8,16]}}"#, 8)),
        ("negative shape", file(&one("F32", "[-1]", 0, 8), 8)),
        ("fractional shape", file(&one("F32", "[1.5]", 0, 8), 8)),
        ("shape beyond u64", file(&one("F32", "[99999999999999999999]", 0, 8), 8)),
        ("shape overflow", file(&one("F32", "[4294967296,4294967296,4294967296]", 0, 8), 8)),
        ("overflow hidden by a zero", file(&one("F32", "[0,4294967296,4294967296,4294967296]", 0, 0), 0)),
        ("too many dimensions", file(&one("F32", &huge_dims, 0, 4), 4)),
        ("shape against size", file(&one("F32", "[3]", 0, 8), 8)),
        ("half a byte", file(&one("F4", "[3]", 0, 2), 2)),
        ("unknown dtype", file(&one("F33", "[2]", 0, 8), 8)),
        ("dtype in lower case", file(&one("f32", "[2]", 0, 8), 8)),
        ("metadata that is not text", file(r#"{"__metadata__":{"format":1}}"#, 0)),
        ("a pickle", b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00c\x05posix\x06system.....".to_vec()),
        ("a zip", b"PK\x03\x04\x00\x00\x08\x08archive/data.pkl".to_vec()),
        ("a git-lfs pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n".to_vec()),
    ]
}

fn open(path: &Path, bytes: &[u8]) -> Result<SafetensorsFile, CkptError> {
    fs::write(path, bytes).unwrap();
    SafetensorsFile::open(path)
}

#[test]
fn every_hostile_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let mut messages = String::new();
    for (kind, bytes) in corpus() {
        let error = open(&path, &bytes).err().unwrap_or_else(|| panic!("accepted: {kind}"));
        assert_eq!(error.class(), FaultClass::BadData, "{kind}");
        let CkptError::Safetensors { fault, .. } = error else { panic!("{kind}: {error}") };
        messages.push_str(&format!("{kind}: {fault}\n"));
    }
    assert_snapshot!(messages, @r"
    empty file: truncated: expected 8 bytes, found 0
    truncated length: truncated: expected 8 bytes, found 3
    no header: its header is invalid: it does not begin with `{`
    huge header length: its header claims 18446744073709551615 bytes, more than the 100000000 allowed
    header above the cap: its header claims 100000001 bytes, more than the 100000000 allowed
    header beyond the file: truncated: expected 1008 bytes, found 70
    truncated header: truncated: expected 62 bytes, found 30
    truncated data: truncated: expected 70 bytes, found 69
    trailing data: 1 bytes after the last tensor; expected 70 bytes, found 71
    not UTF-8: its header is invalid: invalid unicode code point at line 1 column 3
    not JSON: its header is invalid: key must be a string at line 1 column 2
    not an object: its header is invalid: it does not begin with `{`
    leading space: its header is invalid: it does not begin with `{`
    two objects: its header is invalid: trailing characters at line 1 column 3
    deep nesting: its header is invalid: tensor `w`: invalid type: sequence, expected a string at line 1 column 6
    duplicate names: tensor `a` is listed twice
    duplicate fields: its header is invalid: tensor `w`: duplicate field `dtype` at line 1 column 27
    missing field: its header is invalid: tensor `w`: missing field `data_offsets` at line 1 column 32
    overlapping offsets: tensor `b` starts at 4, inside `a`, which ends at 8
    same offsets: tensor `b` starts at 0, inside `a`, which ends at 8
    gap: bytes 8..12, before tensor `b`, belong to no tensor
    gap at the start: bytes 0..8, before tensor `w`, belong to no tensor
    backwards offsets: tensor `w` ends at 0, before its start at 8
    offsets beyond the file: truncated: expected 4068 bytes, found 76
    offsets beyond addressing: tensor `w` of shape [0] is too large to address
    three offsets: its header is invalid: tensor `w`: trailing characters at line 1 column 53
    negative shape: its header is invalid: tensor `w`: invalid value: integer `-1`, expected u64 at line 1 column 31
    fractional shape: its header is invalid: tensor `w`: invalid type: floating point `1.5`, expected u64 at line 1 column 32
    shape beyond u64: its header is invalid: tensor `w`: invalid type: floating point `1e+20`, expected u64 at line 1 column 49
    shape overflow: tensor `w` of shape [4294967296, 4294967296, 4294967296] is too large to address
    overflow hidden by a zero: tensor `w` of shape [0, 4294967296, 4294967296, 4294967296] is too large to address
    too many dimensions: its header is invalid: tensor `w`: invalid length 33, expected a list of at most 32 sizes at line 1 column 95
    shape against size: tensor `w` of shape [3] and dtype F32 needs 12 bytes, but its offsets span 8
    half a byte: tensor `w` of shape [3] and dtype F4 is not a whole number of bytes
    unknown dtype: tensor `w` has unknown dtype `F33`
    dtype in lower case: tensor `w` has unknown dtype `f32`
    metadata that is not text: its header is invalid: invalid type: integer `1`, expected a string at line 1 column 27
    a pickle: its header claims 278201472 bytes, more than the 100000000 allowed
    a zip: it is a zip archive, as torch.save writes
    a git-lfs pointer: it is a Git LFS pointer, not the file itself
    ");
}

#[test]
fn unusual_but_valid_files_are_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    for (kind, header, data) in [
        ("no tensors", "{}".to_string(), 0),
        ("padding", one("F32", "[2]", 0, 8) + "      ", 8),
        ("scalar", one("F32", "[]", 0, 4), 4),
        ("empty tensor", one("F32", "[0,7]", 0, 0), 0),
        ("empty beside full", two(tensor("b", "F32", "[2]", 0, 8), tensor("a", "F32", "[0]", 0, 0)), 8),
        ("a dtype we do not use", one("I64", "[1]", 0, 8), 8),
        ("metadata", r#"{"__metadata__":{"format":"pt"}}"#.to_string(), 0),
    ] {
        let bytes = file(&header, data);
        assert!(open(&path, &bytes).is_ok(), "{kind}");
        assert!(safetensors::SafeTensors::deserialize(&bytes).is_ok(), "{kind}");
    }
    let file = open(&path, &file(&one("I64", "[1]", 0, 8), 8)).unwrap();
    let info = file.tensors().next().unwrap();
    assert_eq!((info.dtype, info.dtype_name.as_str(), info.elems()), (None, "I64", 1));
    assert!(matches!(file.read_f32("w", 0..1, &mut [0.0]), Err(CkptError::DtypeUnreadable { .. })));
    file.read_into("w", 0..1, &mut [0; 8]).unwrap();
}

#[test]
fn pipes_folders_and_missing_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(SafetensorsFile::open(dir.path()), Err(CkptError::WrongKind { .. })));
    assert!(matches!(SafetensorsFile::open(&dir.path().join("no")), Err(CkptError::Missing { .. })));
    let pipe = dir.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert!(matches!(SafetensorsFile::open(&pipe), Err(CkptError::WrongKind { .. })));
}

#[test]
fn truncating_an_open_file_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let file = open(&path, &file(&one("F32", "[2]", 0, 8), 8)).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(20).unwrap();
    let error = file.read_f32("w", 0..2, &mut [0.0; 2]).unwrap_err();
    assert_eq!(error.class(), FaultClass::BadData);
}

proptest! {
    #[test]
    fn random_bytes_never_panic(
        header in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            "\\{(\"[ab]\":\\{\"dtype\":\"(F32|U8|X)\",\"shape\":\\[[0-9]{0,3}\\],\"data_offsets\":\\[[0-9],[0-9]{1,2}\\]\\},?){0,3}\\}"
                .prop_map(String::into_bytes),
        ],
        data in 0usize..40,
        honest in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let mut bytes = if honest { (header.len() as u64).to_le_bytes().to_vec() } else { vec![] };
        bytes.extend(header);
        bytes.resize(bytes.len() + data, 7);
        // We must not accept a file that the safetensors crate refuses.
        if let Ok(file) = open(&path, &bytes) {
            prop_assert!(safetensors::SafeTensors::deserialize(&bytes).is_ok());
            for tensor in file.tensors() {
                let mut out = vec![0; (tensor.bytes.end - tensor.bytes.start) as usize];
                file.read_into(&tensor.name, 0..tensor.elems(), &mut out).unwrap();
            }
        }
    }
}
