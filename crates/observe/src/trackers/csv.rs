//! `metrics.csv`: a row for each step and evaluation, a column for each metric. A metric that appears later adds a column,
//! for which the file is written again.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{Row, Tracker, TrackerError};
use crate::error::ObserveError;

pub(crate) struct CsvFile {
    path: PathBuf,
    file: File,
    /// The names after `step`.
    columns: Vec<String>,
}

impl CsvFile {
    /// Opens the file. A resumed run keeps the rows up to `resume_step`; a new run replaces the file.
    pub(crate) fn open(path: &Path, resume_step: Option<u64>) -> Result<CsvFile, ObserveError> {
        let open = |source| ObserveError::Open { path: path.to_owned(), source };
        let old = match (resume_step, fs::read_to_string(path)) {
            (Some(_), Ok(text)) => text,
            (Some(_), Err(cause)) if cause.kind() != io::ErrorKind::NotFound => return Err(open(cause)),
            _ => String::new(),
        };
        let mut lines = old.split_inclusive('\n').filter(|line| line.ends_with('\n')).map(str::trim_end);
        let columns: Vec<String> = lines.next().map_or_else(Vec::new, |header| {
            header.split(',').skip(1).map(|name| name.trim_matches('"').replace("\"\"", "\"")).collect()
        });
        let in_time = |line: &&str| {
            let step = line.split(',').next().and_then(|step| step.parse::<u64>().ok());
            step.is_some_and(|step| Some(step) <= resume_step)
        };
        let rows: Vec<&str> = lines.filter(in_time).collect();
        replace(path, &columns, &rows).map_err(open)?;
        let file = OpenOptions::new().append(true).open(path).map_err(open)?;
        Ok(CsvFile { path: path.to_owned(), file, columns })
    }

    fn add_columns(&mut self, row: &Row) -> io::Result<()> {
        let before = self.columns.len();
        for (name, _) in &row.numbers {
            if !self.columns.iter().any(|column| column == name) {
                self.columns.push(name.to_string());
            }
        }
        if self.columns.len() > before {
            let text = fs::read_to_string(&self.path)?;
            let rows: Vec<&str> = text.lines().skip(1).collect();
            replace(&self.path, &self.columns, &rows)?;
            self.file = OpenOptions::new().append(true).open(&self.path)?;
        }
        Ok(())
    }

    fn write(&mut self, row: &Row) -> io::Result<()> {
        self.add_columns(row)?;
        let mut line = row.step.to_string();
        for column in &self.columns {
            line.push(',');
            if let Some((_, value)) = row.numbers.iter().find(|(name, _)| name == column) {
                line.push_str(&value.to_string());
            }
        }
        line.push('\n');
        self.file.write_all(line.as_bytes())
    }
}

impl Tracker for CsvFile {
    fn row(&mut self, row: &Row) -> Result<(), TrackerError> {
        let path = self.path.clone();
        self.write(row).map_err(|source| ObserveError::Write { path, source }.into())
    }
}

/// Writes the whole file, atomically. Rows that end early have no value in the last columns.
fn replace(path: &Path, columns: &[String], rows: &[&str]) -> io::Result<()> {
    let quoted = |name: &String| match name.contains([',', '"', '\n']) {
        true => format!("\"{}\"", name.replace('"', "\"\"")),
        false => name.clone(),
    };
    let mut text: String =
        std::iter::once("step".to_owned()).chain(columns.iter().map(quoted)).collect::<Vec<_>>().join(",");
    text.push('\n');
    for row in rows {
        let missing = columns.len().saturating_sub(row.matches(',').count());
        text.push_str(row);
        text.extend(std::iter::repeat_n(',', missing));
        text.push('\n');
    }
    let partial = path.with_extension("csv.partial");
    fs::write(&partial, text)?;
    fs::rename(&partial, path)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn row(step: u64, numbers: &[(&'static str, f64)]) -> Row {
        let numbers = numbers.iter().map(|(name, value)| ((*name).into(), *value)).collect();
        Row { step, at: SystemTime::now(), numbers }
    }

    #[test]
    fn a_later_metric_adds_a_column() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.csv");
        let mut csv = CsvFile::open(&path, None).unwrap();
        csv.row(&row(1, &[("train/loss", 2.5), ("x", f64::NAN)])).unwrap();
        csv.row(&row(1, &[("eval/loss", 2.25)])).unwrap();
        csv.row(&row(2, &[("train/loss", 2.0), ("x", 1.0)])).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, "step,train/loss,x,eval/loss\n1,2.5,NaN,\n1,,,2.25\n2,2,1,\n");
        let mut csv = CsvFile::open(&path, Some(1)).unwrap();
        csv.row(&row(2, &[("train/loss", 2.0)])).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, "step,train/loss,x,eval/loss\n1,2.5,NaN,\n1,,,2.25\n2,2,,\n");
        CsvFile::open(&path, None).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "step\n");
    }
}
