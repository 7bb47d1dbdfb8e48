//! Ranks in processes of their own: results, and what happens after `kill -9`.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use lockstep_comm::{Abort, Comm, CommError, GatherPart, Group};
use lockstep_core::fold::fold_scratch_elems;
use lockstep_core::{Axis, Bytes, DType, Mesh, Rank};
use lockstep_device::{Memory, Pool};
use support::children::{FolderRendezvous, role, start, wait_for_file};
use support::{TestCarrier, bits, connect_by, plain_fold, read, values};

const DEADLINE: Duration = Duration::from_secs(20);

fn carrier(name: &str) -> TestCarrier {
    match name.rsplit('-').next() {
        Some("shm") => TestCarrier::Shm,
        Some("tcp") => TestCarrier::Tcp,
        _ => TestCarrier::Mixed(2),
    }
}

fn member(name: &str, rank: u32, world: u32, folder: &std::path::Path) -> (Comm, Arc<Memory>) {
    let memory = Arc::new(Memory::allocate_shared(Bytes(8 << 20), &Pool::new(1)).unwrap());
    let mut rendezvous = FolderRendezvous::new(folder, rank, world);
    let exchange = &mut |mine: &[u8]| Ok(rendezvous.gather(mine));
    let comm =
        connect_by(carrier(name), rank, world, DEADLINE, &memory, &Abort::default(), exchange).unwrap();
    (comm, memory)
}

/// The entry point of a child process; does nothing in an ordinary run of the tests.
#[test]
fn child() {
    let Some(role) = role() else { return };
    let (mut comm, memory) = member(&role.name, role.rank, role.world, &role.folder);
    if role.name.starts_with("sum") {
        return sums(&mut comm, &memory);
    }
    let group = Group::along(&Mesh::on_one_node(1, role.world), Axis::World, Rank(role.rank));
    comm.barrier(&group, 1).unwrap();
    std::fs::write(role.folder.join(format!("ready-{}", role.rank)), "").unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

/// Sums and gathers, compared with a plain fold.
fn sums(comm: &mut Comm, memory: &Memory) {
    let mesh = Mesh::on_one_node(1, comm.world());
    let group = Group::along(&mesh, Axis::World, comm.rank());
    let scratch = memory.view(4 << 20, fold_scratch_elems(comm.world()), DType::F32);
    for len in [1, 1000, 5 * 256, 300_000] {
        let view = memory.view(0, len, DType::F32);
        view.write_host(&values(comm.rank().0, 3, len));
        comm.all_reduce(&group, 2, &[view], scratch).unwrap();
        let all: Vec<_> = (0..comm.world()).map(|r| values(r, 3, len)).collect();
        assert_eq!(bits(&read(view)), bits(&plain_fold(group.nodes(), &all)));
        let share = group.share(len, group.me());
        let own = view.slice(share.start, share.elems());
        comm.all_gather(&group, 3, &[GatherPart { own, whole: view }]).unwrap();
        assert_eq!(bits(&read(view)), bits(&plain_fold(group.nodes(), &all)));
    }
    comm.barrier(&group, 4).unwrap();
}

#[test]
fn processes_sum_like_threads() {
    if role().is_some() {
        return;
    }
    for name in ["sum-shm", "sum-tcp", "sum-mixed"] {
        let folder = tempfile::tempdir().unwrap();
        let mut children: Vec<_> = (1..4).map(|r| start("child", name, r, 4, folder.path())).collect();
        let (mut comm, memory) = member(name, 0, 4, folder.path());
        sums(&mut comm, &memory);
        for child in &mut children {
            assert!(child.wait().unwrap().success(), "{name}");
        }
    }
}

/// Kills a peer while this rank waits for it, or before that.
fn killed(name: &str, while_waiting: bool) {
    let folder = tempfile::tempdir().unwrap();
    let mut child = start("child", name, 1, 2, folder.path());
    let (mut comm, _memory) = member(name, 0, 2, folder.path());
    let group = Group::along(&Mesh::on_one_node(1, 2), Axis::World, Rank(0));
    comm.barrier(&group, 1).unwrap();
    wait_for_file(&folder.path().join("ready-1"));
    let (error, waited) = std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            if while_waiting {
                std::thread::sleep(Duration::from_millis(150));
            }
            child.kill().unwrap();
            Instant::now()
        });
        if !while_waiting {
            while !killer.is_finished() {
                std::thread::yield_now();
            }
        }
        let error = comm.barrier(&group, 2).expect_err("rank 1 was killed");
        let noticed = Instant::now();
        (error, noticed.saturating_duration_since(killer.join().unwrap()))
    });
    child.wait().unwrap();
    assert!(matches!(error, CommError::Lost { rank: Rank(0), peer: Rank(1), .. }), "{name}: {error}");
    assert!(waited < Duration::from_secs(3), "{name}: noticed after {waited:?}");
}

#[test]
fn a_killed_peer_is_noticed_within_half_a_second() {
    if role().is_some() {
        return;
    }
    for name in ["stay-shm", "stay-tcp"] {
        killed(name, true);
        killed(name, false);
    }
}
