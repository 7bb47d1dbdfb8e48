//! Packing: buffers that are never alive together share bytes.

use lockstep_core::Bytes;

use crate::buffer::{Access, Buffer, BufferId, Tier};
use crate::order::Order;
use crate::schedule::{Lane, OpId, Schedule};

/// Buffers start on huge-page-friendly, cache-line-aligned offsets.
const ALIGN: u64 = 4096;

/// Offsets of a set of buffers in one arena.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    pub offsets: Vec<(BufferId, Bytes)>,
    /// The arena's size.
    pub bytes: Bytes,
    /// The most bytes alive at once: what no packing could go below.
    pub live_peak: Bytes,
}

/// One lifetime of a buffer: from a defining operation to the last that touches it.
struct Life {
    first: OpId,
    last_on_lane: [Option<OpId>; Lane::COUNT],
}

/// Packs the non-resident buffers of `tier` that `schedule` touches.
///
/// Two buffers may share bytes if of any two of their lifetimes one is over, by lane order and waits,
/// before the other begins. Largest first, each at the lowest free offset.
pub fn pack(schedule: &Schedule, buffers: &[Buffer], tier: Tier) -> MemoryPlan {
    let order = Order::of(schedule);
    let mut packed: Vec<(BufferId, Vec<Life>, u64)> = Vec::new();
    for (i, buffer) in buffers.iter().enumerate() {
        let id = BufferId(i as u32);
        if buffer.tier == tier && !buffer.what.is_resident() {
            let lives = lives_of(schedule, id);
            if !lives.is_empty() {
                packed.push((id, lives, buffer.bytes().align_to(ALIGN).0));
            }
        }
    }
    packed.sort_by_key(|(id, _, bytes)| (std::cmp::Reverse(*bytes), *id));

    let mut placed: Vec<(usize, u64)> = Vec::new();
    for i in 0..packed.len() {
        let (_, lives, bytes) = &packed[i];
        let mut taken: Vec<(u64, u64)> = placed
            .iter()
            .filter(|(j, _)| !never_together(&order, lives, &packed[*j].1))
            .map(|(j, start)| (*start, start + packed[*j].2))
            .collect();
        taken.sort_unstable();
        let mut start = 0;
        for (from, to) in taken {
            if start + bytes <= from {
                break;
            }
            start = start.max(to);
        }
        placed.push((i, start));
    }
    let bytes = placed.iter().map(|(i, start)| start + packed[*i].2).max().unwrap_or(0);
    let mut offsets: Vec<_> = placed.iter().map(|(i, start)| (packed[*i].0, Bytes(*start))).collect();
    offsets.sort_by_key(|(id, _)| *id);
    let live_peak = live_peak(schedule, &packed);
    MemoryPlan { offsets, bytes: Bytes(bytes), live_peak }
}

/// A buffer's lifetimes in order.
fn lives_of(schedule: &Schedule, id: BufferId) -> Vec<Life> {
    let mut lives: Vec<Life> = Vec::new();
    for (i, op) in schedule.ops.iter().enumerate() {
        let at = OpId(i as u32);
        for (_, access) in op.accesses.iter().filter(|(buffer, _)| *buffer == id) {
            if *access == Access::Define || lives.is_empty() {
                lives.push(Life { first: at, last_on_lane: [None; Lane::COUNT] });
            }
            let life = lives.last_mut().expect("just pushed");
            life.last_on_lane[op.lane as usize] = Some(at);
        }
    }
    lives
}

fn never_together(order: &Order, a: &[Life], b: &[Life]) -> bool {
    let over = |a: &Life, b: &Life| a.last_on_lane.iter().flatten().all(|last| order.before(*last, b.first));
    a.iter().all(|a| b.iter().all(|b| over(a, b) || over(b, a)))
}

/// The largest sum of buffers alive at one operation, taking the list as the order of time.
fn live_peak(schedule: &Schedule, packed: &[(BufferId, Vec<Life>, u64)]) -> Bytes {
    let mut change = vec![0i64; schedule.ops.len() + 1];
    for (_, lives, bytes) in packed {
        for life in lives {
            let last = life.last_on_lane.iter().flatten().max().expect("a life has a last operation");
            change[life.first.0 as usize] += *bytes as i64;
            change[last.0 as usize + 1] -= *bytes as i64;
        }
    }
    let mut alive = 0;
    Bytes(
        change
            .into_iter()
            .map(|c| {
                alive += c;
                alive
            })
            .max()
            .unwrap_or(0) as u64,
    )
}
