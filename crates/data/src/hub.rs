//! Data sets by name, found on this machine: nothing is downloaded.
//!
//! A name is looked for as a path, in the Hub's download cache (`datasets--owner--name/snapshots/...`),
//! and among what the `datasets` library has prepared (`owner___name/config/version/hash/name-train.arrow`).
//! Which files a split has follows from their names, by the Hub's conventions. The folders come from the
//! caller: this crate does not read the environment. Left out: splits that only a data set's README knows.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::DataError;
use crate::files::{entries, walk};
use crate::read::FileKind;

/// Where Hugging Face libraries keep things on this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HubFolders {
    /// `$HF_HOME/hub`.
    pub hub: PathBuf,
    /// `$HF_HOME/datasets`.
    pub datasets: PathBuf,
}

/// A data set by name.
#[derive(Clone, Copy, Debug)]
pub struct Named<'a> {
    /// `owner/name`, or a path.
    pub name: &'a str,
    /// A part of the data set with its own files.
    pub config: Option<&'a str>,
    pub split: &'a str,
}

/// Words that mean a split in a file's name, by the split.
const SPLITS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "val", "dev"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// The files of a split.
pub fn locate(named: Named<'_>, folders: &HubFolders) -> Result<Vec<PathBuf>, DataError> {
    let path = Path::new(named.name);
    if path.is_file() {
        return Ok(vec![path.into()]);
    }
    let mut looked = Vec::new();
    let mut found = None;
    if path.is_dir() {
        found = Some(in_folder(path, named)?);
        looked.push(path.to_path_buf());
    } else {
        let snapshots = folders.hub.join(format!("datasets--{}", named.name.replace('/', "--")));
        let prepared = folders.datasets.join(named.name.replace('/', "___"));
        if let Some(snapshot) = newest_snapshot(&snapshots)? {
            found = Some(in_folder(&snapshot, named)?);
        }
        if prepared.is_dir() && !matches!(found, Some(Split::Files(_))) {
            found = Some(in_prepared(&prepared, named)?);
        }
        looked.extend([snapshots, prepared]);
    }
    match found {
        Some(Split::Files(files)) => Ok(files),
        Some(Split::Absent { splits }) => {
            Err(DataError::NoSplit { name: named.name.into(), split: named.split.into(), splits, looked })
        }
        Some(Split::Configs(configs)) => Err(DataError::WhichConfig { name: named.name.into(), configs }),
        None => Err(DataError::DatasetMissing { name: named.name.into(), looked }),
    }
}

/// What a folder has of a split.
enum Split {
    Files(Vec<PathBuf>),
    Absent {
        splits: Vec<String>,
    },
    /// Several configurations have files, and none was named, or another one.
    Configs(Vec<String>),
}

/// The snapshot that `main` refers to, or the last changed one.
fn newest_snapshot(repo: &Path) -> Result<Option<PathBuf>, DataError> {
    let snapshots = repo.join("snapshots");
    if !snapshots.is_dir() {
        return Ok(None);
    }
    if let Some(revision) = revision(&repo.join("refs/main")) {
        let snapshot = snapshots.join(revision.trim());
        if !revision.trim().is_empty() && snapshot.is_dir() {
            return Ok(Some(snapshot));
        }
    }
    Ok(entries(&snapshots)?.into_iter().filter(|path| path.is_dir()).max_by_key(|path| changed(path)))
}

/// The revision that a reference names: a hash or a name, never long.
fn revision(reference: &Path) -> Option<String> {
    const MAX_BYTES: u64 = 1024;
    let file = if reference.is_file() { File::open(reference).ok()? } else { return None };
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

fn changed(path: &Path) -> Option<std::time::SystemTime> {
    path.metadata().and_then(|found| found.modified()).ok()
}

/// A file with what its place says.
struct Placed {
    path: PathBuf,
    /// Folders on the way that name no split, `data` left out.
    config: String,
    /// Names that may be the split: folders, and the name before its shard number.
    names: Vec<String>,
}

fn in_folder(root: &Path, named: Named<'_>) -> Result<Split, DataError> {
    let mut all = Vec::new();
    walk(root, &mut |path| all.push(path))?;
    let mut placed: Vec<Placed> = all.into_iter().filter_map(|path| place(root, path)).collect();
    // Descriptions that lie beside the data and have its ending.
    placed.retain(|file| {
        !matches!(file.names.last().map(String::as_str), Some("dataset_infos" | "dataset_info" | "state"))
    });
    let mut configs: Vec<String> = placed.iter().map(|file| file.config.clone()).collect();
    configs.sort();
    configs.dedup();
    let config = match named.config {
        Some(config) => configs.iter().find(|c| *c == config).cloned(),
        None if configs.len() <= 1 => configs.first().cloned(),
        None => configs.iter().find(|c| c.is_empty() || *c == "default").cloned(),
    };
    match (config, named.config) {
        (Some(config), _) => placed.retain(|file| file.config == config),
        // One unnamed configuration, asked for by some name: the Hub calls it `default`.
        (None, Some("default")) if configs.len() == 1 && configs[0].is_empty() => {}
        (None, _) if !configs.is_empty() => return Ok(Split::Configs(configs)),
        _ => {}
    }
    Ok(choose(placed, named.split))
}

fn choose(placed: Vec<Placed>, split: &str) -> Split {
    let exact = |file: &&Placed| file.names.iter().any(|name| name == split);
    let words = SPLITS.iter().find(|(name, _)| *name == split).map_or(&[][..], |(_, words)| words);
    let by_word = |file: &&Placed| file.names.iter().any(|name| has_word(name, words));
    let unnamed = |file: &&Placed| split == "train" && file.names.iter().all(|name| word_of(name).is_none());
    let pick = |wanted: &dyn Fn(&&Placed) -> bool| {
        placed.iter().filter(wanted).map(|file| file.path.clone()).collect::<Vec<_>>()
    };
    let chosen = [pick(&exact), pick(&by_word)].into_iter().find(|files| !files.is_empty());
    // Files that name no split at all are for training.
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

fn place(root: &Path, path: PathBuf) -> Option<Placed> {
    FileKind::of(&path)?;
    let below = path.strip_prefix(root).ok()?.to_path_buf();
    let (mut config, mut names) = (Vec::new(), Vec::new());
    let folders = below.parent()?.components().map(|c| c.as_os_str().to_string_lossy().into_owned());
    for folder in folders.filter(|folder| folder != "data") {
        match word_of(&folder) {
            Some(_) => names.push(folder),
            None => config.push(folder),
        }
    }
    names.push(stem(&below));
    Some(Placed { path, config: config.join("/"), names })
}

/// A file's name without endings and shard numbers: `train-00000-of-00002-9f.parquet` is `train`.
fn stem(path: &Path) -> String {
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

/// The split that a name means.
fn word_of(name: &str) -> Option<&'static str> {
    SPLITS.iter().find(|(_, words)| has_word(name, words)).map(|(split, _)| *split)
}

fn has_word(name: &str, words: &[&str]) -> bool {
    name.split(|c: char| !c.is_ascii_alphabetic())
        .any(|part| words.iter().any(|w| part.eq_ignore_ascii_case(w)))
}

/// `config/version/hash/name-split.arrow`, the last changed of several.
fn in_prepared(root: &Path, named: Named<'_>) -> Result<Split, DataError> {
    let configs: Vec<PathBuf> = entries(root)?.into_iter().filter(|path| path.is_dir()).collect();
    let name_of = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let wanted = named.config.unwrap_or("default");
    let config = match &configs[..] {
        [only] if named.config.is_none() => only,
        _ => match configs.iter().find(|path| name_of(path) == wanted) {
            Some(config) => config,
            None => return Ok(Split::Configs(configs.iter().map(|path| name_of(path)).collect())),
        },
    };
    let short = named.name.rsplit('/').next().unwrap_or(named.name);
    let mut by_folder: Vec<(PathBuf, Vec<Placed>)> = Vec::new();
    let mut all = Vec::new();
    walk(config, &mut |path| all.push(path))?;
    for path in all.into_iter().filter(|path| FileKind::of(path) == Some(FileKind::Arrow)) {
        let folder = path.parent().unwrap_or(root).to_path_buf();
        let stem = stem(&path);
        // Beside the splits lie results of `map`, which are called cache-HASH.
        let Some(split) = stem.strip_prefix(short).and_then(|rest| rest.strip_prefix('-')) else { continue };
        let file = Placed { path, config: String::new(), names: vec![split.into()] };
        match by_folder.iter_mut().find(|(known, _)| *known == folder) {
            Some((_, files)) => files.push(file),
            None => by_folder.push((folder, vec![file])),
        }
    }
    let newest = by_folder.into_iter().max_by_key(|(folder, _)| changed(folder));
    Ok(match newest {
        Some((_, files)) => choose(files, named.split),
        None => Split::Absent { splits: Vec::new() },
    })
}

/// Whether a name could be a path that is misspelled rather than a data set's.
pub(crate) fn looks_like_a_path(name: &str) -> bool {
    name.starts_with(['.', '/', '~'])
        || name.matches('/').count() > 1
        || FileKind::of(Path::new(name)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    struct Home(tempfile::TempDir);

    impl Home {
        fn new(files: &[&str]) -> Home {
            let home = Home(tempfile::tempdir().unwrap());
            for name in files {
                let path = home.0.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "").unwrap();
            }
            home
        }

        fn find(&self, name: &str, config: Option<&str>, split: &str) -> Result<Vec<String>, String> {
            let folders =
                HubFolders { hub: self.0.path().join("hub"), datasets: self.0.path().join("datasets") };
            let show = |path: PathBuf| path.strip_prefix(self.0.path()).unwrap().display().to_string();
            match locate(Named { name, config, split }, &folders) {
                Ok(files) => Ok(files.into_iter().map(show).collect()),
                Err(e) => Err(e.to_string().replace(&format!("{}/", self.0.path().display()), "")),
            }
        }
    }

    #[test]
    fn snapshots() {
        let home = Home::new(&[
            "hub/datasets--a--b/snapshots/r1/data/train-00000-of-00002.parquet",
            "hub/datasets--a--b/snapshots/r1/data/train-00001-of-00002-9f3c.parquet",
            "hub/datasets--a--b/snapshots/r1/data/train_sft-00000-of-00001.parquet",
            "hub/datasets--a--b/snapshots/r1/data/test-00000-of-00001.parquet",
            "hub/datasets--a--b/snapshots/r1/README.md",
            "hub/datasets--a--b/snapshots/r0/old.jsonl",
            "hub/datasets--c/snapshots/r/rows.jsonl.gz",
            "hub/datasets--c/snapshots/r/dataset_infos.json",
            "hub/datasets--d--e/snapshots/r/en/train.jsonl",
            "hub/datasets--d--e/snapshots/r/en/dev.jsonl",
            "hub/datasets--d--e/snapshots/r/de/train/0000.parquet",
        ]);
        fs::create_dir_all(home.0.path().join("hub/datasets--a--b/refs")).unwrap();
        fs::write(home.0.path().join("hub/datasets--a--b/refs/main"), "r1\n").unwrap();
        let root = "hub/datasets--a--b/snapshots/r1/data";
        let shards = ["train-00000-of-00002", "train-00001-of-00002-9f3c"];
        assert_eq!(home.find("a/b", None, "train").unwrap(), shards.map(|s| format!("{root}/{s}.parquet")));
        assert_eq!(
            home.find("a/b", None, "train_sft").unwrap(),
            [format!("{root}/train_sft-00000-of-00001.parquet")]
        );
        assert_eq!(home.find("a/b", Some("default"), "test").unwrap().len(), 1);
        assert_eq!(home.find("c", None, "train").unwrap(), ["hub/datasets--c/snapshots/r/rows.jsonl.gz"]);
        assert_eq!(
            home.find("d/e", Some("en"), "validation").unwrap(),
            ["hub/datasets--d--e/snapshots/r/en/dev.jsonl"]
        );
        assert_eq!(
            home.find("d/e", Some("de"), "train").unwrap(),
            ["hub/datasets--d--e/snapshots/r/de/train/0000.parquet"]
        );
        insta::assert_snapshot!(home.find("d/e", None, "train").unwrap_err(), @"dataset d/e has several configurations: de, en");
        insta::assert_snapshot!(home.find("a/b", None, "validation").unwrap_err(), @"dataset a/b has no split `validation`; found test, train, train_sft");
        insta::assert_snapshot!(home.find("no/such", None, "train").unwrap_err(), @"dataset no/such is not on this machine; searched hub/datasets--no--such and datasets/no___such");
    }

    #[test]
    fn what_datasets_has_prepared() {
        let home = Home::new(&[
            "datasets/a___b/default/0.0.0/1f/b-train.arrow",
            "datasets/a___b/default/0.0.0/1f/b-test-00000-of-00002.arrow",
            "datasets/a___b/default/0.0.0/1f/b-test-00001-of-00002.arrow",
            "datasets/a___b/default/0.0.0/1f/cache-77.arrow",
            "datasets/a___b/default/0.0.0/1f/dataset_info.json",
        ]);
        let root = "datasets/a___b/default/0.0.0/1f";
        assert_eq!(home.find("a/b", None, "train").unwrap(), [format!("{root}/b-train.arrow")]);
        assert_eq!(home.find("a/b", None, "test").unwrap().len(), 2);
        insta::assert_snapshot!(home.find("a/b", Some("x"), "train").unwrap_err(), @"dataset a/b has several configurations: default");
    }
}
