//! A run that does not fit into its memory: the error, with the changes that make it fit.

use lockstep_config::RunConfig;
use lockstep_core::{Fault, FaultClass};
use lockstep_plan::PlanError;
use lockstep_plan::cost::{Machine, Refusal, changes_text, suggest_changes};
use lockstep_train::TrainError;

use super::PlanSubject;
use crate::report::Failure;
use crate::train::boxed;

/// A run that does not fit.
#[derive(Debug)]
struct DoesNotFit(Refusal);

impl std::fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for DoesNotFit {}

impl Fault for DoesNotFit {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        Some(changes_text(&self.0).trim_end().into())
    }
}

/// The failure of a run. If it does not fit, the hint has the changes that make it fit with the least time lost, for rows
/// of `max_length` tokens.
pub(crate) fn explained(error: TrainError, config: &RunConfig) -> Failure {
    let TrainError::Plan(PlanError::OverBudget { budget, .. }) = error else { return boxed(error) };
    let refusal = PlanSubject::of(config, None).and_then(|subject| {
        subject.with_workload(config, |workload, machine| {
            suggest_changes(workload, &Machine { budget, ..*machine })
        })
    });
    match refusal {
        Ok(Some(refusal)) => Box::new(DoesNotFit(refusal)),
        // The data needs memory that only a run knows.
        _ => boxed(error),
    }
}
