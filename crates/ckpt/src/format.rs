//! The manifest's format on disk. Only the types in this file are serialized. A change that older programs could not
//! read gets a new version and a new module.
//!
//! The file consists of a frame around a body. The frame holds a hash of the body's bytes, so that a changed counter
//! is detected like a changed weight. The whole file is still plain JSON.

use crate::ManifestFault;

/// The version that is written. Version 1 can still be read.
pub(crate) const VERSION: u64 = 2;

const OPEN: &str = "{\n\"blake3\": \"";
const MIDDLE: &str = "\",\n\"manifest\": ";
const CLOSE: &str = "\n}\n";

/// Puts a frame around `body`.
pub(crate) fn frame(body: &str) -> String {
    let hash = blake3::hash(body.as_bytes()).to_hex();
    format!("{OPEN}{hash}{MIDDLE}{body}{CLOSE}")
}

/// Returns the body of a frame, after verifying its hash.
pub(crate) fn unframe(text: &str) -> Result<&str, ManifestFault> {
    let inside = text.strip_prefix(OPEN).and_then(|t| t.strip_suffix(CLOSE)).ok_or(ManifestFault::Frame)?;
    let (expected, body) = inside.split_once(MIDDLE).ok_or(ManifestFault::Frame)?;
    let found = blake3::hash(body.as_bytes()).to_hex().to_string();
    if expected == found {
        return Ok(body);
    }
    // The expected hash is shown to the user, so report it only if it looks like a hash.
    if expected.len() != found.len() || !expected.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(ManifestFault::Frame);
    }
    Err(ManifestFault::Hash { expected: expected.into(), found })
}

/// The version, which is read before the rest of the body.
#[derive(serde::Deserialize)]
pub(crate) struct Version {
    pub(crate) format: u64,
}

pub(crate) mod v1 {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Serialize};

    /// Never written, only read.
    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(crate) struct Manifest {
        #[serde(rename = "format")]
        pub(crate) _format: u64,
        pub(crate) step: u64,
        pub(crate) world: u32,
        pub(crate) files: Vec<File>,
        pub(crate) tensors: BTreeMap<String, Tensor>,
        pub(crate) counters: BTreeMap<String, u64>,
        pub(crate) reals: BTreeMap<String, Real>,
        pub(crate) data: Cursor,
        pub(crate) config_hash: String,
        pub(crate) tokenizer_hash: String,
        pub(crate) run_config: String,
    }

    #[derive(Debug, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(crate) struct File {
        pub(crate) name: String,
        pub(crate) bytes: u64,
        pub(crate) blake3: String,
    }

    #[derive(Debug, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(crate) struct Tensor {
        pub(crate) shape: Vec<usize>,
        pub(crate) pieces: Vec<Piece>,
    }

    #[derive(Debug, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(crate) struct Piece {
        pub(crate) file: String,
        pub(crate) tensor: String,
        pub(crate) start: Vec<usize>,
        pub(crate) extent: Vec<usize>,
    }

    /// A float as its bits, because decimal text may lose the last bit. `shown` is for human readers.
    #[derive(Debug, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(crate) struct Real {
        pub(crate) bits: u64,
        pub(crate) shown: String,
    }

    #[derive(Debug, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(crate) struct Cursor {
        pub(crate) seed: u64,
        pub(crate) next_step: u64,
        pub(crate) rows_per_step: u64,
        pub(crate) num_rows: u64,
        pub(crate) fingerprint: String,
    }
}

/// Version 1 plus the fingerprint of numbers and the settings.
pub(crate) mod v2 {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Serialize};

    use super::v1::{self, Cursor, File, Real, Tensor};

    #[derive(Debug, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(crate) struct Manifest {
        pub(crate) format: u64,
        pub(crate) step: u64,
        pub(crate) world: u32,
        pub(crate) files: Vec<File>,
        pub(crate) tensors: BTreeMap<String, Tensor>,
        pub(crate) counters: BTreeMap<String, u64>,
        pub(crate) reals: BTreeMap<String, Real>,
        pub(crate) data: Cursor,
        pub(crate) config_hash: String,
        pub(crate) tokenizer_hash: String,
        pub(crate) run_config: String,
        pub(crate) numbers: Numbers,
        pub(crate) settings: BTreeMap<String, String>,
    }

    #[derive(Debug, Default, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(crate) struct Numbers {
        pub(crate) fingerprint: String,
        /// In the order in which they are hashed.
        pub(crate) fields: Vec<(String, String)>,
    }

    impl From<v1::Manifest> for Manifest {
        fn from(old: v1::Manifest) -> Manifest {
            Manifest {
                format: super::VERSION,
                step: old.step,
                world: old.world,
                files: old.files,
                tensors: old.tensors,
                counters: old.counters,
                reals: old.reals,
                data: old.data,
                config_hash: old.config_hash,
                tokenizer_hash: old.tokenizer_hash,
                run_config: old.run_config,
                numbers: Numbers::default(),
                settings: BTreeMap::new(),
            }
        }
    }
}
