//! What the model computes in. Three keys say it: `mixed_precision`, `bf16` and `fp16`; the last may be
//! DeepSpeed's map, which also says how losses are scaled.

use crate::error::Problem;
use crate::raw::Given;
use crate::reader::{Later, Reader};
use crate::yaml::{Node, Value};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Precision {
    /// What suits the device: bf16 on a GPU, fp32 on the CPU.
    Auto,
    F32,
    /// bf16 compute with fp32 masters and sums.
    Bf16,
    /// fp16 compute with fp32 masters and sums; losses are scaled, so that small gradients stay.
    F16(LossScaling),
}

/// How losses are scaled in fp16, by DeepSpeed's names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    /// The same scale throughout; `None`: it is found as training goes.
    pub loss_scale: Option<f64>,
    /// The scale at first, as a power of two.
    pub initial_scale_power: u32,
    /// Steps without an overflow after which the scale is doubled.
    pub loss_scale_window: u64,
    /// Overflows until the scale is halved.
    pub hysteresis: u32,
    pub min_loss_scale: f64,
}

impl Default for LossScaling {
    fn default() -> Self {
        LossScaling {
            loss_scale: None,
            initial_scale_power: 16,
            loss_scale_window: 1000,
            hysteresis: 2,
            min_loss_scale: 1.0,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    Auto,
    Fp32,
    Bf16,
    Fp16,
}

impl Precision {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        r.prefer_flags(&["mixed_precision", "bf16", "fp16"]);
        let words = [
            ("auto", Asked::Auto),
            ("fp32", Asked::Fp32),
            ("no", Asked::Fp32),
            ("bf16", Asked::Bf16),
            ("fp16", Asked::Fp16),
        ];
        let later = Later(&["fp8"], "write `mixed_precision: bf16`.");
        let word = r.given("mixed_precision").zip(r.word("mixed_precision", &words, later));
        let mut scaling = LossScaling::default();
        let bf16 = read_switch(r, "bf16", None);
        let fp16 = read_switch(r, "fp16", Some(&mut scaling));

        if let (Some((a, true)), Some((b, true))) = (&bf16, &fp16) {
            r.conflict(a, b, "at most one of `bf16` and `fp16` can be true.");
            return Precision::F32;
        }
        let mut asked: Option<(Given, Asked)> = word;
        for (switch, means) in [(bf16, Asked::Bf16), (fp16, Asked::Fp16)] {
            let Some((given, on)) = switch else { continue };
            match &asked {
                // `fp16: false` beside `mixed_precision: bf16` is no contradiction.
                Some((_, word)) if (*word == means) == on => {}
                Some((word, _)) => {
                    r.conflict(word, &given, "both say what to compute in; keep one.");
                    return Precision::F32;
                }
                None if on => asked = Some((given, means)),
                None => {}
            }
        }
        let Some((given, precision)) = asked else { return Precision::F32 };
        if given.spelled.ends_with("16") || given.spelled.contains("16.") {
            r.derived("mixed_precision", if precision == Asked::Bf16 { "bf16" } else { "fp16" });
        }
        match precision {
            Asked::Auto => Precision::Auto,
            Asked::Fp32 => Precision::F32,
            Asked::Bf16 => Precision::Bf16,
            Asked::Fp16 => Precision::F16(scaling),
        }
    }
}

/// `true`, `false`, or DeepSpeed's map with `enabled`; a map without it, or with `auto`, asks for nothing.
fn read_switch(
    r: &mut Reader<'_>,
    key: &'static str,
    mut scaling: Option<&mut LossScaling>,
) -> Option<(Given, bool)> {
    let given = r.given(key)?;
    let Value::Map(entries) = &given.node.value else {
        let on = given.node.bool();
        if on.is_none() {
            r.wrong_type(key, "true or false", &given.node);
        }
        return Some((given, on?));
    };
    let mut enabled = None;
    for entry in entries.clone() {
        let name = format!("{key}.{}", entry.key);
        let node = &entry.node;
        if node.text().is_some_and(|text| text.eq_ignore_ascii_case("auto")) {
            continue;
        }
        match (entry.key.as_str(), &mut scaling) {
            ("enabled", _) => {
                enabled = node.bool();
                if enabled.is_none() {
                    r.wrong_type(&name, "true or false", node);
                }
            }
            ("loss_scale", Some(s)) => {
                let scale = r.float_of(&name, "at least 0, and 0 to find it", |x| x >= 0.0, node);
                s.loss_scale = scale.filter(|scale| *scale > 0.0);
            }
            ("initial_scale_power", Some(s)) => s.initial_scale_power = power_of(r, &name, node),
            ("loss_scale_window", Some(s)) => {
                s.loss_scale_window = r.count_of(&name, 1, node).unwrap_or(1);
            }
            ("hysteresis", Some(s)) => s.hysteresis = r.count_of(&name, 1, node).unwrap_or(1),
            ("min_loss_scale", Some(s)) => {
                s.min_loss_scale = r.float_of(&name, "above 0", |x| x > 0.0, node).unwrap_or(1.0);
            }
            ("auto_cast" | "consecutive_hysteresis" | "fp16_master_weights_and_grads", Some(_))
                if node.bool() == Some(false) =>
            {
                r.note(format!("`{name}` has no effect here: it is off"));
            }
            _ => {
                let known = [
                    "enabled",
                    "loss_scale",
                    "initial_scale_power",
                    "loss_scale_window",
                    "hysteresis",
                    "min_loss_scale",
                ];
                let known = if scaling.is_some() { &known[..] } else { &known[..1] };
                let closest = lockstep_core::closest(&entry.key, known.iter().copied());
                r.fail(Problem::UnknownKey { key: name, closest }, entry.key_at);
            }
        }
    }
    enabled.map(|on| (given, on))
}

fn power_of(r: &mut Reader<'_>, name: &str, node: &Node) -> u32 {
    let power: u32 = r.count_of(name, 0, node).unwrap_or(0);
    // Beyond, the largest gradient that f32 holds is not one.
    if power > 64 {
        r.out_of_range(name, "at most 64", node);
    }
    power.min(64)
}
