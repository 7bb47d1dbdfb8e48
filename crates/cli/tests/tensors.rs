//! Reads and writes safetensors files, to damage them.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

/// The tensors of a file, by name.
pub(crate) fn read(path: &Path) -> Vec<Tensor> {
    let file = fs::read(path).unwrap();
    let header_len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let (header, data) = file[8..].split_at(header_len);
    let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
    let mut tensors: Vec<Tensor> = header
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .map(|(name, info)| {
            let offset = |i: usize| info["data_offsets"][i].as_u64().unwrap() as usize;
            Tensor {
                name,
                dtype: info["dtype"].as_str().unwrap().into(),
                shape: info["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect(),
                bytes: data[offset(0)..offset(1)].to_vec(),
            }
        })
        .collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    tensors
}

pub(crate) fn write(path: &Path, tensors: &[Tensor]) {
    let mut header = Map::new();
    let mut data = Vec::new();
    for tensor in tensors {
        let start = data.len();
        data.extend_from_slice(&tensor.bytes);
        header.insert(
            tensor.name.clone(),
            json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()]}),
        );
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    fs::write(path, file).unwrap();
}

/// Reads a file, changes its tensors, and writes it back.
pub(crate) fn edit(path: &Path, change: impl FnOnce(&mut Vec<Tensor>)) {
    let mut tensors = read(path);
    change(&mut tensors);
    write(path, &tensors);
}

/// Flips one bit in the middle of a file.
pub(crate) fn flip_bit(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}
