//! What is at which path. Runs have numbers, and files fixed names: no path of a request becomes a path of a file.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::access::Access;
use crate::columns::Axis;
use crate::request::Request;
use crate::response::Response;
use crate::run_view::{RunView, SeriesQuery, scrape_text};
use crate::runs::{Runs, locked};
use crate::{config_table, health, page, timeline};

/// The longest time that a request for changes waits.
const MAX_WAIT: Duration = Duration::from_secs(20);
const MAX_KEYS: usize = 128;
const DEFAULT_BUCKETS: usize = 600;
const MAX_BUCKETS: usize = 4000;
const MAX_COMPLETIONS: usize = 50;
const MAX_COMPARED: usize = 16;

/// Everything that is needed to answer.
pub(crate) struct Site {
    pub(crate) access: Access,
    pub(crate) runs: Runs,
    pub(crate) stopping: Arc<AtomicBool>,
}

impl Site {
    pub(crate) fn answer(&self, request: &Request) -> Response {
        if !matches!(request.method.as_str(), "GET" | "HEAD") {
            return Response::text(405, "only GET and HEAD are possible").with_header("Allow", "GET, HEAD");
        }
        match request.path.as_str() {
            // A probe has no token, and the answer no text of a run.
            "/healthz" => return health::answer(&self.runs.all().0, request.number("stalled_after")),
            // The page that asks for the token needs them.
            "/assets/app.css" | "/assets/icon.svg" => {}
            _ => {
                if let Err(refused) = self.access.check(request) {
                    return refused;
                }
            }
        }
        let path: Vec<&str> = request.path.trim_start_matches('/').split('/').collect();
        match path.as_slice() {
            [""] => page::index(),
            ["assets", name] => page::asset(name).unwrap_or_else(not_found),
            ["metrics"] => self.metrics(),
            ["api", "runs"] => Response::json(self.runs.list_json().to_string()),
            ["api", "wait"] => {
                // A page without a revision knows nothing yet and is answered at once.
                if let Some(revision) = request.number("revision") {
                    self.runs.wait(revision, MAX_WAIT, &self.stopping);
                }
                Response::json(self.runs.list_json().to_string())
            }
            ["api", "config"] => self.configurations(request),
            ["api", "runs", id, rest @ ..] => match id.parse() {
                Ok(id) => self.of_run(id, rest, request),
                Err(_) => not_found(),
            },
            _ => not_found(),
        }
    }

    fn of_run(&self, id: usize, rest: &[&str], request: &Request) -> Response {
        let Some(run) = self.runs.get(id) else {
            return Response::error(404, "there is no run with this number");
        };
        if matches!(rest, ["series"] | ["keys"]) {
            self.runs.make_room(id);
        }
        let mut run = locked(&run);
        match rest {
            [] => Response::json(run.details_json(id).to_string()),
            ["keys"] => written(run.keys_json()),
            ["series"] => series(&mut run, request),
            ["completions"] => {
                let count = request.number("count").unwrap_or(20).min(MAX_COMPLETIONS);
                let skip = request.number("skip").unwrap_or(0);
                written(
                    run.completions_json(request.number("step"), skip, count).map(|page| page.to_string()),
                )
            }
            ["log"] => Response::json(run.log_json().to_string()),
            ["timelines", index] => {
                let path = index.parse().ok().and_then(|index| run.timeline_path(index));
                // The file may be large, and the run is not needed any more.
                drop(run);
                path.map_or_else(not_found, |path| written(timeline::read(&path)))
            }
            _ => not_found(),
        }
    }

    fn metrics(&self) -> Response {
        let scraped: Vec<_> = self.runs.all().0.iter().map(|run| locked(run).scraped()).collect();
        Response::new(200, "text/plain; version=0.0.4; charset=utf-8", scrape_text(&scraped))
    }

    /// The settings of several runs side by side.
    fn configurations(&self, request: &Request) -> Response {
        let ids = request.parameter("runs").unwrap_or_default().split(',').take(MAX_COMPARED);
        let known = self.runs.all().0;
        let runs: Option<Vec<_>> = ids.map(|id| known.get(id.parse::<usize>().ok()?)).collect();
        match runs {
            Some(runs) => {
                let infos: Vec<_> = runs.iter().map(|run| locked(run).info.clone()).collect();
                Response::json(config_table::table(&infos).to_string())
            }
            None => Response::error(404, "there is no run with one of these numbers"),
        }
    }
}

fn series(run: &mut RunView, request: &Request) -> Response {
    let axis = match request.parameter("x") {
        None | Some("step") => Axis::Step,
        Some("tokens") => Axis::Tokens,
        Some("seconds") => Axis::Seconds,
        Some(_) => return Response::error(400, "`x` is step, tokens or seconds"),
    };
    let border =
        |name, otherwise: f64| request.number(name).filter(|x: &f64| !x.is_nan()).unwrap_or(otherwise);
    let query = SeriesQuery {
        keys: request
            .parameter("keys")
            .unwrap_or_default()
            .split(',')
            .filter(|key| !key.is_empty())
            .take(MAX_KEYS)
            .collect(),
        axis,
        from: border("from", f64::NEG_INFINITY),
        to: border("to", f64::INFINITY),
        buckets: request.number("buckets").unwrap_or(DEFAULT_BUCKETS).clamp(10, MAX_BUCKETS),
        after: request.number("after").zip(request.number("generation")),
    };
    written(run.series_json(&query))
}

fn written(json: io::Result<String>) -> Response {
    match json {
        Ok(json) => Response::json(json),
        Err(error) => Response::error(500, &format!("a file of the run cannot be read: {error}")),
    }
}

fn not_found() -> Response {
    Response::error(404, "there is nothing at this path")
}
