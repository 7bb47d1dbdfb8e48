//! Packing: buffers that are never alive together share bytes.

use std::cmp::Reverse;

use lockstep_core::Bytes;

use crate::buffer::{Access, Buffer, BufferId};
use crate::happens_before::HappensBefore;
use crate::schedule::{Lane, OpId, Schedule};

/// Buffers start on huge-page-friendly, cache-line-aligned offsets.
const ALIGN: u64 = 4096;

/// Placements tried from each starting order.
const ATTEMPTS: usize = 40;

/// Offsets of a set of buffers in one arena.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    pub offsets: Vec<(BufferId, Bytes)>,
    /// The arena's size.
    pub bytes: Bytes,
    /// Bytes of the heaviest set found of buffers any two of which can be alive together: what no packing
    /// could go below.
    pub live_peak: Bytes,
}

impl MemoryPlan {
    /// This and, from byte `start` of the same arena on, another.
    pub(crate) fn then(self, start: Bytes, other: MemoryPlan) -> MemoryPlan {
        let moved = other.offsets.iter().map(|(id, at)| (*id, start + *at));
        let mut offsets: Vec<_> = self.offsets.into_iter().chain(moved).collect();
        offsets.sort_unstable_by_key(|(id, _)| *id);
        MemoryPlan { offsets, bytes: start + other.bytes, live_peak: self.live_peak + other.live_peak }
    }
}

/// One lifetime of a buffer: from a defining operation to the last that touches it.
struct Life {
    first: OpId,
    last_on_lane: [Option<OpId>; Lane::COUNT],
}

/// A buffer to place.
struct Item {
    id: BufferId,
    lives: Vec<Life>,
    bytes: u64,
}

/// Packs those of the non-resident buffers that `schedule` touches for which `is_wanted` holds.
///
/// Two buffers may share bytes if of any two of their lifetimes one is over, by lane order and waits,
/// before the other begins. Each is placed at the lowest free offset; of several orders of placing them,
/// the one that ends lowest.
pub fn pack(schedule: &Schedule, buffers: &[Buffer], is_wanted: impl Fn(BufferId) -> bool) -> MemoryPlan {
    let order = HappensBefore::of(schedule);
    let mut items: Vec<Item> = Vec::new();
    for (i, (buffer, lives)) in buffers.iter().zip(lives_of(schedule, buffers.len())).enumerate() {
        let id = BufferId(i as u32);
        if is_wanted(id) && !buffer.kind.is_resident() && !lives.is_empty() {
            items.push(Item { id, lives, bytes: buffer.bytes().align_to(ALIGN).0 });
        }
    }
    let together: Vec<Vec<bool>> = items
        .iter()
        .map(|a| items.iter().map(|b| !never_together(&order, &a.lives, &b.lives)).collect())
        .collect();
    // What conflicts with much is hardest to place.
    let pressure: Vec<u64> = together
        .iter()
        .map(|row| row.iter().zip(&items).filter(|(t, _)| **t).map(|(_, i)| i.bytes).sum())
        .collect();
    let born = |i: usize| items[i].lives[0].first;
    let by_size = |i: &usize| (Reverse(items[*i].bytes), Reverse(pressure[*i]), born(*i));
    let by_pressure = |i: &usize| (Reverse(pressure[*i]), Reverse(items[*i].bytes), born(*i));
    let by_birth = |i: &usize| (born(*i), Reverse(items[*i].bytes));
    let mut orders: [Vec<usize>; 3] = std::array::from_fn(|_| (0..items.len()).collect());
    orders[0].sort_by_key(by_size);
    orders[1].sort_by_key(by_pressure);
    orders[2].sort_by_key(by_birth);
    let live_peak = Bytes(heaviest_clique(&items, &together));
    let (mut bytes, mut starts) = (u64::MAX, Vec::new());
    for mut order in orders {
        for _ in 0..ATTEMPTS {
            let (end, attempt) = place_in_order(&order, &items, &together);
            if end < bytes {
                (bytes, starts) = (end, attempt.clone());
            }
            if bytes <= live_peak.0 {
                break;
            }
            // Whatever ends highest is placed before the others next time.
            order.sort_by_key(|i| attempt[*i] + items[*i].bytes < end);
        }
    }
    MemoryPlan {
        offsets: items.iter().zip(starts).map(|(item, start)| (item.id, Bytes(start))).collect(),
        bytes: Bytes(bytes),
        live_peak,
    }
}

/// First fit: the arena's end and each item's start.
fn place_in_order(order: &[usize], items: &[Item], together: &[Vec<bool>]) -> (u64, Vec<u64>) {
    let mut starts = vec![0; items.len()];
    for (n, i) in order.iter().enumerate() {
        let mut taken: Vec<(u64, u64)> = order[..n]
            .iter()
            .filter(|j| together[*i][**j])
            .map(|j| (starts[*j], starts[*j] + items[*j].bytes))
            .collect();
        taken.sort_unstable();
        for (from, to) in taken {
            if starts[*i] + items[*i].bytes <= from {
                break;
            }
            starts[*i] = starts[*i].max(to);
        }
    }
    let end = items.iter().zip(&starts).map(|(item, start)| start + item.bytes).max().unwrap_or(0);
    (end, starts)
}

/// Every buffer's lifetimes, in order.
fn lives_of(schedule: &Schedule, num_buffers: usize) -> Vec<Vec<Life>> {
    let mut all: Vec<Vec<Life>> = (0..num_buffers).map(|_| Vec::new()).collect();
    for (at, op) in schedule.in_flight() {
        for (buffer, access) in &op.accesses {
            let lives = &mut all[buffer.0 as usize];
            if *access == Access::Define || lives.is_empty() {
                lives.push(Life { first: at, last_on_lane: [None; Lane::COUNT] });
            }
            lives.last_mut().expect("just pushed").last_on_lane[op.lane as usize] = Some(at);
        }
    }
    all
}

/// For every operation, the buffers that nothing needs when it is over: those that are not residents, and all of whose
/// other uses are finished when it starts. Where two lanes use a buffer last, neither operation is listed.
pub fn last_uses(schedule: &Schedule, buffers: &[Buffer]) -> Vec<Vec<BufferId>> {
    let order = HappensBefore::of(schedule);
    let mut ended = vec![Vec::new(); schedule.ops.len()];
    for (i, (buffer, lives)) in buffers.iter().zip(lives_of(schedule, buffers.len())).enumerate() {
        for life in lives.iter().filter(|_| !buffer.kind.is_resident()) {
            let lasts = || life.last_on_lane.iter().flatten().copied();
            let end = lasts().find(|end| lasts().all(|other| other == *end || order.before(other, *end)));
            // Runs that overlap are numbered through; each has the same ends.
            if let Some(end) = end.filter(|end| (end.0 as usize) < schedule.ops.len()) {
                ended[end.0 as usize].push(BufferId(i as u32));
            }
        }
    }
    ended
}

/// A buffer's lifetimes follow each other, so each need only be compared with the other buffer's next one
/// and the one before that.
fn never_together(order: &HappensBefore, a: &[Life], b: &[Life]) -> bool {
    let over = |a: &Life, b: &Life| a.last_on_lane.iter().flatten().all(|last| order.before(*last, b.first));
    a.iter().all(|life| {
        let next = b.partition_point(|other| other.first <= life.first);
        b.get(next).is_none_or(|other| over(life, other)) && (next == 0 || over(&b[next - 1], life))
    })
}

/// Bytes of the heaviest set found of buffers of which any two can be alive together.
fn heaviest_clique(items: &[Item], together: &[Vec<bool>]) -> u64 {
    let mut heaviest_first: Vec<usize> = (0..items.len()).collect();
    heaviest_first.sort_by_key(|i| Reverse(items[*i].bytes));
    let around = |seed: usize| {
        let mut clique = vec![seed];
        for i in &heaviest_first {
            if clique.iter().all(|j| i != j && together[*i][*j]) {
                clique.push(*i);
            }
        }
        clique.iter().map(|i| items[*i].bytes).sum()
    };
    (0..items.len()).map(around).max().unwrap_or(0)
}
