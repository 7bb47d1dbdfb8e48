//! Every collective over every carrier, on meshes of many shapes: results are correct, with the same bits over every
//! carrier.

mod support;

use std::time::Duration;

use lockstep_comm::{BYTES_PER_ROUND, Call, GatherPart, Group, MAX_OFFERS};
use lockstep_core::{Axis, DType, Mesh, Rank};
use support::{ALL_CARRIERS, Member, bits, plain_fold, read, run_world, values};

const DEADLINE: Duration = Duration::from_secs(20);
const MEMORY: usize = 4 << 20;

const MESHES: &[Mesh] = &[
    Mesh::on_one_node(1, 1),
    Mesh::on_one_node(1, 2),
    Mesh::on_one_node(1, 3),
    Mesh::on_one_node(2, 2),
    Mesh { replicate: 5, shard: 1, per_node: 1 },
    Mesh { replicate: 2, shard: 2, per_node: 2 },
    Mesh { replicate: 2, shard: 3, per_node: 3 },
];
const AXES: [Axis; 3] = [Axis::World, Axis::Shard, Axis::Replicate];

/// One element, less than a block, a whole block, odd numbers, and more than one chunk of the fold.
const LENGTHS: &[usize] = &[1, 3, 256, 1000, 2560, 70_001];

/// Runs `body` over every carrier and mesh.
fn over_all_carriers(body: impl Fn(&mut Member, &Mesh) + Sync) {
    for mesh in MESHES {
        for carrier in ALL_CARRIERS {
            run_world(carrier, mesh.world_size(), DEADLINE, MEMORY, |member| body(member, mesh));
        }
    }
}

/// The expected sum of the contributions of a group's members.
fn sum_of(group: &Group, salt: u32, len: usize) -> Vec<f32> {
    let contributions: Vec<_> = group.members().iter().map(|m| values(m.0, salt, len)).collect();
    plain_fold(group.nodes(), &contributions)
}

#[test]
fn all_reduce_sums_along_the_mesh_tree() {
    over_all_carriers(|member, mesh| {
        let scratch = member.scratch();
        for axis in AXES {
            let group = Group::along(mesh, axis, member.rank);
            for (salt, len) in (0..).zip(LENGTHS) {
                let start = member.taken_mark();
                let part = member.take_f32(&values(member.rank.0, salt, *len));
                member.comm.all_reduce(&group, 7, &[part], scratch).unwrap();
                assert_eq!(bits(&read(part)), bits(&sum_of(&group, salt, *len)), "{axis} {len}");
                member.reset_mark(start);
            }
        }
    });
}

#[test]
fn reduce_scatter_sums_the_own_share_and_keeps_the_rest() {
    over_all_carriers(|member, mesh| {
        let scratch = member.scratch();
        let group = Group::along(mesh, Axis::World, member.rank);
        let parts: Vec<_> = (0..).zip(LENGTHS).map(|(s, len)| values(member.rank.0, s, *len)).collect();
        let views: Vec<_> = parts.iter().map(|part| member.take_f32(part)).collect();
        member.comm.reduce_scatter(&group, 3, &views, scratch).unwrap();
        for (salt, (view, before)) in (0..).zip(views.iter().zip(&parts)) {
            let own = group.share(view.len(), group.me());
            let mut expected = before.clone();
            expected[own.start..own.end]
                .copy_from_slice(&sum_of(&group, salt, view.len())[own.start..own.end]);
            assert_eq!(bits(&read(*view)), bits(&expected), "{} elements", view.len());
        }
    });
}

#[test]
fn all_gather_of_many_parts() {
    over_all_carriers(|member, mesh| {
        let group = Group::along(mesh, Axis::World, member.rank);
        // More parts than fit into one call; the shares of some members are empty.
        let lengths: Vec<usize> = (0..MAX_OFFERS * 2 + 5).map(|i| [256, 0, 700, 5000][i % 4]).collect();
        let whole = |i: usize| values(99, i as u32, lengths[i]);
        let parts: Vec<GatherPart<'_>> = (0..lengths.len())
            .map(|i| {
                let share = group.share(lengths[i], group.me());
                let view = member.take_f32(&vec![-1.0; lengths[i]]);
                let own = &whole(i)[share.start..share.end];
                // Every other shard already lies in its whole.
                let own = match i % 2 {
                    0 => member.take_f32(own),
                    _ => {
                        let in_place = view.slice(share.start, share.elems());
                        in_place.write_host(own);
                        in_place
                    }
                };
                GatherPart { own, whole: view }
            })
            .collect();
        member.comm.all_gather(&group, 5, &parts).unwrap();
        for (i, part) in parts.iter().enumerate() {
            assert_eq!(bits(&read(part.whole)), bits(&whole(i)), "part {i}");
        }
    });
}

#[test]
fn broadcast_from_every_root() {
    over_all_carriers(|member, mesh| {
        let group = Group::along(mesh, Axis::World, member.rank);
        for root in group.members() {
            for len in [1, 1000, 40_000] {
                let start = member.taken_mark();
                let parts = [
                    member.take_f32(&values(member.rank.0, 1, len)),
                    member.take_f32(&values(member.rank.0, 2, 3)),
                ];
                member.comm.broadcast(&group, 2, *root, &parts).unwrap();
                assert_eq!(bits(&read(parts[0])), bits(&values(root.0, 1, len)));
                assert_eq!(bits(&read(parts[1])), bits(&values(root.0, 2, 3)));
                member.reset_mark(start);
            }
        }
    });
}

#[test]
fn gather_of_different_lengths() {
    over_all_carriers(|member, mesh| {
        let group = Group::along(mesh, Axis::World, member.rank);
        let len = |rank: Rank| 5 + 3000 * rank.0 as usize;
        for root in group.members() {
            let start = member.taken_mark();
            let mine = member.take_f32(&values(member.rank.0, 8, len(member.rank)));
            let into: Vec<_> = match member.rank == *root {
                true => group.members().iter().map(|m| member.take_f32(&vec![0.0; len(*m)])).collect(),
                false => Vec::new(),
            };
            member.comm.gather(&group, 2, *root, mine, &into).unwrap();
            for (m, view) in group.members().iter().zip(&into) {
                assert_eq!(bits(&read(*view)), bits(&values(m.0, 8, len(*m))));
            }
            member.reset_mark(start);
        }
    });
}

#[test]
fn messages_pass_along_a_chain() {
    over_all_carriers(|member, mesh| {
        let world = mesh.world_size();
        if world == 1 {
            return;
        }
        // Every rank forwards what it has received. One length is sent inline, the other is not.
        let me = member.rank.0;
        for len in [10, 70_000] {
            let start = member.taken_mark();
            let parts = [member.take_f32(&values(0, 1, len)), member.take_f32(&[me as f32])];
            if me > 0 {
                member.comm.recv(Rank(me - 1), 4, &parts).unwrap();
            }
            if me + 1 < world {
                member.comm.send(Rank(me + 1), 4, &parts).unwrap();
            }
            assert_eq!(bits(&read(parts[0])), bits(&values(0, 1, len)));
            assert_eq!(read(parts[1]), [0.0]);
            member.reset_mark(start);
        }
    });
}

#[test]
fn byte_strings_of_any_length() {
    over_all_carriers(|member, mesh| {
        let group = Group::along(mesh, Axis::World, member.rank);
        for base in [0, 1, 13, 5000, BYTES_PER_ROUND - 1, BYTES_PER_ROUND + 1, 3 * BYTES_PER_ROUND] {
            // Lengths differ, and one member sends nothing.
            let text = |m: usize| -> Vec<u8> {
                let len = if m == 1 { 0 } else { base + m * 3 };
                (0..len).map(|i| (i * 7 + m) as u8).collect()
            };
            let mut all = vec![None; group.len()];
            let mut order = Vec::new();
            member
                .comm
                .all_gather_bytes(&group, Call::HOST + 1, &text(group.me()), &mut |m, bytes| {
                    all[m].get_or_insert_with(Vec::new).extend_from_slice(bytes);
                    order.push(m);
                })
                .unwrap();
            for (m, bytes) in all.iter().enumerate() {
                assert_eq!(bytes.as_ref(), Some(&text(m)), "member {m}, base {base}");
            }
            assert_eq!(order[..group.len()], (0..group.len()).collect::<Vec<_>>());
        }
    });
}

#[test]
fn all_gather_of_every_dtype_with_barriers_between() {
    over_all_carriers(|member, mesh| {
        let group = Group::along(mesh, Axis::World, member.rank);
        for dtype in [DType::BF16, DType::F16, DType::F64, DType::U32] {
            member.comm.barrier(&group, 1).unwrap();
            let whole = member.take(1024, dtype);
            let share = group.share(1024, group.me());
            let own = whole.slice(share.start, share.elems());
            // SAFETY: only this test accesses the memory.
            unsafe { own.as_bytes_mut() }.fill(member.rank.0 as u8 + 1);
            member.comm.all_gather(&group, 2, &[GatherPart { own, whole }]).unwrap();
            for m in 0..group.len() {
                let share = group.share(1024, m);
                // SAFETY: as above.
                let bytes = unsafe { whole.slice(share.start, share.elems()).as_bytes() };
                assert!(bytes.iter().all(|b| *b == m as u8 + 1));
            }
        }
    });
}
