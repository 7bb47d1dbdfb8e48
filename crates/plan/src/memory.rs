//! Packs buffers into an arena: buffers that are never live at the same time share bytes.

use std::cmp::Reverse;

use lockstep_core::Bytes;

use crate::buffer::{Access, Buffer, BufferId};
use crate::happens_before::HappensBefore;
use crate::lane::Lane;
use crate::schedule::{OpId, Schedule};

/// Buffers start on multiples of a page.
pub(crate) const ALIGN: u64 = 4096;

/// How often packing is tried again from each initial order.
const ATTEMPTS: usize = 40;

/// The offsets of a set of buffers in one arena.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    pub offsets: Vec<(BufferId, Bytes)>,
    /// The arena's size.
    pub bytes: Bytes,
    /// A lower bound for any packing: the bytes of `peak`.
    pub live_peak: Bytes,
    /// The largest set found of buffers that are pairwise live at the same time. None of them share bytes.
    pub peak: Vec<BufferId>,
}

impl MemoryPlan {
    /// Appends another plan to this one, from byte `start` of the same arena on.
    pub(crate) fn then(self, start: Bytes, other: MemoryPlan) -> MemoryPlan {
        let moved = other.offsets.iter().map(|(id, at)| (*id, start + *at));
        let mut offsets: Vec<_> = self.offsets.into_iter().chain(moved).collect();
        offsets.sort_unstable_by_key(|(id, _)| *id);
        MemoryPlan {
            offsets,
            bytes: start + other.bytes,
            live_peak: self.live_peak + other.live_peak,
            peak: self.peak.into_iter().chain(other.peak).collect(),
        }
    }
}

/// One lifetime of a buffer: from the operation that defines it to the last one that uses it.
struct Lifetime {
    first: OpId,
    last_on_lane: [Option<OpId>; Lane::COUNT],
}

/// A buffer to pack.
struct Item {
    id: BufferId,
    lifetimes: Vec<Lifetime>,
    bytes: u64,
}

/// Packs the non-resident buffers that `schedule` uses and for which `is_wanted` holds.
///
/// Two buffers may share bytes if, for any two of their lifetimes, lane order and waits guarantee that one ends before
/// the other begins. Buffers are placed one after the other, each at the lowest free offset. Several orders are tried;
/// the smallest arena wins.
pub fn pack(schedule: &Schedule, buffers: &[Buffer], is_wanted: impl Fn(BufferId) -> bool) -> MemoryPlan {
    let order = HappensBefore::of(schedule);
    let mut items: Vec<Item> = Vec::new();
    for (i, (buffer, lifetimes)) in buffers.iter().zip(lifetimes(schedule, buffers.len())).enumerate() {
        let id = BufferId(i as u32);
        if is_wanted(id) && !buffer.kind.is_resident() && !lifetimes.is_empty() {
            items.push(Item { id, lifetimes, bytes: buffer.bytes().align_to(ALIGN).0 });
        }
    }
    let conflicts: Vec<Vec<bool>> = items
        .iter()
        .map(|a| items.iter().map(|b| !are_disjoint(&order, &a.lifetimes, &b.lifetimes)).collect())
        .collect();
    // A buffer that conflicts with many bytes is hard to place.
    let pressure: Vec<u64> = conflicts
        .iter()
        .map(|row| row.iter().zip(&items).filter(|(t, _)| **t).map(|(_, i)| i.bytes).sum())
        .collect();
    let first_use = |i: usize| items[i].lifetimes[0].first;
    let by_size = |i: &usize| (Reverse(items[*i].bytes), Reverse(pressure[*i]), first_use(*i));
    let by_pressure = |i: &usize| (Reverse(pressure[*i]), Reverse(items[*i].bytes), first_use(*i));
    let by_first_use = |i: &usize| (first_use(*i), Reverse(items[*i].bytes));
    let mut orders: [Vec<usize>; 3] = std::array::from_fn(|_| (0..items.len()).collect());
    orders[0].sort_by_key(by_size);
    orders[1].sort_by_key(by_pressure);
    orders[2].sort_by_key(by_first_use);
    let peak = heaviest_clique(&items, &conflicts);
    let live_peak = Bytes(peak.iter().map(|i| items[*i].bytes).sum());
    let (mut bytes, mut starts) = (u64::MAX, Vec::new());
    for mut order in orders {
        for _ in 0..ATTEMPTS {
            let (end, attempt) = place_in_order(&order, &items, &conflicts);
            if end < bytes {
                (bytes, starts) = (end, attempt.clone());
            }
            if bytes <= live_peak.0 {
                break;
            }
            // Next time the buffer that ends highest is placed first.
            order.sort_by_key(|i| attempt[*i] + items[*i].bytes < end);
        }
    }
    MemoryPlan {
        offsets: items.iter().zip(starts).map(|(item, start)| (item.id, Bytes(start))).collect(),
        bytes: Bytes(bytes),
        live_peak,
        peak: peak.into_iter().map(|i| items[i].id).collect(),
    }
}

/// Places items by first fit. Returns the arena's size and each item's offset.
fn place_in_order(order: &[usize], items: &[Item], conflicts: &[Vec<bool>]) -> (u64, Vec<u64>) {
    let mut starts = vec![0; items.len()];
    for (n, i) in order.iter().enumerate() {
        let mut taken: Vec<(u64, u64)> = order[..n]
            .iter()
            .filter(|j| conflicts[*i][**j])
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
fn lifetimes(schedule: &Schedule, num_buffers: usize) -> Vec<Vec<Lifetime>> {
    let mut all: Vec<Vec<Lifetime>> = (0..num_buffers).map(|_| Vec::new()).collect();
    for (at, op) in schedule.in_flight() {
        for (buffer, access) in &op.accesses {
            let lifetimes = &mut all[buffer.0 as usize];
            if *access == Access::Define || lifetimes.is_empty() {
                lifetimes.push(Lifetime { first: at, last_on_lane: [None; Lane::COUNT] });
            }
            lifetimes.last_mut().expect("just pushed").last_on_lane[op.lane as usize] = Some(at);
        }
    }
    all
}

/// For every operation, the non-resident buffers whose last use it is: all their other uses have finished when it
/// starts. If the last uses of a buffer are on two lanes and neither waits for the other, no operation lists it.
pub fn last_uses(schedule: &Schedule, buffers: &[Buffer]) -> Vec<Vec<BufferId>> {
    let order = HappensBefore::of(schedule);
    let mut ended = vec![Vec::new(); schedule.ops.len()];
    for (i, (buffer, lifetimes)) in buffers.iter().zip(lifetimes(schedule, buffers.len())).enumerate() {
        for lifetime in lifetimes.iter().filter(|_| !buffer.kind.is_resident()) {
            let lasts = || lifetime.last_on_lane.iter().flatten().copied();
            let end = lasts().find(|end| lasts().all(|other| other == *end || order.before(other, *end)));
            // Ids continue in the second run, whose last uses are the same.
            if let Some(end) = end.filter(|end| (end.0 as usize) < schedule.ops.len()) {
                ended[end.0 as usize].push(BufferId(i as u32));
            }
        }
    }
    ended
}

/// Whether two buffers are never live at the same time. A buffer's lifetimes follow each other, so each is compared
/// only with its neighbours among the other buffer's lifetimes.
fn are_disjoint(order: &HappensBefore, a: &[Lifetime], b: &[Lifetime]) -> bool {
    let ends_before =
        |a: &Lifetime, b: &Lifetime| a.last_on_lane.iter().flatten().all(|last| order.before(*last, b.first));
    a.iter().all(|lifetime| {
        let next = b.partition_point(|other| other.first <= lifetime.first);
        b.get(next).is_none_or(|other| ends_before(lifetime, other))
            && (next == 0 || ends_before(&b[next - 1], lifetime))
    })
}

/// The largest set found of items that conflict pairwise.
fn heaviest_clique(items: &[Item], conflicts: &[Vec<bool>]) -> Vec<usize> {
    let mut heaviest_first: Vec<usize> = (0..items.len()).collect();
    heaviest_first.sort_by_key(|i| Reverse(items[*i].bytes));
    let clique_of = |seed: usize| {
        let mut clique = vec![seed];
        for i in &heaviest_first {
            if clique.iter().all(|j| i != j && conflicts[*i][*j]) {
                clique.push(*i);
            }
        }
        clique
    };
    let bytes = |clique: &Vec<usize>| clique.iter().map(|i| items[*i].bytes).sum::<u64>();
    (0..items.len()).map(clique_of).max_by_key(bytes).unwrap_or_default()
}
