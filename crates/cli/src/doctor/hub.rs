//! Hugging Face's folder on this machine. Nothing is downloaded by this program; what its libraries have downloaded
//! is found there.

use crate::host;

use super::Finding;

pub(super) fn look() -> Vec<Finding> {
    let folder = host::hub_folders().hub;
    let shown = folder.display().to_string();
    let cache = match folder.is_dir() {
        true => Finding::ok("Hugging Face", shown),
        false => Finding::none("Hugging Face", format!("{shown} is not there: nothing was downloaded")),
    };
    // Whether, never what.
    let token = match host::has_hub_token() {
        true => Finding::ok("its token", "there (not shown)"),
        false => Finding::none("its token", "none"),
    };
    vec![cache, token]
}
