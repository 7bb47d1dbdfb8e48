//! Collects what a run is configured by: files and the files that they refer to, a launch line, settings and
//! environment variables.

use std::path::Path;

use lockstep_config::{
    ConfigErrors, FileReference, FileRole, Inputs, LaunchLine, LaunchSettings, Origin, Purpose, RunConfig,
    Source, VARIABLES,
};

use crate::config_file::{self, FileError};
use crate::host;
use crate::ranks::variable;
use crate::report::Failure;

/// Separates settings from the launch line of another launcher.
pub(crate) const LINE: &str = "--";

/// Settings whose value names a file, as in `--deepspeed ds.json`.
const FILE_SETTINGS: [&str; 4] = ["deepspeed", "deepspeed_config", "config_file", "accelerate_config"];

/// Everything that a run is configured by.
pub(crate) struct RunInputs {
    files: Vec<ConfigText>,
    line: Option<LaunchLine>,
    overrides: Vec<String>,
    variables: Vec<(String, String)>,
}

/// A file's name as the user gave it, and its text.
struct ConfigText {
    name: String,
    text: String,
}

impl RunInputs {
    /// Reads the files among `words`, and those that they refer to. The other words are settings and, after `--`, a
    /// launch line. `extra` settings replace all others.
    pub(crate) fn read(words: &[String], extra: &[String]) -> Result<RunInputs, Failure> {
        let (settings, line) = split_line(words);
        let line = line.map(lockstep_config::translate_launch_line).transpose().map_err(config_failed)?;
        let mut inputs = RunInputs { files: Vec::new(), line, overrides: Vec::new(), variables: variables() };
        for word in settings {
            match file_of(word) {
                Some(path) => inputs.add(path).map_err(file_failed)?,
                None => inputs.overrides.push(word.clone()),
            }
        }
        inputs.overrides.extend_from_slice(extra);
        inputs.follow_references().map_err(file_failed)?;
        Ok(inputs)
    }

    /// Adds a setting that replaces all others.
    pub(crate) fn set(&mut self, setting: String) {
        self.overrides.push(setting);
    }

    /// What other launchers' files and the launch line set.
    pub(crate) fn launch(&self) -> LaunchSettings {
        self.with(lockstep_config::launch_settings)
    }

    /// The configuration, and its text, which checkpoints store and ranks compare. Secrets are removed from the text.
    pub(crate) fn load(&self, purpose: Purpose) -> Result<(RunConfig, String), Failure> {
        let loaded = self.with(|inputs| lockstep_config::load_inputs(purpose, inputs));
        let mut config = loaded.map_err(config_failed)?.config;
        config.data.hub = host::hub_folders();
        use_shared_cache(&mut config);
        let text = self.text().map_err(config_failed)?;
        Ok((config, text))
    }

    /// The inputs as one YAML of Lockstep's keys.
    pub(crate) fn convert(&self) -> Result<String, Failure> {
        self.with(lockstep_config::convert).map_err(config_failed)
    }

    fn text(&self) -> Result<String, ConfigErrors> {
        let ours = |file: &ConfigText| lockstep_config::recognize(&file.text) == FileRole::Config;
        if self.line.is_some() || self.files.len() > 1 || !self.files.iter().all(ours) {
            return self.with(lockstep_config::convert_run).map(|page| lockstep_config::redact(&page));
        }
        let mut text = lockstep_config::redact(self.files.first().map_or("", |file| &file.text));
        for line in &self.overrides {
            text.push_str(&format!("# {}\n", lockstep_config::redact_setting(line)));
        }
        Ok(text)
    }

    fn with<T>(&self, work: impl FnOnce(&Inputs<'_>) -> T) -> T {
        let files: Vec<Source<'_>> =
            self.files.iter().map(|file| Source { name: &file.name, text: &file.text }).collect();
        work(&Inputs {
            files: &files,
            launch_line: self.line.as_ref(),
            overrides: &self.overrides,
            variables: &self.variables,
        })
    }

    fn add(&mut self, name: &str) -> Result<(), FileError> {
        let text = config_file::read(Path::new(name))?;
        self.files.push(ConfigText { name: name.to_owned(), text });
        Ok(())
    }

    /// Reads files that other files and the launch line refer to, until there are no more. A file that does not exist
    /// is left to the configuration, whose error quotes the line that names it.
    fn follow_references(&mut self) -> Result<(), FileError> {
        loop {
            let missing = self.with(lockstep_config::referenced_files);
            let found: Vec<String> = missing.iter().filter_map(locate).collect();
            let new: Vec<String> =
                found.into_iter().filter(|name| !self.files.iter().any(|file| file.name == *name)).collect();
            if new.is_empty() {
                return Ok(());
            }
            for name in new {
                self.add(&name)?;
            }
        }
    }
}

/// Loads the configuration from words that the user typed. See [`RunInputs::read`].
pub(crate) fn load(
    purpose: Purpose,
    words: &[String],
    extra: &[String],
) -> Result<(RunConfig, String), Failure> {
    RunInputs::read(words, extra)?.load(purpose)
}

/// Settings, and the words of a launch line. Words after `--` that start no launcher are settings.
fn split_line(words: &[String]) -> (Vec<&String>, Option<&[String]>) {
    let Some(at) = words.iter().position(|word| word == LINE) else { return (words.iter().collect(), None) };
    let (settings, line) = (&words[..at], &words[at + 1..]);
    match lockstep_config::is_launch_line(line) {
        true => (settings.iter().collect(), Some(line)),
        false => (settings.iter().chain(line).collect(), None),
    }
}

/// The variables in front of the launch line among the words, if there is one.
pub(crate) fn line_variables(words: &[String]) -> Result<Vec<(String, String)>, Failure> {
    let line = split_line(words).1.map(lockstep_config::translate_launch_line).transpose();
    Ok(line.map_err(config_failed)?.map(|line| line.variables).unwrap_or_default())
}

/// The file that a word names. A key contains no path separators, so `runs/lr=1e-4.yaml` is a file.
fn file_of(word: &str) -> Option<&str> {
    let setting = word.split_once('=').filter(|(key, _)| !key.contains(['/', '\\']));
    match setting {
        _ if Path::new(word).is_file() => Some(word),
        None => Some(word),
        Some((key, path)) => (FILE_SETTINGS.contains(&key) && Path::new(path).is_file()).then_some(path),
    }
}

/// The path of a file that is referred to, if it exists: relative to the folder of the file that names it, or to the
/// working directory.
fn locate(reference: &FileReference) -> Option<String> {
    let path = Path::new(&reference.path);
    let beside = match &reference.origin {
        Origin::File { name, .. } => Path::new(name).parent().map(|folder| folder.join(path)),
        _ => None,
    };
    let exists = |path: &Path| path.exists().then(|| path.display().to_string());
    beside.as_deref().and_then(exists).or_else(|| exists(path))
}

/// The variables of this process that a configuration may depend on.
fn variables() -> Vec<(String, String)> {
    VARIABLES.iter().filter_map(|known| Some((known.name.to_owned(), variable(known.name)?))).collect()
}

/// Sets the default of `data_cache_dir`. Without a folder that this user can write to, it stays unset, and prepared
/// data goes to the output folder.
fn use_shared_cache(config: &mut RunConfig) {
    if config.data.data_cache_dir.is_some() {
        return;
    }
    match host::data_cache() {
        Ok(folder) => config.data.data_cache_dir = Some(folder),
        Err(why) => {
            config.notes.push(format!("prepared data goes to the output folder and is not shared: {why}"))
        }
    }
}

fn config_failed(error: ConfigErrors) -> Failure {
    Box::new(error)
}

fn file_failed(error: FileError) -> Failure {
    Box::new(error)
}
