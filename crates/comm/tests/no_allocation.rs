//! Collectives do not allocate: a training step must not, and collectives are part of it.

mod support;

use std::sync::Barrier;
use std::time::Duration;

use lockstep_comm::{Call, GatherPart, Group};
use lockstep_core::{Axis, DType, Mesh, Rank};
use lockstep_device::CountingAllocator;
use support::{Member, TestCarrier, run_world};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

#[test]
fn collectives_allocate_nothing() {
    for carrier in [TestCarrier::Threads, TestCarrier::Shm, TestCarrier::Tcp, TestCarrier::Mixed(2)] {
        let all_ranks = Barrier::new(3);
        run_world(carrier, 3, Duration::from_secs(20), 8 << 20, |member| {
            let group = Group::along(&Mesh::on_one_node(1, 3), Axis::World, member.rank);
            let scratch = member.scratch();
            let parts = [member.take(300_000, DType::F32), member.take(700, DType::F32)];
            let pieces =
                [member.take(50, DType::F32), member.take(50, DType::F32), member.take(50, DType::F32)];
            let step = |member: &mut Member| {
                let comm = &mut member.comm;
                let gathered = parts.map(|whole| {
                    let share = group.share(whole.len(), group.me());
                    GatherPart { own: whole.slice(share.start, share.elems()), whole }
                });
                comm.all_gather(&group, 1, &gathered).unwrap();
                comm.reduce_scatter(&group, 2, &parts, scratch).unwrap();
                comm.all_reduce(&group, 3, &parts, scratch).unwrap();
                comm.all_reduce(&group, 4, &parts[1..], scratch).unwrap();
                comm.broadcast(&group, 5, Rank(1), &parts).unwrap();
                let into: &[_] = if member.rank.0 == 2 { &pieces } else { &[] };
                comm.gather(&group, 6, Rank(2), pieces[group.me()], into).unwrap();
                let mut received = 0;
                comm.all_gather_bytes(&group, Call::HOST, &[7; 100_000], &mut |_, bytes| {
                    received += bytes.len()
                })
                .unwrap();
                assert_eq!(received, 300_000);
                match member.rank.0 {
                    0 => comm.send(Rank(1), 7, &parts).unwrap(),
                    1 => comm.recv(Rank(0), 7, &parts).unwrap(),
                    _ => {}
                }
                comm.barrier(&group, 8).unwrap();
            };
            step(member);
            all_ranks.wait();
            let before = ALLOCATOR.calls();
            all_ranks.wait();
            for _ in 0..20 {
                step(member);
            }
            all_ranks.wait();
            let after = ALLOCATOR.calls();
            all_ranks.wait();
            assert_eq!(after - before, 0, "{carrier:?}: allocations in 20 steps of 3 ranks");
        });
    }
}
