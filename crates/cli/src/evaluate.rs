//! `lockstep eval`: how well a model predicts.

use serde_json::json;

use lockstep_core::{Fault, FaultClass};

use crate::args::Eval;
use crate::gpu;
use crate::host::CacheFolder;
use crate::report::{self, Failure};
use crate::train::boxed;

/// There is nowhere to keep prepared data.
#[derive(Debug)]
struct NoCacheFolder {
    cause: std::io::Error,
}

impl std::fmt::Display for NoCacheFolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot make a folder for prepared data: {}", self.cause)
    }
}

impl std::error::Error for NoCacheFolder {}

impl Fault for NoCacheFolder {
    fn class(&self) -> FaultClass {
        FaultClass::CannotWrite
    }

    fn hint(&self) -> Option<String> {
        Some("Set XDG_CACHE_HOME or HOME, or data_cache_dir=FOLDER.".into())
    }
}

pub(crate) fn run(args: &Eval) -> Result<(), Failure> {
    let model = lockstep_train::model_folder(&args.model);
    // Nothing of a run is written but its prepared data, which later evaluations find.
    let cache = CacheFolder::open().map_err(|cause| -> Failure { Box::new(NoCacheFolder { cause }) })?;
    let folder = cache.path().display();
    let mut settings = vec![format!("data_cache_dir={folder}"), format!("output_dir={folder}")];
    settings.extend(args.settings.iter().cloned());
    let (config, _) = report::load(&settings, &[format!("model_name_or_path={}", model.display())])?;
    let device = gpu::chosen(config.device.kind)?;
    let found = lockstep_train::evaluate(&config, device).map_err(boxed)?;
    let text = if args.json {
        let (loss, tokens, seconds) = (found.loss, found.tokens, found.seconds);
        json!({ "loss": loss, "perplexity": found.perplexity(), "tokens": tokens, "seconds": seconds })
            .to_string()
    } else {
        format!(
            "loss {:.6}, perplexity {:.4}, over {} tokens ({:.0} tokens/s)",
            found.loss,
            found.perplexity(),
            found.tokens,
            found.tokens as f64 / found.seconds
        )
    };
    report::print(&(text + "\n"))
}
