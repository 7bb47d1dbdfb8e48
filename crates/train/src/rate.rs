//! Learning rates, as Hugging Face's and DeepSpeed's schedulers define them.

use std::f64::consts::PI;

use lockstep_config::{Growth, MinRate, RunConfig, Schedule, Warmup, WarmupRates};

/// The rate of every step of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateSchedule {
    peak: f64,
    /// What `lr_scaling` makes of a rate.
    factor: f64,
    kind: Schedule,
    warmup: u64,
    total: u64,
}

impl RateSchedule {
    pub fn new(config: &RunConfig, total_steps: u64) -> RateSchedule {
        let warmup = match config.optim.warmup {
            Warmup::Steps(steps) => steps,
            // Rounded up, as Hugging Face does.
            Warmup::Ratio(ratio) => (ratio * total_steps as f64).ceil() as u64,
        };
        RateSchedule {
            peak: config.peak_learning_rate(),
            factor: config.optim.lr_scaling.factor(config.plan.world_size()),
            kind: config.optim.lr_scheduler_type,
            warmup,
            total: total_steps,
        }
    }

    /// The rate of step `s`, counted from 0.
    pub fn at(&self, s: u64) -> f64 {
        match self.kind {
            Schedule::Constant => self.peak,
            Schedule::ConstantWithWarmup => self.peak * self.warming(s).unwrap_or(1.0),
            Schedule::Linear => {
                let left = self.total.saturating_sub(s) as f64 / self.after_warmup();
                self.peak * self.warming(s).unwrap_or(left)
            }
            Schedule::Cosine { cycles } => {
                self.peak * self.warming(s).unwrap_or_else(|| self.wave(s, cycles))
            }
            Schedule::CosineWithMinLr { cycles, min } => {
                let floor = match min {
                    MinRate::Rate(rate) => rate / self.peak,
                    MinRate::Share(share) => share,
                };
                let wave = || self.wave(s, cycles) * (1.0 - floor) + floor;
                self.peak * self.warming(s).unwrap_or_else(wave)
            }
            Schedule::WarmupLr(rates) => self.between(&rates, self.grown(s, rates.growth).unwrap_or(1.0)),
            Schedule::WarmupDecayLr(rates) => {
                let total = rates.total_num_steps.unwrap_or(self.total) as f64;
                let left = (total - before(s)) / (total - self.deepspeed_warmup()).max(1.0);
                self.between(&rates, self.grown(s, rates.growth).unwrap_or(left.max(0.0)))
            }
            Schedule::WarmupCosineLr { growth, warmup_min_ratio, cos_min_ratio, total_num_steps } => {
                let total = total_num_steps.unwrap_or(self.total);
                self.peak * self.warmup_cosine(s, growth, warmup_min_ratio, cos_min_ratio, total)
            }
        }
    }

    /// Hugging Face's warm-up: a share that starts at 0. `None` once it is over.
    fn warming(&self, s: u64) -> Option<f64> {
        (s < self.warmup).then(|| s as f64 / self.warmup as f64)
    }

    fn after_warmup(&self) -> f64 {
        self.total.saturating_sub(self.warmup).max(1) as f64
    }

    fn wave(&self, s: u64, cycles: f64) -> f64 {
        let progress = (s - self.warmup) as f64 / self.after_warmup();
        (0.5 * (1.0 + (PI * cycles * 2.0 * progress).cos())).max(0.0)
    }

    fn deepspeed_warmup(&self) -> f64 {
        self.warmup.max(2) as f64
    }

    /// DeepSpeed's warm-up as a share. `None` once it is over.
    fn grown(&self, s: u64, growth: Growth) -> Option<f64> {
        let (t, warmup) = (before(s), self.deepspeed_warmup());
        (t < warmup).then(|| match growth {
            Growth::Log => (t.max(0.0) + 1.0).ln() / warmup.ln(),
            Growth::Linear => t.max(0.0) / warmup,
        })
    }

    fn between(&self, rates: &WarmupRates, share: f64) -> f64 {
        let max = rates.warmup_max_lr.map_or(self.peak, |max| max * self.factor);
        rates.warmup_min_lr + (max - rates.warmup_min_lr) * share
    }

    fn warmup_cosine(&self, s: u64, growth: Growth, warmup_min: f64, cos_min: f64, total: u64) -> f64 {
        // It has not begun, and says so with no rate at all.
        if s == 0 {
            return 0.0;
        }
        if let Some(share) = self.grown(s, growth) {
            return warmup_min + share * (1.0 - warmup_min);
        }
        let warmup = self.deepspeed_warmup();
        let progress = (s as f64 - warmup) / (total as f64 - warmup).max(1.0);
        let wave = (1.0 + (PI * progress).cos()) / 2.0;
        (cos_min + (1.0 - cos_min) * wave).max(0.0)
    }
}

/// DeepSpeed's count at step `s`: it starts at −1 and goes up after each update.
fn before(s: u64) -> f64 {
    s as f64 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(kind: Schedule, warmup: u64) -> Vec<f64> {
        let schedule = RateSchedule { peak: 3e-4, factor: 1.0, kind, warmup, total: 12 };
        (0..12).map(|s| schedule.at(s)).collect()
    }

    fn assert_near(found: &[f64], expected: &[f64]) {
        for (s, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!((found - expected).abs() <= 1e-15 * 3e-4, "step {s}: {found:e}, expected {expected:e}");
        }
    }

    /// The numbers are transformers' own; `goldens/rates.py` prints them.
    #[test]
    fn hugging_face_has_the_same_rates() {
        assert_eq!(rates(Schedule::Constant, 3), [3e-4; 12]);
        let warmed = [0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003];
        let expect = |kind, warmup, rest: &[f64]| {
            let expected = if warmup > 0 { [&warmed, rest].concat() } else { rest.to_vec() };
            assert_near(&rates(kind, warmup), &expected);
        };
        expect(Schedule::ConstantWithWarmup, 3, &[3e-4; 8]);
        expect(
            Schedule::Linear,
            3,
            &[
                0.0002666666666666666,
                0.0002333333333333333,
                0.00019999999999999998,
                0.00016666666666666666,
                0.0001333333333333333,
                9.999999999999999e-05,
                6.666666666666666e-05,
                3.333333333333333e-05,
            ],
        );
        expect(
            Schedule::Cosine { cycles: 0.5 },
            3,
            &[
                0.0002909538931178862,
                0.00026490666646784665,
                0.000225,
                0.00017604722665003956,
                0.00012395277334996044,
                7.500000000000002e-05,
                3.509333353215331e-05,
                9.046106882113751e-06,
            ],
        );
        expect(
            Schedule::Cosine { cycles: 1.5 },
            0,
            &[
                0.0003,
                0.00025606601717798207,
                0.00015,
                4.3933982822017876e-05,
                0.0,
                4.393398282201784e-05,
                0.00014999999999999996,
                0.00025606601717798207,
                0.0003,
                0.0002560660171779821,
                0.00015000000000000001,
                4.393398282201799e-05,
            ],
        );
        expect(
            Schedule::CosineWithMinLr { cycles: 0.5, min: MinRate::Rate(3e-5) },
            3,
            &[
                0.00029185850380609757,
                0.000268415999821062,
                0.00023249999999999999,
                0.0001884425039850356,
                0.0001415574960149644,
                9.750000000000003e-05,
                6.158400017893799e-05,
                3.814149619390237e-05,
            ],
        );
        expect(
            Schedule::CosineWithMinLr { cycles: 0.5, min: MinRate::Share(0.25) },
            3,
            &[
                0.0002932154198384147,
                0.000273679999850885,
                0.00024375,
                0.00020703541998752967,
                0.0001679645800124703,
                0.00013125000000000002,
                0.00010132000014911497,
                8.17845801615853e-05,
            ],
        );
    }

    fn warmup_rates(growth: Growth) -> WarmupRates {
        WarmupRates { warmup_min_lr: 1e-5, warmup_max_lr: None, growth, total_num_steps: None }
    }

    /// By the formulas, with t = −1, 0, 1 ... at steps 0, 1, 2 ...
    #[test]
    fn deepspeed_has_the_same_rates() {
        let mix = |g: f64| 1e-5 + (3e-4 - 1e-5) * g;
        let logs = [0.0, 0.0, 2f64.ln() / 4f64.ln(), 3f64.ln() / 4f64.ln(), 1.0];
        let lines = [0.0, 0.0, 0.25, 0.5, 0.75];
        let stays = [1.0; 7];
        assert_near(
            &rates(Schedule::WarmupLr(warmup_rates(Growth::Log)), 4),
            &[&logs[..], &stays].concat().iter().map(|g| mix(*g)).collect::<Vec<_>>(),
        );
        let decay = [1.0, 7.0 / 8.0, 6.0 / 8.0, 5.0 / 8.0, 4.0 / 8.0, 3.0 / 8.0, 2.0 / 8.0];
        assert_near(
            &rates(Schedule::WarmupDecayLr(warmup_rates(Growth::Linear)), 4),
            &[&lines[..], &decay].concat().iter().map(|g| mix(*g)).collect::<Vec<_>>(),
        );
        let cosine = Schedule::WarmupCosineLr {
            growth: Growth::Linear,
            warmup_min_ratio: 0.1,
            cos_min_ratio: 1e-4,
            total_num_steps: Some(12),
        };
        let found = rates(cosine, 4);
        assert_near(&found[..3], &[0.0, 3e-5, 3e-4 * (0.1 + 0.25 * 0.9)]);
        // At step 8 half of the cosine's eight steps are done.
        assert_near(&found[8..9], &[3e-4 * (1e-4 + 0.5 * (1.0 - 1e-4))]);
    }

    #[test]
    fn a_run_shorter_than_its_warmup_has_rates() {
        for kind in [
            Schedule::Linear,
            Schedule::Cosine { cycles: 0.5 },
            Schedule::WarmupDecayLr(warmup_rates(Growth::Log)),
        ] {
            let schedule = RateSchedule { peak: 1.0, factor: 1.0, kind, warmup: 1000, total: 3 };
            assert!((0..5).all(|s| schedule.at(s).is_finite() && schedule.at(s) < 0.5));
        }
    }
}
