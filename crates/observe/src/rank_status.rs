//! `status/rank-N.json`: what each rank of a run is doing, for programs that watch it. A rank replaces its file about once
//! a second, and removes it when it ends.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Map, Value, json};

use crate::error::ObserveError;
use crate::time::utc;

/// Larger files are not statuses.
const MAX_BYTES: u64 = 64 << 10;
/// A schedule can name dozens of units in one operation.
const MAX_OPERATION_CHARS: usize = 160;

/// What a rank is doing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankStatus {
    pub rank: u32,
    pub host: String,
    pub pid: u32,
    /// The steps that the rank has completed.
    pub step: u64,
    /// The lanes that are not idle.
    pub operations: Vec<RunningOperation>,
    /// How long ago the rank wrote this. Not in the file: it is the file's age.
    pub age: Duration,
}

/// An operation that has begun and has not ended.
#[derive(Clone, Debug, PartialEq)]
pub struct RunningOperation {
    /// `compute`, `comm`, `copy`, `host`, or `between steps`.
    pub lane: String,
    pub operation: String,
    /// Whether it ends only when other ranks take part.
    pub collective: bool,
    /// Since it has begun.
    pub seconds: f64,
}

/// Ranks write about once a second; one that has written nothing for longer than this hangs or has ended.
const SILENT: Duration = Duration::from_secs(10);

impl RankStatus {
    /// Whether the rank still replaces its file.
    pub fn is_new(&self) -> bool {
        self.age < SILENT
    }

    fn path(dir: &Path, rank: u32) -> PathBuf {
        dir.join("status").join(format!("rank-{rank}.json"))
    }

    /// Writes the file in the output folder `dir`.
    pub fn write(&self, dir: &Path) -> Result<(), ObserveError> {
        let path = RankStatus::path(dir, self.rank);
        let operation = |one: &RunningOperation| {
            let text: String = one.operation.chars().take(MAX_OPERATION_CHARS).collect();
            let seconds = (one.seconds * 1e3).round() / 1e3;
            json!({ "lane": one.lane, "operation": text, "collective": one.collective, "seconds": seconds })
        };
        let operations: Vec<Value> = self.operations.iter().map(operation).collect();
        let object = json!({
            "rank": self.rank, "host": self.host, "pid": self.pid, "written": utc(SystemTime::now()), "step": self.step,
            "operations": operations,
        });
        let partial = path.with_extension("json.partial");
        let written = fs::create_dir_all(dir.join("status"))
            .and_then(|()| fs::write(&partial, format!("{object}\n")))
            .and_then(|()| fs::rename(&partial, &path));
        written.map_err(|source| ObserveError::Write { path, source })
    }

    /// Removes the file of a rank that ends, and the folder with the last one.
    pub fn remove(dir: &Path, rank: u32) {
        let path = RankStatus::path(dir, rank);
        let _ = fs::remove_file(path.with_extension("json.partial"));
        let _ = fs::remove_file(path);
        let _ = fs::remove_dir(dir.join("status"));
    }

    /// Removes the files of `first` and later ranks, which an earlier run of more ranks has left behind.
    pub fn remove_from(dir: &Path, first: u32) {
        if dir.join("status").is_dir() {
            (first..MAX_RANKS).for_each(|rank| RankStatus::remove(dir, rank));
        }
    }

    /// The statuses of the first `ranks` ranks that have one.
    pub(crate) fn read_all(dir: &Path, ranks: u64) -> Vec<RankStatus> {
        if !dir.join("status").is_dir() {
            return Vec::new();
        }
        let ranks = u32::try_from(ranks).unwrap_or(u32::MAX).min(MAX_RANKS);
        (0..ranks).filter_map(|rank| RankStatus::read(&RankStatus::path(dir, rank), rank).ok()).collect()
    }

    fn read(path: &Path, rank: u32) -> io::Result<RankStatus> {
        let file = fs::File::open(path)?;
        // A file from a host whose clock is ahead is new.
        let age = file.metadata()?.modified()?.elapsed().unwrap_or_default();
        let mut text = String::new();
        file.take(MAX_BYTES).read_to_string(&mut text)?;
        let object: Map<String, Value> = serde_json::from_str(&text)?;
        let text = |object: &Value, key: &str| object[key].as_str().unwrap_or_default().to_owned();
        let of_lane = |one: &Value| RunningOperation {
            lane: text(one, "lane"),
            operation: text(one, "operation"),
            collective: one["collective"] == true,
            seconds: one["seconds"].as_f64().unwrap_or_default(),
        };
        let object = Value::Object(object);
        Ok(RankStatus {
            rank,
            host: text(&object, "host"),
            pid: object["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).unwrap_or_default(),
            step: object["step"].as_u64().unwrap_or_default(),
            operations: object["operations"].as_array().into_iter().flatten().map(of_lane).collect(),
            age,
        })
    }
}

/// Worlds up to this size have a file for each rank: more would load a shared file system.
pub const MAX_RANKS: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_reads_back_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let operation = |lane: &str, operation: &str| RunningOperation {
            lane: lane.into(),
            operation: operation.into(),
            collective: lane == "comm",
            seconds: 1.5,
        };
        let status = RankStatus {
            rank: 1,
            host: "alpha".into(),
            pid: 77,
            step: 12,
            operations: vec![
                operation("comm", "#3 all-reduce \"head\""),
                operation("compute", "#4 backward block 0"),
            ],
            age: Duration::ZERO,
        };
        status.write(dir.path()).unwrap();
        let other = RankStatus { rank: 3, ..RankStatus::default() };
        other.write(dir.path()).unwrap();
        let read = RankStatus::read_all(dir.path(), 3);
        assert_eq!(read.len(), 1, "rank 3 is of another run");
        assert_eq!(RankStatus { age: Duration::ZERO, ..read[0].clone() }, status);
        assert!(read[0].operations[0].collective && !read[0].operations[1].collective);
        fs::write(dir.path().join("status/rank-0.json"), "{\"pid\": \"x\", \"operations\": 3}").unwrap();
        fs::write(dir.path().join("status/rank-2.json"), "{").unwrap();
        assert_eq!(RankStatus::read_all(dir.path(), 4).iter().map(|s| s.rank).collect::<Vec<_>>(), [0, 1, 3]);
        fs::remove_file(dir.path().join("status/rank-2.json")).unwrap();
        RankStatus::remove_from(dir.path(), 1);
        assert_eq!(RankStatus::read_all(dir.path(), 4).len(), 1);
        RankStatus::remove(dir.path(), 0);
        assert!(!dir.path().join("status").exists());
    }

    #[test]
    fn names_of_operations_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let long = RunningOperation {
            lane: "comm".into(),
            operation: "é".repeat(1000),
            collective: true,
            seconds: 0.0,
        };
        RankStatus { operations: vec![long], ..RankStatus::default() }.write(dir.path()).unwrap();
        let read = RankStatus::read_all(dir.path(), 1);
        assert_eq!(read[0].operations[0].operation.chars().count(), MAX_OPERATION_CHARS);
    }
}
