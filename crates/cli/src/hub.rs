//! Models and data sets by their names on the Hub: finds out which a command needs, downloads what is missing, and puts
//! the folders into the configuration.
//!
//! A path that exists on this machine wins over a name. With several ranks, rank 0 resolves each name to a commit and
//! sends it to the others; then the first rank of each host downloads, while the others wait. All of this goes over the
//! session, whose heartbeats keep the waiting ranks alive, and not over collectives, which would time out.

use std::path::{Path, PathBuf};
use std::time::Duration;

use lockstep_config::{InitialWeights, ModelSource, RunConfig, TokenizerChoice};
use lockstep_data::{HubFolders, Named, files_of_splits, locate};
use lockstep_hub::{
    DownloadProgress, Hub, HubError, HubSettings, ModelFiles, NoDownloadProgress, Repo, RepoKind,
    ResolvedRepo, looks_like_repo, model_files,
};
use lockstep_launch::Session;

use crate::download_progress::progress;
use crate::report::Failure;
use crate::train::launch_failed;

/// The card of a data set.
pub(crate) const CARD: &str = "README.md";
pub(crate) const MAX_CARD_BYTES: u64 = 8 << 20;
const DEFAULT_REVISION: &str = "main";
/// A large model takes hours on a slow connection. Ranks that wait see at once if the one that downloads fails.
const DOWNLOAD_TIMEOUT: Duration = Duration::from_secs(48 * 3600);
/// Stands for a commit if the name is a path on rank 0's machine.
const LOCAL: &str = "-";

/// What a command needs of the Hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// The model, with its weights if training starts from them, and all data.
    Train,
    /// The tokenizer and all data.
    Prepare,
    /// The model without its weights, and no data.
    Plan,
    /// The evaluation data. The model is a folder already.
    Evaluate,
}

/// The place in the configuration that a repository fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Model,
    /// Another model of the algorithm, by its key.
    AlgorithmModel(&'static str),
    Tokenizer,
    Dataset,
}

/// A name in the configuration that may be a repository.
#[derive(Clone, Debug)]
struct Wanted {
    role: Role,
    repo: Repo,
    revision: String,
    need: Need,
}

/// Opens the client with the settings of the environment.
pub(crate) fn open() -> Result<Hub, Failure> {
    let settings = HubSettings::from_env(&|name| std::env::var_os(name)).map_err(failed)?;
    Hub::new(settings).map_err(failed)
}

pub(crate) fn failed(error: HubError) -> Failure {
    Box::new(error)
}

/// The folder of a model that was given on the command line: a path, or a name on the Hub.
pub(crate) fn model(given: &Path) -> Result<PathBuf, Failure> {
    let Some(name) = model_name(given).filter(|_| !given.exists()) else { return Ok(given.into()) };
    let repo = Repo::new(RepoKind::Model, name).map_err(failed)?;
    let (hub, mut progress) = (open()?, progress());
    let resolved = hub.resolve(&repo, DEFAULT_REVISION, &mut *progress).map_err(failed)?;
    download_model(&hub, &resolved, ModelFiles::All, &mut *progress)
}

/// Downloads what a command needs, for a process that runs alone.
pub(crate) fn provide(config: &mut RunConfig, text: &mut String, need: Need) -> Result<(), Failure> {
    let wanted: Vec<Wanted> = wanted(config, need)?.into_iter().filter(|w| !w.is_path(config)).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let (hub, mut progress) = (open()?, progress());
    // What is wrong with any of them is reported before anything large is downloaded.
    let mut downloads = Vec::new();
    for wanted in wanted {
        if let Some(resolved) = wanted.resolve(&hub, config, &mut *progress)? {
            let files = wanted.files(&hub, config, &resolved)?;
            downloads.push((wanted, resolved, files));
        }
    }
    for (wanted, resolved, files) in downloads {
        let folder = hub.download(&resolved, &files, &mut *progress).map_err(failed)?;
        wanted.apply(config, text, &resolved.commit, folder);
    }
    Ok(())
}

/// Downloads what training needs, once on each host.
pub(crate) fn provide_to_ranks(
    session: &mut Session,
    config: &mut RunConfig,
    text: &mut String,
) -> Result<(), Failure> {
    // From the configuration alone, so that all ranks make the same exchanges.
    let all = wanted(config, Need::Train)?;
    if all.is_empty() {
        return Ok(());
    }
    let (hub, mut progress) = (open()?, progress());
    let mut mine = Vec::new();
    if session.world().rank == 0 {
        for wanted in &all {
            let resolved = match wanted.is_path(config) {
                true => None,
                false => wanted.resolve(&hub, config, &mut *progress)?,
            };
            if let Some(resolved) = &resolved {
                wanted.files(&hub, config, resolved)?;
            }
            mine.push(resolved.map_or(LOCAL.into(), |resolved| resolved.commit));
        }
    }
    let values = session.exchange_within("the Hub's commits", mine.join(" ").as_bytes(), DOWNLOAD_TIMEOUT);
    let first = values.map_err(launch_failed)?.swap_remove(0);
    let commits = String::from_utf8_lossy(&first).into_owned();
    let chosen: Vec<(&Wanted, &str)> =
        all.iter().zip(commits.split(' ')).filter(|(_, commit)| *commit != LOCAL).collect();
    if session.world().local_rank == 0 {
        for (wanted, commit) in &chosen {
            let resolved = wanted.resolve_commit(&hub, commit, &mut *progress)?;
            let files = wanted.files(&hub, config, &resolved)?;
            hub.download(&resolved, &files, &mut *progress).map_err(failed)?;
        }
    }
    session.exchange_within("the downloads", &[], DOWNLOAD_TIMEOUT).map_err(launch_failed)?;
    for (wanted, commit) in chosen {
        wanted.apply(config, text, commit, hub.snapshot(&wanted.repo, commit));
    }
    Ok(())
}

/// The name of a model on the Hub that a path may be: `org/name`. Names without an organization are old aliases, and more
/// likely misspelled folders.
fn model_name(path: &Path) -> Option<&str> {
    path.to_str().filter(|name| name.contains('/') && looks_like_repo(name))
}

/// The names in a configuration that can be repositories, whether they exist as paths or not.
fn wanted(config: &RunConfig, need: Need) -> Result<Vec<Wanted>, Failure> {
    let mut all = Vec::new();
    let mut add = |role, kind, name: &str, revision: &Option<String>| -> Result<(), Failure> {
        let repo = Repo::new(kind, name).map_err(failed)?;
        let revision = revision.clone().unwrap_or_else(|| DEFAULT_REVISION.into());
        all.push(Wanted { role, repo, revision, need });
        Ok(())
    };
    if let ModelSource::Folder(path) = &config.model.source
        && let Some(name) = model_name(path)
    {
        add(Role::Model, RepoKind::Model, name, &config.model.revision)?;
    }
    if matches!(need, Need::Train | Need::Plan) {
        for (key, path) in config.algorithm.clone().models_mut() {
            if let Some(name) = model_name(path) {
                add(Role::AlgorithmModel(key), RepoKind::Model, name, &None)?;
            }
        }
    }
    if let TokenizerChoice::File(path) = &config.data.tokenizer
        && let Some(name) = model_name(path)
    {
        add(Role::Tokenizer, RepoKind::Model, name, &None)?;
    }
    if let Some(named) = config.data.dataset.as_ref().filter(|named| looks_like_repo(&named.name))
        && !splits(config, need).is_empty()
    {
        add(Role::Dataset, RepoKind::Dataset, &named.name, &named.revision)?;
    }
    Ok(all)
}

/// The splits of the configuration's data set that a command reads.
fn splits(config: &RunConfig, need: Need) -> Vec<String> {
    let data = &config.data;
    let Some(named) = &data.dataset else { return Vec::new() };
    let evaluates_part = data.eval_files.is_empty() && data.eval_fraction.is_some();
    let evaluates_split =
        data.eval_files.is_empty() && data.eval_fraction.is_none() && named.evaluates_test_split;
    let (train, test) = match need {
        Need::Train | Need::Prepare => (true, evaluates_split),
        Need::Evaluate => (evaluates_part, evaluates_split),
        Need::Plan => (false, false),
    };
    let mut splits = Vec::new();
    splits.extend(train.then(|| named.train_split.clone()));
    splits.extend(test.then(|| named.test_split.clone()));
    splits.dedup();
    splits
}

impl Wanted {
    /// Whether the name is a path on this machine.
    fn is_path(&self, config: &mut RunConfig) -> bool {
        if !Path::new(self.repo.name()).exists() {
            return false;
        }
        let key = match self.role {
            Role::Model => config.model.revision.as_ref().map(|_| "model_revision"),
            Role::Dataset => config
                .data
                .dataset
                .as_ref()
                .and_then(|named| named.revision.as_ref())
                .map(|_| "dataset_revision"),
            Role::Tokenizer | Role::AlgorithmModel(_) => None,
        };
        if let Some(key) = key {
            let name = self.repo.name();
            config.notes.push(format!("`{key}` has no effect: {name} is a folder on this machine"));
        }
        true
    }

    /// Resolves the revision to a commit. `None`: the Hub cannot be reached, but the data set is on this machine, as
    /// the `datasets` library has prepared it.
    fn resolve(
        &self,
        hub: &Hub,
        config: &mut RunConfig,
        progress: &mut dyn DownloadProgress,
    ) -> Result<Option<ResolvedRepo>, Failure> {
        match hub.resolve(&self.repo, &self.revision, progress) {
            Ok(resolved) => Ok(Some(resolved)),
            Err(error @ (HubError::Offline { .. } | HubError::Network { .. }))
                if self.role == Role::Dataset && self.is_prepared(config) =>
            {
                let note = format!("{error}; using the data that the `datasets` library has prepared");
                config.notes.push(note);
                Ok(None)
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Resolves a commit that another host has chosen.
    fn resolve_commit(
        &self,
        hub: &Hub,
        commit: &str,
        progress: &mut dyn DownloadProgress,
    ) -> Result<ResolvedRepo, Failure> {
        let mut resolved = hub.resolve(&self.repo, commit, progress).map_err(failed)?;
        // So that a later run without a network finds the commit under the revision's name.
        resolved.revision = self.revision.clone();
        Ok(resolved)
    }

    fn is_prepared(&self, config: &RunConfig) -> bool {
        let (data, default) = (&config.data, self.revision == DEFAULT_REVISION);
        let Some(named) = data.dataset.as_ref().filter(|_| default) else { return false };
        let folders = HubFolders { hub: data.hub.hub.clone(), datasets: data.hub.datasets.clone() };
        splits(config, self.need).iter().all(|split| {
            let named = Named { name: &named.name, config: named.config.as_deref(), split, revision: None };
            locate(named, &folders).is_ok()
        })
    }

    /// The files that are needed.
    fn files(&self, hub: &Hub, config: &RunConfig, resolved: &ResolvedRepo) -> Result<Vec<String>, Failure> {
        let wanted = match (self.role, self.need, config.model.init) {
            (Role::Dataset, ..) => return self.dataset_files(hub, config, resolved),
            (Role::Tokenizer, ..) => ModelFiles::Tokenizer,
            (Role::AlgorithmModel(_), Need::Train, _) => ModelFiles::All,
            (Role::Model, Need::Train, InitialWeights::Pretrained) => ModelFiles::All,
            (Role::Model | Role::AlgorithmModel(_), ..) => ModelFiles::WithoutWeights,
        };
        model_files(&self.repo, &resolved.file_names(), wanted).map_err(failed)
    }

    /// The files of the splits that are needed. Downloads the card, which is small.
    fn dataset_files(
        &self,
        hub: &Hub,
        config: &RunConfig,
        resolved: &ResolvedRepo,
    ) -> Result<Vec<String>, Failure> {
        let card = hub.read_text(resolved, CARD, MAX_CARD_BYTES, &mut NoDownloadProgress).map_err(failed)?;
        let names: Vec<String> = resolved.file_names().into_iter().map(String::from).collect();
        let splits = splits(config, self.need);
        let splits: Vec<&str> = splits.iter().map(String::as_str).collect();
        let subset = config.data.dataset.as_ref().and_then(|named| named.config.as_deref());
        files_of_splits(self.repo.name(), subset, &splits, &names, card.as_deref())
            .map_err(|e| -> Failure { Box::new(e) })
    }

    /// Puts the folder into the configuration, and the commit into the text that checkpoints keep.
    fn apply(&self, config: &mut RunConfig, text: &mut String, commit: &str, folder: PathBuf) {
        let key = match self.role {
            Role::Model => {
                config.model.source = ModelSource::Folder(folder);
                "model_revision"
            }
            Role::AlgorithmModel(key) => {
                let mut models = config.algorithm.models_mut();
                if let Some((_, path)) = models.iter_mut().find(|(other, _)| *other == key) {
                    **path = folder;
                }
                key
            }
            Role::Tokenizer => {
                config.data.tokenizer = TokenizerChoice::File(folder);
                "tokenizer_revision"
            }
            Role::Dataset => {
                if let Some(named) = &mut config.data.dataset {
                    named.revision = Some(commit.into());
                }
                "dataset_revision"
            }
        };
        text.push_str(&format!("# {key}={commit}\n"));
        config.notes.push(format!("{} is at commit {commit}", self.repo));
    }
}

/// Downloads files of a model and returns the folder.
pub(crate) fn download_model(
    hub: &Hub,
    resolved: &ResolvedRepo,
    wanted: ModelFiles,
    progress: &mut dyn DownloadProgress,
) -> Result<PathBuf, Failure> {
    let files = model_files(&resolved.repo, &resolved.file_names(), wanted).map_err(failed)?;
    hub.download(resolved, &files, progress).map_err(failed)
}
