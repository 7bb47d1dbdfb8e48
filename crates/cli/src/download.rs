//! `lockstep download`: downloads models and data sets ahead of a run.

use std::path::{Path, PathBuf};

use lockstep_config::{ModelSource, Purpose};
use lockstep_core::{Fault, FaultClass};
use lockstep_data::data_files;
use lockstep_hub::{ModelFiles, Repo, RepoKind};

use crate::args::{Download, RepoType};
use crate::download_progress::progress;
use crate::hub::{self, CARD, Need};
use crate::inputs;
use crate::report::{self, Failure};

/// Why there is nothing to download.
#[derive(Debug)]
enum DownloadError {
    /// Flags of a repository with a configuration.
    NotARepo {
        flag: &'static str,
    },
    NothingNamed,
    NoData {
        name: String,
    },
}

impl std::fmt::Display for DownloadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DownloadError::NotARepo { flag } => write!(f, "{flag} needs the name of a single repository"),
            DownloadError::NothingNamed => {
                write!(f, "the configuration names no model or dataset on the Hub")
            }
            DownloadError::NoData { name } => write!(f, "dataset {name} has no data files"),
        }
    }
}

impl std::error::Error for DownloadError {}

impl Fault for DownloadError {
    fn class(&self) -> FaultClass {
        match self {
            DownloadError::NoData { .. } => FaultClass::BadData,
            _ => FaultClass::BadConfig,
        }
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            DownloadError::NotARepo { .. } => {
                "In a configuration, set model_revision and dataset_revision instead.".into()
            }
            DownloadError::NothingNamed => {
                "Set model_name_or_path or dataset_name to a name such as org/name; paths that exist on this \
                 machine need no download."
                    .into()
            }
            DownloadError::NoData { .. } => {
                "Data sets that are loaded by a Python script are not supported.".into()
            }
        })
    }
}

pub(crate) fn run(args: &Download) -> Result<(), Failure> {
    match &args.settings[..] {
        [name] if !name.contains('=') && !Path::new(name).is_file() => one(name, args),
        _ => configured(args),
    }
}

/// Downloads one repository: all that training can use of a model, all data files of a data set.
fn one(name: &str, args: &Download) -> Result<(), Failure> {
    let kind = match args.repo_type.unwrap_or(RepoType::Model) {
        RepoType::Model => RepoKind::Model,
        RepoType::Dataset => RepoKind::Dataset,
    };
    let repo = Repo::new(kind, name).map_err(hub::failed)?;
    let (client, mut progress) = (hub::open()?, progress());
    let revision = args.revision.as_deref().unwrap_or("main");
    let resolved = client.resolve(&repo, revision, &mut *progress).map_err(hub::failed)?;
    let folder = match kind {
        RepoKind::Model => hub::download_model(&client, &resolved, ModelFiles::All, &mut *progress)?,
        RepoKind::Dataset => {
            let names: Vec<String> = resolved.file_names().into_iter().map(String::from).collect();
            let mut files = data_files(&names);
            if files.is_empty() {
                return Err(Box::new(DownloadError::NoData { name: name.into() }));
            }
            files.extend(names.into_iter().filter(|name| name == CARD));
            client.download(&resolved, &files, &mut *progress).map_err(hub::failed)?
        }
    };
    report::print(&line(&repo.to_string(), &resolved.commit, &folder))
}

/// Downloads what a configuration names.
fn configured(args: &Download) -> Result<(), Failure> {
    let flag = match (args.repo_type, &args.revision) {
        (Some(_), _) => Some("--repo-type"),
        (None, Some(_)) => Some("--revision"),
        (None, None) => None,
    };
    if let Some(flag) = flag {
        return Err(Box::new(DownloadError::NotARepo { flag }));
    }
    let (mut config, _) = inputs::load(Purpose::Plan, &args.settings, &[])?;
    let mut commits = String::new();
    let model = match &config.model.source {
        ModelSource::Folder(path) => Some(path.clone()),
        _ => None,
    };
    hub::provide(&mut config, &mut commits, Need::Train)?;
    let commit = |key: &str| {
        commits.lines().find_map(|line| line.strip_prefix("# ")?.strip_prefix(key)?.strip_prefix('='))
    };
    let mut text = String::new();
    if let (Some(commit), Some(name), ModelSource::Folder(folder)) =
        (commit("model_revision"), model, &config.model.source)
    {
        text.push_str(&line(&format!("model {}", name.display()), commit, folder));
    }
    if let (Some(commit), Some(named)) = (commit("dataset_revision"), &config.data.dataset) {
        let repo = Repo::new(RepoKind::Dataset, &named.name).map_err(hub::failed)?;
        let folder: PathBuf = config.data.hub.hub.join(repo.folder()).join("snapshots").join(commit);
        text.push_str(&line(&repo.to_string(), commit, &folder));
    }
    if commits.is_empty() {
        return Err(Box::new(DownloadError::NothingNamed));
    }
    report::print(&text)
}

fn line(repo: &str, commit: &str, folder: &Path) -> String {
    format!("{repo}, commit {commit}\n  {}\n", folder.display())
}
