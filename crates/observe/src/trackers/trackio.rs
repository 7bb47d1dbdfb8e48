//! Trackio: batches of rows to the server that `trackio show` starts.

use serde_json::{Map, Value, json};

use super::background::{Background, Sender};
use super::http::{Failure, Server, ServerAddress};
use super::{Row, TrackedRun, TrackerError};

pub(super) fn start(
    address: &ServerAddress,
    project: &str,
    run: &TrackedRun,
) -> Result<Background, TrackerError> {
    let (server, project) = (Server::new(address), project.to_owned());
    Background::start("trackio", TrackioSender { server, project, run: run.clone(), sent: false })
}

struct TrackioSender {
    server: Server,
    project: String,
    run: TrackedRun,
    /// The configuration is sent once.
    sent: bool,
}

impl Sender for TrackioSender {
    fn send(&mut self, rows: &[Row]) -> Result<(), Failure> {
        let config: Map<String, Value> =
            self.run.settings.iter().map(|(key, value)| (key.clone(), value.clone().into())).collect();
        let entry = |(index, row): (usize, &Row)| {
            // Trackio stores the numbers that JSON does not have as texts.
            let number = |value: f64| match serde_json::Number::from_f64(value) {
                Some(number) => Value::from(number),
                None if value.is_nan() => "NaN".into(),
                None => if value > 0.0 { "Infinity" } else { "-Infinity" }.into(),
            };
            let metrics: Map<String, Value> =
                row.numbers.iter().map(|(name, value)| (name.to_string(), number(*value))).collect();
            let config = (index == 0 && !self.sent).then_some(&config);
            json!({
                "project": self.project, "run": self.run.name, "step": row.step, "metrics": metrics, "config": config,
            })
        };
        let logs: Vec<Value> = rows.iter().enumerate().map(entry).collect();
        self.server.post("/api/bulk_log", &json!({ "logs": logs, "hf_token": null }))?;
        self.sent = true;
        Ok(())
    }
}
