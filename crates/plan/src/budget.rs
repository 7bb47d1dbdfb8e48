//! The choices that a configuration leaves to the plan: how much to recompute, and which optimizer states stay on the
//! device. The cost model decides: of the candidates that fit, the one with the shortest predicted step wins.
//!
//! All ranks must choose the same, so the rates that decide are published or generic figures, never what a rank has
//! measured.

use lockstep_core::Bytes;

use crate::buffer::MemoryTier;
use crate::cost::{Machine, Prediction};
use crate::input::{ModelPlan, PlanInput, RecomputePolicy};
use crate::run_plan::{PlanData, lay_out};

/// Amounts of recomputation that are compared, besides the least that fits.
const AMOUNTS: u32 = 4;

/// Predictions that differ by less than this are equal. The first of equal candidates wins: it recomputes less.
const EQUAL: f64 = 0.001;

/// Which choices are open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenChoices {
    /// How much each block recomputes.
    pub recompute: bool,
    /// How many units' optimizer states are on the device, if states are offloaded.
    pub offload: bool,
}

/// A plan whose choices are made.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) plan: PlanData,
    pub(crate) prediction: Prediction,
    pub(crate) fits: bool,
}

impl Candidate {
    fn of(input: PlanInput, machine: &Machine) -> Candidate {
        let plan = lay_out(input);
        Candidate { prediction: machine.predict(&plan), fits: machine.fits(&plan), plan }
    }

    pub(crate) fn seconds(&self) -> f64 {
        self.prediction.step_seconds
    }

    /// The place of the fastest of candidates that all fit. The first of equal ones wins.
    pub(crate) fn fastest<'a>(candidates: impl IntoIterator<Item = &'a Candidate>) -> usize {
        let mut all = candidates.into_iter().enumerate();
        let mut best = all.next().expect("there is a candidate");
        for next in all {
            if next.1.seconds() < (1.0 - EQUAL) * best.1.seconds() {
                best = next;
            }
        }
        best.0
    }
}

impl PlanInput {
    /// Makes the open choices: the fastest candidate that fits. If none fits, the one that needs the least memory.
    pub fn with_fastest_choices(self, open: OpenChoices, machine: &Machine) -> PlanInput {
        if !self.is_open(open) {
            return self;
        }
        let mut candidates = self.candidates(open, machine);
        candidates.swap_remove(Candidate::fastest(&candidates)).plan.input
    }

    fn is_open(&self, open: OpenChoices) -> bool {
        open.recompute || open.offload && self.models.iter().any(offloads)
    }

    /// All candidates for the open choices that fit. If none fits, the one that needs the least memory.
    ///
    /// Recomputation and offload compete for the same memory: what is recomputed makes room for states on the device.
    /// So candidates are amounts of recomputation from the least that fits to everything, each with as many states on
    /// the device as then fit: a state on the device never takes longer to update than one on the host.
    pub(crate) fn candidates(self, open: OpenChoices, machine: &Machine) -> Vec<Candidate> {
        if !self.is_open(open) {
            return vec![Candidate::of(self, machine)];
        }
        let offload = open.offload && self.models.iter().any(offloads);
        let blocks = self.models.iter().map(|model| model.shape.layers as u32).max().unwrap_or(0);
        let most = 2 * blocks;
        let amounts = match open.recompute {
            true => {
                let nth = |n: u32| self.with_recompute(RecomputePolicy::nth(n, blocks));
                let least = first_true(most, |n| machine.fits(&lay_out(nth(n))));
                let mut amounts: Vec<u32> =
                    (0..=AMOUNTS).map(|i| least + (most - least) * i / AMOUNTS).collect();
                amounts.dedup();
                amounts.into_iter().map(nth).collect()
            }
            false => vec![self],
        };
        // With more recomputation at least as many units fit on the device.
        let mut units_on_device = 0;
        let mut candidates = Vec::new();
        for input in amounts {
            let input = match offload {
                true => input.with_units_that_fit(units_on_device, &|plan| machine.fits(plan)),
                false => input,
            };
            units_on_device = input.models[0].placements.optimizer_units_on_device;
            candidates.push(Candidate::of(input, machine));
        }
        if candidates.iter().any(|candidate| candidate.fits) {
            candidates.retain(|candidate| candidate.fits);
        } else {
            // The last one recomputes most, and so needs the least memory.
            candidates.drain(..candidates.len() - 1);
        }
        candidates
    }

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
        self.with_units_that_fit(0, &|plan| plan.device_bytes() <= budget)
    }

    /// If optimizer states are offloaded, keeps those of as many units on the device as fit. `least` units are known
    /// to fit, or nothing does.
    fn with_units_that_fit(self, least: u32, fits: &dyn Fn(&PlanData) -> bool) -> PlanInput {
        // At least one unit is offloaded, because the configuration asks for offload.
        let units =
            self.models.iter().filter(|model| offloads(model)).map(|model| model.units.len() as u32 - 1);
        let Some(most) = units.min() else { return self };
        let offloading = |n: u32| self.with_units_on_device(most - n);
        offloading(first_true(most - least.min(most), |n| fits(&lay_out(offloading(n)))))
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

fn offloads(model: &ModelPlan) -> bool {
    model.trains() && model.placements.optimizer_tier != MemoryTier::Device
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
