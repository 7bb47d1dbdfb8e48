//! MLflow: an experiment named after the project, a run in it, and batches of metrics over its REST interface.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::background::{Background, Sender};
use super::http::{Failure, Server, ServerAddress, percent_encoded};
use super::{Row, TrackedRun, TrackerError};

/// Limits of the interface.
const MAX_METRICS: usize = 1000;
const MAX_PARAMS: usize = 100;
const MAX_PARAM_CHARS: usize = 500;

pub(super) fn start(
    address: &ServerAddress,
    experiment: &str,
    run: &TrackedRun,
) -> Result<Background, TrackerError> {
    let (server, experiment) = (Server::new(address), experiment.to_owned());
    let sender = MlflowSender { server, experiment, run: run.clone(), run_id: None };
    Background::start("mlflow", sender)
}

struct MlflowSender {
    server: Server,
    experiment: String,
    run: TrackedRun,
    run_id: Option<String>,
}

impl MlflowSender {
    /// The run's id, which a resumed run finds in a file.
    fn run_id(&mut self) -> Result<String, Failure> {
        if let Some(id) = &self.run_id {
            return Ok(id.clone());
        }
        let file = self.id_file();
        let kept = std::fs::read_to_string(&file).ok().map(|id| id.trim().to_owned());
        let is_id = |id: &String| !id.is_empty() && id.bytes().all(|b| b.is_ascii_alphanumeric());
        let id = match kept.filter(|id| self.run.resume_step.is_some() && is_id(id)) {
            Some(id) => id,
            None => {
                let id = self.create_run()?;
                // Without the file, a resumed run begins a new one.
                let _ = std::fs::write(&file, &id);
                id
            }
        };
        self.run_id = Some(id.clone());
        Ok(id)
    }

    fn id_file(&self) -> PathBuf {
        self.run.dir.join("logs").join("mlflow-run")
    }

    fn create_run(&self) -> Result<String, Failure> {
        let experiment = self.experiment_id()?;
        let body = json!({
            "experiment_id": experiment, "run_name": self.run.name, "start_time": milliseconds(SystemTime::now()),
        });
        let answer = self.server.post("/api/2.0/mlflow/runs/create", &body)?;
        let id = text(&answer["run"]["info"]["run_id"])?;
        let params: Vec<Value> = self
            .run
            .settings
            .iter()
            .map(|(key, value)| json!({ "key": key, "value": value.chars().take(MAX_PARAM_CHARS).collect::<String>() }))
            .collect();
        for params in params.chunks(MAX_PARAMS) {
            self.server.post("/api/2.0/mlflow/runs/log-batch", &json!({ "run_id": id, "params": params }))?;
        }
        Ok(id)
    }

    /// The id of the experiment, which is created if it does not exist.
    fn experiment_id(&self) -> Result<String, Failure> {
        let name = &self.experiment;
        let path =
            format!("/api/2.0/mlflow/experiments/get-by-name?experiment_name={}", percent_encoded(name));
        match self.server.get(&path) {
            Ok(answer) => text(&answer["experiment"]["experiment_id"]),
            Err(Failure::Refused { status: 404, answer, .. })
                if answer["error_code"] == "RESOURCE_DOES_NOT_EXIST" =>
            {
                let answer =
                    self.server.post("/api/2.0/mlflow/experiments/create", &json!({ "name": name }))?;
                text(&answer["experiment_id"])
            }
            Err(failure) => Err(failure),
        }
    }
}

impl Sender for MlflowSender {
    fn send(&mut self, rows: &[Row]) -> Result<(), Failure> {
        let id = self.run_id()?;
        let of_row = |row: &Row| {
            let (step, timestamp) = (row.step, milliseconds(row.at));
            let finite = row.numbers.iter().filter(|(_, value)| value.is_finite());
            let metric = move |(key, value): &(std::borrow::Cow<'static, str>, f64)| json!({ "key": key, "value": value, "timestamp": timestamp, "step": step });
            finite.map(metric).collect::<Vec<Value>>()
        };
        let metrics: Vec<Value> = rows.iter().flat_map(of_row).collect();
        for metrics in metrics.chunks(MAX_METRICS) {
            self.server
                .post("/api/2.0/mlflow/runs/log-batch", &json!({ "run_id": id, "metrics": metrics }))?;
        }
        Ok(())
    }

    fn finish(&mut self, completed: bool) -> Result<(), Failure> {
        let Some(id) = &self.run_id else { return Ok(()) };
        let status = if completed { "FINISHED" } else { "KILLED" };
        let body = json!({ "run_id": id, "status": status, "end_time": milliseconds(SystemTime::now()) });
        self.server.post("/api/2.0/mlflow/runs/update", &body).map(drop)
    }
}

fn text(value: &Value) -> Result<String, Failure> {
    let refused = |text: &str| Failure::Refused { status: 200, answer: Value::Null, text: text.into() };
    value.as_str().map(str::to_owned).ok_or_else(|| refused("its server does not answer like MLflow"))
}

fn milliseconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
