//! Learning-rate schedules, equal to those of Hugging Face and DeepSpeed.

use std::f64::consts::PI;

use lockstep_config::{LrSchedulerType, MinLr, RunConfig, Warmup, WarmupLrParams, WarmupType};

/// Computes the learning rate of every step of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrSchedule {
    peak: f64,
    /// The factor of `lr_scaling`.
    factor: f64,
    kind: LrSchedulerType,
    warmup: u64,
    total: u64,
}

impl LrSchedule {
    pub fn new(config: &RunConfig, total_steps: u64) -> LrSchedule {
        let warmup = match config.optim.warmup {
            Warmup::Steps(steps) => steps,
            // Rounded up, as Hugging Face does.
            Warmup::Ratio(ratio) => (ratio * total_steps as f64).ceil() as u64,
        };
        LrSchedule {
            peak: config.peak_learning_rate(),
            factor: config.optim.lr_scaling.factor(config.plan.world_size()),
            kind: config.optim.lr_scheduler_type,
            warmup,
            total: total_steps,
        }
    }

    /// The learning rate of step `s`, counted from 0.
    pub fn at(&self, s: u64) -> f64 {
        match self.kind {
            LrSchedulerType::Constant => self.peak,
            LrSchedulerType::ConstantWithWarmup => self.peak * self.warmup_factor(s).unwrap_or(1.0),
            LrSchedulerType::Linear => {
                let left = self.total.saturating_sub(s) as f64 / self.after_warmup();
                self.peak * self.warmup_factor(s).unwrap_or(left)
            }
            LrSchedulerType::Cosine { cycles } => {
                self.peak * self.warmup_factor(s).unwrap_or_else(|| self.cosine(s, cycles))
            }
            LrSchedulerType::CosineWithMinLr { cycles, min } => {
                let min_ratio = match min {
                    MinLr::Lr(lr) => lr / self.peak,
                    MinLr::Ratio(ratio) => ratio,
                };
                let cosine = || self.cosine(s, cycles) * (1.0 - min_ratio) + min_ratio;
                self.peak * self.warmup_factor(s).unwrap_or_else(cosine)
            }
            LrSchedulerType::WarmupLr(rates) => {
                self.interpolate(&rates, self.deepspeed_warmup_factor(s, rates.warmup_type).unwrap_or(1.0))
            }
            LrSchedulerType::WarmupDecayLr(rates) => {
                let total = rates.total_num_steps.unwrap_or(self.total) as f64;
                let left = (total - last_iteration(s)) / (total - self.deepspeed_warmup()).max(1.0);
                self.interpolate(
                    &rates,
                    self.deepspeed_warmup_factor(s, rates.warmup_type).unwrap_or(left.max(0.0)),
                )
            }
            LrSchedulerType::WarmupCosineLr {
                warmup_type,
                warmup_min_ratio,
                cos_min_ratio,
                total_num_steps,
            } => {
                let total = total_num_steps.unwrap_or(self.total);
                self.peak * self.warmup_cosine(s, warmup_type, warmup_min_ratio, cos_min_ratio, total)
            }
        }
    }

    /// Hugging Face's warmup as a factor that starts at 0. `None` after the warmup.
    fn warmup_factor(&self, s: u64) -> Option<f64> {
        (s < self.warmup).then(|| s as f64 / self.warmup as f64)
    }

    fn after_warmup(&self) -> f64 {
        self.total.saturating_sub(self.warmup).max(1) as f64
    }

    /// The cosine factor after the warmup.
    fn cosine(&self, s: u64, cycles: f64) -> f64 {
        let progress = (s - self.warmup) as f64 / self.after_warmup();
        (0.5 * (1.0 + (PI * cycles * 2.0 * progress).cos())).max(0.0)
    }

    /// DeepSpeed's warmup steps: at least 2, because it divides by their logarithm.
    fn deepspeed_warmup(&self) -> f64 {
        self.warmup.max(2) as f64
    }

    /// DeepSpeed's warmup as a factor. `None` after the warmup.
    fn deepspeed_warmup_factor(&self, s: u64, warmup_type: WarmupType) -> Option<f64> {
        let (t, warmup) = (last_iteration(s), self.deepspeed_warmup());
        (t < warmup).then(|| match warmup_type {
            WarmupType::Log => (t.max(0.0) + 1.0).ln() / warmup.ln(),
            WarmupType::Linear => t.max(0.0) / warmup,
        })
    }

    /// Interpolates between the minimum and maximum learning rate of DeepSpeed's schedulers.
    fn interpolate(&self, params: &WarmupLrParams, factor: f64) -> f64 {
        let max = params.warmup_max_lr.map_or(self.peak, |max| max * self.factor);
        params.warmup_min_lr + (max - params.warmup_min_lr) * factor
    }

    fn warmup_cosine(
        &self,
        s: u64,
        warmup_type: WarmupType,
        warmup_min: f64,
        cos_min: f64,
        total: u64,
    ) -> f64 {
        // DeepSpeed returns a rate of 0 before its first update.
        if s == 0 {
            return 0.0;
        }
        if let Some(factor) = self.deepspeed_warmup_factor(s, warmup_type) {
            return warmup_min + factor * (1.0 - warmup_min);
        }
        let warmup = self.deepspeed_warmup();
        let progress = (s as f64 - warmup) / (total as f64 - warmup).max(1.0);
        let cosine = (1.0 + (PI * progress).cos()) / 2.0;
        (cos_min + (1.0 - cos_min) * cosine).max(0.0)
    }
}

/// DeepSpeed's `last_batch_iteration` at step `s`: it starts at −1 and increases after each update.
fn last_iteration(s: u64) -> f64 {
    s as f64 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(kind: LrSchedulerType, warmup: u64) -> Vec<f64> {
        let schedule = LrSchedule { peak: 3e-4, factor: 1.0, kind, warmup, total: 12 };
        (0..12).map(|s| schedule.at(s)).collect()
    }

    fn assert_near(found: &[f64], expected: &[f64]) {
        for (s, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!((found - expected).abs() <= 1e-15 * 3e-4, "step {s}: {found:e}, expected {expected:e}");
        }
    }

    /// Compares with values of transformers, which `goldens/rates.py` prints. `rest` starts after the warmup.
    fn expect(kind: LrSchedulerType, warmup: u64, rest: &[f64]) {
        let warmed = [0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003];
        let expected = if warmup > 0 { [&warmed, rest].concat() } else { rest.to_vec() };
        assert_near(&rates(kind, warmup), &expected);
    }

    #[test]
    fn rates_match_hugging_face() {
        assert_eq!(rates(LrSchedulerType::Constant, 3), [3e-4; 12]);
        expect(LrSchedulerType::ConstantWithWarmup, 3, &[3e-4; 8]);
        expect(
            LrSchedulerType::Linear,
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
            LrSchedulerType::Cosine { cycles: 0.5 },
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
            LrSchedulerType::Cosine { cycles: 1.5 },
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
    }

    #[test]
    fn rates_with_a_minimum_match_hugging_face() {
        expect(
            LrSchedulerType::CosineWithMinLr { cycles: 0.5, min: MinLr::Lr(3e-5) },
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
            LrSchedulerType::CosineWithMinLr { cycles: 0.5, min: MinLr::Ratio(0.25) },
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

    fn warmup_rates(warmup_type: WarmupType) -> WarmupLrParams {
        WarmupLrParams { warmup_min_lr: 1e-5, warmup_max_lr: None, warmup_type, total_num_steps: None }
    }

    /// The expected values follow DeepSpeed's formulas, with t = −1, 0, 1 ... at steps 0, 1, 2 ...
    #[test]
    fn rates_match_deepspeed() {
        let mix = |g: f64| 1e-5 + (3e-4 - 1e-5) * g;
        let logs = [0.0, 0.0, 2f64.ln() / 4f64.ln(), 3f64.ln() / 4f64.ln(), 1.0];
        let lines = [0.0, 0.0, 0.25, 0.5, 0.75];
        let constant = [1.0; 7];
        assert_near(
            &rates(LrSchedulerType::WarmupLr(warmup_rates(WarmupType::Log)), 4),
            &[&logs[..], &constant].concat().iter().map(|g| mix(*g)).collect::<Vec<_>>(),
        );
        let decay = [1.0, 7.0 / 8.0, 6.0 / 8.0, 5.0 / 8.0, 4.0 / 8.0, 3.0 / 8.0, 2.0 / 8.0];
        assert_near(
            &rates(LrSchedulerType::WarmupDecayLr(warmup_rates(WarmupType::Linear)), 4),
            &[&lines[..], &decay].concat().iter().map(|g| mix(*g)).collect::<Vec<_>>(),
        );
        let cosine = LrSchedulerType::WarmupCosineLr {
            warmup_type: WarmupType::Linear,
            warmup_min_ratio: 0.1,
            cos_min_ratio: 1e-4,
            total_num_steps: Some(12),
        };
        let found = rates(cosine, 4);
        assert_near(&found[..3], &[0.0, 3e-5, 3e-4 * (0.1 + 0.25 * 0.9)]);
        // Step 8 is halfway through the eight steps of the cosine.
        assert_near(&found[8..9], &[3e-4 * (1e-4 + 0.5 * (1.0 - 1e-4))]);
    }

    #[test]
    fn a_run_shorter_than_its_warmup_has_finite_rates() {
        for kind in [
            LrSchedulerType::Linear,
            LrSchedulerType::Cosine { cycles: 0.5 },
            LrSchedulerType::WarmupDecayLr(warmup_rates(WarmupType::Log)),
        ] {
            let schedule = LrSchedule { peak: 1.0, factor: 1.0, kind, warmup: 1000, total: 3 };
            assert!((0..5).all(|s| schedule.at(s).is_finite() && schedule.at(s) < 0.5));
        }
    }
}
