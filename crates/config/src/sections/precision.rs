//! The compute precision. Three keys set it: `mixed_precision`, `bf16` and `fp16`. The last may be DeepSpeed's
//! map, which also configures loss scaling.

use crate::error::Problem;
use crate::raw::Setting;
use crate::reader::{Later, Reader};
use crate::yaml::{Node, Value};

/// The compute precision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Precision {
    /// bf16 on a GPU, fp32 on the CPU.
    Auto,
    F32,
    /// bf16 compute with fp32 master weights and accumulation.
    Bf16,
    /// fp16 compute with fp32 master weights and accumulation, and with loss scaling against underflow of gradients.
    F16(LossScaling),
}

/// Loss scaling in fp16, with DeepSpeed's names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    /// A static scale. `None`: dynamic loss scaling.
    pub loss_scale: Option<f64>,
    /// The initial dynamic scale is 2 to this power.
    pub initial_scale_power: u32,
    /// Steps without an overflow after which the scale is doubled.
    pub loss_scale_window: u64,
    /// Overflows after which the scale is halved.
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
enum PrecisionWord {
    Auto,
    Fp32,
    Bf16,
    Fp16,
}

impl Precision {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        r.prefer_flags(&["mixed_precision", "bf16", "fp16"]);
        let words = [
            ("auto", PrecisionWord::Auto),
            ("fp32", PrecisionWord::Fp32),
            ("no", PrecisionWord::Fp32),
            ("bf16", PrecisionWord::Bf16),
            ("fp16", PrecisionWord::Fp16),
        ];
        let later = Later(&["fp8"], "use `mixed_precision: bf16`.");
        let word = r.given("mixed_precision").zip(r.word("mixed_precision", &words, later));
        let mut scaling = LossScaling::default();
        let bf16 = read_switch(r, "bf16", None);
        let fp16 = read_switch(r, "fp16", Some(&mut scaling));

        if let (Some((a, true)), Some((b, true))) = (&bf16, &fp16) {
            r.conflict(a, b, "at most one of `bf16` and `fp16` can be true.");
            return Precision::F32;
        }
        let mut asked: Option<(Setting, PrecisionWord)> = word;
        for (switch, means) in [(bf16, PrecisionWord::Bf16), (fp16, PrecisionWord::Fp16)] {
            let Some((given, on)) = switch else { continue };
            match &asked {
                // `fp16: false` does not contradict `mixed_precision: bf16`.
                Some((_, word)) if (*word == means) == on => {}
                Some((word, _)) => {
                    r.conflict(word, &given, "both set the precision; keep one.");
                    return Precision::F32;
                }
                None if on => asked = Some((given, means)),
                None => {}
            }
        }
        let Some((given, precision)) = asked else { return Precision::F32 };
        if given.spelled.ends_with("16") || given.spelled.contains("16.") {
            r.derived("mixed_precision", if precision == PrecisionWord::Bf16 { "bf16" } else { "fp16" });
        }
        match precision {
            PrecisionWord::Auto => Precision::Auto,
            PrecisionWord::Fp32 => Precision::F32,
            PrecisionWord::Bf16 => Precision::Bf16,
            PrecisionWord::Fp16 => Precision::F16(scaling),
        }
    }
}

/// Reads `true`, `false`, or DeepSpeed's map with `enabled`. Without `enabled`, or with `auto`, the map does not set
/// the precision.
fn read_switch(
    r: &mut Reader<'_>,
    key: &'static str,
    mut scaling: Option<&mut LossScaling>,
) -> Option<(Setting, bool)> {
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
                let scale = r.float_of(&name, "at least 0; 0 means dynamic", |x| x >= 0.0, node);
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
                r.note(format!("`{name}` has no effect: it is off"));
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
    // Beyond 2^64 even small losses overflow f32.
    if power > 64 {
        r.out_of_range(name, "at most 64", node);
    }
    power.min(64)
}
