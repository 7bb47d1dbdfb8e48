//! Data sets by name, found on this machine. This crate downloads nothing: the Hub client does, into the same cache.
//!
//! A name is looked up as a path, in the Hub's download cache (`datasets--owner--name/snapshots/...`),
//! and among the prepared files of the `datasets` library (`owner___name/config/version/hash/name-train.arrow`).
//! The folders come from the caller: this crate does not read the environment.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::DataError;
use crate::files::{entries, walk};
use crate::read::FileKind;
use crate::splits::{self, Placed, Split};

/// The largest card that is read. Cards are written by hand, so they are small.
const MAX_CARD_BYTES: u64 = 8 << 20;

/// The cache folders of the Hugging Face libraries.
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
    /// A branch, a tag or a commit in the Hub's cache. `None`: `main`, or the newest snapshot.
    pub revision: Option<&'a str>,
}

/// The files of a split.
pub fn locate(named: Named<'_>, folders: &HubFolders) -> Result<Vec<PathBuf>, DataError> {
    let path = Path::new(named.name);
    if path.is_file() {
        return Ok(vec![path.into()]);
    }
    let mut searched = Vec::new();
    let mut found = None;
    if path.is_dir() {
        found = Some(in_folder(path, named)?);
        searched.push(path.to_path_buf());
    } else {
        let repo = folders.hub.join(format!("datasets--{}", named.name.replace('/', "--")));
        let prepared = folders.datasets.join(named.name.replace('/', "___"));
        if let Some(snapshot) = snapshot(&repo, named.revision)? {
            found = Some(in_folder(&snapshot, named)?);
        }
        // The prepared files of the `datasets` library do not record their revision.
        let may_be_prepared = named.revision.is_none() && prepared.is_dir();
        if may_be_prepared && !matches!(found, Some((_, Split::Files(_)))) {
            found = Some(in_prepared(&prepared, named)?);
        }
        searched.extend([repo, prepared]);
    }
    match found {
        Some((paths, Split::Files(files))) => Ok(files.into_iter().map(|idx| paths[idx].clone()).collect()),
        Some((_, absent)) => Err(absent.error(named, searched)),
        None => Err(DataError::DatasetMissing { name: named.name.into(), searched }),
    }
}

/// Paths, and which of them hold a split.
type Found = (Vec<PathBuf>, Split);

/// The snapshot of a revision. Without one: the snapshot that `main` refers to, or the last changed one.
fn snapshot(repo: &Path, revision: Option<&str>) -> Result<Option<PathBuf>, DataError> {
    let snapshots = repo.join("snapshots");
    if !snapshots.is_dir() {
        return Ok(None);
    }
    if let Some(commit) = commit_of(&repo.join("refs").join(revision.unwrap_or("main"))) {
        let snapshot = snapshots.join(commit.trim());
        if !commit.trim().is_empty() && snapshot.is_dir() {
            return Ok(Some(snapshot));
        }
    }
    match revision {
        Some(commit) => Ok(Some(snapshots.join(commit)).filter(|path| path.is_dir())),
        None => {
            Ok(entries(&snapshots)?.into_iter().filter(|path| path.is_dir()).max_by_key(|path| changed(path)))
        }
    }
}

/// The commit that a reference names. Reads a limited number of bytes.
fn commit_of(reference: &Path) -> Option<String> {
    const MAX_BYTES: u64 = 1024;
    let file = if reference.is_file() { File::open(reference).ok()? } else { return None };
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

fn changed(path: &Path) -> Option<std::time::SystemTime> {
    path.metadata().and_then(|found| found.modified()).ok()
}

fn in_folder(root: &Path, named: Named<'_>) -> Result<Found, DataError> {
    let mut paths = Vec::new();
    walk(root, &mut |path| paths.push(path))?;
    let below = |path: &PathBuf| path.strip_prefix(root).unwrap_or(path).to_string_lossy().into_owned();
    let names: Vec<String> = paths.iter().map(below).collect();
    let split = splits::choose(&names, read_card(&root.join("README.md")).as_deref(), named)?;
    Ok((paths, split))
}

fn read_card(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_CARD_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// `config/version/hash/name-split.arrow`, the last changed of several.
fn in_prepared(root: &Path, named: Named<'_>) -> Result<Found, DataError> {
    let configs: Vec<PathBuf> = entries(root)?.into_iter().filter(|path| path.is_dir()).collect();
    let name_of = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let wanted = named.config.unwrap_or("default");
    let config = match &configs[..] {
        [only] if named.config.is_none() => only,
        _ => match configs.iter().find(|path| name_of(path) == wanted) {
            Some(config) => config,
            None => {
                let configs = configs.iter().map(|path| name_of(path)).collect();
                return Ok((Vec::new(), Split::Configs(configs)));
            }
        },
    };
    let short = named.name.rsplit('/').next().unwrap_or(named.name);
    let mut by_folder: Vec<(PathBuf, Vec<Placed>)> = Vec::new();
    let mut paths = Vec::new();
    walk(config, &mut |path| paths.push(path))?;
    for (idx, path) in paths.iter().enumerate().filter(|(_, p)| FileKind::of(p) == Some(FileKind::Arrow)) {
        let folder = path.parent().unwrap_or(root).to_path_buf();
        let stem = splits::stem(path);
        // The folder also has results of `map`, which are named cache-HASH.
        let Some(split) = stem.strip_prefix(short).and_then(|rest| rest.strip_prefix('-')) else { continue };
        let file = Placed::of_split(idx, split);
        match by_folder.iter_mut().find(|(known, _)| *known == folder) {
            Some((_, files)) => files.push(file),
            None => by_folder.push((folder, vec![file])),
        }
    }
    let newest = by_folder.into_iter().max_by_key(|(folder, _)| changed(folder));
    let split = match newest {
        Some((_, files)) => splits::of_placed(&files, named.split),
        None => Split::Absent { splits: Vec::new() },
    };
    Ok((paths, split))
}

/// Whether a name looks like a misspelled path rather than the name of a data set.
pub(crate) fn looks_like_a_path(name: &str) -> bool {
    name.starts_with(['.', '/', '~'])
        || name.matches('/').count() > 1
        || FileKind::of(Path::new(name)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    struct TestHome(tempfile::TempDir);

    impl TestHome {
        fn new(files: &[&str]) -> TestHome {
            let home = TestHome(tempfile::tempdir().unwrap());
            for name in files {
                let path = home.0.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "").unwrap();
            }
            home
        }

        fn at(
            &self,
            name: &str,
            config: Option<&str>,
            split: &str,
            revision: Option<&str>,
        ) -> Result<Vec<PathBuf>, DataError> {
            let folders =
                HubFolders { hub: self.0.path().join("hub"), datasets: self.0.path().join("datasets") };
            locate(Named { name, config, split, revision }, &folders)
        }

        fn find(&self, name: &str, config: Option<&str>, split: &str) -> Result<Vec<String>, String> {
            let show = |path: PathBuf| path.strip_prefix(self.0.path()).unwrap().display().to_string();
            match self.at(name, config, split, None) {
                Ok(files) => Ok(files.into_iter().map(show).collect()),
                Err(e) => Err(e.to_string().replace(&format!("{}/", self.0.path().display()), "")),
            }
        }
    }

    #[test]
    fn snapshots() {
        let home = TestHome::new(&[
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
    fn revisions() {
        let home = TestHome::new(&[
            "hub/datasets--a--b/snapshots/c1/train.jsonl",
            "hub/datasets--a--b/snapshots/c2/train.jsonl",
            "datasets/a___b/default/0.0.0/1f/b-test.arrow",
        ]);
        fs::create_dir_all(home.0.path().join("hub/datasets--a--b/refs")).unwrap();
        fs::write(home.0.path().join("hub/datasets--a--b/refs/v1"), "c1").unwrap();
        let at = |split: &str, revision: &str| home.at("a/b", None, split, Some(revision));
        for (revision, commit) in [("v1", "c1"), ("c1", "c1"), ("c2", "c2")] {
            let files = at("train", revision).unwrap();
            assert!(files.len() == 1 && files[0].to_str().unwrap().contains(commit), "{files:?}");
        }
        assert!(matches!(at("train", "v2"), Err(DataError::DatasetMissing { .. })));
        assert!(matches!(at("test", "c1"), Err(DataError::NoSplit { .. })), "prepared data has no revision");
    }

    #[test]
    fn the_card_of_a_snapshot_is_read() {
        let home = TestHome::new(&[
            "hub/datasets--a--b/snapshots/c1/x.jsonl",
            "hub/datasets--a--b/snapshots/c1/y.jsonl",
        ]);
        let card = "---\nconfigs:\n- data_files:\n  - {split: train, path: y.jsonl}\n---\n";
        fs::write(home.0.path().join("hub/datasets--a--b/snapshots/c1/README.md"), card).unwrap();
        assert_eq!(home.find("a/b", None, "train").unwrap(), ["hub/datasets--a--b/snapshots/c1/y.jsonl"]);
        insta::assert_snapshot!(home.find("a/b", None, "test").unwrap_err(), @"dataset a/b has no split `test`; found train");
    }

    #[test]
    fn what_datasets_has_prepared() {
        let home = TestHome::new(&[
            "datasets/a___b/default/0.0.0/1f/b-train.arrow",
            "datasets/a___b/default/0.0.0/1f/b-test-00000-of-00002.arrow",
            "datasets/a___b/default/0.0.0/1f/b-test-00001-of-00002.arrow",
            "datasets/a___b/default/0.0.0/1f/cache-77.arrow",
            "datasets/a___b/default/0.0.0/1f/dataset_info.json",
        ]);
        let root = "datasets/a___b/default/0.0.0/1f";
        assert_eq!(home.find("a/b", None, "train").unwrap(), [format!("{root}/b-train.arrow")]);
        assert_eq!(home.find("a/b", None, "test").unwrap().len(), 2);
        insta::assert_snapshot!(home.find("a/b", Some("x"), "train").unwrap_err(), @"dataset a/b has no configuration `x`; found default");
    }
}
