//! Text and overrides become a `RunConfig`, in which every value is typed and knows its origin.
//!
//! Two stages. The first only recognises what was typed: a YAML or JSON text becomes a tree with places
//! (`yaml`), the tree and the `key=value` overrides become one untyped value per key (`raw`). The second
//! gives each value its type, range and default, section by section (`sections`). All errors of both
//! stages are told at once, each with its place, the quoted line and what was probably meant.
//!
//! Nothing is ignored: a key of another trainer either has no effect here, which is noted, or is refused
//! by name. Left out: DeepSpeed and accelerate files as a whole, and everything that needs a disk, the
//! environment, a clock or a network; whether a path exists is for the crate that opens it to say.

#![forbid(unsafe_code)]

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
pub use raw::Source;
pub use reference::reference;
pub use run::RunConfig;
pub use secret::{is_secret, redact, redact_setting};
pub use sections::*;
pub use settings::{ChangedSetting, changed_settings};
pub use yaml::MAX_TEXT_BYTES;

/// Whether `name` is a key of this program, or one of the peers' that is answered by name.
pub fn knows(name: &str) -> bool {
    keys::find(name).is_some() || foreign::inert(name).is_some() || foreign::refused(name).is_some()
}

/// Reads a configuration from a file's text and `key=value` overrides, which take the place of the
/// file's values.
pub fn load(file: Option<Source<'_>>, overrides: &[String]) -> Result<RunConfig, ConfigErrors> {
    RunConfig::resolve(raw::RawConfig::read(file, overrides))
}
