//! The loss scale of fp16, by DeepSpeed's rules: halved after overflows, doubled after quiet.
//!
//! Whether a step overflowed is the engine's to say, alike on all ranks; this decides what follows.

use lockstep_config::LossScaling;

/// The scale and what decides when it changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LossScaler {
    rules: LossScaling,
    pub(crate) state: ScaleState,
}

/// What a checkpoint keeps of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScaleState {
    pub(crate) scale: f64,
    /// Overflows until the scale is halved.
    pub(crate) patience: u64,
    /// Steps since the last overflow.
    pub(crate) stable: u64,
}

/// What an overflow comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Overflow {
    /// The scale stays, for now or because it is fixed.
    Kept,
    Halved,
    /// There is no lower scale to try.
    AtFloor,
}

impl LossScaler {
    pub(crate) fn new(rules: LossScaling) -> LossScaler {
        let scale = rules.loss_scale.unwrap_or_else(|| 2f64.powi(rules.initial_scale_power as i32));
        let state = ScaleState { scale, patience: rules.hysteresis.into(), stable: 0 };
        LossScaler { rules, state }
    }

    /// The same scale at every step.
    pub(crate) fn is_fixed(&self) -> bool {
        self.rules.loss_scale.is_some()
    }

    /// A step without an overflow.
    pub(crate) fn applied(&mut self) {
        let state = &mut self.state;
        state.stable += 1;
        if self.rules.loss_scale.is_none() && state.stable.is_multiple_of(self.rules.loss_scale_window) {
            state.scale *= 2.0;
            state.patience = self.rules.hysteresis.into();
        }
    }

    pub(crate) fn overflowed(&mut self) -> Overflow {
        let state = &mut self.state;
        state.stable = 0;
        if self.rules.loss_scale.is_some() {
            return Overflow::Kept;
        }
        if state.patience > 1 {
            state.patience -= 1;
            return Overflow::Kept;
        }
        if state.scale <= self.rules.min_loss_scale {
            return Overflow::AtFloor;
        }
        state.scale = (state.scale / 2.0).max(self.rules.min_loss_scale);
        Overflow::Halved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_overflow_is_forgiven_and_the_next_ones_halve() {
        let mut scaler = LossScaler::new(LossScaling::default());
        assert_eq!(scaler.state.scale, 65536.0);
        assert_eq!(scaler.overflowed(), Overflow::Kept);
        assert_eq!((scaler.overflowed(), scaler.state.scale), (Overflow::Halved, 32768.0));
        // Patience comes back only when the scale goes up again.
        scaler.applied();
        assert_eq!((scaler.overflowed(), scaler.state.scale), (Overflow::Halved, 16384.0));
    }

    #[test]
    fn a_window_without_overflow_doubles() {
        let rules = LossScaling { initial_scale_power: 4, loss_scale_window: 3, ..LossScaling::default() };
        let mut scaler = LossScaler::new(rules);
        scaler.overflowed();
        let scales: Vec<f64> = (0..7)
            .map(|_| {
                scaler.applied();
                scaler.state.scale
            })
            .collect();
        assert_eq!(scales, [16.0, 16.0, 32.0, 32.0, 32.0, 64.0, 64.0]);
        assert_eq!(scaler.state.patience, 2);
        // An overflow starts the count again.
        scaler.overflowed();
        (0..2).for_each(|_| scaler.applied());
        assert_eq!(scaler.state.scale, 64.0);
        scaler.applied();
        assert_eq!(scaler.state.scale, 128.0);
    }

    #[test]
    fn at_the_floor_there_is_nothing_left_to_try() {
        let rules = LossScaling {
            initial_scale_power: 2,
            hysteresis: 1,
            min_loss_scale: 3.0,
            ..LossScaling::default()
        };
        let mut scaler = LossScaler::new(rules);
        assert_eq!((scaler.overflowed(), scaler.state.scale), (Overflow::Halved, 3.0));
        assert_eq!(scaler.overflowed(), Overflow::AtFloor);
    }

    #[test]
    fn a_fixed_scale_stays() {
        let rules = LossScaling { loss_scale: Some(100.0), loss_scale_window: 1, ..LossScaling::default() };
        let mut scaler = LossScaler::new(rules);
        scaler.applied();
        assert_eq!((0..5).map(|_| scaler.overflowed()).collect::<Vec<_>>(), [Overflow::Kept; 5]);
        assert_eq!(scaler.state.scale, 100.0);
    }
}
