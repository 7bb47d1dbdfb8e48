//! A timeline of steps in the format of Chrome's trace viewer, which Perfetto opens as well: a process for each rank, a
//! track for each lane.

use std::fmt::Write;

use serde_json::json;

/// Something that took time.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSpan {
    /// The lane, or another track of the rank.
    pub track: String,
    pub name: String,
    pub category: &'static str,
    /// On the clock that all ranks share.
    pub start_us: f64,
    pub duration_us: f64,
}

/// The spans of one rank.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    spans: Vec<TraceSpan>,
}

impl Trace {
    pub fn add(&mut self, span: TraceSpan) {
        self.spans.push(span);
    }

    /// The earliest time of a span.
    pub fn start_us(&self) -> Option<f64> {
        self.spans.iter().map(|span| span.start_us).min_by(f64::total_cmp)
    }

    /// This rank's part of the file. Times count from `origin_us`.
    pub fn events(&self, rank: u32, origin_us: f64) -> String {
        let mut tracks: Vec<&str> = Vec::new();
        let mut out = json!({
            "name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": { "name": format!("rank {rank}") },
        })
        .to_string();
        for span in &self.spans {
            let track = tracks.iter().position(|track| *track == span.track).unwrap_or_else(|| {
                tracks.push(&span.track);
                let args = json!({ "name": span.track });
                let (tid, order) = (tracks.len(), json!({ "sort_index": tracks.len() }));
                for (name, args) in [("thread_name", args), ("thread_sort_index", order)] {
                    let event = json!({ "name": name, "ph": "M", "pid": rank, "tid": tid, "args": args });
                    let _ = write!(out, ",\n{event}");
                }
                tracks.len() - 1
            });
            let event = json!({
                "name": span.name, "cat": span.category, "ph": "X", "pid": rank, "tid": track + 1,
                "ts": thousandths(span.start_us - origin_us), "dur": thousandths(span.duration_us),
            });
            let _ = write!(out, ",\n{event}");
        }
        out
    }

    /// The whole file, from the parts of all ranks.
    pub fn file(parts: &[String]) -> String {
        format!("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", parts.join(",\n"))
    }
}

/// Microseconds to the nanosecond.
fn thousandths(us: f64) -> f64 {
    (us * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_processes_and_lanes_are_tracks() {
        let mut trace = Trace::default();
        for (track, name, start_us) in
            [("compute", "forward \"0\"", 10.0), ("comm", "gather", 12.5), ("compute", "x", 20.25)]
        {
            trace.add(TraceSpan {
                track: track.into(),
                name: name.into(),
                category: "forward",
                start_us,
                duration_us: 1.0004,
            });
        }
        assert_eq!(trace.start_us(), Some(10.0));
        let text = Trace::file(&[trace.events(0, 10.0), Trace::default().events(1, 10.0)]);
        let file: serde_json::Value = serde_json::from_str(&text).unwrap();
        let events = file["traceEvents"].as_array().unwrap();
        let spans: Vec<String> = events
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|e| format!("{} {} {} {} {}", e["pid"], e["tid"], e["name"], e["ts"], e["dur"]))
            .collect();
        assert_eq!(
            spans,
            ["0 1 \"forward \\\"0\\\"\" 0.0 1.0", "0 2 \"gather\" 2.5 1.0", "0 1 \"x\" 10.25 1.0"]
        );
        assert_eq!(events.iter().filter(|event| event["name"] == "process_name").count(), 2);
        assert_eq!(events.iter().filter(|event| event["name"] == "thread_name").count(), 2);
    }
}
