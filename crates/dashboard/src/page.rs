//! The page's files, in this binary.

use crate::response::Response;

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

pub(crate) fn index() -> Response {
    Response::new(200, HTML, include_str!("assets/index.html"))
}

/// A file of the page by its name.
pub(crate) fn asset(name: &str) -> Option<Response> {
    let (kind, text) = match name {
        "app.css" => (CSS, include_str!("assets/app.css")),
        "main.js" => (SCRIPT, include_str!("assets/main.js")),
        "api.js" => (SCRIPT, include_str!("assets/api.js")),
        "dom.js" => (SCRIPT, include_str!("assets/dom.js")),
        "format.js" => (SCRIPT, include_str!("assets/format.js")),
        "chart.js" => (SCRIPT, include_str!("assets/chart.js")),
        "overview.js" => (SCRIPT, include_str!("assets/overview.js")),
        "timeline.js" => (SCRIPT, include_str!("assets/timeline.js")),
        "memory.js" => (SCRIPT, include_str!("assets/memory.js")),
        "ranks.js" => (SCRIPT, include_str!("assets/ranks.js")),
        "samples.js" => (SCRIPT, include_str!("assets/samples.js")),
        "configuration.js" => (SCRIPT, include_str!("assets/configuration.js")),
        "icon.svg" => ("image/svg+xml", include_str!("assets/icon.svg")),
        _ => return None,
    };
    Some(Response::new(200, kind, text))
}
