//! The Hugging Face cache of this machine, and whether there is a token.

use crate::host;

use super::Finding;

pub(super) fn check() -> Vec<Finding> {
    let folder = host::hub_folders().hub;
    let shown = folder.display().to_string();
    let cache = match folder.is_dir() {
        true => Finding::ok("Hugging Face", shown),
        false => Finding::none("Hugging Face", format!("{shown} does not exist: nothing was downloaded yet")),
    };
    // The token itself is never printed.
    let token = match host::has_hub_token() {
        true => Finding::ok("HF token", "found (not shown)"),
        false => Finding::none("HF token", "none"),
    };
    vec![cache, token]
}
