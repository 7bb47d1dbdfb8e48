//! Learning rates, as Hugging Face's schedulers define them.

use lockstep_config::{OptimConfig, Schedule, Warmup};

/// The rate of every step of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateSchedule {
    peak: f64,
    kind: Schedule,
    warmup: u64,
    total: u64,
}

impl RateSchedule {
    pub fn new(optim: &OptimConfig, total_steps: u64) -> RateSchedule {
        let warmup = match optim.warmup {
            Warmup::Steps(steps) => steps,
            // Rounded up, as Hugging Face does.
            Warmup::Ratio(ratio) => (ratio * total_steps as f64).ceil() as u64,
        };
        RateSchedule { peak: optim.learning_rate, kind: optim.lr_scheduler_type, warmup, total: total_steps }
    }

    /// The rate of step `s`, counted from 0. The first step of a warmup has rate 0.
    pub fn at(&self, s: u64) -> f64 {
        let (s, warmup, total) = (s as f64, self.warmup as f64, self.total as f64);
        if s < warmup {
            return self.peak * s / warmup.max(1.0);
        }
        let rest = (total - warmup).max(1.0);
        self.peak
            * match self.kind {
                Schedule::Constant => 1.0,
                Schedule::Linear => ((total - s) / rest).max(0.0),
                Schedule::Cosine => {
                    let progress = (s - warmup) / rest;
                    (0.5 * (1.0 + (std::f64::consts::PI * progress).cos())).max(0.0)
                }
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_the_formulas() {
        let at = |kind, s| RateSchedule { peak: 1.0, kind, warmup: 2, total: 10 }.at(s);
        assert_eq!([0, 1, 2].map(|s| at(Schedule::Linear, s)), [0.0, 0.5, 1.0]);
        assert_eq!(at(Schedule::Linear, 6), 0.5);
        assert_eq!(at(Schedule::Linear, 10), 0.0);
        assert!((at(Schedule::Cosine, 6) - 0.5).abs() < 1e-12);
        assert_eq!(at(Schedule::Constant, 9), 1.0);
    }
}
