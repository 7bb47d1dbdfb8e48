//! An offline run of wandb: a folder with the transaction log that `wandb sync` uploads. Nothing here uses the network.
//!
//! The log has LevelDB's framing: blocks of 32 KiB, in which a record is divided into fragments, each with a checksum, a
//! length and a type. The records are protobuf messages.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{Row, TrackedRun, Tracker, TrackerError};
use crate::error::ObserveError;
use crate::protobuf::{Message, crc_table, crc32};
use crate::record::NamedMetric;
use crate::time::compact_utc;

const BLOCK_BYTES: usize = 32 << 10;
const HEADER_BYTES: usize = 7;
/// The first bytes of the file: a name, a magic number and a version.
const FILE_HEADER: [u8; HEADER_BYTES] = [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0];
/// The oldest version of wandb that can read these records.
const MIN_CONSUMER: &str = "0.12.0";
const STEP: &str = "train/global_step";

/// The fields of wandb's messages.
mod field {
    pub(super) mod record {
        pub(in super::super) const NUM: u32 = 1;
        pub(in super::super) const HISTORY: u32 = 2;
        pub(in super::super) const SUMMARY: u32 = 3;
        pub(in super::super) const METRIC: u32 = 12;
        pub(in super::super) const RUN: u32 = 17;
        pub(in super::super) const EXIT: u32 = 18;
        pub(in super::super) const HEADER: u32 = 21;
    }
    pub(super) mod run {
        pub(in super::super) const ID: u32 = 1;
        pub(in super::super) const ENTITY: u32 = 2;
        pub(in super::super) const PROJECT: u32 = 3;
        pub(in super::super) const CONFIG: u32 = 4;
        pub(in super::super) const DISPLAY_NAME: u32 = 8;
        pub(in super::super) const STARTING_STEP: u32 = 14;
        pub(in super::super) const START_TIME: u32 = 17;
        pub(in super::super) const RESUMED: u32 = 18;
    }
    /// Of items of a configuration, of the history and of the summary.
    pub(super) const KEY: u32 = 1;
    pub(super) const NESTED_KEY: u32 = 2;
    pub(super) const VALUE_JSON: u32 = 16;
    /// The list in a configuration, a row of the history and a summary.
    pub(super) const ITEM: u32 = 1;
    pub(super) const HISTORY_STEP: u32 = 2;
    pub(super) const STEP_NUM: u32 = 1;
    pub(super) const VERSION_INFO: u32 = 1;
    pub(super) const PRODUCER: u32 = 1;
    pub(super) const MIN_CONSUMER: u32 = 2;
    pub(super) const SECONDS: u32 = 1;
    pub(super) const NANOS: u32 = 2;
    pub(super) const EXIT_CODE: u32 = 1;
    pub(super) const RUNTIME: u32 = 2;
    pub(super) const METRIC_NAME: u32 = 1;
    pub(super) const METRIC_GLOB: u32 = 2;
    pub(super) const METRIC_STEP: u32 = 4;
    pub(super) const METRIC_OPTIONS: u32 = 6;
    pub(super) const STEP_SYNC: u32 = 1;
}

/// Writes the transaction log of one run.
pub(crate) struct WandbFile {
    log: LogWriter<File>,
    path: PathBuf,
    started: SystemTime,
    /// The number of the last record.
    num: u64,
    /// A step and its metrics so far: those of an evaluation belong to the row of their step.
    pending: Option<(u64, SystemTime, Vec<NamedMetric>)>,
}

impl WandbFile {
    /// Creates the folder of an offline run in `wandb` in the run's folder. A resumed run has the id of the first one.
    pub(crate) fn open(
        run: &TrackedRun,
        project: &str,
        entity: Option<&str>,
    ) -> Result<WandbFile, ObserveError> {
        let root = run.dir.join("wandb");
        let failed = |source| ObserveError::Open { path: root.clone(), source };
        fs::create_dir_all(&root).map_err(failed)?;
        let started = SystemTime::now();
        let id = run_id(run, &root.join("run-id"), started).map_err(failed)?;
        let dir = root.join(format!("offline-run-{}-{id}", compact_utc(started)));
        fs::create_dir_all(dir.join("files")).map_err(failed)?;
        let path = dir.join(format!("run-{id}.wandb"));
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
        let log = LogWriter::new(file).map_err(failed)?;
        let mut wandb = WandbFile { log, path, started, num: 0, pending: None };
        wandb.begin(run, &id, (project, entity)).map_err(|source| wandb.cannot_write(source))?;
        Ok(wandb)
    }

    fn begin(
        &mut self,
        run: &TrackedRun,
        id: &str,
        (project, entity): (&str, Option<&str>),
    ) -> io::Result<()> {
        let version = Message::default()
            .text(field::PRODUCER, concat!("lockstep-", env!("CARGO_PKG_VERSION")))
            .text(field::MIN_CONSUMER, MIN_CONSUMER);
        self.record(field::record::HEADER, &Message::default().message(field::VERSION_INFO, &version))?;
        let mut config = Message::default().message(field::ITEM, &item(field::KEY, "_wandb", "{}"));
        for (name, value) in &run.settings {
            let value = serde_json::json!(value).to_string();
            config = config.message(field::ITEM, &item(field::KEY, name, &value));
        }
        let mut message = Message::default()
            .text(field::run::ID, id)
            .text(field::run::PROJECT, project)
            .message(field::run::CONFIG, &config)
            .text(field::run::DISPLAY_NAME, &run.name)
            .message(field::run::START_TIME, &timestamp(self.started));
        if let Some(entity) = entity {
            message = message.text(field::run::ENTITY, entity);
        }
        if let Some(step) = run.resume_step {
            message = message.varint(field::run::STARTING_STEP, step).varint(field::run::RESUMED, 1);
        }
        self.record(field::record::RUN, &message)?;
        // Charts have the step below them.
        self.record(field::record::METRIC, &Message::default().text(field::METRIC_NAME, STEP))?;
        let options = Message::default().varint(field::STEP_SYNC, 1);
        let all = Message::default()
            .text(field::METRIC_GLOB, "*")
            .text(field::METRIC_STEP, STEP)
            .message(field::METRIC_OPTIONS, &options);
        self.record(field::record::METRIC, &all)
    }

    fn record(&mut self, kind: u32, message: &Message) -> io::Result<()> {
        self.num += 1;
        self.log.push(&Message::default().varint(field::record::NUM, self.num).message(kind, message).0)
    }

    /// Writes the row of the last step, and the newest values.
    fn write_pending(&mut self) -> io::Result<()> {
        let Some((step, at, numbers)) = self.pending.take() else { return Ok(()) };
        let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let runtime = at.duration_since(self.started).unwrap_or_default().as_secs_f64();
        let own = [("_timestamp", seconds(at)), ("_runtime", runtime)];
        let mut values: Vec<(String, String)> =
            own.iter().map(|(name, value)| (name.to_string(), json(*value))).collect();
        values.extend([("_step".into(), step.to_string()), (STEP.into(), step.to_string())]);
        values.extend(numbers.iter().map(|(name, value)| (name.to_string(), json(*value))));
        let list = values.iter().fold(Message::default(), |list, (name, value)| {
            list.message(field::ITEM, &item(field::NESTED_KEY, name, value))
        });
        self.record(field::record::SUMMARY, &list)?;
        let num = Message::default().varint(field::STEP_NUM, step);
        self.record(field::record::HISTORY, &list.message(field::HISTORY_STEP, &num))
    }

    fn cannot_write(&self, source: io::Error) -> ObserveError {
        ObserveError::Write { path: self.path.clone(), source }
    }
}

impl Tracker for WandbFile {
    fn row(&mut self, row: &Row) -> Result<(), TrackerError> {
        if let Some((step, _, numbers)) = &mut self.pending
            && *step == row.step
        {
            numbers.extend(row.numbers.iter().cloned());
            return Ok(());
        }
        self.write_pending().map_err(|source| self.cannot_write(source))?;
        self.pending = Some((row.step, row.at, row.numbers.clone()));
        Ok(())
    }

    fn sync(&mut self) -> Result<(), TrackerError> {
        Ok(self.log.file.sync_data().map_err(|source| self.cannot_write(source))?)
    }

    fn finish(&mut self, completed: bool) -> Result<(), TrackerError> {
        let runtime = self.started.elapsed().unwrap_or_default().as_secs();
        let exit = Message::default()
            .varint(field::EXIT_CODE, u64::from(!completed))
            .varint(field::RUNTIME, runtime);
        let written = self.write_pending().and_then(|()| self.record(field::record::EXIT, &exit));
        Ok(written.map_err(|source| self.cannot_write(source))?)
    }
}

/// JSON as wandb reads it: with the numbers that JSON does not have.
fn json(value: f64) -> String {
    match value {
        _ if value.is_finite() => serde_json::json!(value).to_string(),
        _ if value.is_nan() => "NaN".into(),
        _ if value > 0.0 => "Infinity".into(),
        _ => "-Infinity".into(),
    }
}

fn item(key_field: u32, key: &str, value_json: &str) -> Message {
    Message::default().text(key_field, key).text(field::VALUE_JSON, value_json)
}

fn timestamp(time: SystemTime) -> Message {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Message::default()
        .varint(field::SECONDS, since.as_secs())
        .varint(field::NANOS, u64::from(since.subsec_nanos()))
}

/// The id of the run: eight characters, kept in a file for runs that resume it.
fn run_id(run: &TrackedRun, file: &std::path::Path, now: SystemTime) -> io::Result<String> {
    let is_id = |id: &String| id.len() == 8 && id.bytes().all(|b| b.is_ascii_alphanumeric());
    if run.resume_step.is_some()
        && let Some(id) = fs::read_to_string(file).ok().map(|id| id.trim().to_owned()).filter(is_id)
    {
        return Ok(id);
    }
    let nanos = now.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_nanos() as u64;
    let mut bits = nanos.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(std::process::id()) << 32;
    let mut id = String::new();
    for _ in 0..8 {
        id.push(char::from_digit((bits % 36) as u32, 36).expect("a digit below 36"));
        bits /= 36;
    }
    fs::write(file, &id)?;
    Ok(id)
}

/// Divides records into the fragments of a LevelDB log.
struct LogWriter<W> {
    file: W,
    /// The position in the current block.
    at: usize,
}

/// The types of fragments.
const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

impl<W: Write> LogWriter<W> {
    fn new(mut file: W) -> io::Result<LogWriter<W>> {
        file.write_all(&FILE_HEADER)?;
        Ok(LogWriter { file, at: FILE_HEADER.len() })
    }

    /// Writes a record at once, so that a killed run leaves at most one incomplete record at the end.
    fn push(&mut self, record: &[u8]) -> io::Result<()> {
        const IEEE: [u32; 256] = crc_table(0xedb8_8320);
        let mut out = Vec::with_capacity(record.len() + 2 * HEADER_BYTES);
        let (mut rest, mut is_first) = (record, true);
        loop {
            let left = BLOCK_BYTES - self.at;
            if left < HEADER_BYTES {
                out.resize(out.len() + left, 0);
                self.at = 0;
                continue;
            }
            let (part, after) = rest.split_at(rest.len().min(left - HEADER_BYTES));
            let kind = match (is_first, after.is_empty()) {
                (true, true) => FULL,
                (true, false) => FIRST,
                (false, true) => LAST,
                (false, false) => MIDDLE,
            };
            let crc = crc32(&IEEE, crc32(&IEEE, 0, &[kind]), part);
            out.extend(crc.to_le_bytes());
            out.extend((part.len() as u16).to_le_bytes());
            out.push(kind);
            out.extend(part);
            self.at = (self.at + HEADER_BYTES + part.len()) % BLOCK_BYTES;
            (rest, is_first) = (after, false);
            if rest.is_empty() {
                return self.file.write_all(&out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protobuf::tests::fields;
    use crate::trackers::tests::run;

    /// CRC-32 computed bit by bit, independently of the tables.
    fn slow_crc(bytes: impl Iterator<Item = u8>) -> u32 {
        let mut crc = u32::MAX;
        for byte in bytes {
            for bit in 0..8 {
                let out = (crc ^ u32::from(byte >> bit)) & 1;
                crc = crc >> 1 ^ if out == 1 { 0xedb8_8320 } else { 0 };
            }
        }
        !crc
    }

    /// The records of a log. Checks its framing.
    fn records(log: &[u8]) -> Vec<Vec<u8>> {
        assert_eq!(log[..7], FILE_HEADER);
        let (mut at, mut found, mut open) = (7, Vec::new(), None::<Vec<u8>>);
        while at < log.len() {
            let left = BLOCK_BYTES - at % BLOCK_BYTES;
            if left < HEADER_BYTES {
                assert!(log[at..at + left].iter().all(|byte| *byte == 0));
                at += left;
                continue;
            }
            let crc = u32::from_le_bytes(log[at..at + 4].try_into().unwrap());
            let length = usize::from(u16::from_le_bytes(log[at + 4..at + 6].try_into().unwrap()));
            let (kind, body) = (log[at + 6], &log[at + 7..at + 7 + length]);
            assert_eq!(crc, slow_crc(std::iter::once(kind).chain(body.iter().copied())));
            assert_eq!(open.is_none(), kind == FULL || kind == FIRST, "fragments follow each other");
            open.get_or_insert_default().extend_from_slice(body);
            if kind == FULL || kind == LAST {
                found.extend(open.take());
            }
            at += HEADER_BYTES + length;
            assert!(at.is_multiple_of(BLOCK_BYTES) || length < BLOCK_BYTES);
        }
        found
    }

    #[test]
    fn a_log_begins_as_wandb_writes_it() {
        // The first bytes of an offline run that wandb 0.31 has written: the header of the file and the first record.
        let recorded = "3a572642e1be00f0e96de44d00010801c20c0a0a086b74616a73777938aa013b0a390a2f302e33312e30\
             2b3135663863626335383164316335636663366533316636386234386264643133636563326464326312\
             06302e37302e30";
        let byte = |i: usize| u8::from_str_radix(&recorded[i..i + 2], 16).unwrap();
        let recorded: Vec<u8> = (0..recorded.len()).step_by(2).map(byte).collect();
        let mut log = LogWriter::new(Vec::new()).unwrap();
        log.push(&recorded[2 * HEADER_BYTES..]).unwrap();
        assert_eq!(log.file, recorded);
    }

    #[test]
    fn records_of_all_sizes_read_back() {
        let mut log = LogWriter::new(Vec::new()).unwrap();
        let sizes = [1, 100, BLOCK_BYTES, 3 * BLOCK_BYTES + 5, 7, BLOCK_BYTES - 20, 1, 2, 3];
        let all: Vec<Vec<u8>> = sizes
            .iter()
            .enumerate()
            .map(|(i, len)| vec![i as u8 + 1; *len])
            .chain((0..9000).map(|i| vec![1; i % 11 + 1]))
            .collect();
        all.iter().for_each(|record| log.push(record).unwrap());
        assert_eq!(records(&log.file), all);
    }

    fn written(dir: &std::path::Path) -> Vec<(PathBuf, Vec<u8>)> {
        let runs = fs::read_dir(dir.join("wandb")).unwrap().map(|entry| entry.unwrap().path());
        let mut runs: Vec<PathBuf> = runs.filter(|path| path.is_dir()).collect();
        runs.sort();
        let log = |run: &PathBuf| {
            let mut files = fs::read_dir(run).unwrap().map(|entry| entry.unwrap().path());
            files.find(|path| path.extension().is_some_and(|e| e == "wandb")).unwrap()
        };
        runs.iter().map(|run| (run.clone(), fs::read(log(run)).unwrap())).collect()
    }

    #[test]
    fn a_run_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut wandb = WandbFile::open(&run(dir.path()), "lockstep", Some("team")).unwrap();
        let row = |step, numbers: &[(&'static str, f64)]| Row {
            step,
            at: SystemTime::now(),
            numbers: numbers.iter().map(|(name, value)| ((*name).into(), *value)).collect(),
        };
        wandb.row(&row(1, &[("train/loss", 2.5)])).unwrap();
        wandb.row(&row(1, &[("eval/loss", f64::NAN)])).unwrap();
        wandb.row(&row(2, &[("train/loss", 2.0)])).unwrap();
        wandb.finish(true).unwrap();
        let all = written(dir.path());
        let name = all[0].0.file_name().unwrap().to_str().unwrap();
        assert!(
            name.starts_with("offline-run-20") && name.len() == "offline-run-20260101_000000-abcdefgh".len()
        );
        let found: Vec<Vec<(u32, Vec<u8>)>> =
            records(&all[0].1).iter().map(|record| fields(record)).collect();
        let kinds: Vec<u32> = found.iter().map(|fields| fields[1].0).collect();
        use field::record::*;
        assert_eq!(kinds, [HEADER, RUN, METRIC, METRIC, SUMMARY, HISTORY, SUMMARY, HISTORY, EXIT]);
        for (i, fields) in found.iter().enumerate() {
            assert_eq!(fields[0], (NUM, (i as u64 + 1).to_le_bytes().to_vec()));
        }
        let history = fields(&found[5][1].1);
        let items: Vec<String> = history
            .iter()
            .filter(|(number, _)| *number == field::ITEM)
            .map(|(_, item)| {
                fields(item)
                    .iter()
                    .map(|(_, v)| String::from_utf8(v.clone()).unwrap())
                    .collect::<Vec<_>>()
                    .join("=")
            })
            .collect();
        assert_eq!(items[2..], ["_step=1", "train/global_step=1", "train/loss=2.5", "eval/loss=NaN"]);
        assert_eq!(history.last().unwrap().0, field::HISTORY_STEP);
    }

    #[test]
    fn a_resumed_run_has_the_same_id() {
        let dir = tempfile::tempdir().unwrap();
        let id = |resume_step| {
            let file =
                WandbFile::open(&TrackedRun { resume_step, ..run(dir.path()) }, "lockstep", None).unwrap();
            file.path.file_name().unwrap().to_owned()
        };
        let first = id(None);
        assert_eq!(id(Some(1)), first);
        assert_ne!(id(None), first);
    }
}
