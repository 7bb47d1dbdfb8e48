//! Reads what runs have written: `run.json` and `metrics.jsonl`, also while a run is writing them, and of other versions.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use crate::error::ObserveError;
use crate::history::History;
use crate::rank_status::RankStatus;
use crate::time::utc;

/// The most bytes to read at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// Longer lines are not metrics.
const MAX_LINE_BYTES: usize = 1 << 20;
/// The end of the log that is read for its newest lines.
const LOG_TAIL_BYTES: u64 = 64 << 10;
/// The end of the completions that is read for the newest ones.
const COMPLETIONS_TAIL_BYTES: u64 = 1 << 20;

/// What is known of a run when it starts. Fields that a file does not have are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunInfo {
    pub name: String,
    /// UTC, for example `2026-03-01T09:05:07.250Z`.
    pub started: String,
    pub version: String,
    /// The configuration as text, without secrets.
    pub config: String,
    /// The settings that differ from their defaults.
    pub settings: BTreeMap<String, String>,
    pub ranks: u64,
    pub device: String,
    pub total_steps: u64,
    pub parameters: u64,
    /// The planned memory of a rank, by kind, in bytes.
    pub planned_memory_bytes: BTreeMap<String, u64>,
    /// All settings, in the order of the reference page.
    pub all_settings: Vec<SettingRow>,
    /// The command line that repeats the run, without secrets.
    pub command: String,
}

/// A setting of a run: its value and where that came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SettingRow {
    pub key: String,
    pub value: String,
    pub origin: String,
}

impl RunInfo {
    /// Writes `run.json` in `dir`, with the current time.
    pub fn write(&self, dir: &Path) -> Result<(), ObserveError> {
        let path = dir.join("run.json");
        let row = |row: &SettingRow| json!({ "key": row.key, "value": row.value, "origin": row.origin });
        let all_settings: Vec<Value> = self.all_settings.iter().map(row).collect();
        let object = json!({
            "name": self.name, "started": utc(SystemTime::now()), "version": self.version, "config": self.config,
            "settings": self.settings, "ranks": self.ranks, "device": self.device, "total_steps": self.total_steps,
            "parameters": self.parameters, "planned_memory_bytes": self.planned_memory_bytes,
            "all_settings": all_settings, "command": self.command,
        });
        let partial = dir.join("run.json.partial");
        let written = fs::write(&partial, format!("{object:#}\n")).and_then(|()| fs::rename(&partial, &path));
        written.map_err(|source| ObserveError::Write { path, source })
    }

    fn parse(text: &str) -> Option<RunInfo> {
        let object: Map<String, Value> = serde_json::from_str(text).ok()?;
        let text = |key: &str| object.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let number = |key: &str| object.get(key).and_then(Value::as_u64).unwrap_or_default();
        let entries = |key: &str| object.get(key).and_then(Value::as_object).into_iter().flatten();
        let rows = object.get("all_settings").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let part = |row: &Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
        let shown = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Some(RunInfo {
            name: text("name"),
            started: text("started"),
            version: text("version"),
            config: text("config"),
            settings: entries("settings").map(|(key, value)| (key.clone(), shown(value))).collect(),
            ranks: number("ranks"),
            device: text("device"),
            total_steps: number("total_steps"),
            parameters: number("parameters"),
            planned_memory_bytes: entries("planned_memory_bytes")
                .filter_map(|(key, value)| Some((key.clone(), value.as_u64()?)))
                .collect(),
            all_settings: rows
                .iter()
                .map(|row| SettingRow {
                    key: part(row, "key"),
                    value: part(row, "value"),
                    origin: part(row, "origin"),
                })
                .collect(),
            command: text("command"),
        })
    }
}

/// A line of `metrics.jsonl`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetricsLine {
    pub step: u64,
    pub evaluation: bool,
    /// All numbers but the step. Values that JSON does not have are numbers here.
    pub numbers: Vec<(String, f64)>,
    /// Lists of numbers, such as one for each rank.
    pub lists: Vec<(String, Vec<f64>)>,
}

impl MetricsLine {
    /// `None`: not a line of metrics, or an incomplete one.
    pub fn parse(line: &[u8]) -> Option<MetricsLine> {
        let object: Map<String, Value> = serde_json::from_slice(line).ok()?;
        let mut parsed = MetricsLine {
            step: object.get("step")?.as_u64()?,
            evaluation: object.contains_key("eval_seconds"),
            numbers: Vec::new(),
            lists: Vec::new(),
        };
        for (key, value) in object.iter().filter(|(key, _)| *key != "step") {
            match value {
                Value::Number(number) => parsed.numbers.extend(number.as_f64().map(|n| (key.clone(), n))),
                Value::String(text) => {
                    let named =
                        key.strip_suffix("_text").filter(|key| object.get(*key) == Some(&Value::Null));
                    let number = named.and_then(|key| Some((key.to_owned(), text.parse::<f64>().ok()?)));
                    parsed.numbers.extend(number);
                }
                Value::Array(values) => {
                    let list: Option<Vec<f64>> = values.iter().map(Value::as_f64).collect();
                    parsed.lists.extend(list.map(|list| (key.clone(), list)));
                }
                Value::Bool(flag) => parsed.numbers.push((key.clone(), f64::from(u8::from(*flag)))),
                Value::Null | Value::Object(_) => {}
            }
        }
        Some(parsed)
    }

    pub fn get(&self, key: &str) -> Option<f64> {
        self.numbers.iter().find(|(name, _)| name == key).map(|(_, value)| *value)
    }
}

/// Reads the lines of `metrics.jsonl` as they are written.
#[derive(Debug)]
pub struct MetricsReader {
    path: PathBuf,
    /// The bytes read so far.
    offset: u64,
    /// The device and inode of the file that they were read from: a run that resumes replaces it.
    file_id: Option<(u64, u64)>,
    /// The beginning of a line whose end is not written yet.
    partial: Vec<u8>,
}

/// What [`MetricsReader::read_each`] finds.
#[derive(Debug)]
pub enum MetricsEvent {
    /// The file was replaced or cut, as by a run that resumes: forget all earlier lines.
    Restarted,
    Line(MetricsLine),
}

impl MetricsReader {
    /// The file need not exist yet.
    pub fn new(path: PathBuf) -> MetricsReader {
        MetricsReader { path, offset: 0, file_id: None, partial: Vec::new() }
    }

    /// Reads of what exists now only about the last `bytes`, and everything that follows.
    pub fn of_newest(path: PathBuf, bytes: u64) -> MetricsReader {
        let metadata = fs::metadata(&path).ok();
        // The rest of a line that the offset cuts is not JSON, and so is ignored.
        let offset = metadata.as_ref().map_or(0, |metadata| metadata.len().saturating_sub(bytes));
        let file_id = metadata.map(|metadata| (metadata.dev(), metadata.ino()));
        MetricsReader { path, offset, file_id, partial: Vec::new() }
    }

    /// The lines since the last call. `restarted`: the file was replaced or cut, as by a run that resumes, so these lines
    /// replace all earlier ones.
    pub fn read_new(&mut self) -> io::Result<NewLines> {
        let mut new = NewLines::default();
        self.read_each(&mut |event| match event {
            MetricsEvent::Restarted => new.restarted = true,
            MetricsEvent::Line(line) => new.lines.push(line),
        })?;
        Ok(new)
    }

    /// Like [`MetricsReader::read_new`], but keeps no line: for long runs.
    pub fn read_each(&mut self, each: &mut dyn FnMut(MetricsEvent)) -> io::Result<()> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            // A run that starts anew moves the file away and creates another.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        let file_id = Some((metadata.dev(), metadata.ino()));
        if metadata.len() < self.offset || (self.offset > 0 && self.file_id != file_id) {
            self.offset = 0;
            self.partial.clear();
            each(MetricsEvent::Restarted);
        }
        self.file_id = file_id;
        file.seek(SeekFrom::Start(self.offset))?;
        let mut chunk = Vec::new();
        while Read::by_ref(&mut file).take(CHUNK_BYTES).read_to_end(&mut chunk)? > 0 {
            self.offset += chunk.len() as u64;
            for piece in chunk.split_inclusive(|byte| *byte == b'\n') {
                if self.partial.len() < MAX_LINE_BYTES {
                    self.partial.extend_from_slice(piece);
                }
                if piece.ends_with(b"\n") {
                    MetricsLine::parse(&self.partial)
                        .into_iter()
                        .for_each(|line| each(MetricsEvent::Line(line)));
                    self.partial.clear();
                }
            }
            chunk.clear();
        }
        Ok(())
    }
}

/// What [`MetricsReader::read_new`] has found.
#[derive(Debug, Default)]
pub struct NewLines {
    pub lines: Vec<MetricsLine>,
    pub restarted: bool,
}

/// The output folder of a run.
#[derive(Clone, Debug)]
pub struct RunFiles {
    dir: PathBuf,
}

impl RunFiles {
    /// `None`: no run has written metrics or its start there.
    pub fn open(dir: &Path) -> Option<RunFiles> {
        let is_run = dir.join("metrics.jsonl").is_file() || dir.join("run.json").is_file();
        is_run.then(|| RunFiles { dir: dir.to_path_buf() })
    }

    /// The runs below a folder, up to `depth` folders down, in the order of their paths.
    pub fn find(dir: &Path, depth: u32) -> Vec<RunFiles> {
        if let Some(run) = RunFiles::open(dir) {
            return vec![run];
        }
        let Some(deeper) = depth.checked_sub(1) else { return Vec::new() };
        let mut folders: Vec<PathBuf> = fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| entry.path())
            .collect();
        folders.sort();
        folders.iter().flat_map(|folder| RunFiles::find(folder, deeper)).collect()
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What is known of the start. Empty if the run was started by an older version.
    pub fn info(&self) -> RunInfo {
        let text = fs::read_to_string(self.dir.join("run.json")).unwrap_or_default();
        RunInfo::parse(&text).unwrap_or_default()
    }

    pub fn metrics(&self) -> MetricsReader {
        MetricsReader::new(self.dir.join("metrics.jsonl"))
    }

    /// Like [`RunFiles::metrics`], for the newest lines of a long file.
    pub fn newest_metrics(&self, bytes: u64) -> MetricsReader {
        MetricsReader::of_newest(self.dir.join("metrics.jsonl"), bytes)
    }

    /// All metrics so far, in bounded memory.
    pub fn history(&self) -> io::Result<History> {
        let mut history = History::default();
        self.metrics().read_each(&mut |event| match event {
            MetricsEvent::Restarted => history = History::default(),
            MetricsEvent::Line(line) => history.push(line),
        })?;
        Ok(history)
    }

    /// When metrics or the log were last written.
    pub fn last_written(&self) -> Option<SystemTime> {
        let written = |name| fs::metadata(self.dir.join(name)).and_then(|metadata| metadata.modified()).ok();
        ["metrics.jsonl", "logs/training.log"].into_iter().filter_map(written).max()
    }

    /// The newest lines of the log, oldest first.
    pub fn log_tail(&self, lines: usize) -> Vec<String> {
        let tail = tail(&self.dir.join("logs/training.log"), LOG_TAIL_BYTES).unwrap_or_default();
        let all: Vec<&str> = tail.lines().collect();
        all[all.len().saturating_sub(lines)..].iter().map(|line| (*line).to_owned()).collect()
    }

    /// What the ranks are doing, as far as they have written it.
    pub fn rank_status(&self, ranks: u64) -> Vec<RankStatus> {
        RankStatus::read_all(&self.dir, ranks)
    }

    /// The newest completions of a run that learns from rewards, oldest first.
    pub fn completions(&self, most: usize) -> Vec<Completion> {
        let tail = tail(&self.dir.join("completions.jsonl"), COMPLETIONS_TAIL_BYTES).unwrap_or_default();
        let mut newest: Vec<Completion> =
            tail.lines().rev().filter_map(Completion::parse).take(most).collect();
        newest.reverse();
        newest
    }
}

/// A line of `completions.jsonl`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    pub step: u64,
    pub prompt: String,
    pub completion: String,
    pub reward: Option<f64>,
}

impl Completion {
    fn parse(line: &str) -> Option<Completion> {
        let object: Value = serde_json::from_str(line).ok()?;
        let text = |key: &str| Some(object.get(key)?.as_str()?.to_owned());
        Some(Completion {
            step: object.get("step")?.as_u64()?,
            prompt: text("prompt")?,
            completion: text("completion")?,
            reward: object.get("reward").and_then(Value::as_f64),
        })
    }
}

/// The last bytes of a file as text, from the beginning of a line. The last line may be incomplete.
fn tail(path: &Path, most_bytes: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let start = len.saturating_sub(most_bytes);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(most_bytes).read_to_end(&mut bytes)?;
    let from = if start == 0 {
        0
    } else {
        bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |at| at + 1)
    };
    Ok(String::from_utf8_lossy(&bytes[from..]).into_owned())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::record::tests::RECORD;
    use crate::record::{EvalRecord, StepCost, StepRecord};

    #[test]
    fn lines_are_read_as_they_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut reader = MetricsReader::new(path.clone());
        assert!(reader.read_new().unwrap().lines.is_empty(), "the file does not exist yet");
        let mut file = File::create(&path).unwrap();
        let line = |step| StepRecord { step, ..RECORD }.json() + "\n";
        file.write_all(line(1).as_bytes()).unwrap();
        file.write_all(&line(2).as_bytes()[..20]).unwrap();
        let steps = |new: &NewLines| new.lines.iter().map(|line| line.step).collect::<Vec<_>>();
        assert_eq!(steps(&reader.read_new().unwrap()), [1]);
        assert!(reader.read_new().unwrap().lines.is_empty());
        file.write_all(&line(2).as_bytes()[20..]).unwrap();
        file.write_all(b"not json\n{\"step\":\"x\"}\n").unwrap();
        assert_eq!(steps(&reader.read_new().unwrap()), [2]);
        fs::write(&path, line(1)).unwrap();
        let new = reader.read_new().unwrap();
        assert!(new.restarted && steps(&new) == [1]);
        // A resumed run replaces the file, and may have appended more than was there before.
        fs::rename(&path, dir.path().join("old")).unwrap();
        assert!(reader.read_new().unwrap().lines.is_empty());
        fs::write(&path, line(1) + &line(2) + &line(3)).unwrap();
        let new = reader.read_new().unwrap();
        assert!(new.restarted && steps(&new) == [1, 2, 3]);
    }

    #[test]
    fn the_newest_lines_of_a_long_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let lines: String = (1..=9).map(|step| StepRecord { step, ..RECORD }.json() + "\n").collect();
        fs::write(&path, &lines).unwrap();
        let len = lines.len() as u64 / 9;
        let steps = |bytes| {
            let new = MetricsReader::of_newest(path.clone(), bytes).read_new().unwrap();
            assert!(!new.restarted);
            new.lines.iter().map(|line| line.step).collect::<Vec<_>>()
        };
        assert_eq!(steps(2 * len + 10), [8, 9]);
        assert_eq!(steps(1 << 20).len(), 9);
        let mut early = MetricsReader::of_newest(dir.path().join("later.jsonl"), 10);
        assert!(early.read_new().unwrap().lines.is_empty());
        fs::write(dir.path().join("later.jsonl"), &lines).unwrap();
        assert_eq!(early.read_new().unwrap().lines.len(), 9);
    }

    #[test]
    fn the_ends_of_the_log_and_of_completions_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let files = RunFiles { dir: dir.path().to_path_buf() };
        assert!(
            files.log_tail(3).is_empty() && files.completions(2).is_empty() && files.last_written().is_none()
        );
        fs::create_dir(dir.path().join("logs")).unwrap();
        let log: String = (0..20_000).map(|i| format!("line {i}\n")).collect();
        fs::write(dir.path().join("logs/training.log"), log).unwrap();
        assert_eq!(files.log_tail(2), ["line 19998", "line 19999"]);
        assert!(files.log_tail(100_000)[0].starts_with("line "), "the first line is whole");
        let one = |step| {
            json!({"step": step, "prompt": "1+1=", "completion": "<b>2", "reward": null}).to_string() + "\n"
        };
        fs::write(dir.path().join("completions.jsonl"), one(1) + &one(2) + &one(3) + "{\"step\"").unwrap();
        let read = files.completions(2);
        assert_eq!(read.iter().map(|completion| completion.step).collect::<Vec<_>>(), [2, 3]);
        assert_eq!((&*read[0].completion, read[0].reward), ("<b>2", None));
    }

    #[test]
    fn a_line_has_all_its_numbers() {
        let cost = StepCost { numbers: vec![("forward_seconds", 0.25)], rank_busy_seconds: vec![1.0, 2.0] };
        let record = StepRecord { loss: f64::NAN, skipped: true, cost, ..RECORD };
        let line = MetricsLine::parse(record.json().as_bytes()).unwrap();
        assert!(line.get("loss").unwrap().is_nan() && !line.evaluation);
        assert_eq!(line.get("forward_seconds"), Some(0.25));
        assert_eq!(line.get("skipped"), Some(1.0));
        assert_eq!(line.lists, [("rank_busy_seconds".to_string(), vec![1.0, 2.0])]);
        let record = EvalRecord { step: 3, loss: Some(1.0), seconds: 1.0, ..EvalRecord::default() };
        assert!(MetricsLine::parse(record.json().as_bytes()).unwrap().evaluation);
    }

    #[test]
    fn the_start_of_a_run_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        assert!(RunFiles::open(dir.path()).is_none());
        let info = RunInfo {
            name: "first".into(),
            config: "a: \"b\"\n".into(),
            settings: [("max_steps".to_string(), "3".to_string())].into(),
            ranks: 2,
            planned_memory_bytes: [("gradients".to_string(), 7)].into(),
            all_settings: vec![SettingRow {
                key: "seed".into(),
                value: "1".into(),
                origin: "default".into(),
            }],
            command: "lockstep train run.yaml".into(),
            ..RunInfo::default()
        };
        let run = dir.path().join("runs/first");
        fs::create_dir_all(&run).unwrap();
        info.write(&run).unwrap();
        let found = RunFiles::find(dir.path(), 2);
        assert_eq!(found.len(), 1);
        assert_eq!(RunInfo { started: String::new(), ..found[0].info() }, info);
        assert!(RunFiles::find(dir.path(), 1).is_empty());
        fs::write(run.join("run.json"), "{").unwrap();
        assert_eq!(found[0].info(), RunInfo::default());
    }
}
