//! The schedule of the learning rate: Hugging Face's by `lr_scheduler_type`, DeepSpeed's by the same key or
//! as its `scheduler: {type, params}`.

use crate::error::Problem;
use crate::raw::Given;
use crate::reader::{Later, Reader};
use crate::yaml::{Entry, Node, Value};

/// How the learning rate goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Schedule {
    /// The same at every step; there is no warm-up.
    Constant,
    ConstantWithWarmup,
    Linear,
    Cosine {
        /// Waves after the warm-up; a half goes down once.
        cycles: f64,
    },
    CosineWithMinLr {
        cycles: f64,
        min: MinRate,
    },
    /// DeepSpeed's, by the rates it starts and stays at.
    WarmupLr(WarmupRates),
    WarmupDecayLr(WarmupRates),
    /// DeepSpeed's, by shares of the learning rate.
    WarmupCosineLr {
        growth: Growth,
        warmup_min_ratio: f64,
        cos_min_ratio: f64,
        /// `None`: the run's.
        total_num_steps: Option<u64>,
    },
}

impl Schedule {
    /// Whether it is one of DeepSpeed's, which warm up in their own way.
    pub fn is_deepspeed(&self) -> bool {
        use Schedule::*;
        matches!(self, WarmupLr(_) | WarmupDecayLr(_) | WarmupCosineLr { .. })
    }
}

/// What the rate does not fall below.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MinRate {
    Rate(f64),
    /// A share of the learning rate.
    Share(f64),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupRates {
    pub warmup_min_lr: f64,
    /// `None`: the learning rate.
    pub warmup_max_lr: Option<f64>,
    pub growth: Growth,
    /// `None`: the run's.
    pub total_num_steps: Option<u64>,
}

/// DeepSpeed's `warmup_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    Log,
    Linear,
}

/// A schedule, and the steps of warm-up that it names itself.
pub(crate) struct Read {
    pub(crate) schedule: Schedule,
    pub(crate) warmup: Option<u64>,
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
    "write linear, cosine or constant.",
);

impl Schedule {
    pub(crate) fn read(r: &mut Reader<'_>) -> Read {
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
            r.conflict(&scheduler, &rival, "both say how the learning rate goes; keep one.");
        }
        r.derived("lr_scheduler_type", "scheduler");
        Params::of(r, "scheduler.params", params.as_ref()).schedule(r, name)
    }
}

/// DeepSpeed's `{type: WarmupLR, params: {...}}`.
fn read_scheduler(r: &mut Reader<'_>, given: &Given) -> (Option<Name>, Option<Node>) {
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

/// The named numbers of a schedule, each of which must be asked for.
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
                r.wrong_type(under, "a map of names and numbers", node.expect("there is one"));
                Vec::new()
            }
        };
        Params { under, entries, known: Vec::new() }
    }

    /// The value of `name`; `auto` leaves it to what the rest of the configuration says.
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

    fn schedule(&mut self, r: &mut Reader<'_>, name: Name) -> Read {
        let mut warmup = None;
        let schedule = match name {
            Name::Constant => Schedule::Constant,
            Name::ConstantWithWarmup => Schedule::ConstantWithWarmup,
            Name::Linear => Schedule::Linear,
            Name::Cosine => Schedule::Cosine { cycles: self.cycles(r) },
            Name::CosineWithMinLr => {
                Schedule::CosineWithMinLr { cycles: self.cycles(r), min: self.min_rate(r) }
            }
            Name::WarmupLr | Name::WarmupDecayLr => {
                warmup = self.count(r, "warmup_num_steps");
                let rates = WarmupRates {
                    warmup_min_lr: self.real(r, "warmup_min_lr").unwrap_or(0.0),
                    warmup_max_lr: self.real(r, "warmup_max_lr"),
                    growth: self.growth(r),
                    total_num_steps: self.count(r, "total_num_steps"),
                };
                if name == Name::WarmupLr {
                    Schedule::WarmupLr(rates)
                } else {
                    Schedule::WarmupDecayLr(rates)
                }
            }
            Name::WarmupCosineLr => {
                warmup = self.count(r, "warmup_num_steps");
                Schedule::WarmupCosineLr {
                    growth: self.growth(r),
                    warmup_min_ratio: self.real(r, "warmup_min_ratio").unwrap_or(0.0),
                    cos_min_ratio: self.real(r, "cos_min_ratio").unwrap_or(0.0001),
                    total_num_steps: self.count(r, "total_num_steps"),
                }
            }
        };
        if self.entries.iter().any(|entry| entry.key == "last_batch_iteration") {
            r.note("`last_batch_iteration` has no effect here: a checkpoint knows its step".into());
            self.entries.retain(|entry| entry.key != "last_batch_iteration");
        }
        for entry in &self.entries {
            let closest = lockstep_core::closest(&entry.key, self.known.iter().copied());
            let key = format!("{}.{}", self.under, entry.key);
            r.fail(Problem::UnknownKey { key, closest }, entry.key_at);
        }
        Read { schedule, warmup }
    }

    fn cycles(&mut self, r: &mut Reader<'_>) -> f64 {
        self.real(r, "num_cycles").unwrap_or(0.5)
    }

    fn min_rate(&mut self, r: &mut Reader<'_>) -> MinRate {
        let (rate_node, share_node) = (self.find("min_lr"), self.find("min_lr_rate"));
        match (self.real(r, "min_lr"), self.real(r, "min_lr_rate")) {
            (Some(rate), None) => MinRate::Rate(rate),
            (None, Some(share)) => MinRate::Share(share),
            (Some(_), Some(_)) => {
                let node = share_node.or(rate_node).expect("both are there");
                r.out_of_range("lr_scheduler_kwargs.min_lr_rate", "absent where `min_lr` is given", &node);
                MinRate::Share(0.0)
            }
            (None, None) => {
                if rate_node.or(share_node).is_none() {
                    r.missing(
                        "lr_scheduler_kwargs",
                        "cosine_with_min_lr needs `lr_scheduler_kwargs: {min_lr_rate: 0.1}`, or `min_lr`",
                    );
                }
                MinRate::Share(0.0)
            }
        }
    }

    fn growth(&mut self, r: &mut Reader<'_>) -> Growth {
        let Some(node) = self.take("warmup_type") else { return Growth::Log };
        let key = if self.under == "scheduler.params" { "scheduler" } else { "lr_scheduler_kwargs" };
        let kinds = [("log", Growth::Log), ("linear", Growth::Linear)];
        r.word_of(key, &kinds, Later::NONE, &node).unwrap_or(Growth::Log)
    }

    fn find(&self, name: &str) -> Option<Node> {
        self.entries.iter().find(|entry| entry.key == name).map(|entry| entry.node.clone())
    }
}
