//! NCCL between processes that share one GPU: results, and peers that end or never call.
//!
//! NCCL refuses two ranks on one GPU of the same host, so each rank gets its own `NCCL_HOSTID`.

mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockstep_comm::{Abort, Call, Comm, CommError, GatherPart, Group, Nccl, NcclSpec, NcclWorld};
use lockstep_core::{Axis, Bytes, DType, Mesh, Rank};
use lockstep_device::cuda::{self, CudaQueue, Gpu, GpuError, LibrarySearch};
use lockstep_device::{Memory, Pool, View};
use support::children::{FolderRendezvous, Role, role, start_with, wait_for_file};
use support::{TestCarrier, bits, connect_by, read, values};

const DEADLINE: Duration = Duration::from_secs(60);

fn search() -> LibrarySearch {
    let roots = |names: &[&str]| -> Vec<PathBuf> {
        names.iter().filter_map(std::env::var_os).map(PathBuf::from).collect()
    };
    LibrarySearch::around(&roots(&["CUDA_HOME", "CUDA_PATH"]), &roots(&["VIRTUAL_ENV", "CONDA_PREFIX"]))
}

/// Why these tests cannot run on this machine, if they cannot.
fn missing() -> Option<GpuError> {
    let search = search();
    cuda::find_driver(&search).and_then(|_| Nccl::open(&search)).err()
}

/// Starts `world` ranks, waits for those in `awaited`, and asserts that they succeed.
fn run(name: &str, world: u32, awaited: std::ops::Range<u32>) {
    let folder = tempfile::tempdir().unwrap();
    let mut children: Vec<_> = (0..world)
        .map(|rank| {
            let variables = [
                ("NCCL_HOSTID", format!("test-{rank}")),
                ("NCCL_SOCKET_IFNAME", "lo".into()),
                ("NCCL_IB_DISABLE", "1".into()),
            ];
            start_with("child", name, rank, world, folder.path(), &variables)
        })
        .collect();
    let succeeded: Vec<bool> =
        awaited.map(|rank| children[rank as usize].wait().unwrap().success()).collect();
    for child in &mut children {
        let _ = child.kill();
        let _ = child.wait();
    }
    assert!(succeeded.iter().all(|success| *success), "{name}: {succeeded:?}");
}

/// A rank with its GPU and its communicators.
struct Member {
    role: Role,
    mesh: Mesh,
    comm: Comm,
    nccl: NcclWorld,
    queue: CudaQueue,
    memory: Memory,
    abort: Abort,
    taken: usize,
}

impl Member {
    fn new(role: Role, mesh: Mesh, deadline: Duration) -> Member {
        let (rank, world) = (Rank(role.rank), role.world);
        let search = search();
        let gpu = Gpu::open(0, &search, None).unwrap();
        let shared = Arc::new(Memory::allocate_shared(Bytes(1 << 20), &Pool::new(1)).unwrap());
        let mut rendezvous = FolderRendezvous::new(&role.folder, rank.0, world);
        let abort = Abort::default();
        let exchange = &mut |mine: &[u8]| Ok(rendezvous.gather(mine));
        let mut comm =
            connect_by(TestCarrier::Shm, rank.0, world, DEADLINE, &shared, &abort, exchange).unwrap();
        let nccl = Nccl::open(&search).unwrap();
        let spec = NcclSpec { nccl, gpu, deadline, abort: abort.clone() };
        let groups = [Axis::World, Axis::Shard, Axis::Replicate].map(|axis| Group::along(&mesh, axis, rank));
        let nccl = NcclWorld::connect(&spec, &groups, &mut comm, Call::HOST).unwrap();
        let memory = Memory::allocate_on(gpu, Bytes(64 << 20)).unwrap();
        Member { role, mesh, comm, nccl, queue: CudaQueue::new(gpu, 1).unwrap(), memory, abort, taken: 0 }
    }

    fn group(&self, axis: Axis) -> Group {
        Group::along(&self.mesh, axis, Rank(self.role.rank))
    }

    fn take(&mut self, len: usize, dtype: DType) -> View<'static> {
        let view = self.memory.view(self.taken, len, dtype);
        self.taken += (len * dtype.size()).next_multiple_of(256);
        // SAFETY: a member outlives every use of its views in a test.
        unsafe { std::mem::transmute::<View<'_>, View<'static>>(view) }
    }

    fn wait(&self) {
        self.nccl.wait(&self.queue, "a test").unwrap();
    }
}

/// The entry point of a child process; does nothing in an ordinary run of the tests.
#[test]
fn child() {
    let Some(role) = role() else { return };
    let world = role.world;
    match role.name.as_str() {
        "sums" => sums(&mut Member::new(role, Mesh::on_one_node(1, world), DEADLINE)),
        "axes" => sums(&mut Member::new(role, Mesh::on_one_node(2, world / 2), DEADLINE)),
        "killed" => killed(&mut Member::new(role, Mesh::on_one_node(1, world), DEADLINE)),
        "aborted" => aborted(&mut Member::new(role, Mesh::on_one_node(1, world), DEADLINE)),
        "late" => late(&mut Member::new(role, Mesh::on_one_node(1, world), Duration::from_secs(3))),
        other => panic!("{other}"),
    }
}

/// Every collective on every axis, with equal, short and empty shares, and several parts at once.
fn sums(member: &mut Member) {
    for axis in [Axis::World, Axis::Shard, Axis::Replicate] {
        for lens in [&[1usize][..], &[3, 1000], &[256 * 12], &[5 * 256, 70_001, 256, 0], &[1 << 20]] {
            member.taken = 0;
            let group = member.group(axis);
            gathers(member, &group, lens);
            reduces(member, &group, lens);
        }
    }
    let group = member.group(Axis::World);
    member.comm.barrier(&group, Call::HOST + 1).unwrap();
}

fn gathers(member: &mut Member, group: &Group, lens: &[usize]) {
    // The value of element `i` of part `p`, whichever rank owns it.
    let value = |p: usize, i: usize| (i * 31 + p * 7 + 1) as u16;
    for in_place in [true, false] {
        let mut parts = Vec::new();
        for (p, len) in lens.iter().enumerate() {
            let (whole, range) = (member.take(*len, DType::BF16), group.share(*len, group.me()));
            whole.zero().unwrap();
            let own = match in_place {
                true => whole.slice(range.start, range.elems()),
                false => member.take(range.elems(), DType::BF16),
            };
            own.write(&(range.start..range.end).map(|i| value(p, i)).collect::<Vec<u16>>()).unwrap();
            parts.push(GatherPart { own, whole });
        }
        member.nccl.of(group).all_gather(&member.queue, &parts).unwrap();
        member.wait();
        for (p, part) in parts.iter().enumerate() {
            let mut got = vec![0u16; part.whole.len()];
            part.whole.read(&mut got).unwrap();
            assert!(got.iter().enumerate().all(|(i, got)| *got == value(p, i)), "{lens:?} part {p}");
        }
    }
}

fn reduces(member: &mut Member, group: &Group, lens: &[usize]) {
    let me = member.role.rank;
    let sum = |salt: u32, len: usize| -> Vec<f64> {
        let all: Vec<_> = group.members().iter().map(|m| values(m.0, salt, len)).collect();
        (0..len).map(|i| all.iter().map(|one| f64::from(one[i])).sum()).collect()
    };
    let near = |got: &[f32], want: &[f64]| {
        got.iter().zip(want).all(|(got, want)| (f64::from(*got) - want).abs() <= 1e-4 * (1.0 + want.abs()))
    };
    let mut seen: Vec<Vec<u32>> = Vec::new();
    let parts: Vec<View<'_>> = lens.iter().map(|len| member.take(*len, DType::F32)).collect();
    let fill = |parts: &[View<'_>]| {
        for (salt, part) in (0..).zip(parts) {
            part.write(&values(me, salt, part.len())).unwrap();
        }
    };
    // Repeated to check that the bits are the same.
    for _ in 0..2 {
        fill(&parts);
        member.nccl.of(group).reduce_scatter(&member.queue, &parts).unwrap();
        member.wait();
        let mut all = Vec::new();
        for (salt, part) in (0..).zip(&parts) {
            let range = group.share(part.len(), group.me());
            let got = read(part.slice(range.start, range.elems()));
            assert!(near(&got, &sum(salt, part.len())[range.start..range.end]), "{lens:?}");
            all.extend(bits(&got));
        }
        fill(&parts);
        member.nccl.of(group).all_reduce(&member.queue, &parts).unwrap();
        member.wait();
        for (salt, part) in (0..).zip(&parts) {
            assert!(near(&read(*part), &sum(salt, part.len())), "{lens:?}");
            all.extend(bits(&read(*part)));
        }
        seen.push(all);
    }
    assert!(seen[0] == seen[1], "{lens:?}: the second run gave other bits");
    let norm = member.take(1, DType::F64);
    norm.write(&[f64::from(me) + 0.5]).unwrap();
    member.nccl.of(group).all_reduce(&member.queue, &[norm]).unwrap();
    let root = *group.members().last().unwrap();
    let tokens = member.take(5, DType::U32);
    tokens.write(&[me; 5]).unwrap();
    member.nccl.of(group).broadcast(&member.queue, root, &[tokens]).unwrap();
    member.wait();
    let (mut got, mut ids) = ([0f64], [0u32; 5]);
    norm.read(&mut got).unwrap();
    tokens.read(&mut ids).unwrap();
    assert_eq!(got[0], group.members().iter().map(|m| f64::from(m.0) + 0.5).sum::<f64>());
    assert_eq!(ids, [root.0; 5]);
}

/// Rank 1 aborts while rank 0 waits for it on the GPU.
fn killed(member: &mut Member) {
    let group = member.group(Axis::World);
    let view = member.take(1000, DType::F32);
    view.zero().unwrap();
    member.nccl.of(&group).all_reduce(&member.queue, &[view]).unwrap();
    member.wait();
    if member.role.rank == 1 {
        std::fs::write(member.role.folder.join("gone"), "").unwrap();
        std::process::abort();
    }
    wait_for_file(&member.role.folder.join("gone"));
    let start = Instant::now();
    let error = member
        .nccl
        .of(&group)
        .all_reduce(&member.queue, &[view])
        .and_then(|()| member.nccl.wait(&member.queue, "a sum that cannot end"))
        .expect_err("rank 1 has ended");
    assert!(matches!(&error, CommError::Nccl { rank: Rank(0), .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(20), "{error}: after {:?}", start.elapsed());
    assert_eq!(member.nccl.check(), Err(error));
}

/// The run is aborted while rank 0 waits for rank 1, which sleeps.
fn aborted(member: &mut Member) {
    let group = member.group(Axis::World);
    let view = member.take(1000, DType::F32);
    view.zero().unwrap();
    member.nccl.of(&group).all_reduce(&member.queue, &[view]).unwrap();
    member.wait();
    if member.role.rank == 1 {
        std::thread::sleep(Duration::from_secs(40));
        return;
    }
    let start = Instant::now();
    let abort = member.abort.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        abort.raise("another rank failed");
    });
    let error = member
        .nccl
        .of(&group)
        .all_reduce(&member.queue, &[view])
        .and_then(|()| member.nccl.wait(&member.queue, "a sum"))
        .expect_err("the run was aborted");
    assert_eq!(error, CommError::Aborted { why: "another rank failed".into() });
    assert!(start.elapsed() < Duration::from_secs(15), "after {:?}", start.elapsed());
    // The kernel has ended too, so the stream can still be used.
    member.queue.synchronize().unwrap();
}

/// Rank 1 does not call before the deadline.
fn late(member: &mut Member) {
    let group = member.group(Axis::World);
    let view = member.take(1000, DType::F32);
    view.zero().unwrap();
    if member.role.rank == 1 {
        std::thread::sleep(Duration::from_secs(40));
        return;
    }
    let error = member
        .nccl
        .of(&group)
        .all_reduce(&member.queue, &[view])
        .and_then(|()| member.nccl.wait(&member.queue, "a sum"))
        .expect_err("rank 1 is late");
    assert!(matches!(&error, CommError::Stalled { rank: Rank(0), .. }), "{error}");
}

#[test]
fn collectives_between_ranks_on_one_gpu() {
    if role().is_some() {
        return;
    }
    if let Some(why) = missing() {
        return println!("skipped: {why}");
    }
    run("sums", 2, 0..2);
    run("sums", 3, 0..3);
    run("axes", 4, 0..4);
}

#[test]
fn peers_that_end_or_never_call() {
    if role().is_some() {
        return;
    }
    if let Some(why) = missing() {
        return println!("skipped: {why}");
    }
    for name in ["killed", "aborted", "late"] {
        run(name, 2, 0..1);
    }
}
