//! Runs a schedule on its lanes, with a duration for every operation.
//!
//! Lanes run in order and wait as the schedule says. All ranks run the same list, so one rank stands for all of them; a
//! straggler is a second one. Collectives begin when both have arrived. Several runs follow each other, because waits
//! may point into the previous run and updates overlap the next forward.

use crate::lane::Lane;
use crate::schedule::{Schedule, Wait};

/// Runs before the measurement, so that what overlaps the previous run does so.
const WARM_UP_RUNS: usize = 4;
/// Runs that are measured.
const MEASURED_RUNS: usize = 4;

/// One rank that computes slower than the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Straggler {
    /// How many times longer its computations take; at least 1.
    pub slowdown: f64,
}

/// How long one operation takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpTime {
    pub seconds: f64,
    /// It begins only when all ranks have arrived.
    pub is_collective: bool,
}

/// The times of a schedule that runs again and again.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// From one step to the next, in the long run.
    pub step_seconds: f64,
    /// Start and end of every operation of one step, in seconds from the beginning of that step.
    pub times: Vec<(f64, f64)>,
    /// How long each lane works in one step.
    pub busy_seconds: [f64; Lane::COUNT],
}

/// Simulates a schedule. `lanes_share_cores`: only one operation of a rank runs at a time.
pub fn simulate(
    schedule: &Schedule,
    ops: &[OpTime],
    lanes_share_cores: bool,
    straggler: Option<Straggler>,
) -> Simulation {
    assert_eq!(schedule.ops.len(), ops.len(), "every operation has a duration");
    let slowdowns = match straggler {
        Some(straggler) => vec![1.0, straggler.slowdown.max(1.0)],
        None => vec![1.0],
    };
    let runs = WARM_UP_RUNS + MEASURED_RUNS;
    let mut lanes = Lanes::new(schedule, ops, slowdowns, lanes_share_cores);
    for run in 0..runs {
        lanes.begin(run);
        while lanes.run_next(run) {}
    }
    let ends = |run: usize, lane: Lane| {
        let of_lane = |(i, op): (usize, &crate::schedule::Op)| (op.lane == lane).then_some(i);
        let ids = schedule.ops.iter().enumerate().filter_map(of_lane);
        ids.map(|i| lanes.latest(run, i).1).fold(0.0, f64::max)
    };
    // The lane that has the most to do falls behind the others until they wait for it.
    let step_seconds = Lane::ALL
        .map(|lane| (ends(runs - 1, lane) - ends(WARM_UP_RUNS - 1, lane)) / MEASURED_RUNS as f64)
        .into_iter()
        .fold(0.0, f64::max);
    let begin = lanes.begins[runs - 1];
    let relative = |i: usize| {
        let (start, end) = lanes.latest(runs - 1, i);
        (start - begin, end - begin)
    };
    let mut busy_seconds = [0.0; Lane::COUNT];
    for (op, time) in schedule.ops.iter().zip(ops) {
        busy_seconds[op.lane as usize] += time.seconds;
    }
    Simulation { step_seconds, times: (0..ops.len()).map(relative).collect(), busy_seconds }
}

/// The lanes of one rank of each speed, while they run.
struct Lanes<'a> {
    schedule: &'a Schedule,
    ops: &'a [OpTime],
    slowdowns: Vec<f64>,
    share_cores: bool,
    /// The operations of each lane.
    queues: [Vec<usize>; Lane::COUNT],
    next: [usize; Lane::COUNT],
    /// For every rank, run and operation: start and end.
    times: Vec<Vec<(f64, f64)>>,
    /// Which operations of the current run have been timed.
    done: Vec<bool>,
    /// For every rank: when each lane is free, and when the cores are.
    lane_free: Vec<[f64; Lane::COUNT]>,
    cores_free: Vec<f64>,
    /// When each run began.
    begins: Vec<f64>,
}

impl<'a> Lanes<'a> {
    fn new(schedule: &'a Schedule, ops: &'a [OpTime], slowdowns: Vec<f64>, share_cores: bool) -> Lanes<'a> {
        let mut queues: [Vec<usize>; Lane::COUNT] = Default::default();
        for (i, op) in schedule.ops.iter().enumerate() {
            queues[op.lane as usize].push(i);
        }
        let ranks = slowdowns.len();
        Lanes {
            schedule,
            ops,
            slowdowns,
            share_cores,
            queues,
            next: [0; Lane::COUNT],
            times: vec![Vec::new(); ranks],
            done: vec![],
            lane_free: vec![[0.0; Lane::COUNT]; ranks],
            cores_free: vec![0.0; ranks],
            begins: vec![],
        }
    }

    /// Begins a run: when the previous one has returned, and the one before that has finished.
    fn begin(&mut self, run: usize) {
        let finished = |run: usize| {
            let all = 0..self.ops.len();
            all.map(|i| self.latest(run, i).1).fold(0.0, f64::max)
        };
        let mut begin = 0.0;
        if let Some(previous) = run.checked_sub(1) {
            begin = match &self.schedule.returns_after {
                Some(ids) => ids.iter().map(|id| self.latest(previous, id.0 as usize).1).fold(0.0, f64::max),
                None => finished(previous),
            };
            begin = previous.checked_sub(1).map_or(begin, |older| begin.max(finished(older)));
        }
        self.begins.push(begin);
        self.next = [0; Lane::COUNT];
        self.done = vec![false; self.ops.len()];
        for times in &mut self.times {
            times.resize((run + 1) * self.ops.len(), (0.0, 0.0));
        }
    }

    /// Start and end of an operation on the slowest rank.
    fn latest(&self, run: usize, i: usize) -> (f64, f64) {
        let at = run * self.ops.len() + i;
        let later = |a: (f64, f64), b: (f64, f64)| if b.1 > a.1 { b } else { a };
        self.times.iter().map(|times| times[at]).fold((0.0, 0.0), later)
    }

    /// Times the operation that can start first among the next ones of all lanes. Returns whether there was one.
    fn run_next(&mut self, run: usize) -> bool {
        let mut first: Option<(f64, usize)> = None;
        for lane in Lane::ALL {
            let Some(i) = self.queues[lane as usize].get(self.next[lane as usize]).copied() else { continue };
            let is_ready = |wait: &Wait| match wait {
                Wait::SameRun(id) => self.done[id.0 as usize],
                Wait::PreviousRun(_) => true,
            };
            if !self.schedule.ops[i].waits.iter().all(is_ready) {
                continue;
            }
            let ranks = 0..self.slowdowns.len();
            let start = ranks.map(|rank| self.earliest(rank, run, i)).fold(0.0, f64::max);
            if first.is_none_or(|(best, other)| (start, i) < (best, other)) {
                first = Some((start, i));
            }
        }
        let Some((_, i)) = first else { return false };
        self.time(run, i);
        true
    }

    /// When a rank can start an operation whose waits have been timed.
    fn earliest(&self, rank: usize, run: usize, i: usize) -> f64 {
        let (op, len) = (&self.schedule.ops[i], self.ops.len());
        let mut start = self.begins[run].max(self.lane_free[rank][op.lane as usize]);
        for wait in &op.waits {
            let of = match wait {
                Wait::SameRun(id) => Some(run * len + id.0 as usize),
                Wait::PreviousRun(id) => run.checked_sub(1).map(|before| before * len + id.0 as usize),
            };
            start = of.map_or(start, |at| start.max(self.times[rank][at].1));
        }
        if self.share_cores { start.max(self.cores_free[rank]) } else { start }
    }

    fn time(&mut self, run: usize, i: usize) {
        let (lane, op) = (self.schedule.ops[i].lane, self.ops[i]);
        let mut starts: Vec<f64> =
            (0..self.slowdowns.len()).map(|rank| self.earliest(rank, run, i)).collect();
        if op.is_collective {
            let all_arrived = starts.iter().copied().fold(0.0, f64::max);
            starts.fill(all_arrived);
        }
        for (rank, start) in starts.into_iter().enumerate() {
            let slowdown = if lane == Lane::Compute { self.slowdowns[rank] } else { 1.0 };
            let end = start + op.seconds * slowdown;
            self.times[rank][run * self.ops.len() + i] = (start, end);
            self.lane_free[rank][lane as usize] = end;
            self.cores_free[rank] = self.cores_free[rank].max(end);
        }
        self.done[i] = true;
        self.next[lane as usize] += 1;
    }
}
