//! The Hugging Face Hub: its address, the cache of this machine, and whether there is a token. Nothing is requested.

use lockstep_core::Fault as _;
use lockstep_hub::HubSettings;

use crate::host;

use super::Finding;

pub(super) fn check() -> Vec<Finding> {
    let folder = host::hub_folders().hub;
    let shown = folder.display().to_string();
    let cache = match folder.is_dir() {
        true => Finding::ok("HF cache", shown),
        false => Finding::none("HF cache", format!("{shown} does not exist: nothing was downloaded yet")),
    };
    let settings = match HubSettings::from_env(&|name| std::env::var_os(name)) {
        Ok(settings) => settings,
        Err(error) => {
            let hint = error.hint().unwrap_or_default();
            return vec![Finding::warn("HF Hub", error.to_string(), hint), cache];
        }
    };
    let endpoint = match settings.offline {
        true => Finding::none("HF Hub", "offline: HF_HUB_OFFLINE is set, so nothing is downloaded"),
        false => Finding::ok("HF Hub", settings.endpoint()),
    };
    // The token itself is never printed.
    let token = match settings.token {
        Some(_) => Finding::ok("HF token", "found (not shown)"),
        None => Finding::none("HF token", "none: public repositories need none"),
    };
    vec![endpoint, cache, token]
}
