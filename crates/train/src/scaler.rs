//! Dynamic loss scaling for fp16, by DeepSpeed's rules: halve the scale after overflows, double it after a window of
//! steps without one.
//!
//! The engine determines whether a step overflowed, with the same result on all ranks.

use lockstep_config::LossScaling;

/// The loss scale and the rules by which it changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LossScaler {
    rules: LossScaling,
    pub(crate) state: ScaleState,
}

/// The state that a checkpoint stores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScaleState {
    pub(crate) scale: f64,
    /// The remaining overflows until the scale is halved.
    pub(crate) patience: u64,
    /// Steps since the last overflow.
    pub(crate) stable: u64,
}

/// How the scaler reacts to an overflow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Overflow {
    /// The scale stays the same, because of hysteresis or because it is static.
    Kept,
    Halved,
    /// The scale is already at its minimum.
    AtFloor,
}

impl LossScaler {
    pub(crate) fn new(rules: LossScaling) -> LossScaler {
        let scale = rules.loss_scale.unwrap_or_else(|| 2f64.powi(rules.initial_scale_power as i32));
        let state = ScaleState { scale, patience: rules.hysteresis.into(), stable: 0 };
        LossScaler { rules, state }
    }

    /// Whether the scale is static.
    pub(crate) fn is_static(&self) -> bool {
        self.rules.loss_scale.is_some()
    }

    /// Records a step without an overflow.
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
    fn the_first_overflow_keeps_the_scale_and_later_ones_halve_it() {
        let mut scaler = LossScaler::new(LossScaling::default());
        assert_eq!(scaler.state.scale, 65536.0);
        assert_eq!(scaler.overflowed(), Overflow::Kept);
        assert_eq!((scaler.overflowed(), scaler.state.scale), (Overflow::Halved, 32768.0));
        // The hysteresis is restored only when the scale is doubled.
        scaler.applied();
        assert_eq!((scaler.overflowed(), scaler.state.scale), (Overflow::Halved, 16384.0));
    }

    #[test]
    fn a_window_without_overflow_doubles_the_scale() {
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
        // An overflow restarts the window.
        scaler.overflowed();
        (0..2).for_each(|_| scaler.applied());
        assert_eq!(scaler.state.scale, 64.0);
        scaler.applied();
        assert_eq!(scaler.state.scale, 128.0);
    }

    #[test]
    fn overflow_at_the_minimum_scale_is_reported() {
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
    fn a_static_scale_never_changes() {
        let rules = LossScaling { loss_scale: Some(100.0), loss_scale_window: 1, ..LossScaling::default() };
        let mut scaler = LossScaler::new(rules);
        scaler.applied();
        assert_eq!((0..5).map(|_| scaler.overflowed()).collect::<Vec<_>>(), [Overflow::Kept; 5]);
        assert_eq!(scaler.state.scale, 100.0);
    }
}
