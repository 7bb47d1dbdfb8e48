//! Parses configuration text and overrides into a [`RunConfig`], in which every value is typed and has an origin.
//!
//! There are two stages. The first parses: YAML or JSON text becomes a tree with source locations (`yaml`), and
//! the tree and the `key=value` overrides become one untyped value per key (`raw`). The second checks the type and
//! range of each value and fills in defaults, section by section (`sections`). All errors of both stages are
//! reported together, each with its location, the quoted line and a suggestion.
//!
//! No key is ignored silently: a key of another trainer is either accepted with a note that it has no effect, or
//! it is an error. Not supported: whole DeepSpeed and accelerate files. This crate does not access the disk, the
//! environment, the clock or the network; the crate that opens a path checks whether it exists.

#![forbid(unsafe_code)]

mod diagnose;
mod error;
mod foreign;
mod keys;
mod origin;
mod raw;
mod reader;
mod reference;
mod run;
mod secret;
mod sections;
mod settings;
mod value;
mod yaml;

#[cfg(test)]
mod tests;

pub use error::{ConfigError, ConfigErrors, Problem};
pub use origin::Origin;
pub use raw::{COMMAND_KEY, Source};
pub use reference::reference;
pub use run::{Purpose, RunConfig};
pub use secret::{is_secret, redact, redact_setting};
pub use sections::*;
pub use settings::{ChangedSetting, changed_settings};
pub use yaml::MAX_TEXT_BYTES;

/// Whether `name` is a key of Lockstep, or a key of another trainer that is recognized.
pub fn is_known_key(name: &str) -> bool {
    keys::find(name).is_some() || foreign::inert(name).is_some() || foreign::refused(name).is_some()
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
    RunConfig::resolve(raw::RawConfig::read(file, overrides), purpose)
}
