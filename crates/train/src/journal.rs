//! The run's log and trackers. Only rank 0 writes them.

use std::path::{Path, PathBuf};

use lockstep_config::{OutputConfig, RunConfig, Tracker, list_settings};
use lockstep_device::{Device, Machine};
use lockstep_observe::{
    EvalRecord, ObserveError, RunInfo, RunLog, ServerAddress, SettingRow, StepRecord, TrackedRun,
    TrackerTarget, Trackers,
};
use lockstep_plan::cost::{MemoryByKind, MemoryCurve, curve_json, memory_json};
use lockstep_plan::{MemoryBreakdown, RunPlan, operation_text};
use serde_json::json;

use crate::numerics::NumericsFingerprint;

/// A phase with more operations is not written to `plan.json`.
const MAX_OPERATIONS: usize = 50_000;

/// The project of runs that set none.
const DEFAULT_PROJECT: &str = "lockstep";

/// How trackers on servers are reached, and what they call the run: from the environment, which this crate does not
/// read. A setting in the configuration precedes.
#[derive(Clone, Debug, Default)]
pub struct TrackerAccess {
    pub wandb_entity: Option<String>,
    pub wandb_project: Option<String>,
    /// `None`: a server on this machine, at MLflow's own port.
    pub mlflow: Option<ServerAddress>,
    pub mlflow_experiment: Option<String>,
    /// `None`: a server on this machine, at Trackio's own port.
    pub trackio: Option<ServerAddress>,
    pub trackio_project: Option<String>,
}

impl TrackerAccess {
    fn targets(&self, output: &OutputConfig) -> Vec<TrackerTarget> {
        let project = |of_tracker: &Option<String>| {
            output.project.as_ref().or(of_tracker.as_ref()).cloned().unwrap_or_else(|| DEFAULT_PROJECT.into())
        };
        let here = |address: &Option<ServerAddress>, port: u16| {
            let own = || ServerAddress::parse(&format!("http://127.0.0.1:{port}")).expect("an address");
            address.clone().unwrap_or_else(own)
        };
        let board = output.tensorboard.clone().map(TrackerTarget::TensorBoard);
        let others = output.trackers.iter().map(|tracker| match tracker {
            Tracker::Csv => TrackerTarget::Csv,
            Tracker::Wandb => TrackerTarget::Wandb {
                project: project(&self.wandb_project),
                entity: self.wandb_entity.clone(),
            },
            Tracker::Mlflow => TrackerTarget::Mlflow {
                address: here(&self.mlflow, 5000),
                experiment: project(&self.mlflow_experiment),
            },
            Tracker::Trackio => TrackerTarget::Trackio {
                address: here(&self.trackio, 7860),
                project: project(&self.trackio_project),
            },
        });
        board.into_iter().chain(others).collect()
    }
}

/// A run as rank 0 knows it when it starts.
pub(crate) struct RunDescription<'a> {
    pub(crate) dir: &'a Path,
    pub(crate) config: &'a RunConfig,
    /// Without secrets.
    pub(crate) config_text: &'a str,
    /// The command line that repeats the run, without secrets.
    pub(crate) command: &'a str,
    pub(crate) plan: &'a RunPlan,
    pub(crate) machine: Machine,
    pub(crate) total_steps: u64,
    pub(crate) trackers: &'a TrackerAccess,
    pub(crate) resume_step: Option<u64>,
}

impl RunDescription<'_> {
    fn info(&self) -> RunInfo {
        let config = self.config;
        let kinds = MemoryByKind::of(self.plan).rows();
        RunInfo {
            name: run_name(config, self.dir),
            started: String::new(),
            version: env!("CARGO_PKG_VERSION").into(),
            config: self.config_text.to_owned(),
            settings: config
                .changed
                .iter()
                .map(|(key, text)| (key.to_string(), value_of(key, text)))
                .collect(),
            ranks: config.plan.world_size().into(),
            device: match self.machine.device {
                Device::Cpu => format!("{} threads", self.machine.num_threads),
                Device::Cuda(gpu) => gpu.name.clone(),
            },
            total_steps: self.total_steps,
            parameters: self.plan.input.models[0].params(),
            command: self.command.to_owned(),
            planned_memory_bytes: kinds.iter().map(|(name, bytes)| (name.to_string(), bytes.0)).collect(),
            all_settings: list_settings(config)
                .into_iter()
                .map(|row| SettingRow { key: row.key, value: row.value, origin: row.origin.to_string() })
                .collect(),
        }
    }

    /// Writes `plan.json`: where the memory of a rank goes, and what is in use during each operation of a step.
    fn write_plan(&self) -> Result<(), ObserveError> {
        let plan = self.plan;
        let curve = MemoryCurve::of_largest_phase(plan).filter(|curve| curve.points.len() <= MAX_OPERATIONS);
        let phase =
            curve.as_ref().and_then(|curve| plan.phases.iter().find(|phase| phase.name == curve.phase));
        let operations: Vec<String> = phase.map_or_else(Vec::new, |phase| {
            (0..phase.schedule.ops.len()).map(|i| operation_text(plan, phase, i)).collect()
        });
        let object = json!({
            "memory": memory_json(&MemoryBreakdown::of(plan)),
            "memory_over_step": curve.as_ref().map(curve_json),
            "operations": operations,
        });
        let path: PathBuf = self.dir.join("plan.json");
        let partial = self.dir.join("plan.json.partial");
        let written =
            std::fs::write(&partial, format!("{object}\n")).and_then(|()| std::fs::rename(&partial, &path));
        written.map_err(|source| ObserveError::Write { path, source })
    }
}

/// Writes the log and reports to trackers on rank 0, and does nothing on other ranks.
pub(crate) struct Journal {
    log: Option<RunLog>,
    trackers: Trackers,
}

impl Journal {
    /// Opens the log and the trackers, and writes `run.json`, by which other programs know the run.
    pub(crate) fn open(run: &RunDescription<'_>) -> Result<Journal, ObserveError> {
        let log = RunLog::open(run.dir, run.resume_step)?;
        let info = run.info();
        info.write(run.dir)?;
        run.write_plan()?;
        let tracked = TrackedRun {
            name: info.name,
            dir: run.dir.to_path_buf(),
            config: info.config,
            settings: info.settings.into_iter().collect(),
            resume_step: run.resume_step,
        };
        let trackers = Trackers::open(&run.trackers.targets(&run.config.output), &tracked);
        Ok(Journal { log: Some(log), trackers })
    }

    pub(crate) fn closed() -> Journal {
        Journal { log: None, trackers: Trackers::default() }
    }

    /// Logs a step. Trackers get only the steps that are `shown`.
    pub(crate) fn step(&mut self, record: &StepRecord, shown: bool) -> Result<(), ObserveError> {
        if shown {
            self.trackers.step(record);
        }
        self.log.as_mut().map_or(Ok(()), |log| log.step(record))
    }

    pub(crate) fn evaluation(&mut self, record: &EvalRecord) -> Result<(), ObserveError> {
        self.trackers.evaluation(record);
        self.log.as_mut().map_or(Ok(()), |log| log.evaluation(record))
    }

    /// Reports what the model has generated, to trackers that show texts.
    pub(crate) fn samples(&mut self, step: u64, text: &str) {
        self.trackers.text(step, "completions", text);
    }

    pub(crate) fn event(&mut self, text: &str) -> Result<(), ObserveError> {
        self.log.as_mut().map_or(Ok(()), |log| log.event(text))
    }

    pub(crate) fn fingerprint(&mut self, numerics: &NumericsFingerprint) -> Result<(), ObserveError> {
        self.log.as_mut().map_or(Ok(()), |log| log.fingerprint(&numerics.hash(), numerics.fields()))
    }

    pub(crate) fn sync(&mut self) -> Result<(), ObserveError> {
        self.trackers.sync();
        self.log.as_mut().map_or(Ok(()), |log| log.sync())
    }

    /// Warnings about trackers that have failed since the last call.
    pub(crate) fn tracker_warnings(&mut self) -> Vec<String> {
        self.trackers.take_warnings()
    }

    /// Ends the run for trackers. `completed`: it was not stopped.
    pub(crate) fn finish_trackers(&mut self, completed: bool) -> Vec<String> {
        self.trackers.finish(completed);
        self.trackers.take_warnings()
    }
}

/// The experiment's name, or that of the output folder.
fn run_name(config: &RunConfig, dir: &Path) -> String {
    let folder = || dir.file_name().map(|name| name.to_string_lossy().into_owned());
    config.output.experiment_name.clone().or_else(folder).unwrap_or_else(|| "run".into())
}

/// The value in `key: value`, as text.
fn value_of(key: &str, yaml: &str) -> String {
    let text = yaml.trim().strip_prefix(key).and_then(|rest| rest.strip_prefix(':')).unwrap_or(yaml);
    text.trim().trim_matches('"').to_owned()
}
