//! Which files of a data set belong to a split: as its card declares, otherwise by the conventions of the `datasets`
//! library for file names. Pure: a list of names in, names out. So the Hub client can ask which files to download.

use std::path::Path;

use crate::card::{self, CardConfig};
use crate::files::wild;
use crate::read::FileKind;
use crate::{DataError, Named};

/// The words in file names that denote each split.
const SPLITS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "val", "dev"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// Files beside the data that have the same extension but no rows.
const DESCRIPTIONS: [&str; 3] = ["dataset_infos", "dataset_info", "state"];

/// The result of looking for a split in a data set.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Split {
    /// Indices of files.
    Files(Vec<usize>),
    Absent {
        splits: Vec<String>,
    },
    /// There are several configurations, and the caller named none of them.
    Configs(Vec<String>),
}

/// The files of `names` that hold the given splits, sorted. `names` are paths below the root of the data set, with `/`;
/// `card` is the text of its README.md. `config` is the configuration, if one is named.
pub fn files_of_splits(
    dataset: &str,
    config: Option<&str>,
    splits: &[&str],
    names: &[String],
    card: Option<&str>,
) -> Result<Vec<String>, DataError> {
    let mut found = Vec::new();
    for split in splits {
        let named = Named { name: dataset, config, split, revision: None };
        match choose(names, card, named)? {
            Split::Files(files) => found.extend(files.into_iter().map(|idx| names[idx].clone())),
            absent => return Err(absent.error(named, Vec::new())),
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

/// The data files of `names`, of all configurations and splits.
pub fn data_files(names: &[String]) -> Vec<String> {
    names.iter().filter(|name| is_data_file(name)).cloned().collect()
}

impl Split {
    /// The error that explains why there are no files.
    pub(crate) fn error(self, named: Named<'_>, searched: Vec<std::path::PathBuf>) -> DataError {
        let name = named.name.to_owned();
        match self {
            Split::Files(_) => DataError::NoFiles,
            Split::Absent { splits } => {
                DataError::NoSplit { name, split: named.split.into(), splits, searched }
            }
            Split::Configs(configs) => match named.config {
                Some(config) => DataError::NoConfig { name, config: config.into(), configs },
                None => DataError::WhichConfig { name, configs },
            },
        }
    }
}

pub(crate) fn choose(names: &[String], card: Option<&str>, named: Named<'_>) -> Result<Split, DataError> {
    let bad_card = |why| DataError::BadCard { name: named.name.into(), why };
    let configs = card::configs(card.unwrap_or_default()).map_err(bad_card)?;
    if configs.is_empty() {
        return Ok(by_convention(names, "", named.config, named.split));
    }
    let Some(config) = pick_config(&configs, named.config) else {
        return Ok(Split::Configs(configs.into_iter().map(|config| config.name).collect()));
    };
    if config.splits.is_empty() {
        return Ok(by_convention(names, &config.data_dir, None, named.split));
    }
    let Some((_, patterns)) = config.splits.iter().find(|(split, _)| split == named.split) else {
        return Ok(Split::Absent { splits: config.splits.iter().map(|(split, _)| split.clone()).collect() });
    };
    let mut matched = Vec::new();
    for pattern in patterns {
        let pattern = join(&config.data_dir, pattern.trim_start_matches("./"));
        let hits = (0..names.len()).filter(|idx| matches(&pattern, &names[*idx]) && !matched.contains(idx));
        matched.extend(hits.collect::<Vec<_>>());
    }
    let files: Vec<usize> = matched.iter().copied().filter(|idx| is_data_file(&names[*idx])).collect();
    match (files.is_empty(), matched.first()) {
        (true, Some(first)) => Err(DataError::UnknownKind { path: names[*first].clone().into() }),
        (true, None) => Err(DataError::NoMatch { pattern: patterns.join(", ").into() }),
        (false, _) => Ok(Split::Files(files)),
    }
}

fn pick_config<'a>(configs: &'a [CardConfig], named: Option<&str>) -> Option<&'a CardConfig> {
    match (named, configs) {
        (Some(name), _) => configs.iter().find(|config| config.name == name),
        (None, [only]) => Some(only),
        (None, _) => {
            let declared = configs.iter().find(|config| config.is_default);
            declared.or_else(|| configs.iter().find(|config| config.name == "default"))
        }
    }
}

fn join(dir: &str, pattern: &str) -> String {
    if dir.is_empty() { pattern.to_owned() } else { format!("{dir}/{pattern}") }
}

/// Whether a glob pattern matches a path: `**` stands for any folders, the others for parts of one name. A pattern
/// that names a folder matches everything in it.
fn matches(pattern: &str, name: &str) -> bool {
    fn parts(pattern: &[&str], name: &[&str]) -> bool {
        match (pattern, name) {
            ([], _) => true,
            (["**", rest @ ..], _) => (0..=name.len()).any(|skip| parts(rest, &name[skip..])),
            (_, []) => false,
            ([first, rest @ ..], [part, others @ ..]) => {
                let chars = |text: &str| text.chars().collect::<Vec<_>>();
                // The last part of a pattern with wildcards matches a file, not a folder.
                let ends = rest.is_empty() && !others.is_empty() && first.contains(['*', '?', '[']);
                !ends && wild(&chars(first), &chars(part)) && parts(rest, others)
            }
        }
    }
    // More `**` than this would take too long to match, and no real pattern has as many.
    const MAX_FOLDER_STARS: usize = 4;
    let pattern: Vec<&str> = pattern.split('/').filter(|part| !part.is_empty()).collect();
    let name: Vec<&str> = name.split('/').collect();
    pattern.iter().filter(|part| **part == "**").count() <= MAX_FOLDER_STARS
        && !pattern.is_empty()
        && parts(&pattern, &name)
}

/// Whether rows can be read from a file: a known kind, not hidden, and not a description of the data.
fn is_data_file(name: &str) -> bool {
    let path = Path::new(name);
    FileKind::of(path).is_some()
        && !name.split('/').any(|part| part.starts_with('.'))
        && !DESCRIPTIONS.contains(&stem(path).as_str())
}

/// A file, and the configuration and split that its path suggests.
pub(crate) struct Placed {
    pub(crate) idx: usize,
    /// The folders of its path that do not name a split, without `data`.
    config: String,
    /// Names that may be the split: folders, and the name before its shard number.
    pub(crate) names: Vec<String>,
}

impl Placed {
    /// A file of which only the name suggests the split.
    pub(crate) fn of_split(idx: usize, split: &str) -> Placed {
        Placed { idx, config: String::new(), names: vec![split.into()] }
    }
}

/// The conventions of the `datasets` library, for the files in `dir`.
fn by_convention(names: &[String], dir: &str, config: Option<&str>, split: &str) -> Split {
    let below = |name: &str| match dir {
        "" => Some(name.to_owned()),
        dir => name.strip_prefix(dir)?.strip_prefix('/').map(String::from),
    };
    let files = names.iter().enumerate().filter(|(_, name)| is_data_file(name));
    let mut placed: Vec<Placed> = files.filter_map(|(idx, name)| Some(place(idx, &below(name)?))).collect();
    let mut configs: Vec<String> = placed.iter().map(|file| file.config.clone()).collect();
    configs.sort();
    configs.dedup();
    let chosen = match config {
        Some(config) => configs.iter().find(|c| *c == config).cloned(),
        None if configs.len() <= 1 => configs.first().cloned(),
        None => configs.iter().find(|c| c.is_empty() || *c == "default").cloned(),
    };
    match (chosen, config) {
        (Some(chosen), _) => placed.retain(|file| file.config == chosen),
        // A single unnamed configuration: the Hub calls it `default`.
        (None, Some("default")) if configs.len() == 1 && configs[0].is_empty() => {}
        (None, _) if !configs.is_empty() => return Split::Configs(configs),
        _ => {}
    }
    of_placed(&placed, split)
}

/// The files of a split: those that are named exactly like it, those whose name contains a word for it, or all files if
/// none names a split and the training split is wanted.
pub(crate) fn of_placed(placed: &[Placed], split: &str) -> Split {
    let exact = |file: &&Placed| file.names.iter().any(|name| name == split);
    let words = SPLITS.iter().find(|(name, _)| *name == split).map_or(&[][..], |(_, words)| words);
    let by_word = |file: &&Placed| file.names.iter().any(|name| has_word(name, words));
    let unnamed = |file: &&Placed| split == "train" && file.names.iter().all(|name| word_of(name).is_none());
    let pick = |wanted: &dyn Fn(&&Placed) -> bool| {
        placed.iter().filter(wanted).map(|file| file.idx).collect::<Vec<_>>()
    };
    let chosen = [pick(&exact), pick(&by_word)].into_iter().find(|files| !files.is_empty());
    let chosen = chosen.or_else(|| {
        let files = pick(&unnamed);
        (files.len() == placed.len() && !files.is_empty()).then_some(files)
    });
    match chosen {
        Some(files) => Split::Files(files),
        None => {
            let mut splits: Vec<String> =
                placed.iter().filter_map(|file| file.names.last().cloned()).collect();
            splits.sort();
            splits.dedup();
            Split::Absent { splits }
        }
    }
}

fn place(idx: usize, below: &str) -> Placed {
    let (mut config, mut names) = (Vec::new(), Vec::new());
    let mut parts: Vec<&str> = below.split('/').collect();
    parts.pop();
    for folder in parts.into_iter().filter(|folder| *folder != "data") {
        match word_of(folder) {
            Some(_) => names.push(folder.to_owned()),
            None => config.push(folder),
        }
    }
    names.push(stem(Path::new(below)));
    Placed { idx, config: config.join("/"), names }
}

/// A file's name without extensions and shard numbers: `train-00000-of-00002-9f.parquet` is `train`.
pub(crate) fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.split('.').next().unwrap_or_default();
    let number = |text: &str| text.len() >= 4 && text.bytes().all(|b| b.is_ascii_digit());
    let mut parts = stem.split('-').peekable();
    let mut kept = Vec::new();
    while let Some(part) = parts.next() {
        if number(part) && parts.peek() == Some(&"of") {
            break;
        }
        kept.push(part);
    }
    kept.join("-")
}

/// The split that a name denotes.
fn word_of(name: &str) -> Option<&'static str> {
    SPLITS.iter().find(|(_, words)| has_word(name, words)).map(|(split, _)| *split)
}

fn has_word(name: &str, words: &[&str]) -> bool {
    name.split(|c: char| !c.is_ascii_alphabetic())
        .any(|part| words.iter().any(|w| part.eq_ignore_ascii_case(w)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str], card: &str, config: Option<&str>, split: &str) -> Result<Vec<String>, String> {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        let card = format!("---\n{card}\n---\n");
        files_of_splits("a/b", config, &[split], &names, Some(&card)).map_err(|e| e.to_string())
    }

    const CARD: &str = "configs:\n- config_name: en\n  data_files:\n  - split: train\n    path: data/en-*.parquet\n  \
                        - split: heldout\n    path: [data/x.jsonl, 'extra/**']\n- config_name: de\n  data_dir: de\n";

    #[test]
    fn the_card_decides() {
        let names = [
            "README.md",
            "data/en-0.parquet",
            "data/en-1.parquet",
            "data/sub/en-2.parquet",
            "data/x.jsonl",
            "extra/a/b.jsonl",
            "extra/notes.md",
            "de/train.csv",
            "de/dev.csv",
        ];
        let of = |config: &str, split: &str| files(&names, CARD, Some(config), split);
        assert_eq!(of("en", "train").unwrap(), names[1..3]);
        assert_eq!(of("en", "heldout").unwrap(), [names[4], names[5]]);
        assert_eq!(of("de", "validation").unwrap(), [names[8]]);
        insta::assert_snapshot!(of("en", "test").unwrap_err(), @"dataset a/b has no split `test`; found train, heldout");
        insta::assert_snapshot!(of("fr", "train").unwrap_err(), @"dataset a/b has no configuration `fr`; found en, de");
        insta::assert_snapshot!(files(&names, CARD, None, "train").unwrap_err(), @"dataset a/b has several configurations: en, de");
        let default = format!("{CARD}  default: true\n");
        assert_eq!(files(&names, &default, None, "train").unwrap(), [names[7]]);
    }

    #[test]
    fn cards_that_match_nothing() {
        let of = |pattern: &str| {
            files(&["a.tar", "b.jsonl"], &format!("configs:\n- data_files: {pattern}"), None, "train")
        };
        assert_eq!(of("'*.jsonl'").unwrap(), ["b.jsonl"]);
        insta::assert_snapshot!(of("'*.tar'").unwrap_err(), @"a.tar is not a supported data file");
        insta::assert_snapshot!(of("'*.csv'").unwrap_err(), @"no file matches the pattern *.csv");
        insta::assert_snapshot!(of("{").unwrap_err(), @"the card (README.md) of dataset a/b cannot be read: line 3: unclosed bracket '{'");
    }

    #[test]
    fn file_names_decide_without_a_card() {
        let of = |names: &[&str], split: &str| files(names, "license: mit", None, split);
        let shards =
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/val.parquet"];
        assert_eq!(of(&shards, "train").unwrap(), shards[..2]);
        assert_eq!(of(&shards, "validation").unwrap(), shards[2..]);
        assert_eq!(of(&["test/1.csv", "train/1.csv", "README.md"], "test").unwrap(), ["test/1.csv"]);
        assert_eq!(
            of(&["my_dev_set.jsonl", "rest.train.jsonl"], "validation").unwrap(),
            ["my_dev_set.jsonl"]
        );
        assert_eq!(
            of(&["x.jsonl", "y.txt", ".gitattributes", "z.md"], "train").unwrap(),
            ["x.jsonl", "y.txt"]
        );
        assert!(of(&["x.jsonl"], "test").is_err());
        insta::assert_snapshot!(of(&["load.py"], "train").unwrap_err(), @"dataset a/b has no split `train`; found no data files");
    }

    #[test]
    fn patterns() {
        let cases = [
            ("data/train-*", "data/train-0.parquet", true),
            ("data/train-*", "data/train-0/x.parquet", false),
            ("data/*", "data/a/b.csv", false),
            ("data", "data/a/b.csv", true),
            ("**/train.csv", "train.csv", true),
            ("**/train.csv", "a/b/train.csv", true),
            ("**", "a/b.csv", true),
            ("a/**/*.csv", "a/b/c/d.csv", true),
            ("*.csv", "a/b.csv", false),
            ("train-[0-9].csv", "train-7.csv", true),
            ("", "a.csv", false),
        ];
        for (pattern, name, expected) in cases {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}
