//! The contents of a manifest, and its conversion to and from the format on disk.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_core::{Bytes, Step};

use crate::durable::{is_model_file_name, is_plain_name};
use crate::format::{self, v1, v2};
use crate::{ManifestFault, TensorBox, geometry};

pub(crate) const MANIFEST: &str = "manifest.json";
/// Limits how much a damaged or hostile manifest can make us read. Enough for about seven million pieces: ten
/// thousand ranks that shard a hundred units with three states each.
pub(crate) const MANIFEST_CAP: Bytes = Bytes(1 << 30);
/// Manifests with at most this many pieces are indented for readability; larger ones are compact, in a third of the
/// space.
const MAX_PRETTY_PIECES: usize = 10_000;

/// Everything that a run needs to resume, besides its tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Meta {
    /// The number of completed steps, which is the index of the next one.
    pub step: Step,
    /// The number of ranks that wrote the checkpoint. Any number of ranks can read it.
    pub world: u32,
    /// Exact counts by name, such as tokens seen and Adam's t.
    pub counters: BTreeMap<String, u64>,
    /// Real numbers by name, stored bit for bit, such as the best metric and the loss scale.
    pub reals: BTreeMap<String, f64>,
    pub data: DataCursor,
    pub config_hash: String,
    pub tokenizer_hash: String,
    /// The run's configuration, as text.
    pub run_config: String,
    /// What determined the bits of the run's results.
    pub numbers: NumbersRecord,
    /// The run's settings by key. Empty in checkpoints of format version 1.
    pub settings: BTreeMap<String, String>,
}

/// The fingerprint of numbers of the run that wrote a checkpoint. Empty in checkpoints of format version 1.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumbersRecord {
    pub fingerprint: String,
    /// The names and values that the fingerprint is computed from.
    pub fields: Vec<(String, String)>,
}

/// The position of a run in its data. The order of rows is a function of seed and step, so these are enough; the
/// other fields let a resumed run check that it has the same data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataCursor {
    pub seed: u64,
    pub next_step: u64,
    pub rows_per_step: u64,
    pub num_rows: u64,
    /// A hash of the prepared data.
    pub fingerprint: String,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Manifest {
    pub(crate) meta: Meta,
    pub(crate) files: Vec<FileEntry>,
    pub(crate) tensors: BTreeMap<String, StoredTensor>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileEntry {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) blake3: String,
}

/// The shape of a tensor, and the pieces that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredTensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) file: String,
    pub(crate) tensor: String,
    pub(crate) part: TensorBox,
}

impl Manifest {
    /// The text of `manifest.json`.
    pub(crate) fn to_text(&self) -> String {
        let num_pieces: usize = self.tensors.values().map(|tensor| tensor.pieces.len()).sum();
        let body = match num_pieces {
            0..=MAX_PRETTY_PIECES => serde_json::to_string_pretty(&self.to_disk()),
            _ => serde_json::to_string(&self.to_disk()),
        };
        format::frame(&body.expect("a manifest can be serialized"))
    }

    /// Parses and validates `manifest.json`.
    pub(crate) fn from_text(text: &[u8]) -> Result<Self, ManifestFault> {
        let json = |e: serde_json::Error| ManifestFault::Json { why: e.to_string() };
        let text = std::str::from_utf8(text).map_err(|_| ManifestFault::Frame)?;
        let body = format::unframe(text)?;
        let version: format::Version = serde_json::from_str(body).map_err(json)?;
        let manifest = Self::from_disk(match version.format {
            1 => serde_json::from_str::<v1::Manifest>(body).map_err(json)?.into(),
            format::VERSION => serde_json::from_str(body).map_err(json)?,
            found => return Err(ManifestFault::Version { found, known: format::VERSION }),
        });
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), ManifestFault> {
        let mut names = BTreeSet::new();
        let mut with_tensors = BTreeSet::new();
        for file in &self.files {
            let fresh = names.insert(file.name.as_str());
            let weights = file.name.ends_with(".safetensors");
            let named = if weights { is_plain_name(&file.name) } else { is_model_file_name(&file.name) };
            if !fresh || !named || file.name == MANIFEST {
                return Err(ManifestFault::File { name: file.name.clone() });
            }
            if file.has_tensors() {
                with_tensors.insert(file.name.as_str());
            }
        }
        for (tensor, logical) in &self.tensors {
            let unlisted = logical.pieces.iter().find(|piece| !with_tensors.contains(piece.file.as_str()));
            if let Some(piece) = unlisted {
                return Err(ManifestFault::UnlistedFile { tensor: tensor.clone(), file: piece.file.clone() });
            }
            let boxes: Vec<&TensorBox> = logical.pieces.iter().map(|piece| &piece.part).collect();
            if !geometry::tiles(&boxes, &logical.shape) {
                return Err(ManifestFault::Pieces { tensor: tensor.clone(), shape: logical.shape.clone() });
            }
        }
        Ok(())
    }

    fn to_disk(&self) -> v2::Manifest {
        let Meta { step, world, counters, reals, data, .. } = &self.meta;
        let Meta { config_hash, tokenizer_hash, run_config, numbers, settings, .. } = &self.meta;
        let real = |x: f64| v1::Real { bits: x.to_bits(), shown: x.to_string() };
        v2::Manifest {
            format: format::VERSION,
            step: step.0,
            world: *world,
            files: self.files.iter().map(FileEntry::to_disk).collect(),
            tensors: self.tensors.iter().map(|(name, t)| (name.clone(), t.to_disk())).collect(),
            counters: counters.clone(),
            reals: reals.iter().map(|(name, x)| (name.clone(), real(*x))).collect(),
            data: v1::Cursor {
                seed: data.seed,
                next_step: data.next_step,
                rows_per_step: data.rows_per_step,
                num_rows: data.num_rows,
                fingerprint: data.fingerprint.clone(),
            },
            config_hash: config_hash.clone(),
            tokenizer_hash: tokenizer_hash.clone(),
            run_config: run_config.clone(),
            numbers: v2::Numbers { fingerprint: numbers.fingerprint.clone(), fields: numbers.fields.clone() },
            settings: settings.clone(),
        }
    }

    fn from_disk(disk: v2::Manifest) -> Self {
        let v2::Numbers { fingerprint: numbers_hash, fields } = disk.numbers;
        let v1::Cursor { seed, next_step, rows_per_step, num_rows, fingerprint } = disk.data;
        Manifest {
            meta: Meta {
                step: Step(disk.step),
                world: disk.world,
                counters: disk.counters,
                reals: disk.reals.into_iter().map(|(name, x)| (name, f64::from_bits(x.bits))).collect(),
                data: DataCursor { seed, next_step, rows_per_step, num_rows, fingerprint },
                config_hash: disk.config_hash,
                tokenizer_hash: disk.tokenizer_hash,
                run_config: disk.run_config,
                numbers: NumbersRecord { fingerprint: numbers_hash, fields },
                settings: disk.settings,
            },
            files: disk.files.into_iter().map(FileEntry::from_disk).collect(),
            tensors: disk.tensors.into_iter().map(|(name, t)| (name, StoredTensor::from_disk(t))).collect(),
        }
    }
}

impl FileEntry {
    /// Whether the file holds tensors. All other files belong to the model folder that can be exported from the
    /// checkpoint.
    pub(crate) fn has_tensors(&self) -> bool {
        self.name.ends_with(".safetensors")
    }

    pub(crate) fn to_disk(&self) -> v1::File {
        v1::File { name: self.name.clone(), bytes: self.bytes, blake3: self.blake3.clone() }
    }

    pub(crate) fn from_disk(f: v1::File) -> FileEntry {
        FileEntry { name: f.name, bytes: f.bytes, blake3: f.blake3 }
    }
}

impl StoredTensor {
    pub(crate) fn to_disk(&self) -> v1::Tensor {
        let piece = |p: &Piece| v1::Piece {
            file: p.file.clone(),
            tensor: p.tensor.clone(),
            start: p.part.start.clone(),
            extent: p.part.extent.clone(),
        };
        v1::Tensor { shape: self.shape.clone(), pieces: self.pieces.iter().map(piece).collect() }
    }

    pub(crate) fn from_disk(t: v1::Tensor) -> StoredTensor {
        let piece = |p: v1::Piece| Piece {
            file: p.file,
            tensor: p.tensor,
            part: TensorBox { start: p.start, extent: p.extent },
        };
        StoredTensor { shape: t.shape, pieces: t.pieces.into_iter().map(piece).collect() }
    }
}
