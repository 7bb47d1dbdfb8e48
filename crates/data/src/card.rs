//! The data files that a data set's card declares: the `configs` list in the YAML front matter of its README.md.
//!
//! ```yaml
//! configs:
//! - config_name: en
//!   default: true
//!   data_files:
//!   - split: train
//!     path: en/train-*.parquet
//! ```
//!
//! `data_files` may also be one pattern or a list of patterns, which are the training data.

use granit_parser::{Event, Parser, ScalarStyle, StrInput};
use serde_json::{Map, Value};

const MAX_FRONT_MATTER_BYTES: usize = 4 << 20;
const MAX_DEPTH: usize = 32;
const MAX_NODES: usize = 200_000;

/// A configuration (subset) of a data set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CardConfig {
    pub(crate) name: String,
    pub(crate) is_default: bool,
    /// The folder to which patterns are relative. Empty: the root.
    pub(crate) data_dir: String,
    /// Names of splits with their patterns. Empty: the conventions for file names apply.
    pub(crate) splits: Vec<(String, Vec<String>)>,
}

/// The configurations that a card declares; empty if it declares none. `Err`: why the card cannot be read.
pub(crate) fn configs(card: &str) -> Result<Vec<CardConfig>, String> {
    let Some(yaml) = front_matter(card) else { return Ok(Vec::new()) };
    let root = parse(yaml)?;
    match root.get("configs") {
        Some(Value::Array(items)) => items.iter().map(config).collect(),
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(_) => Err("`configs` is not a list".into()),
    }
}

/// The text between the first line, `---`, and the next line `---`.
fn front_matter(card: &str) -> Option<&str> {
    let rest = card.trim_start_matches('\u{feff}').strip_prefix("---")?;
    let rest = rest.strip_prefix("\r\n").or_else(|| rest.strip_prefix('\n'))?;
    let mut end = 0;
    for line in rest.split_inclusive('\n') {
        if line.trim_end() == "---" {
            return Some(&rest[..end]);
        }
        end += line.len();
    }
    None
}

fn config(item: &Value) -> Result<CardConfig, String> {
    let text = |key: &str| item.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let name = text("config_name");
    let name = if name.is_empty() { "default".into() } else { name };
    let splits = match item.get("data_files") {
        None | Some(Value::Null) => Vec::new(),
        Some(files) => {
            splits(files).ok_or_else(|| format!("`data_files` of `{name}` has an unknown form"))?
        }
    };
    let is_default = text("default").eq_ignore_ascii_case("true");
    let data_dir = text("data_dir").trim_start_matches("./").trim_matches('/').to_owned();
    Ok(CardConfig { name, is_default, data_dir, splits })
}

fn splits(files: &Value) -> Option<Vec<(String, Vec<String>)>> {
    let train = |patterns| Some(vec![("train".to_owned(), patterns)]);
    match files {
        Value::String(_) => train(patterns(files)?),
        Value::Array(items) if items.iter().any(Value::is_object) => items
            .iter()
            .map(|item| Some((item.get("split")?.as_str()?.to_owned(), patterns(item.get("path")?)?)))
            .collect(),
        Value::Array(_) => train(patterns(files)?),
        Value::Object(map) => {
            map.iter().map(|(split, paths)| Some((split.clone(), patterns(paths)?))).collect()
        }
        _ => None,
    }
}

fn patterns(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(pattern) => Some(vec![pattern.clone()]),
        Value::Array(items) => items.iter().map(|item| Some(item.as_str()?.to_owned())).collect(),
        _ => None,
    }
}

/// Reads YAML. Every scalar but null becomes a string: only names and patterns are used.
fn parse(text: &str) -> Result<Value, String> {
    if text.len() > MAX_FRONT_MATTER_BYTES {
        return Err("its front matter is too large".into());
    }
    let options = granit_parser::options! {
        emit_comments: false,
        flow_nesting_limit: MAX_DEPTH,
        block_nesting_limit: MAX_DEPTH,
    };
    let mut reader = Reader {
        parser: Parser::new_from_str_with_options(text, options),
        num_nodes: 0,
        anchors: Vec::new(),
    };
    loop {
        match reader.next()? {
            Event::StreamStart | Event::DocumentStart(..) => {}
            Event::StreamEnd | Event::DocumentEnd => return Ok(Value::Null),
            event => return reader.value(event, 0),
        }
    }
}

struct Reader<'a> {
    parser: Parser<'a, StrInput<'a>>,
    num_nodes: usize,
    anchors: Vec<(usize, Value)>,
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<Event<'a>, String> {
        match self.parser.next_event() {
            Some(Ok((event, _))) => Ok(event),
            Some(Err(error)) => Err(format!("line {}: {}", error.marker().line() + 1, error.info())),
            None => Ok(Event::StreamEnd),
        }
    }

    fn value(&mut self, event: Event<'a>, depth: usize) -> Result<Value, String> {
        self.num_nodes += 1;
        if self.num_nodes > MAX_NODES || depth > MAX_DEPTH {
            return Err("its front matter is too large".into());
        }
        let anchor = event.anchor_id();
        let value = match event {
            Event::Scalar(text, ScalarStyle::Plain, ..) if matches!(&*text, "" | "~" | "null") => Value::Null,
            Event::Scalar(text, ..) => Value::String(text.into_owned()),
            Event::SequenceStart(..) => self.sequence(depth)?,
            Event::MappingStart(..) => self.mapping(depth)?,
            Event::Alias(id) => {
                let target = self.anchors.iter().find(|(anchor, _)| *anchor == id);
                let value = target.map_or(Value::Null, |(_, value)| value.clone());
                self.num_nodes += size(&value);
                value
            }
            _ => return Err("a value is missing".into()),
        };
        if let Some(id) = anchor {
            self.anchors.push((id, value.clone()));
        }
        Ok(value)
    }

    fn sequence(&mut self, depth: usize) -> Result<Value, String> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                Event::SequenceEnd => return Ok(Value::Array(items)),
                event => items.push(self.value(event, depth + 1)?),
            }
        }
    }

    fn mapping(&mut self, depth: usize) -> Result<Value, String> {
        let mut map = Map::new();
        loop {
            let key = match self.next()? {
                Event::MappingEnd => return Ok(Value::Object(map)),
                event => self.value(event, depth + 1)?,
            };
            let event = self.next()?;
            let value = self.value(event, depth + 1)?;
            if let Value::String(key) = key {
                map.insert(key, value);
            }
        }
    }
}

fn size(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(size).sum::<usize>(),
        Value::Object(map) => 1 + map.values().map(size).sum::<usize>(),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(yaml: &str) -> Vec<CardConfig> {
        configs(&format!("---\n{yaml}\n---\n# Title\n")).unwrap()
    }

    fn owned(splits: &[(&str, &[&str])]) -> Vec<(String, Vec<String>)> {
        let owned = |list: &[&str]| list.iter().map(|text| text.to_string()).collect();
        splits.iter().map(|(split, patterns)| (split.to_string(), owned(patterns))).collect()
    }

    #[test]
    fn every_form_of_data_files() {
        let found = of(
            "license: mit\nconfigs:\n- config_name: en\n  default: true\n  data_files:\n  - split: train\n    \
                        path: en/train-*\n  - split: test\n    path: [a, b]\n- config_name: de\n  data_dir: ./de/\n",
        );
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].name.as_str(), found[0].is_default), ("en", true));
        assert_eq!(found[0].splits, owned(&[("train", &["en/train-*"]), ("test", &["a", "b"])]));
        assert_eq!((found[1].data_dir.as_str(), found[1].splits.len()), ("de", 0));
        let splits = |files: &str| of(&format!("configs:\n- data_files: {files}")).remove(0).splits;
        assert_eq!(splits("x.csv"), owned(&[("train", &["x.csv"])]));
        assert_eq!(splits("[x.csv, y.csv]"), owned(&[("train", &["x.csv", "y.csv"])]));
        assert_eq!(splits("{dev: x.csv}"), owned(&[("dev", &["x.csv"])]));
    }

    #[test]
    fn cards_without_configs() {
        for card in [
            "",
            "# Title\n",
            "---\nlicense: mit\n---\n",
            "---\n---\n",
            "---\nno end\n",
            "---\nconfigs:\n---\n",
        ] {
            assert_eq!(configs(card), Ok(Vec::new()), "{card:?}");
        }
        assert_eq!(configs("\u{feff}---\r\nconfigs:\r\n- data_files: a\r\n---\r\n").unwrap().len(), 1);
    }

    #[test]
    fn broken_cards_are_errors() {
        for yaml in [
            "configs: [",
            "configs: x",
            "configs:\n- data_files: [{split: train}]",
            "configs:\n- data_files: [[a]]",
        ] {
            assert!(configs(&format!("---\n{yaml}\n---\n")).is_err(), "{yaml}");
        }
        let bomb: String = (1..30).map(|i| format!("a{i}: &a{i} [*a{0}, *a{0}]\n", i - 1)).collect();
        assert!(configs(&format!("---\na0: &a0 [x, x]\n{bomb}---\n")).is_err());
    }
}
