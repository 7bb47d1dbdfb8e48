//! How trackers are reached: from the environment variables that their own clients read.

use lockstep_config::{RunConfig, Tracker};
use lockstep_core::{Fault, FaultClass};
use lockstep_observe::{BadAddress, ServerAddress};
use lockstep_train::TrackerAccess;

use crate::report::Failure;

/// A variable whose value is not usable. The value is not shown: it may contain a password.
#[derive(Debug)]
struct BadVariable {
    name: &'static str,
    cause: BadAddress,
}

impl std::fmt::Display for BadVariable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} cannot be used: {}", self.name, self.cause)
    }
}

impl std::error::Error for BadVariable {}

impl Fault for BadVariable {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        Some("Metrics are sent to a server: start one (`mlflow server`, `trackio show`), or remove the tracker from `report_to`.".into())
    }
}

/// Reads the variables of the trackers that the run reports to.
pub(crate) fn access(config: &RunConfig) -> Result<TrackerAccess, Failure> {
    read(&config.output.trackers, &|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

fn read(trackers: &[Tracker], variable: &dyn Fn(&str) -> Option<String>) -> Result<TrackerAccess, Failure> {
    let address = |name: &'static str| -> Result<Option<ServerAddress>, Failure> {
        let parsed = variable(name).map(|text| ServerAddress::parse(&text)).transpose();
        parsed.map_err(|cause| -> Failure { Box::new(BadVariable { name, cause }) })
    };
    let mut access = TrackerAccess::default();
    if trackers.contains(&Tracker::Wandb) {
        (access.wandb_project, access.wandb_entity) = (variable("WANDB_PROJECT"), variable("WANDB_ENTITY"));
    }
    if trackers.contains(&Tracker::Mlflow) {
        access.mlflow_experiment = variable("MLFLOW_EXPERIMENT_NAME");
        let name_and_password =
            variable("MLFLOW_TRACKING_USERNAME").zip(variable("MLFLOW_TRACKING_PASSWORD"));
        access.mlflow = address("MLFLOW_TRACKING_URI")?.map(|address| {
            match (variable("MLFLOW_TRACKING_TOKEN"), name_and_password) {
                (Some(token), _) => address.with_token(&token),
                (None, Some((name, password))) => address.with_password(&name, &password),
                (None, None) => address,
            }
        });
    }
    if trackers.contains(&Tracker::Trackio) {
        access.trackio_project = variable("TRACKIO_PROJECT");
        // `trackio show` prints an address with the token in it.
        let in_address = variable("TRACKIO_SERVER_URL").and_then(|url| {
            let (_, token) = url.split_once("write_token=")?;
            Some(token.split(['&', '#']).next()?.to_owned())
        });
        let token = variable("TRACKIO_WRITE_TOKEN").or(in_address);
        access.trackio = address("TRACKIO_SERVER_URL")?.map(|address| match token {
            Some(token) => address.with_header("X-Trackio-Write-Token", token),
            None => address,
        });
    }
    Ok(access)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_of_variables_are_not_shown() {
        let all = [Tracker::Wandb, Tracker::Mlflow, Tracker::Trackio];
        let value = |name: &str| match name {
            "WANDB_PROJECT" => Some("mine".to_owned()),
            "MLFLOW_TRACKING_URI" => Some("http://me:hidden-1@host:5000".into()),
            "TRACKIO_SERVER_URL" => Some("http://host:7860/?write_token=hidden-2&x=1".into()),
            "MLFLOW_TRACKING_TOKEN" => Some("hidden-3".into()),
            _ => None,
        };
        let found = read(&all, &value).unwrap();
        assert_eq!(found.wandb_project.as_deref(), Some("mine"));
        let shown = format!("{found:?}");
        assert!(shown.contains("http://host:5000") && shown.contains("http://host:7860"), "{shown}");
        assert!(!shown.contains("hidden"), "{shown}");
        let bad = |name: &str| (name == "MLFLOW_TRACKING_URI").then(|| "sqlite:///secret.db".to_owned());
        let error = read(&all, &bad).unwrap_err().to_string();
        assert!(
            error.starts_with("MLFLOW_TRACKING_URI cannot be used: ") && !error.contains("secret"),
            "{error}"
        );
        assert!(read(&[Tracker::Csv], &bad).is_ok(), "variables of other trackers do not matter");
    }
}
