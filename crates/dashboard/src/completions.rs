//! `completions.jsonl`: what the model has generated, with its rewards. An index of where each line is stays in memory; the
//! texts are read when they are shown.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use crate::files;
use crate::text::beginning;

/// Only about this much of the end of a file is indexed when it is first opened.
const INDEXED_BYTES: u64 = 64 << 20;
/// Longer lines are not shown.
const MAX_LINE_BYTES: usize = 1 << 20;
const MAX_ENTRIES: usize = 200_000;
const MAX_STEPS: usize = 2000;
/// Characters of a prompt or a completion.
const SHOWN_CHARS: usize = 16_000;

/// Where the completions of a run are.
#[derive(Debug)]
pub(crate) struct CompletionIndex {
    path: PathBuf,
    entries: VecDeque<Entry>,
    /// The bytes read so far, and of which file.
    offset: u64,
    inode: u64,
    /// Whether there are older ones.
    cut: bool,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    step: u64,
    offset: u64,
    len: u32,
}

impl CompletionIndex {
    pub(crate) fn new(path: PathBuf) -> CompletionIndex {
        CompletionIndex { path, entries: VecDeque::new(), offset: 0, inode: 0, cut: false }
    }

    /// Reads what was written since the last call.
    fn refresh(&mut self) -> io::Result<()> {
        let mut file = match files::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        if metadata.ino() != self.inode || metadata.len() < self.offset {
            self.entries.clear();
            self.inode = metadata.ino();
            self.offset = metadata.len().saturating_sub(INDEXED_BYTES);
            self.cut = self.offset > 0;
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut reader = BufReader::new(file);
        let mut line = Vec::new();
        loop {
            line.clear();
            let len = reader.by_ref().take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut line)?;
            if !line.ends_with(b"\n") {
                if len < MAX_LINE_BYTES {
                    // The end is not written yet.
                    return Ok(());
                }
                // The rest of this line is no JSON.
                self.offset += len as u64;
                continue;
            }
            let step = serde_json::from_slice::<Map<String, Value>>(&line)
                .ok()
                .and_then(|map| map.get("step")?.as_u64());
            if let Some(step) = step {
                self.entries.push_back(Entry { step, offset: self.offset, len: len as u32 });
            }
            if self.entries.len() > MAX_ENTRIES {
                self.entries.pop_front();
                self.cut = true;
            }
            self.offset += len as u64;
        }
    }

    /// Completions as JSON, the newest first: of a step or of all, without the first `skip` of them.
    pub(crate) fn page(&mut self, step: Option<u64>, skip: usize, count: usize) -> io::Result<Value> {
        self.refresh()?;
        let mut steps: Vec<u64> = self.entries.iter().rev().map(|entry| entry.step).collect();
        steps.dedup();
        steps.truncate(MAX_STEPS);
        let wanted = |entry: &&Entry| step.is_none_or(|step| entry.step == step);
        let total = self.entries.iter().filter(wanted).count();
        let entries: Vec<Entry> =
            self.entries.iter().rev().filter(wanted).skip(skip).take(count).copied().collect();
        let mut items = Vec::new();
        if !entries.is_empty() {
            let mut file = files::open(&self.path)?;
            for entry in entries {
                let mut line = vec![0; entry.len as usize];
                file.seek(SeekFrom::Start(entry.offset))?;
                // The file may have been replaced since; then this is no JSON, or another completion.
                if file.read_exact(&mut line).is_ok() {
                    items.extend(serde_json::from_slice(&line).ok().map(|map| shown(&map)));
                }
            }
        }
        Ok(json!({ "steps": steps, "total": total, "older_exist": self.cut, "items": items }))
    }
}

fn shown(map: &Map<String, Value>) -> Value {
    let text = |key: &str| {
        let (text, cut) = beginning(map.get(key).and_then(Value::as_str).unwrap_or_default(), SHOWN_CHARS);
        json!({ "text": text, "cut": cut })
    };
    let number = |key: &str| map.get(key).and_then(Value::as_f64);
    let rewards = map.get("rewards").and_then(Value::as_object).into_iter().flatten();
    let rewards: Vec<Value> = rewards
        .map(|(name, reward)| json!({ "name": beginning(name, 100).0, "reward": reward.as_f64() }))
        .collect();
    json!({
        "step": number("step"), "prompt": text("prompt"), "completion": text("completion"), "rewards": rewards,
        "reward": number("reward"), "advantage": number("advantage"),
        "truncated": map.get("truncated").and_then(Value::as_bool),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn line(step: u64, text: &str) -> String {
        let rewards = json!({ "exact": 1.0, "other": null });
        let value =
            json!({ "step": step, "prompt": "1+1=", "completion": text, "rewards": rewards, "reward": 0.5 });
        format!("{value}\n")
    }

    fn texts(page: &Value) -> Vec<&str> {
        page["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|item| item["completion"]["text"].as_str().unwrap())
            .collect()
    }

    #[test]
    fn completions_are_paged_and_follow_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("completions.jsonl");
        let mut index = CompletionIndex::new(path.clone());
        assert_eq!(index.page(None, 0, 9).unwrap()["total"], 0);
        std::fs::write(&path, line(1, "a") + &line(1, "<b>\u{1b}[2J") + "not json\n" + &line(2, "c"))
            .unwrap();
        let page = index.page(None, 0, 2).unwrap();
        assert_eq!((texts(&page), &page["total"]), (vec!["c", "<b>\\u{1b}[2J"], &json!(3)));
        assert_eq!(
            (&page["steps"], &page["items"][0]["rewards"][1]["reward"]),
            (&json!([2, 1]), &Value::Null)
        );
        assert_eq!(texts(&index.page(Some(1), 1, 9).unwrap()), ["a"]);
        let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        let more = line(3, "d");
        file.write_all(&more.as_bytes()[..10]).unwrap();
        assert_eq!(index.page(None, 0, 9).unwrap()["total"], 3);
        file.write_all(&more.as_bytes()[10..]).unwrap();
        assert_eq!(texts(&index.page(None, 0, 1).unwrap()), ["d"]);
        // A run that starts anew.
        std::fs::write(&path, line(1, "e")).unwrap();
        assert_eq!(texts(&index.page(None, 0, 9).unwrap()), ["e"]);
    }
}
