//! `lockstep eval`: how well a model predicts.

use serde_json::json;

use crate::args::Eval;
use crate::report::{self, Failure};
use crate::train::boxed;
use crate::{gpu, host};

pub(crate) fn run(args: &Eval) -> Result<(), Failure> {
    let model = lockstep_train::model_folder(&args.model);
    // Nothing of a run is written but its prepared data, which later evaluations find.
    let cache = host::cache_folder();
    let mut settings =
        vec![format!("data_cache_dir={}", cache.display()), format!("output_dir={}", cache.display())];
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
