//! Profiled steps as lanes. The file is Chrome's format with an event on each line, so it is read line by line: the whole
//! of it may be much larger than what a page shows.

use std::collections::HashMap;
use std::fmt::Write;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::files;
use crate::text::beginning;

/// More spans are not read: a page that shows them would be slow.
const MAX_SPANS: usize = 200_000;
const MAX_LINE_BYTES: u64 = 64 * 1024;
const MAX_FILES: usize = 200;

/// The timelines of a run, in the order of their first steps.
pub(crate) fn list(run: &Path) -> Vec<(String, PathBuf)> {
    let mut found: Vec<((u64, u64), String, PathBuf)> = std::fs::read_dir(run.join("profile"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().to_str()?.to_owned();
            let (first, last) = name.strip_prefix("steps-")?.strip_suffix(".json")?.split_once('-')?;
            Some(((first.parse().ok()?, last.parse().ok()?), name, entry.path()))
        })
        .collect();
    found.sort();
    found.truncate(MAX_FILES);
    found.into_iter().map(|((first, last), _, path)| (format!("steps {first} to {last}"), path)).collect()
}

/// A lane of a rank, or another track.
struct Track {
    rank: u64,
    name: String,
    /// `[start, duration, name, category]` for each span, as JSON.
    spans: String,
}

/// Texts with their numbers.
#[derive(Default)]
struct Names {
    list: Vec<String>,
    numbers: HashMap<String, usize>,
}

impl Names {
    fn number(&mut self, text: &str) -> usize {
        if let Some(number) = self.numbers.get(text) {
            return *number;
        }
        self.list.push(beginning(text, 200).0.into_owned());
        self.numbers.insert(text.to_owned(), self.list.len() - 1);
        self.list.len() - 1
    }
}

/// A timeline as JSON: tracks with spans, in microseconds from the first one. Names are numbers of a list.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    let mut reader = BufReader::new(files::open(path)?);
    let (mut tracks, mut by_id) = (Vec::<Track>::new(), HashMap::<(u64, u64), usize>::new());
    let (mut names, mut categories) = (Names::default(), Names::default());
    let (mut num_spans, mut end_us, mut line) = (0usize, 0f64, Vec::new());
    while num_spans < MAX_SPANS {
        line.clear();
        if reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        let text = line.trim_ascii_end();
        let text = text.strip_suffix(b",").unwrap_or(text);
        let Ok(event) = serde_json::from_slice::<Value>(text) else { continue };
        let (Some(rank), Some(id)) = (event["pid"].as_u64(), event["tid"].as_u64()) else { continue };
        let mut track = || {
            *by_id.entry((rank, id)).or_insert_with(|| {
                tracks.push(Track { rank, name: format!("track {id}"), spans: String::new() });
                tracks.len() - 1
            })
        };
        match (event["ph"].as_str(), event["name"].as_str()) {
            (Some("M"), Some("thread_name")) => {
                let at = track();
                tracks[at].name =
                    beginning(event["args"]["name"].as_str().unwrap_or_default(), 100).0.into_owned();
            }
            (Some("X"), Some(name)) => {
                let (Some(start), Some(duration)) = (event["ts"].as_f64(), event["dur"].as_f64()) else {
                    continue;
                };
                let (name, category) =
                    (names.number(name), categories.number(event["cat"].as_str().unwrap_or("")));
                let at = track();
                let spans = &mut tracks[at].spans;
                let comma = if spans.is_empty() { "" } else { "," };
                let _ = write!(spans, "{comma}[{start},{duration},{name},{category}]");
                (num_spans, end_us) = (num_spans + 1, end_us.max(start + duration));
            }
            _ => {}
        }
    }
    let mut out = format!(
        "{{\"end_us\":{end_us},\"cut\":{},\"names\":{},\"categories\":{},\"tracks\":[",
        num_spans >= MAX_SPANS,
        json!(names.list),
        json!(categories.list),
    );
    for (i, track) in tracks.iter().filter(|track| !track.spans.is_empty()).enumerate() {
        let comma = if i > 0 { "," } else { "" };
        let (rank, name, spans) = (track.rank, json!(track.name), &track.spans);
        let _ = write!(out, "{comma}{{\"rank\":{rank},\"name\":{name},\"spans\":[{spans}]}}");
    }
    out.push_str("]}");
    Ok(out)
}

#[cfg(test)]
mod tests {
    use lockstep_observe::{Trace, TraceSpan};

    use super::*;

    #[test]
    fn lanes_of_all_ranks() {
        let dir = tempfile::tempdir().unwrap();
        let mut trace = Trace::default();
        for (track, name, start_us) in
            [("compute", "forward", 10.0), ("comm", "gather \"x\"", 12.5), ("compute", "forward", 20.0)]
        {
            let (track, name) = (track.to_owned(), name.to_owned());
            trace.add(TraceSpan { track, name, category: "forward", start_us, duration_us: 1.5 });
        }
        std::fs::create_dir(dir.path().join("profile")).unwrap();
        let path = |name: &str| dir.path().join("profile").join(name);
        let text = Trace::file(&[trace.events(0, 10.0), trace.events(1, 10.0)]);
        std::fs::write(path("steps-10-12.json"), text).unwrap();
        std::fs::write(path("steps-2-3.json"), "{").unwrap();
        std::fs::write(path("steps-x-3.json"), "").unwrap();
        let list = list(dir.path());
        assert_eq!(
            list.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            ["steps 2 to 3", "steps 10 to 12"]
        );
        let read: Value = serde_json::from_str(&read(&list[1].1).unwrap()).unwrap();
        assert_eq!((&read["names"], &read["end_us"]), (&json!(["forward", "gather \"x\""]), &json!(11.5)));
        let tracks = read["tracks"].as_array().unwrap();
        assert_eq!(tracks.len(), 4);
        assert_eq!(
            (&tracks[0]["name"], &tracks[0]["spans"][1]),
            (&json!("compute"), &json!([10, 1.5, 0, 0]))
        );
        assert_eq!((&tracks[3]["name"], &tracks[3]["rank"]), (&json!("comm"), &json!(1)));
        let empty: Value = serde_json::from_str(&super::read(&list[0].1).unwrap()).unwrap();
        assert_eq!(empty["tracks"], json!([]));
    }
}
