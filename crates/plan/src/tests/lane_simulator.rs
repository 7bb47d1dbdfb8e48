//! A simulator of lanes. Each lane runs its operations in order; an operation starts when its waits have finished and
//! takes a given time. The simulator tracks who wrote each byte.

use std::collections::HashMap;

use crate::{Access, BufferId, Lane, MemoryTier, Op, OpKind, Phase, RunPlan, Schedule, Wait};

use super::gradients::Gradients;

/// Start and end of every operation of one run.
pub(super) fn times(schedule: &Schedule, duration: impl FnMut(usize) -> u64) -> Vec<(u64, u64)> {
    times_of_runs(1, schedule, duration)
}

/// Start and end of every operation of several runs, one run after the other. A run begins when the previous one has
/// returned and the one before that has finished.
pub(super) fn times_of_runs(
    runs: usize,
    schedule: &Schedule,
    mut duration: impl FnMut(usize) -> u64,
) -> Vec<(u64, u64)> {
    let mut free: HashMap<Lane, u64> = HashMap::new();
    let mut times: Vec<(u64, u64)> = Vec::new();
    let len = schedule.ops.len();
    for run in 0..runs {
        let mut begin = 0;
        if run > 0 {
            let before = &times[(run - 1) * len..];
            begin = match &schedule.returns_after {
                Some(ops) => ops.iter().map(|id| before[id.0 as usize].1).max().unwrap_or(0),
                None => before.iter().map(|t| t.1).max().unwrap_or(0),
            };
            let older = times[..(run - 1) * len].iter().map(|t| t.1).max().unwrap_or(0);
            begin = begin.max(older);
        }
        for (i, op) in schedule.ops.iter().enumerate() {
            let mut start = free.get(&op.lane).copied().unwrap_or(0).max(begin);
            for wait in &op.waits {
                let (of, id) = match wait {
                    Wait::SameRun(id) => (Some(run), id),
                    Wait::PreviousRun(id) => (run.checked_sub(1), id),
                };
                start = start.max(of.map_or(0, |of| times[of * len + id.0 as usize].1));
            }
            let end = start + duration(i);
            free.insert(op.lane, end);
            times.push((start, end));
        }
    }
    times
}

/// A small random number generator: splitmix64.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// Random durations that let any lane run far ahead of the others.
pub(super) fn random_times(schedule: &Schedule, seed: u64) -> Vec<(u64, u64)> {
    random_times_of_runs(1, schedule, seed)
}

pub(super) fn random_times_of_runs(runs: usize, schedule: &Schedule, seed: u64) -> Vec<(u64, u64)> {
    let mut random = Random(seed);
    let pace: [u64; Lane::COUNT] = std::array::from_fn(|_| 10u64.pow(random.below(4) as u32));
    times_of_runs(runs, schedule, |i| {
        let stall = if random.below(8) == 0 { 1000 } else { 1 };
        1 + random.below(pace[schedule.ops[i].lane as usize] * stall)
    })
}

/// Runs a phase, as often as there are `times`, and panics if an operation finds bytes that another buffer or another
/// run has overwritten.
pub(super) fn run(plan: &RunPlan, phase: &Phase, times: &[(u64, u64)]) {
    let ops = &phase.schedule.ops;
    let runs = times.len() / ops.len();
    let mut events: Vec<(u64, bool, usize)> = Vec::new();
    for (i, (start, end)) in times.iter().enumerate() {
        events.extend([(*start, true, i), (*end, false, i)]);
    }
    // At equal times ends come first: a wait is over when the other operation has ended.
    events.sort_unstable();
    let mut bytes = ByteOwners::new(plan, phase, runs);
    let mut params = GatheredParams::new(plan, phase);
    let mut gradients: Vec<Gradients> = (0..runs).map(|_| Gradients::new(plan, phase)).collect();
    let mut running: Vec<usize> = Vec::new();
    for (_, starts, i) in events {
        let (op, gradients) = (&ops[i % ops.len()], &mut gradients[i / ops.len()]);
        if starts {
            for other in &running {
                assert_no_conflict(op, &ops[*other % ops.len()]);
            }
            bytes.start(i, op);
            params.start(&phase.schedule, op);
            gradients.start(i, op, &phase.schedule);
            running.push(i);
        } else {
            bytes.end(i, op);
            params.end(&phase.schedule, op);
            gradients.end(i, op, &phase.schedule);
            running.retain(|r| *r != i);
        }
    }
    params.finish();
    gradients.iter().for_each(Gradients::finish);
}

fn assert_no_conflict(a: &Op, b: &Op) {
    for (id, access) in &a.accesses {
        for (other, theirs) in &b.accesses {
            let conflict = id == other && (*access != Access::Read || *theirs != Access::Read);
            assert!(!conflict, "{:?} and {:?} race on {id:?}", a.kind, b.kind);
        }
    }
}

/// Which buffer, in which version, last wrote each range of bytes. Ranges are split where a buffer starts or ends.
struct ByteOwners {
    ranges: HashMap<BufferId, std::ops::Range<usize>>,
    owners: Vec<Option<(BufferId, u32)>>,
    /// For each operation, the version of each of its buffers before and after it, in the order of the list.
    versions: Vec<Vec<(u32, u32)>>,
}

impl ByteOwners {
    fn new(plan: &RunPlan, phase: &Phase, runs: usize) -> ByteOwners {
        let addresses = addresses(plan, phase);
        let mut cuts: Vec<u64> = addresses.values().flat_map(|(start, end)| [*start, *end]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        let cell = |at: &u64| cuts.binary_search(at).unwrap();
        let ranges: HashMap<_, _> =
            addresses.iter().map(|(id, (start, end))| (*id, cell(start)..cell(end))).collect();
        let mut owners = vec![None; cuts.len()];
        for (id, range) in &ranges {
            if plan.buffers[id.0 as usize].kind.is_resident() {
                assert!(owners[range.clone()].iter().all(Option::is_none), "residents overlap");
                owners[range.clone()].fill(Some((*id, 0)));
            }
        }
        let mut now: HashMap<BufferId, u32> = HashMap::new();
        let mut versions = Vec::new();
        for op in std::iter::repeat_n(&phase.schedule.ops, runs).flatten() {
            let touch = |(id, access): &(BufferId, Access)| {
                let version = now.entry(*id).or_default();
                let before = *version;
                *version += u32::from(*access != Access::Read);
                (before, *version)
            };
            versions.push(op.accesses.iter().map(touch).collect());
        }
        ByteOwners { ranges, owners, versions }
    }

    fn start(&mut self, i: usize, op: &Op) {
        for ((id, access), (before, after)) in op.accesses.iter().zip(&self.versions[i]) {
            let range = self.ranges[id].clone();
            if *access != Access::Define {
                let intact = self.owners[range.clone()].iter().all(|o| *o == Some((*id, *before)));
                assert!(intact, "#{i} {:?} finds other bytes in {id:?}", op.kind);
            }
            if *access != Access::Read {
                self.owners[range].fill(Some((*id, *after)));
            }
        }
    }

    fn end(&mut self, i: usize, op: &Op) {
        for ((id, _), (_, after)) in op.accesses.iter().zip(&self.versions[i]) {
            let intact = self.owners[self.ranges[id].clone()].iter().all(|o| *o == Some((*id, *after)));
            assert!(intact, "{id:?} was overwritten while #{i} {:?} ran", op.kind);
        }
    }
}

/// The address range of every buffer that the phase can use, with tiers far apart.
fn addresses(plan: &RunPlan, phase: &Phase) -> HashMap<BufferId, (u64, u64)> {
    const HOST: u64 = 1 << 60;
    let mut apart = 1 << 61;
    let mut found = HashMap::new();
    for (i, buffer) in plan.buffers.iter().enumerate() {
        let (id, size) = (BufferId(i as u32), buffer.bytes().0);
        let packed = phase.host.offsets.iter().find(|(other, _)| *other == id);
        let start = match buffer.tier {
            MemoryTier::Device => plan.offset(phase, id).map(|at| at.0),
            _ if buffer.kind.is_resident() => {
                apart += size;
                Some(apart - size)
            }
            _ => packed.map(|(_, at)| HOST + at.0),
        };
        if let Some(start) = start.filter(|_| size > 0) {
            let end = if buffer.tier == MemoryTier::Device { plan.arena_bytes.0 } else { u64::MAX };
            assert!(start + size <= end && start % 4096 == 0 || start > HOST, "{:?}", buffer.kind);
            found.insert(id, (start, start + size));
        }
    }
    found
}

/// Which units' parameters are gathered, derived from the kinds of operations only.
struct GatheredParams {
    gathers: bool,
    tied: bool,
    head: u32,
    gathered: Vec<u32>,
}

impl GatheredParams {
    fn new(plan: &RunPlan, phase: &Phase) -> GatheredParams {
        let model = &plan.input.models[phase.model.0 as usize];
        let gathers = phase.schedule.ops.iter().any(|op| matches!(op.kind, OpKind::Gather { .. }));
        let p = plan.input.model(phase.model).placements;
        let sharded = p.params == crate::Placement::Shard && plan.input.mesh.shard > 1;
        assert_eq!(gathers, sharded || p.params_tier != MemoryTier::Device);
        GatheredParams {
            gathers,
            tied: model.shape.tied,
            head: model.units.len() as u32 - 1,
            gathered: vec![],
        }
    }

    fn start(&mut self, schedule: &Schedule, op: &Op) {
        let needed = match op.kind {
            OpKind::Release(span) => {
                let unit = schedule.span(span).parts[0].unit;
                let at = self.gathered.iter().position(|u| *u == unit).expect("released, but not gathered");
                self.gathered.remove(at);
                return;
            }
            OpKind::Forward { unit, .. } | OpKind::Recompute { unit, .. } => vec![unit],
            // The embedding's backward adds to a gradient and reads no parameters.
            OpKind::Backward { unit, .. } if unit > 0 => vec![unit],
            OpKind::HeadForward { .. } | OpKind::HeadBackward { .. } | OpKind::HeadStep { .. } => {
                let mut units = vec![self.head];
                units.extend(self.tied.then_some(0));
                units
            }
            OpKind::Generate => (0..=self.head).collect(),
            _ => vec![],
        };
        if self.gathers {
            assert!(needed.iter().all(|u| self.gathered.contains(u)), "{:?} without parameters", op.kind);
        }
    }

    fn end(&mut self, schedule: &Schedule, op: &Op) {
        if let OpKind::Gather { span, .. } = op.kind {
            let unit = schedule.span(span).parts[0].unit;
            assert!(!self.gathered.contains(&unit), "unit {unit} gathered twice");
            self.gathered.push(unit);
        }
    }

    fn finish(&self) {
        assert!(self.gathered.is_empty(), "never released: {:?}", self.gathered);
    }
}
