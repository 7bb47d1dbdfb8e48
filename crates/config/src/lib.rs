//! Parses configuration text and overrides into a [`RunConfig`], in which every value is typed and has an origin.
//!
//! There are two stages. The first parses: YAML or JSON text becomes a tree with source locations (`yaml`), files of
//! other trainers are translated to our keys (`dialects`), and all files, the launch line and the `key=value` overrides
//! become one untyped value per key (`raw`, `settle`). The second checks the type and range of each value and fills in
//! defaults, section by section (`sections`). All errors of both stages are reported together, each with its location,
//! the quoted line and a suggestion.
//!
//! No key is ignored silently: a key of another trainer is either accepted with a note that it has no effect, or
//! it is an error. This crate does not access the disk, the environment, the clock or the network; the crate that opens
//! a path checks whether it exists, and reads the files that other files refer to (`referenced_files`).

#![forbid(unsafe_code)]

mod convert;
mod diagnose;
mod dialects;
mod error;
mod foreign;
mod keys;
mod launch_line;
mod launch_settings;
mod listing;
mod origin;
mod raw;
mod reader;
mod reference;
mod references;
mod run;
mod schema;
mod secret;
mod sections;
mod settings;
mod settle;
mod texts;
mod value;
mod variables;
mod yaml;

#[cfg(test)]
mod tests;

pub use convert::{convert, convert_run};
pub use error::{ConfigError, ConfigErrors, Problem};
pub use launch_line::{LaunchFlag, LaunchLine, LaunchProgram, is_launch_line, translate_launch_line};
pub use launch_settings::{LaunchSettings, NumProcesses};
pub use listing::{ResolvedSetting, list_settings};
pub use origin::Origin;
pub use raw::COMMAND_KEY;
pub use reference::reference;
pub use references::{FileReference, FileRole, recognize, referenced_files};
pub use run::{Purpose, RunConfig};
pub use schema::schema;
pub use secret::{is_secret, redact, redact_setting};
pub use sections::*;
pub use settings::{ChangedSetting, changed_settings};
pub use texts::{Inputs, Source};
pub use variables::{VARIABLES, Variable, VariableEffect};
pub use yaml::MAX_TEXT_BYTES;

/// Whether `name` is a key of Lockstep, or a key of another trainer that is recognized.
pub fn is_known_key(name: &str) -> bool {
    keys::find(name).is_some()
        || foreign::inert(name).is_some()
        || foreign::refused(name).is_some()
        || dialects::guides::is_known(name)
}

/// The names of all keys, for completions.
pub fn key_names() -> impl Iterator<Item = &'static str> {
    keys::KEYS.iter().map(|key| key.name)
}

/// The key that a user who wrote `name` probably means, for an unknown `name`.
pub fn suggested_key(name: &str) -> Option<&'static str> {
    raw::suggestion(name)
}

/// Reads a configuration from a file's text and `key=value` overrides, which replace the file's values. It can be
/// planned; [`RunConfig::check_trainable`] checks whether it can be trained.
pub fn load(file: Option<Source<'_>>, overrides: &[String]) -> Result<RunConfig, ConfigErrors> {
    load_for(Purpose::Plan, file, overrides)
}

/// Like [`load`], and requires the keys that `purpose` needs.
pub fn load_for(
    purpose: Purpose,
    file: Option<Source<'_>>,
    overrides: &[String],
) -> Result<RunConfig, ConfigErrors> {
    let files: Vec<Source<'_>> = file.into_iter().collect();
    load_inputs(purpose, &Inputs { files: &files, overrides, ..Inputs::default() })
        .map(|loaded| loaded.config)
}

/// A configuration, and what the launcher needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    pub config: RunConfig,
    pub launch: LaunchSettings,
}

/// Reads a configuration from files of any dialect, a launch line, variables and overrides.
pub fn load_inputs(purpose: Purpose, inputs: &Inputs<'_>) -> Result<Loaded, ConfigErrors> {
    let mut raw = raw::RawConfig::read(inputs);
    let launch = LaunchSettings::settle(&mut raw);
    Ok(Loaded { config: RunConfig::resolve(raw, purpose)?.config, launch })
}

/// What the launcher needs to know, without checking the run. The number of processes may be left to the launcher, and
/// a run can be checked only once it is known.
pub fn launch_settings(inputs: &Inputs<'_>) -> LaunchSettings {
    LaunchSettings::settle(&mut raw::RawConfig::read(inputs))
}
