//! `lockstep eval`: the loss and perplexity of a model on a data set.

use serde_json::json;

use lockstep_config::{Purpose, RunConfig};
use lockstep_core::{Fault, FaultClass};

use crate::args::Eval;
use crate::host::TemporaryFolder;
use crate::hub::Need;
use crate::report::{self, Failure};
use crate::train::boxed;
use crate::{gpu, hub, inputs};

/// There is no folder for prepared data.
#[derive(Debug)]
struct NoCacheFolder {
    cause: std::io::Error,
}

impl std::fmt::Display for NoCacheFolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot create a folder for prepared data: {}", self.cause)
    }
}

impl std::error::Error for NoCacheFolder {}

impl Fault for NoCacheFolder {
    fn class(&self) -> FaultClass {
        FaultClass::CannotWrite
    }

    fn hint(&self) -> Option<String> {
        Some("Set data_cache_dir to a folder that can be written to.".into())
    }
}

pub(crate) fn run(args: &Eval) -> Result<(), Failure> {
    let (model, adapter) =
        lockstep_train::model_and_adapter(&hub::model(&args.model)?, args.adapter.as_deref())
            .map_err(boxed)?;
    let mut own = vec![format!("model_name_or_path={}", model.display())];
    own.extend(adapter.map(|path| format!("adapter_name_or_path={}", path.display())));
    let (mut config, _) = inputs::load(Purpose::Plan, &args.settings, &own)?;
    if let Some(named) = &mut config.data.dataset {
        named.evaluates_test_split = true;
    }
    hub::provide(&mut config, &mut String::new(), Need::Evaluate)?;
    // Dropped, and with it removed, after the evaluation.
    let _temporary = use_any_cache(&mut config)?;
    let device = gpu::choose(config.device.kind)?;
    let found = lockstep_train::evaluate(&config, device).map_err(boxed)?;
    let text = if args.json {
        let (loss, tokens, seconds) = (found.loss, found.tokens, found.seconds);
        json!({ "loss": loss, "perplexity": found.perplexity(), "tokens": tokens, "seconds": seconds })
            .to_string()
    } else {
        let (loss, perplexity) = (found.loss.unwrap_or(f64::NAN), found.perplexity().unwrap_or(f64::NAN));
        let tokens = found.tokens.unwrap_or(0);
        let speed = tokens as f64 / found.seconds;
        format!("loss {loss:.6}, perplexity {perplexity:.4}, over {tokens} tokens ({speed:.0} tokens/s)")
    };
    report::print(&(text + "\n"))
}

/// Makes sure that there is a folder for prepared data: without a shared cache and an output folder, a temporary one.
fn use_any_cache(config: &mut RunConfig) -> Result<Option<TemporaryFolder>, Failure> {
    if config.data.data_cache_dir.is_some() || !config.output.output_dir.as_os_str().is_empty() {
        return Ok(None);
    }
    let folder =
        TemporaryFolder::create().map_err(|cause| -> Failure { Box::new(NoCacheFolder { cause }) })?;
    config.data.data_cache_dir = Some(folder.path().into());
    Ok(Some(folder))
}
