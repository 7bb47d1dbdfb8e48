//! Direct preference optimization.

use std::fmt;
use std::path::PathBuf;

use crate::error::Problem;
use crate::reader::{Later, Reader};
use crate::sections::SyncRefModel;
use crate::yaml::Value;

/// Direct preference optimization. The names are TRL's.
#[derive(Clone, Debug, PartialEq)]
pub struct DpoConfig {
    pub beta: f64,
    /// Loss types with their weights; at least one.
    pub losses: Vec<(DpoLoss, f64)>,
    /// 0 unless one of the losses uses it.
    pub label_smoothing: f64,
    pub f_divergence: FDivergence,
    /// `None`: all tokens have weight 1.
    pub ld_alpha: Option<f64>,
    pub discopop_tau: f64,
    pub precompute_ref_log_probs: bool,
    /// `None`: the reference model never changes.
    pub sync_ref_model: Option<SyncRefModel>,
    /// A folder or Hub name; `None`: the initial policy.
    pub ref_model: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DpoLoss {
    Sigmoid,
    /// `Sigmoid` with label smoothing.
    Cdpo,
    Hinge,
    Ipo,
    ExoPair,
    NcaPair,
    Robust,
    BcoPair,
    SppoHard,
    Aot,
    AotUnpaired,
    ApoZero,
    ApoDown,
    Discopop,
    Sft,
    SigmoidNorm,
}

/// The divergence from the reference model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FDivergence {
    ReverseKl,
    ForwardKl,
    JsDivergence,
    /// With its coefficient, which is not 1: that is `ReverseKl`.
    Alpha(f64),
}

const LOSSES: [(&str, DpoLoss); 16] = [
    ("sigmoid", DpoLoss::Sigmoid),
    ("cdpo", DpoLoss::Cdpo),
    ("hinge", DpoLoss::Hinge),
    ("ipo", DpoLoss::Ipo),
    ("exo_pair", DpoLoss::ExoPair),
    ("nca_pair", DpoLoss::NcaPair),
    ("robust", DpoLoss::Robust),
    ("bco_pair", DpoLoss::BcoPair),
    ("sppo_hard", DpoLoss::SppoHard),
    ("aot", DpoLoss::Aot),
    ("aot_unpaired", DpoLoss::AotUnpaired),
    ("apo_zero", DpoLoss::ApoZero),
    ("apo_down", DpoLoss::ApoDown),
    ("discopop", DpoLoss::Discopop),
    ("sft", DpoLoss::Sft),
    ("sigmoid_norm", DpoLoss::SigmoidNorm),
];

const OTHER_LOSSES: Later = Later(&["kto", "kto_pair", "simpo", "orpo", "cpo"], "use sigmoid or bco_pair.");

impl DpoLoss {
    pub const ALL: [DpoLoss; 16] = {
        let mut all = [DpoLoss::Sigmoid; 16];
        let mut idx = 0;
        while idx < all.len() {
            all[idx] = LOSSES[idx].1;
            idx += 1;
        }
        all
    };

    /// The name that configurations use.
    pub fn name(self) -> &'static str {
        LOSSES[self as usize].0
    }

    /// Whether `label_smoothing` has an effect.
    pub fn uses_label_smoothing(self) -> bool {
        use DpoLoss::*;
        matches!(self, Cdpo | Robust | ExoPair | Aot | AotUnpaired)
    }

    /// Whether the loss is defined for other divergences than the reverse KL: it depends on the difference of the
    /// two scores only.
    pub fn generalizes_to_f_divergences(self) -> bool {
        use DpoLoss::*;
        matches!(self, Sigmoid | Cdpo | SigmoidNorm | Hinge | Ipo | ExoPair | Robust | Discopop | Sft)
    }
}

impl fmt::Display for DpoLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl DpoConfig {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        let losses = read_losses(r);
        let has = |loss: DpoLoss| losses.iter().any(|(other, _)| *other == loss);
        let label_smoothing = read_label_smoothing(r, &losses);
        let f_divergence = read_divergence(r, &losses);
        let discopop_tau = r.float("discopop_tau", "above 0", |x| x > 0.0).unwrap_or(1.0);
        if !has(DpoLoss::Discopop) {
            r.note_no_effect("discopop_tau", "only `loss_type: discopop` uses it");
        }
        if let (Some(true), Some(given)) = (r.bool("use_weighting"), r.given("use_weighting")) {
            let hint = "weighting pairs by the policy's probabilities (WPO) is not implemented yet.";
            r.out_of_range_with("use_weighting", "false", hint, &given.node);
        }
        let (precompute_ref_log_probs, sync_ref_model) = read_reference(r);
        DpoConfig {
            beta: r.float("beta", "above 0", |x| x > 0.0).unwrap_or(1.0),
            losses,
            label_smoothing,
            f_divergence,
            ld_alpha: r.float("ld_alpha", "at least 0 and at most 1", |x| (0.0..=1.0).contains(&x)),
            discopop_tau,
            precompute_ref_log_probs,
            sync_ref_model,
            ref_model: r.model_path("ref_model_name_or_path"),
        }
    }
}

fn read_losses(r: &mut Reader<'_>) -> Vec<(DpoLoss, f64)> {
    let weights_given = r.given("loss_weights");
    let weights = r.floats("loss_weights");
    let Some(node) = r.node("loss_type") else { return Vec::new() };
    let words = match &node.value {
        Value::Seq(items) if items.is_empty() => {
            r.out_of_range("loss_type", "a list of at least one loss", &node);
            return Vec::new();
        }
        Value::Seq(items) => items.clone(),
        _ => vec![node],
    };
    let losses: Vec<_> =
        words.iter().map(|word| r.word_of("loss_type", &LOSSES, OTHER_LOSSES, word)).collect();
    if let (Some(given), Some(weights)) = (&weights_given, &weights)
        && weights.len() != losses.len()
    {
        let rule = format!("a number for each loss in `loss_type` ({})", losses.len());
        r.out_of_range("loss_weights", rule, &given.node);
    }
    let weight = |idx: usize| weights.as_ref().and_then(|weights| weights.get(idx)).copied().unwrap_or(1.0);
    losses.into_iter().flatten().enumerate().map(|(idx, loss)| (loss, weight(idx))).collect()
}

fn read_label_smoothing(r: &mut Reader<'_>, losses: &[(DpoLoss, f64)]) -> f64 {
    let within = |x: f64| (0.0..1.0).contains(&x);
    let Some(smoothing) = r.float("label_smoothing", "at least 0 and below 1", within) else { return 0.0 };
    let (using, ignoring): (Vec<DpoLoss>, Vec<DpoLoss>) =
        losses.iter().map(|(loss, _)| *loss).partition(|loss| loss.uses_label_smoothing());
    let value = format!("{smoothing}");
    let mut fail = |rule: &str, hint: &'static str| {
        let (key, rule) = ("label_smoothing".to_owned(), rule.to_owned().into());
        let problem = Problem::OutOfRange { key, value: value.clone(), rule, hint: hint.into() };
        r.fail_at_key(problem, &["label_smoothing", "loss_type"]);
    };
    if let (true, [], [ignoring, ..]) = (smoothing > 0.0, &using[..], &ignoring[..]) {
        let hint = "use `loss_type: cdpo`, which is sigmoid with label smoothing, or robust, exo_pair, aot or \
                    aot_unpaired.";
        fail(&format!("0 with `loss_type: {ignoring}`, which does not use it"), hint);
    }
    if using.contains(&DpoLoss::Robust) && smoothing >= 0.5 {
        fail("below 0.5 with `loss_type: robust`", "");
    }
    if using.contains(&DpoLoss::ExoPair) && smoothing == 0.0 {
        fail("above 0 with `loss_type: exo_pair`", "set `label_smoothing: 1e-3`, for example.");
    }
    if smoothing > 0.0 && !using.is_empty() {
        for loss in ignoring {
            r.note(format!("`label_smoothing` has no effect on the loss {loss}"));
        }
    }
    smoothing
}

fn read_divergence(r: &mut Reader<'_>, losses: &[(DpoLoss, f64)]) -> FDivergence {
    let names = [
        ("reverse_kl", FDivergence::ReverseKl),
        ("forward_kl", FDivergence::ForwardKl),
        ("js_divergence", FDivergence::JsDivergence),
        ("alpha_divergence", FDivergence::Alpha(0.0)),
    ];
    let given = r.given("f_divergence_type");
    let coefficient = r.float("f_alpha_divergence_coef", "a finite number", |_| true).unwrap_or(0.5);
    let divergence = match r.word("f_divergence_type", &names, Later::NONE) {
        // The limit of the alpha divergence at 1.
        Some(FDivergence::Alpha(_)) if (coefficient - 1.0).abs() < 1e-6 => FDivergence::ReverseKl,
        Some(FDivergence::Alpha(_)) => FDivergence::Alpha(coefficient),
        other => {
            r.note_no_effect("f_alpha_divergence_coef", "only `f_divergence_type: alpha_divergence` uses it");
            other.unwrap_or(FDivergence::ReverseKl)
        }
    };
    let undefined = losses.iter().find(|(loss, _)| !loss.generalizes_to_f_divergences());
    if let (Some((loss, _)), Some(given)) = (undefined, given)
        && divergence != FDivergence::ReverseKl
    {
        let all = DpoLoss::ALL.iter().filter(|loss| loss.generalizes_to_f_divergences());
        let names = crate::error::join(&all.map(ToString::to_string).collect::<Vec<_>>(), "and");
        let rule = format!("reverse_kl with the loss {loss}");
        let hint = format!("other divergences are defined for the losses {names}.");
        r.out_of_range_with("f_divergence_type", rule, hint, &given.node);
    }
    divergence
}

/// Reads whether the reference's log-probabilities are computed in advance, and its updates, which exclude each other.
fn read_reference(r: &mut Reader<'_>) -> (bool, Option<SyncRefModel>) {
    let precompute = r.bool("precompute_ref_log_probs").unwrap_or(false);
    let sync = SyncRefModel::read(r);
    if let (true, Some(_), Some(a), Some(b)) =
        (precompute, sync, r.given("precompute_ref_log_probs"), r.given("sync_ref_model"))
    {
        r.conflict(&a, &b, "log-probabilities that are computed once cannot follow the reference model.");
    }
    (precompute, sync)
}
