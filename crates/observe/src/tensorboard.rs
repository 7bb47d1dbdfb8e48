//! Writes TensorBoard event files: scalars, and texts such as the configuration.
//!
//! A file is a sequence of records: length, checksum of the length, an `Event` message, checksum of the message. The
//! messages are simple enough to encode as protobuf by hand. Each record is a single write, so that a killed run
//! leaves at most one incomplete record at the end, which readers skip. Every run opens its own file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::ObserveError;
use crate::protobuf::{Message, crc_table, crc32};
use crate::record::{EvalRecord, NamedMetric, StepRecord};

/// Writes an event file.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    file: File,
}

impl TensorBoard {
    /// Creates a new event file in `dir`. `resume_step` is the number of completed steps of a resumed run: readers
    /// then discard later steps of older files.
    pub fn open(dir: &Path, resume_step: Option<u64>) -> Result<Self, ObserveError> {
        let open = |path: &Path, source| ObserveError::Open { path: path.to_owned(), source };
        fs::create_dir_all(dir).map_err(|source| open(dir, source))?;
        let (path, file) = new_file(dir).map_err(|(path, source)| open(&path, source))?;
        let mut board = TensorBoard { path, file };
        board.push(&event(0).text(FILE_VERSION, "brain.Event:2"))?;
        if let Some(step) = resume_step {
            let start = Message::default().varint(SESSION_STATUS, SESSION_START);
            board.push(&event(step + 1).message(SESSION_LOG, &start))?;
        }
        Ok(board)
    }

    /// Writes a step, under the tags that Hugging Face uses.
    pub fn step(&mut self, record: &StepRecord) -> Result<(), ObserveError> {
        let scalars = record.scalars();
        self.scalars(record.step, &scalars)
    }

    /// Writes an evaluation.
    pub fn evaluation(&mut self, record: &EvalRecord) -> Result<(), ObserveError> {
        let scalars = record.scalars();
        self.scalars(record.step, &scalars)
    }

    /// Writes any scalars of a step.
    pub fn scalars(&mut self, step: u64, scalars: &[NamedMetric]) -> Result<(), ObserveError> {
        let mut summary = Message::default();
        for (tag, value) in scalars {
            let value = Message::default().text(TAG, tag).float(SIMPLE_VALUE, *value as f32);
            summary = summary.message(VALUE, &value);
        }
        self.push(&event(step).message(SUMMARY, &summary))
    }

    /// Writes a text, which TensorBoard shows as Markdown.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) -> Result<(), ObserveError> {
        let plugin = Message::default().text(PLUGIN_NAME, "text");
        let metadata = Message::default().message(PLUGIN_DATA, &plugin);
        let shape = Message::default().message(DIM, &Message::default().varint(DIM_SIZE, 1));
        let tensor = Message::default()
            .varint(DTYPE, DT_STRING)
            .message(TENSOR_SHAPE, &shape)
            .text(STRING_VALUE, text);
        let value = Message::default().text(TAG, tag).message(TENSOR, &tensor).message(METADATA, &metadata);
        self.push(&event(step).message(SUMMARY, &Message::default().message(VALUE, &value)))
    }

    /// Returns once everything written so far is on disk.
    pub fn sync(&mut self) -> Result<(), ObserveError> {
        self.file.sync_data().map_err(|source| self.cannot_write(source))
    }

    fn push(&mut self, message: &Message) -> Result<(), ObserveError> {
        let length = (message.0.len() as u64).to_le_bytes();
        let mut record = length.to_vec();
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(&message.0);
        record.extend(masked_crc(&message.0).to_le_bytes());
        self.file.write_all(&record).map_err(|source| self.cannot_write(source))
    }

    fn cannot_write(&self, source: io::Error) -> ObserveError {
        ObserveError::Write { path: self.path.clone(), source }
    }
}

/// Creates a file with a name that TensorBoard looks for, and that no other run uses.
fn new_file(dir: &Path) -> Result<(PathBuf, File), (PathBuf, io::Error)> {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    let host = if host.is_empty() || host.contains('/') { "localhost" } else { host };
    let seconds = now().as_secs();
    let mut number = 0;
    loop {
        let name = format!("events.out.tfevents.{seconds}.{host}.{}.{number}", std::process::id());
        let path = dir.join(name);
        match OpenOptions::new().append(true).create_new(true).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(e) => return Err((path, e)),
        }
    }
}

fn now() -> std::time::Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

// Fields of `Event`.
const WALL_TIME: u32 = 1;
const STEP: u32 = 2;
const FILE_VERSION: u32 = 3;
const SUMMARY: u32 = 5;
const SESSION_LOG: u32 = 7;
// Fields of `SessionLog`.
const SESSION_STATUS: u32 = 1;
const SESSION_START: u64 = 1;
// Fields of `Summary` and `Summary.Value`.
const VALUE: u32 = 1;
const TAG: u32 = 1;
const SIMPLE_VALUE: u32 = 2;
const TENSOR: u32 = 8;
const METADATA: u32 = 9;
// Fields of `TensorProto`, and its number for texts.
const DTYPE: u32 = 1;
const TENSOR_SHAPE: u32 = 2;
const STRING_VALUE: u32 = 8;
const DT_STRING: u64 = 7;
// Fields of `TensorShapeProto`, `SummaryMetadata` and `PluginData`.
const DIM: u32 = 2;
const DIM_SIZE: u32 = 1;
const PLUGIN_DATA: u32 = 1;
const PLUGIN_NAME: u32 = 1;

/// An `Event` with the current time.
fn event(step: u64) -> Message {
    Message::default().double(WALL_TIME, now().as_secs_f64()).varint(STEP, step)
}

/// The checksum of a record: a CRC-32C, masked by a rotation and an offset, because the CRC of data that contains its
/// own CRC is degenerate.
fn masked_crc(bytes: &[u8]) -> u32 {
    const CASTAGNOLI: [u32; 256] = crc_table(0x82f6_3b78);
    crc32(&CASTAGNOLI, 0, bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protobuf::tests::fields;
    use crate::record::tests::RECORD;

    /// CRC-32C computed bit by bit from its polynomial, independently of the table above.
    fn slow_masked_crc(bytes: &[u8]) -> u32 {
        let mut crc = u32::MAX;
        for byte in bytes {
            for bit in 0..8 {
                let out = (crc ^ u32::from(byte >> bit)) & 1;
                crc >>= 1;
                if out == 1 {
                    crc ^= 0x82f6_3b78;
                }
            }
        }
        let crc = !crc;
        crc.rotate_left(17).wrapping_add(0xa282_ead8)
    }

    /// The messages of a file. Checks the checksums of each record.
    fn messages(bytes: &[u8]) -> Vec<Vec<u8>> {
        let (mut at, mut found) = (0, Vec::new());
        while at < bytes.len() {
            let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
            let crc = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            assert_eq!(crc(at + 8), slow_masked_crc(&bytes[at..at + 8]));
            let message = &bytes[at + 12..at + 12 + length];
            assert_eq!(crc(at + 12 + length), slow_masked_crc(message));
            found.push(message.to_vec());
            at += 16 + length;
        }
        found
    }

    fn scalars(message: &[u8]) -> Vec<(u64, String, f32)> {
        let event = fields(message);
        let step = event.iter().find(|(field, _)| *field == 2).map(|(_, v)| v.clone()).unwrap();
        let step = u64::from_le_bytes(step.try_into().unwrap());
        let summary = event.iter().filter(|(field, _)| *field == 5).flat_map(|(_, v)| fields(v));
        summary
            .map(|(_, value)| {
                let value = fields(&value);
                let tag = String::from_utf8(value[0].1.clone()).unwrap();
                (step, tag, f32::from_le_bytes(value[1].1.clone().try_into().unwrap()))
            })
            .collect()
    }

    fn only_file(dir: &Path) -> Vec<u8> {
        let mut entries = fs::read_dir(dir).unwrap();
        let path = entries.next().unwrap().unwrap().path();
        assert!(entries.next().is_none());
        assert!(path.file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents."));
        fs::read(path).unwrap()
    }

    #[test]
    fn records_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::open(dir.path(), None).unwrap();
        board
            .step(&StepRecord {
                step: 300,
                loss_scale: Some(65536.0),
                others: vec![("entropy".into(), 0.5)],
                ..RECORD
            })
            .unwrap();
        board
            .evaluation(&EvalRecord {
                step: 300,
                loss: Some(0.0),
                tokens: Some(9),
                seconds: 2.0,
                ..EvalRecord::default()
            })
            .unwrap();
        board.sync().unwrap();
        let found = messages(&only_file(dir.path()));
        assert_eq!(found.len(), 3);
        assert_eq!(fields(&found[0])[2], (3, b"brain.Event:2".to_vec()));
        let train: Vec<_> = scalars(&found[1]);
        let expected = [
            ("train/loss", 3.456789f32),
            ("train/learning_rate", 3e-4),
            ("train/grad_norm", 1.234),
            ("train/tokens_per_second", 2345.4),
            ("train/epoch", 0.25),
            ("train/loss_scale", 65536.0),
            ("train/entropy", 0.5),
        ];
        assert_eq!(train, expected.map(|(tag, value)| (300, tag.to_string(), value)));
        assert_eq!(
            scalars(&found[2])[..2],
            [(300, "eval/loss".to_string(), 0.0), (300, "eval/perplexity".to_string(), 1.0)]
        );
    }

    #[test]
    fn a_resumed_run_writes_its_own_file() {
        let dir = tempfile::tempdir().unwrap();
        drop(TensorBoard::open(dir.path(), None).unwrap());
        drop(TensorBoard::open(dir.path(), Some(7)).unwrap());
        let mut files: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path()).collect();
        files.sort();
        assert_eq!(files.len(), 2);
        let found = messages(&fs::read(&files[1]).unwrap());
        let start = fields(&found[1]);
        assert_eq!(start[1], (2, 8u64.to_le_bytes().to_vec()));
        assert_eq!(start[2], (7, vec![8, 1]));
    }

    #[test]
    fn a_file_in_place_of_the_folder_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("runs"), "").unwrap();
        let error = TensorBoard::open(&dir.path().join("runs"), None).unwrap_err();
        assert!(error.to_string().starts_with("cannot open "), "{error}");
    }
}
