//! The choices that a configuration leaves to the plan: how much to recompute, and which optimizer states stay on the
//! device.

use lockstep_core::Bytes;

use crate::buffer::MemoryTier;
use crate::input::{ModelPlan, PlanInput, RecomputePolicy};
use crate::run_plan::lay_out;

impl PlanInput {
    /// Recomputes as little as `budget` allows. If nothing fits, everything is recomputed.
    pub fn with_least_recompute(self, budget: Bytes) -> PlanInput {
        let blocks = self.models.iter().map(|model| model.shape.layers as u32).max().unwrap_or(0);
        let nth = |n: u32| self.with_recompute(RecomputePolicy::nth(n, blocks));
        nth(first_true(2 * blocks, |n| nth(n).fits(budget)))
    }

    fn with_recompute(&self, recompute: RecomputePolicy) -> PlanInput {
        let models = self.models.iter().cloned().map(|model| model.with_recompute(recompute)).collect();
        PlanInput { models, ..self.clone() }
    }

    /// If optimizer states are offloaded, keeps those of as many units on the device as `budget` allows.
    pub fn with_most_units_on_device(self, budget: Bytes) -> PlanInput {
        let offloads =
            |model: &&ModelPlan| model.trains() && model.placements.optimizer_tier != MemoryTier::Device;
        // At least one unit is offloaded, because the configuration asks for offload.
        let units = self.models.iter().filter(offloads).map(|model| model.units.len() as u32 - 1);
        let Some(most) = units.min() else { return self };
        let offloading = |n: u32| self.with_units_on_device(most - n);
        offloading(first_true(most, |n| offloading(n).fits(budget)))
    }

    /// If optimizer states are offloaded, offloads those of at least `ratio` of the trained parameters.
    pub fn offloading_at_least(self, ratio: f64) -> PlanInput {
        let most = |model: &ModelPlan| {
            let elems = || model.units.iter().map(|unit| unit.trained_elems as f64);
            let on_device = (1.0 - ratio) * elems().sum::<f64>();
            let sums = elems().scan(0.0, |sum, elems| {
                *sum += elems;
                Some(*sum)
            });
            sums.take_while(|sum| *sum <= on_device).count() as u32
        };
        let num_units = self.models.iter().filter(|model| model.trains()).map(most).min().unwrap_or(0);
        self.with_units_on_device(num_units)
    }

    fn with_units_on_device(&self, num_units: u32) -> PlanInput {
        let mut input = self.clone();
        input.models.iter_mut().for_each(|model| model.placements.optimizer_units_on_device = num_units);
        input
    }

    fn fits(self, budget: Bytes) -> bool {
        lay_out(self).device_bytes() <= budget
    }
}

/// The first number below `end` for which `is` holds, by binary search: `is` must hold for all numbers after it.
/// Returns `end` if there is none.
fn first_true(end: u32, is: impl Fn(u32) -> bool) -> u32 {
    let (mut from, mut to) = (0, end);
    while from < to {
        let middle = from.midpoint(to);
        if is(middle) { to = middle } else { from = middle + 1 }
    }
    to
}
