//! What a configuration leaves to the plan: how much is computed again, and whose optimizer states are on the device.

use lockstep_core::Bytes;

use crate::buffer::Tier;
use crate::input::{ModelPlan, PlanInput, Recomputation};
use crate::run_plan::lay_out;

impl PlanInput {
    /// With as little computed again as `budget` has room for; with everything, where it has room for nothing.
    pub fn recomputing_least(self, budget: Bytes) -> PlanInput {
        let blocks = self.models.iter().map(|model| model.shape.layers as u32).max().unwrap_or(0);
        let nth = |n: u32| self.recomputing(Recomputation::nth(n, blocks));
        nth(first_that(2 * blocks, |n| nth(n).fits(budget)))
    }

    fn recomputing(&self, recompute: Recomputation) -> PlanInput {
        let models = self.models.iter().cloned().map(|model| model.recomputing(recompute)).collect();
        PlanInput { models, ..self.clone() }
    }

    /// Where optimizer states are offloaded: with those of as many units on the device as `budget` has room for.
    pub fn staying_most(self, budget: Bytes) -> PlanInput {
        let offloads = |model: &&ModelPlan| model.trains() && model.placements.optimizer_tier != Tier::Device;
        // Something is offloaded, for that was asked for.
        let units = self.models.iter().filter(offloads).map(|model| model.units.len() as u32 - 1);
        let Some(most) = units.min() else { return self };
        let leaving = |n: u32| self.staying(most - n);
        leaving(first_that(most, |n| leaving(n).fits(budget)))
    }

    /// Where optimizer states are offloaded: so that those of at least `ratio` of the trained parameters are.
    pub fn leaving_at_least(self, ratio: f64) -> PlanInput {
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
        self.staying(stay)
    }

    fn staying(&self, stay: u32) -> PlanInput {
        let mut input = self.clone();
        input.models.iter_mut().for_each(|model| model.placements.stay = stay);
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
