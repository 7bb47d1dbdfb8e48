//! The reference model, from which the policy should not diverge too far.

use std::path::PathBuf;

use crate::reader::Reader;

/// Updates of the reference model: every `steps` steps it becomes `mixup_alpha` of the policy and the rest of itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SyncRefModel {
    pub mixup_alpha: f64,
    pub steps: u64,
}

impl SyncRefModel {
    /// `None`: the reference model never changes.
    pub(crate) fn read(r: &mut Reader<'_>) -> Option<Self> {
        let on = r.bool("sync_ref_model").unwrap_or(false);
        let sync = SyncRefModel {
            mixup_alpha: r
                .float("ref_model_mixup_alpha", "at least 0 and at most 1", |x| (0.0..=1.0).contains(&x))
                .unwrap_or(0.0),
            steps: r.count("ref_model_sync_steps", 1).unwrap_or(1),
        };
        if !on {
            for key in ["ref_model_mixup_alpha", "ref_model_sync_steps"] {
                r.note_no_effect(key, "`sync_ref_model` is off");
            }
        }
        on.then_some(sync)
    }
}

/// Reads the reference model of an algorithm that has none if `beta` is 0.
pub(crate) fn read(r: &mut Reader<'_>, beta: f64) -> (Option<PathBuf>, Option<SyncRefModel>) {
    let read = (r.model_path("ref_model_name_or_path"), SyncRefModel::read(r));
    for key in ["ref_model_name_or_path", "sync_ref_model"] {
        if let Some(given) = r.given(key).filter(|given| beta == 0.0 && given.node.bool() != Some(false)) {
            let hint = "remove it, or set `beta` above 0.";
            let rule = "left out with `beta: 0`, which uses no reference model";
            r.out_of_range_with(&given.spelled, rule, hint, &given.node);
        }
    }
    read
}
