//! Mismatched calls, missing ranks and aborted runs: both sides fail in time, with an error that names both ranks.

mod support;

use std::time::{Duration, Instant};

use lockstep_comm::{Comm, CommError, GatherPart, Group};
use lockstep_core::{Axis, DType, Fault, FaultClass, Mesh, Rank};
use lockstep_device::View;
use support::{Member, TestCarrier, run_world};

const DEADLINE: Duration = Duration::from_secs(10);
const MEMORY: usize = 4 << 20;
const CARRIERS: [TestCarrier; 4] =
    [TestCarrier::Threads, TestCarrier::Shm, TestCarrier::Tcp, TestCarrier::Mixed(1)];

fn pair(rank: Rank) -> Group {
    Group::along(&Mesh::on_one_node(1, 2), Axis::World, rank)
}

struct Views {
    whole: View<'static>,
    words: View<'static>,
    scratch: View<'static>,
}

type Action = fn(&mut Comm, &Group, &Views) -> Result<(), CommError>;

/// Both ranks get an error that names both calls, and the receive buffers are untouched.
fn assert_mismatch(first: Action, second: Action, words: [&str; 2]) {
    for carrier in CARRIERS {
        let errors = run_world(carrier, 2, DEADLINE, MEMORY, |member| {
            let group = pair(member.rank);
            let views = Views {
                whole: member.take(4096, DType::F32),
                words: member.take(1024, DType::U32),
                scratch: member.scratch(),
            };
            let action = if member.rank.0 == 0 { first } else { second };
            let error = action(&mut member.comm, &group, &views).expect_err("a mismatch");
            let mut out = [1.0f32; 4096];
            views.whole.read_host(&mut out);
            assert!(out.iter().all(|v| *v == 0.0), "a receive buffer was written");
            error
        });
        for (r, error) in (0..2).zip(&errors) {
            let CommError::Mismatch { rank, peer, mine, theirs } = error else {
                panic!("{carrier:?}: rank {r} got {error}");
            };
            assert_eq!((*rank, *peer), (Rank(r), Rank(1 - r)));
            assert!(
                mine.contains(words[r as usize]),
                "{carrier:?}: {mine:?} does not say {:?}",
                words[r as usize]
            );
            assert!(theirs.contains(words[1 - r as usize]), "{carrier:?}: {theirs:?}");
            assert_ne!(mine, theirs);
            assert_eq!(error.class(), FaultClass::Desync);
            let text = error.to_string();
            assert!(text.contains("rank 0") && text.contains("rank 1"), "{text}");
        }
    }
}

fn gather(comm: &mut Comm, group: &Group, whole: View<'_>, tag: u64) -> Result<(), CommError> {
    let share = group.share(whole.len(), group.me());
    comm.all_gather(group, tag, &[GatherPart { own: whole.slice(share.start, share.elems()), whole }])
}

#[test]
fn different_collectives() {
    assert_mismatch(
        |comm, group, v| gather(comm, group, v.whole, 5),
        |comm, group, v| comm.reduce_scatter(group, 5, &[v.whole], v.scratch),
        ["all-gather", "reduce-scatter"],
    );
    assert_mismatch(
        |comm, group, _| comm.barrier(group, 5),
        |comm, group, v| comm.broadcast(group, 5, Rank(0), &[v.whole]),
        ["barrier", "broadcast"],
    );
}

#[test]
fn different_lengths() {
    assert_mismatch(
        |comm, group, v| gather(comm, group, v.whole, 5),
        |comm, group, v| gather(comm, group, v.whole.first(2048), 5),
        ["4096 f32", "2048 f32"],
    );
}

#[test]
fn different_parts_of_the_same_total_length() {
    assert_mismatch(
        |comm, group, v| comm.broadcast(group, 5, Rank(0), &[v.whole.first(10), v.whole.slice(10, 30)]),
        |comm, group, v| comm.broadcast(group, 5, Rank(0), &[v.whole.first(20), v.whole.slice(20, 20)]),
        ["shape", "shape"],
    );
}

#[test]
fn different_dtypes() {
    assert_mismatch(
        |comm, group, v| gather(comm, group, v.whole.first(1024), 5),
        |comm, group, v| gather(comm, group, v.words, 5),
        ["1024 f32", "1024 u32"],
    );
}

#[test]
fn different_tags() {
    assert_mismatch(
        |comm, group, _| comm.barrier(group, 5),
        |comm, group, _| comm.barrier(group, 6),
        ["operation 5", "operation 6"],
    );
}

#[test]
fn different_roots_and_two_ranks_that_both_send() {
    assert_mismatch(
        |comm, group, v| comm.broadcast(group, 5, Rank(0), &[v.whole]),
        |comm, group, v| comm.broadcast(group, 5, Rank(1), &[v.whole]),
        ["group", "group"],
    );
    assert_mismatch(
        |comm, _, v| comm.send(Rank(1), 5, &[v.whole]),
        |comm, _, v| comm.send(Rank(0), 5, &[v.whole]),
        ["group", "group"],
    );
}

#[test]
fn different_groups() {
    for carrier in CARRIERS {
        let errors = run_world(carrier, 3, DEADLINE, MEMORY, |member| {
            // Ranks 0 and 1 use different groups; rank 2 waits for rank 0, which never calls with it.
            let axis_world = Group::along(&Mesh::on_one_node(1, 3), Axis::World, member.rank);
            match member.rank.0 {
                0 => member.comm.barrier(&pair(member.rank), 1),
                _ => member.comm.barrier(&axis_world, 1),
            }
            .expect_err("a mismatch")
        });
        assert!(
            matches!(&errors[0], CommError::Mismatch { peer: Rank(1), mine, .. } if mine.contains("group"))
        );
        assert!(
            matches!(&errors[1], CommError::Mismatch { .. } | CommError::Lost { .. }),
            "{carrier:?}: {}",
            errors[1]
        );
        assert!(matches!(&errors[2], CommError::Lost { .. }), "{carrier:?}: {}", errors[2]);
    }
}

/// Rank 1 makes no call until rank 0 has given up. Returns the error of rank 0 and how long it waited.
fn wait_for_absent_rank(
    carrier: TestCarrier,
    deadline: Duration,
    before: fn(&Member),
) -> (CommError, Duration) {
    let given_up = std::sync::Barrier::new(2);
    let mut outcomes = run_world(carrier, 2, deadline, MEMORY, |member| {
        if member.rank.0 == 1 {
            given_up.wait();
            return None;
        }
        before(member);
        let start = Instant::now();
        let error = member.comm.barrier(&pair(member.rank), 9).expect_err("rank 1 is absent");
        let waited = start.elapsed();
        given_up.wait();
        Some((error, waited))
    });
    outcomes.remove(0).unwrap()
}

#[test]
fn a_timeout_names_the_awaited_rank() {
    for carrier in CARRIERS {
        let (error, waited) = wait_for_absent_rank(carrier, Duration::from_millis(300), |_| {});
        assert!(
            matches!(error, CommError::TimedOut { rank: Rank(0), peer: Rank(1), .. }),
            "{carrier:?}: {error}"
        );
        assert!(error.to_string().contains("barrier, operation 9"), "{error}");
        assert!((0.3..1.0).contains(&waited.as_secs_f64()), "{carrier:?}: {waited:?}");
    }
}

#[test]
fn an_abort_ends_a_wait() {
    for carrier in CARRIERS {
        let (error, waited) = wait_for_absent_rank(carrier, DEADLINE, |member| {
            let abort = member.abort.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                abort.raise("rank 7 failed");
            });
        });
        assert_eq!(error, CommError::Aborted { why: "rank 7 failed".into() }, "{carrier:?}");
        assert!((0.1..3.0).contains(&waited.as_secs_f64()), "{carrier:?}: {waited:?}");
    }
}

#[test]
fn a_rank_that_leaves_is_noticed_at_once() {
    for carrier in CARRIERS {
        let outcomes = run_world(carrier, 2, DEADLINE, MEMORY, |member| {
            let group = pair(member.rank);
            member.comm.barrier(&group, 1).unwrap();
            if member.rank.0 == 1 {
                return None;
            }
            let start = Instant::now();
            let error = member.comm.barrier(&group, 2).expect_err("rank 1 has left");
            assert!(start.elapsed() < Duration::from_secs(3), "{carrier:?}: {:?}", start.elapsed());
            Some(error)
        });
        let error = outcomes[0].as_ref().unwrap();
        assert!(matches!(error, CommError::Lost { peer: Rank(1), .. }), "{carrier:?}: {error}");
        assert_eq!(error.class(), FaultClass::PeerFailed);
    }
}
