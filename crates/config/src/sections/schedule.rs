//! The learning-rate schedule: Hugging Face's schedulers by `lr_scheduler_type`, DeepSpeed's by the same key or
//! in DeepSpeed's form, `scheduler: {type, params}`.

use crate::error::Problem;
use crate::raw::Setting;
use crate::reader::{Later, Reader};
use crate::yaml::{Entry, Node, Value};

/// The learning-rate scheduler and its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LrSchedulerType {
    /// The same rate at every step, without warmup.
    Constant,
    ConstantWithWarmup,
    Linear,
    Cosine {
        /// Cosine periods after the warmup; with 0.5 the rate decays once.
        cycles: f64,
    },
    CosineWithMinLr {
        cycles: f64,
        min: MinLr,
    },
    /// DeepSpeed's WarmupLR: warms up and then stays constant.
    WarmupLr(WarmupLrParams),
    /// DeepSpeed's WarmupDecayLR: warms up and then decays linearly.
    WarmupDecayLr(WarmupLrParams),
    /// DeepSpeed's WarmupCosineLR, whose rates are ratios of the learning rate.
    WarmupCosineLr {
        warmup_type: WarmupType,
        warmup_min_ratio: f64,
        cos_min_ratio: f64,
        /// `None`: the steps of the run.
        total_num_steps: Option<u64>,
    },
}

impl LrSchedulerType {
    /// Whether this is one of DeepSpeed's schedulers, which have their own warmup.
    pub fn is_deepspeed(&self) -> bool {
        use LrSchedulerType::*;
        matches!(self, WarmupLr(_) | WarmupDecayLr(_) | WarmupCosineLr { .. })
    }
}

/// The minimum learning rate of `cosine_with_min_lr`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MinLr {
    /// `min_lr`.
    Lr(f64),
    /// `min_lr_rate`: a ratio of the learning rate.
    Ratio(f64),
}

/// Parameters of DeepSpeed's WarmupLR and WarmupDecayLR.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupLrParams {
    pub warmup_min_lr: f64,
    /// `None`: the learning rate.
    pub warmup_max_lr: Option<f64>,
    pub warmup_type: WarmupType,
    /// `None`: the steps of the run.
    pub total_num_steps: Option<u64>,
}

/// DeepSpeed's `warmup_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WarmupType {
    Log,
    Linear,
}

/// The scheduler that the configuration names.
pub(crate) struct ScheduleSettings {
    pub(crate) scheduler: LrSchedulerType,
    /// The scheduler's own `warmup_num_steps`, if it is set.
    pub(crate) warmup_num_steps: Option<u64>,
    /// `warmup_num_steps: auto`: `warmup_steps` or `warmup_ratio` decides, and there is no warmup without them.
    pub(crate) has_auto_warmup: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Name {
    Constant,
    ConstantWithWarmup,
    Linear,
    Cosine,
    CosineWithMinLr,
    WarmupLr,
    WarmupDecayLr,
    WarmupCosineLr,
}

const NAMES: [(&str, Name); 8] = [
    ("linear", Name::Linear),
    ("cosine", Name::Cosine),
    ("constant", Name::Constant),
    ("constant_with_warmup", Name::ConstantWithWarmup),
    ("cosine_with_min_lr", Name::CosineWithMinLr),
    ("WarmupLR", Name::WarmupLr),
    ("WarmupDecayLR", Name::WarmupDecayLr),
    ("WarmupCosineLR", Name::WarmupCosineLr),
];

const OTHERS: Later = Later(
    &[
        "cosine_with_restarts",
        "cosine_warmup_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "reduce_lr_on_plateau",
        "warmup_stable_decay",
        "OneCycle",
        "LRRangeTest",
    ],
    "use linear, cosine or constant.",
);

impl LrSchedulerType {
    pub(crate) fn read(r: &mut Reader<'_>) -> ScheduleSettings {
        r.prefer_flags(&["lr_scheduler_type", "scheduler"]);
        let by_word = r.given("lr_scheduler_type");
        let word = r.word("lr_scheduler_type", &NAMES, OTHERS).unwrap_or(Name::Linear);
        let kwargs = r.given("lr_scheduler_kwargs");
        let Some(scheduler) = r.given("scheduler") else {
            let mut params = Params::of(r, "lr_scheduler_kwargs", kwargs.as_ref().map(|given| &given.node));
            return params.schedule(r, word);
        };
        let (name, params) = read_scheduler(r, &scheduler);
        let name = name.unwrap_or(word);
        if let Some(rival) = by_word.filter(|_| name != word).or(kwargs) {
            r.conflict(&scheduler, &rival, "both set the learning-rate schedule; keep one.");
        }
        r.derived("lr_scheduler_type", "scheduler");
        Params::of(r, "scheduler.params", params.as_ref()).schedule(r, name)
    }
}

/// Reads DeepSpeed's `{type: WarmupLR, params: {...}}`.
fn read_scheduler(r: &mut Reader<'_>, given: &Setting) -> (Option<Name>, Option<Node>) {
    let Value::Map(entries) = &given.node.value else {
        r.wrong_type("scheduler", "a map with `type` and `params`", &given.node);
        return (None, None);
    };
    let (mut name, mut params) = (None, None);
    for entry in entries {
        match entry.key.as_str() {
            "type" => name = Some(r.word_of("scheduler", &NAMES, OTHERS, &entry.node)),
            "params" => params = Some(entry.node.clone()),
            other => {
                let closest = lockstep_core::closest(other, ["type", "params"]);
                r.fail(Problem::UnknownKey { key: format!("scheduler.{other}"), closest }, entry.key_at);
            }
        }
    }
    if name.is_none() {
        r.wrong_type("scheduler", "a map with `type`, such as `type: WarmupLR`", &given.node);
    }
    (name.flatten(), params)
}

/// The parameters of a scheduler. Those that the scheduler does not read are reported as unknown.
struct Params {
    under: &'static str,
    entries: Vec<Entry>,
    known: Vec<&'static str>,
}

impl Params {
    fn of(r: &mut Reader<'_>, under: &'static str, node: Option<&Node>) -> Params {
        let entries = match node.map(|node| &node.value) {
            None => Vec::new(),
            Some(Value::Map(entries)) => entries.clone(),
            Some(_) => {
                r.wrong_type(under, "a map of names and numbers", node.expect("the node exists"));
                Vec::new()
            }
        };
        Params { under, entries, known: Vec::new() }
    }

    /// Takes the value of `name`. `auto` means that the rest of the configuration determines it.
    fn take(&mut self, name: &'static str) -> Option<Node> {
        self.known.push(name);
        let at = self.entries.iter().position(|entry| entry.key == name)?;
        let node = self.entries.swap_remove(at).node;
        let auto = node.text().is_some_and(|text| text.eq_ignore_ascii_case("auto"));
        (!auto && !node.is_null()).then_some(node)
    }

    fn real(&mut self, r: &mut Reader<'_>, name: &'static str) -> Option<f64> {
        let node = self.take(name)?;
        let key = format!("{}.{name}", self.under);
        r.float_of(&key, "a finite number, at least 0", |x| x >= 0.0, &node)
    }

    fn count(&mut self, r: &mut Reader<'_>, name: &'static str) -> Option<u64> {
        let node = self.take(name)?;
        r.count_of(&format!("{}.{name}", self.under), 0, &node)
    }

    fn schedule(&mut self, r: &mut Reader<'_>, name: Name) -> ScheduleSettings {
        let mut warmup_num_steps = None;
        let is_auto = |node: &Node| node.text().is_some_and(|text| text.eq_ignore_ascii_case("auto"));
        let has_auto_warmup = self.find("warmup_num_steps").as_ref().is_some_and(is_auto);
        let scheduler = match name {
            Name::Constant => LrSchedulerType::Constant,
            Name::ConstantWithWarmup => LrSchedulerType::ConstantWithWarmup,
            Name::Linear => LrSchedulerType::Linear,
            Name::Cosine => LrSchedulerType::Cosine { cycles: self.cycles(r) },
            Name::CosineWithMinLr => {
                LrSchedulerType::CosineWithMinLr { cycles: self.cycles(r), min: self.min_rate(r) }
            }
            Name::WarmupLr | Name::WarmupDecayLr => {
                warmup_num_steps = self.count(r, "warmup_num_steps");
                let rates = WarmupLrParams {
                    warmup_min_lr: self.real(r, "warmup_min_lr").unwrap_or(0.0),
                    warmup_max_lr: self.real(r, "warmup_max_lr"),
                    warmup_type: self.warmup_type(r),
                    total_num_steps: self.count(r, "total_num_steps"),
                };
                if name == Name::WarmupLr {
                    LrSchedulerType::WarmupLr(rates)
                } else {
                    LrSchedulerType::WarmupDecayLr(rates)
                }
            }
            Name::WarmupCosineLr => {
                warmup_num_steps = self.count(r, "warmup_num_steps");
                LrSchedulerType::WarmupCosineLr {
                    warmup_type: self.warmup_type(r),
                    warmup_min_ratio: self.real(r, "warmup_min_ratio").unwrap_or(0.0),
                    cos_min_ratio: self.real(r, "cos_min_ratio").unwrap_or(0.0001),
                    total_num_steps: self.count(r, "total_num_steps"),
                }
            }
        };
        if self.entries.iter().any(|entry| entry.key == "last_batch_iteration") {
            r.note("`last_batch_iteration` has no effect: the step comes from the checkpoint".into());
            self.entries.retain(|entry| entry.key != "last_batch_iteration");
        }
        for entry in &self.entries {
            let closest = lockstep_core::closest(&entry.key, self.known.iter().copied());
            let key = format!("{}.{}", self.under, entry.key);
            r.fail(Problem::UnknownKey { key, closest }, entry.key_at);
        }
        ScheduleSettings { scheduler, warmup_num_steps, has_auto_warmup }
    }

    fn cycles(&mut self, r: &mut Reader<'_>) -> f64 {
        self.real(r, "num_cycles").unwrap_or(0.5)
    }

    fn min_rate(&mut self, r: &mut Reader<'_>) -> MinLr {
        let (lr_node, ratio_node) = (self.find("min_lr"), self.find("min_lr_rate"));
        match (self.real(r, "min_lr"), self.real(r, "min_lr_rate")) {
            (Some(lr), None) => MinLr::Lr(lr),
            (None, Some(ratio)) => MinLr::Ratio(ratio),
            (Some(_), Some(_)) => {
                let node = ratio_node.or(lr_node).expect("both are given");
                r.out_of_range("lr_scheduler_kwargs.min_lr_rate", "absent if `min_lr` is set", &node);
                MinLr::Ratio(0.0)
            }
            (None, None) => {
                if lr_node.or(ratio_node).is_none() {
                    r.missing(
                        "lr_scheduler_kwargs",
                        "cosine_with_min_lr needs `min_lr_rate` or `min_lr`, such as \
                         `lr_scheduler_kwargs: {min_lr_rate: 0.1}`",
                    );
                }
                MinLr::Ratio(0.0)
            }
        }
    }

    fn warmup_type(&mut self, r: &mut Reader<'_>) -> WarmupType {
        let Some(node) = self.take("warmup_type") else { return WarmupType::Log };
        let key = if self.under == "scheduler.params" { "scheduler" } else { "lr_scheduler_kwargs" };
        let kinds = [("log", WarmupType::Log), ("linear", WarmupType::Linear)];
        r.word_of(key, &kinds, Later::NONE, &node).unwrap_or(WarmupType::Log)
    }

    fn find(&self, name: &str) -> Option<Node> {
        self.entries.iter().find(|entry| entry.key == name).map(|entry| entry.node.clone())
    }
}
