//! What the model computes in. Three keys say it: `mixed_precision`, `bf16` and `fp16`.

use crate::error::Problem;
use crate::raw::Given;
use crate::reader::{Later, Reader};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    F32,
    /// bf16 compute with fp32 masters and sums.
    Bf16,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    Fp32,
    Bf16,
    Fp16,
}

impl Precision {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        r.prefer_flags(&["mixed_precision", "bf16", "fp16"]);
        let words =
            [("fp32", Asked::Fp32), ("no", Asked::Fp32), ("bf16", Asked::Bf16), ("fp16", Asked::Fp16)];
        let later = Later(&["fp8"], "write `mixed_precision: bf16`.");
        let word = r.given("mixed_precision").zip(r.word("mixed_precision", &words, later));
        let bf16 = r.given("bf16").zip(r.bool("bf16"));
        let fp16 = r.given("fp16").zip(r.bool("fp16"));

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
        match asked {
            None => Precision::F32,
            Some((given, precision)) => settle(r, &given, precision),
        }
    }
}

fn settle(r: &mut Reader<'_>, given: &Given, precision: Asked) -> Precision {
    if given.spelled.ends_with("16") {
        r.derived("mixed_precision", if precision == Asked::Bf16 { "bf16" } else { "fp16" });
    }
    match precision {
        Asked::Fp32 => Precision::F32,
        Asked::Bf16 => Precision::Bf16,
        Asked::Fp16 => {
            let key = if given.spelled.ends_with("fp16") { "fp16" } else { "mixed_precision" };
            let value = given.node.text().unwrap_or_default().to_owned();
            let instead = "write `mixed_precision: bf16`, which needs no loss scale.";
            r.fail(Problem::ValueNotImplemented { key, value, instead }, given.node.at);
            Precision::F32
        }
    }
}
