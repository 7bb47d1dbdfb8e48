//! What a configuration leaves to the plan: how much is computed again, and whose optimizer states are on the device.

use lockstep_core::Bytes;

use crate::buffer::MemoryTier;
use crate::input::{ModelPlan, PlanInput, RecomputePolicy};
use crate::run_plan::lay_out;

impl PlanInput {
    /// With as little computed again as `budget` has room for; with everything, where it has room for nothing.
    pub fn with_least_recompute(self, budget: Bytes) -> PlanInput {
        let blocks = self.models.iter().map(|model| model.shape.layers as u32).max().unwrap_or(0);
        let nth = |n: u32| self.recomputing(RecomputePolicy::nth(n, blocks));
        nth(first_that(2 * blocks, |n| nth(n).fits(budget)))
    }

    fn recomputing(&self, recompute: RecomputePolicy) -> PlanInput {
        let models = self.models.iter().cloned().map(|model| model.recomputing(recompute)).collect();
        PlanInput { models, ..self.clone() }
    }

    /// Where optimizer states are offloaded: with those of as many units on the device as `budget` has room for.
    pub fn with_most_units_on_device(self, budget: Bytes) -> PlanInput {
        let offloads =
            |model: &&ModelPlan| model.trains() && model.placements.optimizer_tier != MemoryTier::Device;
        // Something is offloaded, for that was asked for.
        let units = self.models.iter().filter(offloads).map(|model| model.units.len() as u32 - 1);
        let Some(most) = units.min() else { return self };
        let leaving = |n: u32| self.with_units_on_device(most - n);
        leaving(first_that(most, |n| leaving(n).fits(budget)))
    }

    /// Where optimizer states are offloaded: so that those of at least `ratio` of the trained parameters are.
    pub fn offloading_at_least(self, ratio: f64) -> PlanInput {
        let most = |model: &ModelPlan| {
            let elems = || model.units.iter().map(|unit| unit.trained_elems as f64);
            let room = (1.0 - ratio) * elems().sum::<f64>();
            let sums = elems().scan(0.0, |sum, elems| {
                *sum += elems;
                Some(*sum)
            });
            sums.take_while(|sum| *sum <= room).count() as u32
        };
        let stay = self.models.iter().filter(|model| model.trains()).map(most).min().unwrap_or(0);
        self.with_units_on_device(stay)
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

/// The first number below `end` for which `is` holds, if it holds for all after the first; `end`, where there is none.
fn first_that(end: u32, is: impl Fn(u32) -> bool) -> u32 {
    let (mut from, mut to) = (0, end);
    while from < to {
        let middle = from.midpoint(to);
        if is(middle) { to = middle } else { from = middle + 1 }
    }
    to
}
