//! `/healthz`: whether runs make progress, for the probes of a cluster.

use std::sync::{Arc, Mutex};

use crate::response::Response;
use crate::run_view::RunView;
use crate::runs::locked;

/// A run that has written nothing for this long has stalled, unless the request says otherwise.
const STALLED_SECONDS: f64 = 600.0;

/// 200 while each run makes progress or has finished, 503 with the reason otherwise. Before its first step a run may
/// download a model and prepare data, which has no limit. Runs are named by their numbers: anyone may ask.
pub(crate) fn answer(runs: &[Arc<Mutex<RunView>>], limit: Option<f64>) -> Response {
    let limit = limit.filter(|seconds| seconds.is_finite() && *seconds > 0.0).unwrap_or(STALLED_SECONDS);
    let mut stalled = Vec::new();
    let mut progress = "starting";
    for (id, run) in runs.iter().enumerate() {
        let run = locked(run);
        let (steps, total) = (run.summary.steps(), run.info.total_steps);
        if steps > 0 {
            progress = "ok";
        }
        let silent = run.summary.silent_for().map_or(0.0, |silent| silent.as_secs_f64());
        if steps > 0 && (total == 0 || steps < total) && silent > limit {
            stalled.push(format!("run {id} has written nothing for {silent:.0} s after step {steps}"));
        }
    }
    match stalled.is_empty() {
        true => Response::text(200, progress),
        false => Response::text(503, &format!("stalled: {}", stalled.join("; "))),
    }
}
