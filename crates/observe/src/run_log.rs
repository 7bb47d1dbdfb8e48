//! The two log files of a run: `metrics.jsonl` and `logs/training.log`.
//!
//! Each line is a single write to a file opened for appending, so that a killed run leaves at most one incomplete
//! line, at the end, which is removed when the file is opened again. Resuming drops the steps that will be repeated,
//! so that `metrics.jsonl` has each step once. The log keeps them, as a history.
//!
//! The first line of `metrics.jsonl` also holds the fingerprint of numbers, under the keys `fingerprint` and
//! `numbers`. So does the first line after a resume that changes it. Every line is a step or an evaluation.
//!
//! Two things are left to others: the run's lock keeps two runs out of one folder, and the caller decides with
//! [`RunLog::sync`] when lines must be on disk, such as after a checkpoint.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::ObserveError;
use crate::record::{EvalRecord, StepRecord, log_lines};
use crate::time::utc;

/// Writes the metrics and the log of a run.
#[derive(Debug)]
pub struct RunLog {
    metrics: LineFile,
    log: LineFile,
    /// The last fingerprint in the metrics.
    last_fingerprint: Option<String>,
    /// Additional keys for the next line of the metrics, as JSON.
    pending_keys: Option<String>,
}

/// A file that lines are appended to.
#[derive(Debug)]
struct LineFile {
    path: PathBuf,
    file: File,
}

impl RunLog {
    /// Opens the files in `dir`, which is created if needed.
    ///
    /// `resume_step` is the number of completed steps of a resumed run: lines of later steps are dropped from
    /// `metrics.jsonl`. Without it the run is new, and the metrics of an older run are moved to
    /// `metrics.previous.jsonl`.
    pub fn open(dir: &Path, resume_step: Option<u64>) -> Result<Self, ObserveError> {
        let logs = dir.join("logs");
        fs::create_dir_all(&logs).map_err(|source| ObserveError::Open { path: logs.clone(), source })?;
        let path = dir.join("metrics.jsonl");
        let last_fingerprint = match resume_step {
            Some(step) => drop_after(&path, step)?,
            None => {
                set_aside(&path, &dir.join("metrics.previous.jsonl"))?;
                None
            }
        };
        let (metrics, log) = (LineFile::open(path)?, LineFile::open(logs.join("training.log"))?);
        Ok(RunLog { metrics, log, last_fingerprint, pending_keys: None })
    }

    /// Logs the fingerprint of numbers with its fields. They are also added to the next line of the metrics, unless
    /// the fingerprint is unchanged.
    pub fn fingerprint(&mut self, hash: &str, fields: &[(String, String)]) -> Result<(), ObserveError> {
        let all = fields.iter().map(|(name, value)| (name.clone(), value.clone().into()));
        let numbers = serde_json::Value::Object(all.collect());
        if self.last_fingerprint.as_deref() != Some(hash) {
            let keys = format!(",\"fingerprint\":{},\"numbers\":{numbers}}}", serde_json::json!(hash));
            self.pending_keys = Some(keys);
        }
        let fields: Vec<String> = fields.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        self.event(&format!("fingerprint {hash} | {}", fields.join(" | ")))
    }

    fn push_metrics(&mut self, mut json: String) -> Result<(), ObserveError> {
        if let Some(pending_keys) = self.pending_keys.take() {
            assert_eq!(json.pop(), Some('}'), "a line must be a JSON object");
            json.push_str(&pending_keys);
        }
        self.metrics.push(&json)
    }

    /// Writes a step to both files.
    pub fn step(&mut self, record: &StepRecord) -> Result<(), ObserveError> {
        self.push_metrics(record.json())?;
        self.log.push(&format!("{} {}", utc(SystemTime::now()), record.line(None)))
    }

    /// Writes an evaluation to both files.
    pub fn evaluation(&mut self, record: &EvalRecord) -> Result<(), ObserveError> {
        self.push_metrics(record.json())?;
        self.log.push(&format!("{} {}", utc(SystemTime::now()), record.line()))
    }

    /// Writes a message to the log, one line for each line of `text`.
    pub fn event(&mut self, text: &str) -> Result<(), ObserveError> {
        let now = utc(SystemTime::now());
        log_lines(text).try_for_each(|line| self.log.push(&format!("{now} {line}")))
    }

    /// Returns once everything written so far is on disk.
    pub fn sync(&mut self) -> Result<(), ObserveError> {
        self.metrics.sync()?;
        self.log.sync()
    }
}

impl LineFile {
    /// Opens a file for appending, and removes an incomplete last line.
    fn open(path: PathBuf) -> Result<Self, ObserveError> {
        let open = || -> io::Result<File> {
            let mut file = OpenOptions::new().create(true).read(true).append(true).open(&path)?;
            let complete = end_of_last_line(&mut file)?;
            if complete < file.metadata()?.len() {
                file.set_len(complete)?;
            }
            Ok(file)
        };
        match open() {
            Ok(file) => Ok(LineFile { path, file }),
            Err(source) => Err(ObserveError::Open { path, source }),
        }
    }

    fn push(&mut self, line: &str) -> Result<(), ObserveError> {
        let line = format!("{line}\n");
        self.file.write_all(line.as_bytes()).map_err(|source| self.cannot_write(source))
    }

    fn sync(&mut self) -> Result<(), ObserveError> {
        self.file.sync_data().map_err(|source| self.cannot_write(source))
    }

    fn cannot_write(&self, source: io::Error) -> ObserveError {
        ObserveError::Write { path: self.path.clone(), source }
    }
}

/// The length of `file` up to and including its last line break.
fn end_of_last_line(file: &mut File) -> io::Result<u64> {
    const CHUNK_BYTES: u64 = 64 * 1024;
    let mut end = file.metadata()?.len();
    while end > 0 {
        let start = end.saturating_sub(CHUNK_BYTES);
        file.seek(SeekFrom::Start(start))?;
        let mut chunk = Vec::new();
        Read::by_ref(file).take(end - start).read_to_end(&mut chunk)?;
        if let Some(at) = chunk.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

/// Moves the metrics of an older run away, if there are any.
fn set_aside(path: &Path, previous: &Path) -> Result<(), ObserveError> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.len() > 0 => fs::rename(path, previous)
            .map_err(|source| ObserveError::Write { path: previous.to_owned(), source }),
        _ => Ok(()),
    }
}

/// Rewrites the metrics without steps after `step`, without invalid lines, and with each step once. The file is
/// replaced atomically. Returns the last fingerprint in it.
fn drop_after(path: &Path, step: u64) -> Result<Option<String>, ObserveError> {
    let old = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(ObserveError::Read { path: path.to_owned(), source }),
    };
    let partial = path.with_extension("jsonl.partial");
    let rewrite = || -> io::Result<Option<String>> {
        let mut last_fingerprint = None;
        let mut out = BufWriter::new(File::create(&partial)?);
        let mut old = BufReader::new(old);
        let mut line = Vec::new();
        // An evaluation is a separate line, with the step after which it was made.
        let (mut next_step, mut next_evaluation) = (1, 0);
        while old.read_until(b'\n', &mut line)? > 0 {
            let complete = line.last() == Some(&b'\n');
            if let Some(MetricsLine { step: found, evaluation, fingerprint }) =
                parsed(&line).filter(|_| complete)
            {
                let next = if evaluation { &mut next_evaluation } else { &mut next_step };
                if (*next..=step).contains(&found) {
                    out.write_all(&line)?;
                    *next = found + 1;
                    last_fingerprint = fingerprint.or(last_fingerprint);
                }
            }
            line.clear();
        }
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        fs::rename(&partial, path)?;
        // Sync the rename too. Ignore errors, because not every system can sync a folder.
        if let Some(folder) = path.parent().and_then(|parent| File::open(parent).ok()) {
            let _ = folder.sync_all();
        }
        Ok(last_fingerprint)
    };
    rewrite().map_err(|source| {
        let _ = fs::remove_file(&partial);
        ObserveError::Write { path: path.to_owned(), source }
    })
}

/// The parts of a line that resuming needs.
struct MetricsLine {
    step: u64,
    evaluation: bool,
    fingerprint: Option<String>,
}

fn parsed(line: &[u8]) -> Option<MetricsLine> {
    let line: serde_json::Value = serde_json::from_slice(line).ok()?;
    let fingerprint = line.get("fingerprint").and_then(|text| text.as_str()).map(str::to_string);
    Some(MetricsLine {
        step: line.get("step")?.as_u64()?,
        evaluation: line.get("eval_seconds").is_some(),
        fingerprint,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::{RECORD, any_record, parsed as parsed_text};
    use proptest::prelude::*;

    fn record(step: u64) -> StepRecord {
        StepRecord { step, ..RECORD }
    }

    fn steps(dir: &Path) -> Vec<u64> {
        let text = fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
        text.lines().map(|line| super::parsed(line.as_bytes()).expect("a complete line").step).collect()
    }

    #[test]
    fn after_a_resume_each_step_occurs_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = RunLog::open(dir.path(), None).unwrap();
        (1..=5).for_each(|step| log.step(&record(step)).unwrap());
        drop(log);
        let mut log = RunLog::open(dir.path(), Some(3)).unwrap();
        assert_eq!(steps(dir.path()), [1, 2, 3]);
        log.event("resumed after step 3").unwrap();
        log.step(&record(4)).unwrap();
        log.sync().unwrap();
        assert_eq!(steps(dir.path()), [1, 2, 3, 4]);
        let text = fs::read_to_string(dir.path().join("logs/training.log")).unwrap();
        assert_eq!(text.lines().count(), 7);
        assert!(!dir.path().join("metrics.jsonl.partial").exists());
    }

    #[test]
    fn the_first_line_holds_the_fingerprint() {
        let dir = tempfile::tempdir().unwrap();
        let fields = [("storage", "f32"), ("device", "CPU")].map(|(name, value)| (name.into(), value.into()));
        // Resumed with the same fingerprint, with another one, and with the first one again.
        for (resumed, hash) in [(None, "a"), (Some(2), "a"), (Some(4), "b"), (Some(5), "a")] {
            let mut log = RunLog::open(dir.path(), resumed).unwrap();
            log.fingerprint(hash, &fields).unwrap();
            let first = resumed.unwrap_or(0) + 1;
            (first..first + 2).for_each(|step| log.step(&record(step)).unwrap());
        }
        assert_eq!(steps(dir.path()), [1, 2, 3, 4, 5, 6, 7]);
        let text = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let numbers = serde_json::json!({ "storage": "f32", "device": "CPU" });
        for (line, hash) in lines.iter().zip([Some("a"), None, None, None, Some("b"), Some("a"), None]) {
            assert_eq!(line.get("fingerprint").and_then(|text| text.as_str()), hash, "{line}");
            assert_eq!(line.get("numbers"), hash.map(|_| &numbers), "{line}");
        }
        let log = fs::read_to_string(dir.path().join("logs/training.log")).unwrap();
        assert!(log.contains("fingerprint b | storage: f32 | device: CPU\n"), "{log}");
    }

    #[test]
    fn evaluations_are_kept_with_their_steps() {
        let dir = tempfile::tempdir().unwrap();
        let evaluation = |step| EvalRecord {
            step,
            loss: Some(1.5),
            // Only supervised fine-tuning counts tokens.
            tokens: (step % 2 == 0).then_some(3),
            seconds: 0.1,
            ..EvalRecord::default()
        };
        let mut log = RunLog::open(dir.path(), None).unwrap();
        log.evaluation(&evaluation(0)).unwrap();
        for step in 1..=4 {
            log.step(&record(step)).unwrap();
            log.evaluation(&evaluation(step)).unwrap();
        }
        drop(log);
        drop(RunLog::open(dir.path(), Some(2)).unwrap());
        assert_eq!(steps(dir.path()), [0, 1, 1, 2, 2]);
    }

    #[test]
    fn an_incomplete_line_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = RunLog::open(dir.path(), None).unwrap();
        log.step(&record(1)).unwrap();
        drop(log);
        for (name, torn) in
            [("metrics.jsonl", "{\"step\":2,\"ep"), ("logs/training.log", "x step 2 | loss: ")]
        {
            let path = dir.path().join(name);
            let text = fs::read_to_string(&path).unwrap() + torn;
            fs::write(&path, text).unwrap();
        }
        let mut log = RunLog::open(dir.path(), Some(7)).unwrap();
        log.step(&record(2)).unwrap();
        assert_eq!(steps(dir.path()), [1, 2]);
        let text = fs::read_to_string(dir.path().join("logs/training.log")).unwrap();
        assert!(text.lines().all(|line| parsed_text(line).is_some()), "{text}");
    }

    #[test]
    fn a_new_run_moves_old_metrics_away() {
        let dir = tempfile::tempdir().unwrap();
        RunLog::open(dir.path(), None).unwrap().step(&record(1)).unwrap();
        RunLog::open(dir.path(), None).unwrap().step(&record(9)).unwrap();
        assert_eq!(steps(dir.path()), [9]);
        assert!(dir.path().join("metrics.previous.jsonl").exists());
        assert!(RunLog::open(dir.path(), Some(0)).is_ok());
        assert!(steps(dir.path()).is_empty());
    }

    #[test]
    fn a_file_in_place_of_the_folder_is_reported_with_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        fs::write(&path, "").unwrap();
        let error = RunLog::open(&path, None).unwrap_err();
        assert!(error.to_string().starts_with(&format!("cannot open {}", path.join("logs").display())));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn the_log_follows_its_format(
            records in prop::collection::vec(any_record(), 0..6),
            events in prop::collection::vec("(\\PC|\n|loss|step ){0,12}", 0..6),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let mut log = RunLog::open(dir.path(), None).unwrap();
            records.iter().for_each(|r| log.step(r).unwrap());
            events.iter().for_each(|e| log.event(e).unwrap());
            let text = fs::read_to_string(dir.path().join("logs/training.log")).unwrap();
            for line in text.lines() {
                prop_assert!(!line.contains("loss") || parsed_text(line).is_some(), "{}", line);
                prop_assert_eq!(&line[23..25], "Z ");
            }
        }
    }
}
