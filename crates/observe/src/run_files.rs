//! Reads what runs have written: `run.json` and `metrics.jsonl`, also while a run is writing them, and of other versions.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use crate::error::ObserveError;
use crate::time::utc;

/// The most bytes to read at once.
const CHUNK_BYTES: u64 = 8 << 20;
/// Longer lines are not metrics.
const MAX_LINE_BYTES: usize = 1 << 20;

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
}

impl RunInfo {
    /// Writes `run.json` in `dir`, with the current time.
    pub fn write(&self, dir: &Path) -> Result<(), ObserveError> {
        let path = dir.join("run.json");
        let object = json!({
            "name": self.name, "started": utc(SystemTime::now()), "version": self.version, "config": self.config,
            "settings": self.settings, "ranks": self.ranks, "device": self.device, "total_steps": self.total_steps,
            "parameters": self.parameters, "planned_memory_bytes": self.planned_memory_bytes,
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
        })
    }
}

/// A line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq)]
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
    /// The beginning of a line whose end is not written yet.
    partial: Vec<u8>,
}

impl MetricsReader {
    /// The file need not exist yet.
    pub fn new(path: PathBuf) -> MetricsReader {
        MetricsReader { path, offset: 0, partial: Vec::new() }
    }

    /// The lines since the last call. `restarted`: the file was replaced or cut, as by a run that resumes, so these lines
    /// replace all earlier ones.
    pub fn read_new(&mut self) -> io::Result<NewLines> {
        let mut new = NewLines::default();
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.offset == 0 => return Ok(new),
            Err(error) => return Err(error),
        };
        if file.metadata()?.len() < self.offset {
            (self.offset, new.restarted) = (0, true);
            self.partial.clear();
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut chunk = Vec::new();
        while Read::by_ref(&mut file).take(CHUNK_BYTES).read_to_end(&mut chunk)? > 0 {
            self.offset += chunk.len() as u64;
            for piece in chunk.split_inclusive(|byte| *byte == b'\n') {
                if self.partial.len() < MAX_LINE_BYTES {
                    self.partial.extend_from_slice(piece);
                }
                if piece.ends_with(b"\n") {
                    new.lines.extend(MetricsLine::parse(&self.partial));
                    self.partial.clear();
                }
            }
            chunk.clear();
        }
        Ok(new)
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

    /// When metrics were last written.
    pub fn last_written(&self) -> Option<SystemTime> {
        fs::metadata(self.dir.join("metrics.jsonl")).and_then(|metadata| metadata.modified()).ok()
    }
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
