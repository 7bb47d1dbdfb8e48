//! What is known of one run. Files are read when somebody looks, and only what is new of them.

use std::io;
use std::path::PathBuf;
use std::time::Instant;

use lockstep_observe::{
    MetricsEvent, MetricsLine, MetricsReader, RunFiles, RunInfo, RunState, ScrapedRun, prometheus_text,
};
use serde_json::{Value, json};

use crate::columns::{Axis, Columns};
use crate::completions::CompletionIndex;
use crate::files::{self, Stamp};
use crate::reduce::{Reduced, reduce};
use crate::summary::Summary;
use crate::text::{beginning, visible};
use crate::timeline;

/// Files whose changes are a reason to look at a run again.
const WATCHED: [&str; 6] =
    ["metrics.jsonl", "run.json", "completions.jsonl", "logs/training.log", "plan.json", "profile"];
/// Of these files, the first is the one with the steps, and these show that the run does something.
const SIGNS_OF_LIFE: [usize; 3] = [0, 2, 3];

const MAX_INFO_BYTES: u64 = 8 << 20;
const MAX_PLAN_BYTES: u64 = 16 << 20;
const LOG_BYTES: u64 = 64 * 1024;
const LOG_LINE_CHARS: usize = 2000;
const MAX_CONFIG_CHARS: usize = 400_000;

#[derive(Debug)]
pub(crate) struct RunView {
    files: RunFiles,
    /// Among the runs, its own.
    pub(crate) name: String,
    pub(crate) info: RunInfo,
    pub(crate) summary: Summary,
    stamps: [Option<Stamp>; WATCHED.len()],
    state: RunState,
    completions: CompletionIndex,
    columns: Option<(MetricsReader, Columns)>,
    max_values: usize,
    /// When the columns were last wanted.
    pub(crate) used: Instant,
    /// Why the metrics cannot be read.
    problem: Option<String>,
    /// Counts how often columns were dropped: a page must not add to what it had.
    reloads: u64,
}

/// What a chart asks for.
pub(crate) struct SeriesQuery<'a> {
    pub(crate) keys: Vec<&'a str>,
    pub(crate) axis: Axis,
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) buckets: usize,
    /// The rows that the page has, and their generation.
    pub(crate) after: Option<(usize, u64)>,
}

impl RunView {
    pub(crate) fn new(files: RunFiles, max_values: usize) -> RunView {
        RunView {
            summary: Summary::new(&files),
            completions: CompletionIndex::new(files.dir().join("completions.jsonl")),
            name: String::new(),
            info: RunInfo::default(),
            stamps: [None; WATCHED.len()],
            state: RunState::Unknown,
            columns: None,
            max_values,
            used: Instant::now(),
            problem: None,
            reloads: 0,
            files,
        }
    }

    pub(crate) fn dir(&self) -> &std::path::Path {
        self.files.dir()
    }

    /// Reads what has changed. Returns whether anything has.
    pub(crate) fn refresh(&mut self) -> bool {
        let stamps = WATCHED.map(|name| files::stamp(&self.files.dir().join(name)));
        let changed = |i: usize| stamps[i] != self.stamps[i];
        if changed(1) && stamps[1].is_some() {
            let path = self.files.dir().join("run.json");
            // A file that is too large or a link is not ours.
            if files::read_text(&path, MAX_INFO_BYTES).is_ok() {
                self.info = self.files.info();
            }
        }
        let mut is_new = changed(0) || changed(1);
        if changed(0) && stamps[0].is_some() {
            let read = self.summary.refresh();
            self.problem = read.err().map(|error| format!("cannot read metrics.jsonl: {error}"));
        }
        is_new |= (2..WATCHED.len()).any(changed);
        self.summary.last_written = SIGNS_OF_LIFE.iter().filter_map(|i| stamps[*i]?.modified).max();
        (self.summary.alive, self.summary.stop) = (self.files.is_alive(), self.files.stop_reason());
        let state = self.summary.state(&self.info);
        is_new |= state != self.state;
        (self.stamps, self.state) = (stamps, state);
        is_new
    }

    /// The run as a list shows it.
    pub(crate) fn summary_json(&self, id: usize) -> Value {
        let mut object = self.summary.json(&self.info);
        object["id"] = id.into();
        object["name"] = visible(&self.name).into();
        object["path"] = visible(&self.dir().display().to_string()).into();
        object["problem"] = self.problem.clone().into();
        object["has_completions"] = self.stamps[2].is_some().into();
        object["has_timelines"] = self.stamps[5].is_some().into();
        object
    }

    /// All else about the run.
    pub(crate) fn details_json(&mut self, id: usize) -> Value {
        let mut object = self.summary_json(id);
        let plan = files::read_text(&self.dir().join("plan.json"), MAX_PLAN_BYTES);
        let plan: Option<Value> = plan.ok().and_then(|text| serde_json::from_str(&text).ok());
        object["plan"] = plan.map_or(Value::Null, |plan| plan_json(&plan));
        object["config"] = beginning(&self.info.config, MAX_CONFIG_CHARS).0.into();
        object["command"] = visible(&self.info.command).into();
        object["planned_memory_bytes"] = json!(self.info.planned_memory_bytes);
        let timelines = timeline::list(self.dir()).into_iter().map(|(name, _)| name);
        object["timelines"] = timelines.collect::<Vec<_>>().into();
        object
    }

    pub(crate) fn is_loaded(&self) -> bool {
        self.columns.is_some()
    }

    /// Frees the numbers of the run.
    pub(crate) fn unload(&mut self) {
        self.columns = None;
    }

    fn columns(&mut self) -> io::Result<&Columns> {
        self.used = Instant::now();
        let is_plain = self.stamps[0].is_some();
        let (reader, columns) = self.columns.get_or_insert_with(|| {
            self.reloads += 1;
            (self.files.metrics(), Columns::new(self.max_values))
        });
        if is_plain {
            reader.read_each(&mut |event| match event {
                MetricsEvent::Restarted => columns.clear(),
                MetricsEvent::Line(line) => columns.push(&line),
            })?;
        }
        Ok(columns)
    }

    /// The keys of all numbers, without those of single ranks.
    pub(crate) fn keys_json(&mut self) -> io::Result<String> {
        let columns = self.columns()?;
        let is_of_rank = |key: &&str| key.starts_with("rank_busy_seconds/");
        let ranks = columns.keys().filter(is_of_rank).count();
        let keys: Vec<_> = columns.keys().filter(|key| !is_of_rank(key)).map(visible).collect();
        Ok(json!({ "keys": keys, "ranks": ranks }).to_string())
    }

    pub(crate) fn series_json(&mut self, query: &SeriesQuery<'_>) -> io::Result<String> {
        let reloads = self.reloads + u64::from(self.columns.is_none());
        let columns = self.columns()?;
        // In a number of JavaScript: what is loaded again is not what was there before.
        let generation = columns.generation() + (reloads << 32);
        let known = query.after.filter(|(rows, of)| *of == generation && *rows <= columns.num_rows());
        let from_row = known.map_or(0, |(rows, _)| rows);
        let mut out = format!(
            "{{\"generation\":{generation},\"rows\":{},\"from_row\":{from_row},\"series\":[",
            columns.num_rows()
        );
        for (i, key) in query.keys.iter().enumerate() {
            if i > 0 {
                out.push(',');
            }
            let points = reduced(columns, key, query, from_row);
            points.write_json(&mut out, key);
        }
        out.push_str("]}");
        Ok(out)
    }

    pub(crate) fn completions_json(
        &mut self,
        step: Option<u64>,
        skip: usize,
        count: usize,
    ) -> io::Result<Value> {
        self.completions.page(step, skip, count)
    }

    pub(crate) fn timeline_path(&self, index: usize) -> Option<PathBuf> {
        timeline::list(self.dir()).into_iter().nth(index).map(|(_, path)| path)
    }

    /// The newest lines of the log.
    pub(crate) fn log_json(&self) -> Value {
        let lines = files::last_lines(&self.dir().join("logs/training.log"), LOG_BYTES).unwrap_or_default();
        let lines: Vec<_> = lines.iter().map(|line| beginning(line, LOG_LINE_CHARS).0).collect();
        json!({ "lines": lines })
    }

    /// The newest lines and other numbers, for a monitoring system.
    pub(crate) fn scraped(&self) -> Scraped {
        let silent =
            self.summary.silent_for().map(|silent| ("seconds_since_last_write", silent.as_secs_f64()));
        let total = (self.info.total_steps > 0).then_some(("total_steps", self.info.total_steps as f64));
        Scraped {
            name: self.name.clone(),
            lines: self.summary.step.iter().chain(&self.summary.evaluation).cloned().collect(),
            others: silent.into_iter().chain(total).collect(),
        }
    }
}

/// A run for a monitoring system.
pub(crate) struct Scraped {
    name: String,
    lines: Vec<MetricsLine>,
    others: Vec<(&'static str, f64)>,
}

/// The text of a scrape.
pub(crate) fn scrape_text(runs: &[Scraped]) -> String {
    let borrowed = runs.iter().map(|Scraped { name, lines, others }| ScrapedRun { name, lines, others });
    prometheus_text(&borrowed.collect::<Vec<_>>())
}

/// A series for a chart. A page that follows a run gets single points.
fn reduced(columns: &Columns, key: &str, query: &SeriesQuery<'_>, from_row: usize) -> Reduced {
    let points: Vec<(f64, f64)> = columns.points(key, query.axis, from_row).collect();
    reduce(points.into_iter(), query.from, query.to, query.buckets)
}

/// The planned memory of the run, if the file is as ours.
fn plan_json(plan: &Value) -> Value {
    let operations = plan["operations"].as_array().map_or(&[][..], Vec::as_slice);
    let operations: Vec<_> =
        operations.iter().map(|text| beginning(text.as_str().unwrap_or_default(), 200).0).collect();
    json!({ "memory": plan["memory"], "memory_over_step": plan["memory_over_step"], "operations": operations })
}
