//! Collectives by MPI, in ranks that mpiexec starts. Skipped where there is no MPI with the standard ABI.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockstep_comm::{
    Abort, BYTES_PER_ROUND, Call, Comm, CommError, GatherPart, Group, Mpi, MpiSpec, MpiWorld,
};
use lockstep_core::{Axis, Bytes, DType, Mesh, Rank};
use lockstep_device::cuda::LibrarySearch;
use lockstep_device::{Memory, Pool, View};
use support::children::{VARIABLE, role, wait_for_file};
use support::{bits, read, values};

const DEADLINE: Duration = Duration::from_secs(60);
const MEMORY: usize = 16 << 20;

fn search() -> LibrarySearch {
    std::env::var_os("LOCKSTEP_MPI_DIR")
        .map_or_else(LibrarySearch::default, |dir| LibrarySearch::only(PathBuf::from(dir)))
}

/// The mpiexec of the library, or why there is none.
fn mpiexec() -> Result<PathBuf, String> {
    let mpi = Mpi::open(&search()).map_err(|e| e.to_string())?;
    let folder = mpi.path().parent().and_then(Path::parent).map(|root| root.join("bin").join("mpiexec"));
    folder
        .filter(|path| path.exists())
        .ok_or_else(|| format!("{} has no mpiexec beside it", mpi.path().display()))
}

/// Starts ranks that run the test `child`. Returns what they printed if they fail, and why there is no MPI here.
fn run_ranks(name: &str, ranks: u32, folder: &Path) -> Result<Result<(), String>, String> {
    let mpiexec = mpiexec()
        .map_err(|why| format!("{why} (.ci/mpi installs one; set LOCKSTEP_MPI_DIR to its folder)"))?;
    let output = Command::new(mpiexec)
        .args(["-n", &ranks.to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(VARIABLE, format!("{name} 0 {ranks} {}", folder.display()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text =
        || format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    Ok(if output.status.success() { Ok(()) } else { Err(text()) })
}

/// One rank of a test.
struct Member {
    rank: Rank,
    comm: Comm,
    memory: Arc<Memory>,
    abort: Abort,
}

impl Member {
    fn start(world: u32) -> Member {
        let rank = Rank(std::env::var("PMI_RANK").expect("mpiexec sets it").parse().unwrap());
        let abort = Abort::default();
        let spec = MpiSpec {
            mpi: Mpi::open(&search()).unwrap(),
            rank,
            world,
            deadline: DEADLINE,
            abort: abort.clone(),
        };
        let memory = Arc::new(Memory::allocate(Bytes(MEMORY as u64), &Pool::new(1)).unwrap());
        let comm = MpiWorld::start(spec).unwrap().comm(vec![Arc::clone(&memory)]).unwrap();
        assert_eq!((comm.rank(), comm.world()), (rank, world));
        assert!(comm.library().is_some() && comm.note().contains("libmpi_abi"), "{}", comm.note());
        Member { rank, comm, memory, abort }
    }

    fn view(&self, len: usize) -> View<'static> {
        let view = self.memory.view(0, len, DType::F32);
        // SAFETY: a member outlives every use of its views in a test.
        unsafe { std::mem::transmute::<View<'_>, View<'static>>(view) }
    }

    fn filled(&self, values: &[f32]) -> View<'static> {
        let view = self.view(values.len());
        view.write_host(values);
        view
    }
}

/// The entry point of a rank; does nothing in an ordinary run of the tests.
#[test]
fn child() {
    let Some(role) = role() else { return };
    match &*role.name {
        "collectives" => collectives(&mut Member::start(role.world)),
        "late" => late(&mut Member::start(role.world), &role.folder),
        "aborted" => aborted(&mut Member::start(role.world), &role.folder),
        other => panic!("no role {other}"),
    }
}

// ---- results -------------------------------------------------------------------------------------------------

/// One element, less than a block, odd numbers, several pieces of a sum.
const LENGTHS: [usize; 6] = [1, 3, 256, 1000, 70_001, 1_500_001];

#[test]
fn collectives_have_the_right_results() {
    if role().is_some() {
        return;
    }
    for ranks in [2, 4] {
        let folder = tempfile::tempdir().unwrap();
        match run_ranks("collectives", ranks, folder.path()) {
            Ok(ended) => assert_eq!(ended, Ok(()), "{ranks} ranks"),
            Err(why) => return println!("skipped: {why}"),
        }
    }
}

fn collectives(member: &mut Member) {
    let world = member.comm.world();
    let mut meshes = vec![Mesh::on_one_node(1, world)];
    if world == 4 {
        meshes.push(Mesh::on_one_node(2, 2));
    }
    for mesh in meshes {
        for axis in [Axis::World, Axis::Shard, Axis::Replicate] {
            let group = Group::along(&mesh, axis, member.rank);
            member.comm.prepare(&group).unwrap();
            sums(member, &group);
            gathers(member, &group);
            broadcasts(member, &group);
            byte_strings(member, &group);
            member.comm.barrier(&group, 9).unwrap();
        }
    }
    messages(member);
}

/// Whole numbers, whose sums are exact in any order, and others, whose sums agree to rounding.
fn contribution(rank: Rank, len: usize, is_whole: bool) -> Vec<f32> {
    let fraction = values(rank.0, 5, len);
    match is_whole {
        true => (0..len).map(|i| ((i * 7 + rank.0 as usize * 13) % 101) as f32).collect(),
        false => fraction,
    }
}

fn sums(member: &mut Member, group: &Group) {
    for len in LENGTHS {
        for is_whole in [true, false] {
            let all: Vec<Vec<f32>> =
                group.members().iter().map(|rank| contribution(*rank, len, is_whole)).collect();
            let expected = |i: usize| all.iter().map(|one| f64::from(one[i])).sum::<f64>();
            let size = |i: usize| all.iter().map(|one| f64::from(one[i]).abs()).sum::<f64>();
            let close = |i: usize, found: f32| {
                let tolerance = if is_whole { 0.0 } else { 4.0 * size(i) * f64::from(f32::EPSILON) };
                (f64::from(found) - expected(i)).abs() <= tolerance
            };
            let mine = contribution(member.rank, len, is_whole);

            let part = member.filled(&mine);
            member.comm.all_reduce(group, 1, &[part], View::empty()).unwrap();
            let found = read(part);
            let wrong = (0..len).find(|i| !close(*i, found[*i]));
            assert_eq!(wrong, None, "all-reduce of {len}, {:?}", wrong.map(|i| (found[i], expected(i))));
            // Replicas that differ in a bit drift apart.
            let mut hashes = Vec::new();
            let hash = hash_of(&found);
            let each = &mut |_: usize, bytes: &[u8]| hashes.push(bytes.to_vec());
            member.comm.all_gather_bytes(group, 2, &hash, each).unwrap();
            assert!(hashes.iter().all(|other| *other == hash), "all-reduce of {len} differs between ranks");

            let part = member.filled(&mine);
            member.comm.reduce_scatter(group, 3, &[part], View::empty()).unwrap();
            let (found, share) = (read(part), group.share(len, group.me()));
            for i in 0..len {
                let right = match (share.start..share.end).contains(&i) {
                    true => close(i, found[i]),
                    false => found[i].to_bits() == mine[i].to_bits(),
                };
                assert!(right, "reduce-scatter of {len}, element {i}: {}", found[i]);
            }
        }
    }
    // Many parts in one call.
    let lengths: Vec<usize> = (0..70).map(|i| [256, 0, 700, 5000][i % 4]).collect();
    let all = member.view(lengths.iter().sum());
    all.write_host(&contribution(member.rank, all.len(), true));
    let mut start = 0;
    let parts: Vec<View<'_>> = lengths
        .iter()
        .map(|len| {
            start += len;
            all.slice(start - len, *len)
        })
        .collect();
    member.comm.all_reduce(group, 4, &parts, View::empty()).unwrap();
    let found = read(all);
    for (i, found) in found.iter().enumerate() {
        let sum: f32 = group.members().iter().map(|rank| ((i * 7 + rank.0 as usize * 13) % 101) as f32).sum();
        assert_eq!(*found, sum, "element {i} of many parts");
    }
}

/// A number that differs if a bit does.
fn hash_of(values: &[f32]) -> [u8; 8] {
    let mix = |hash: u64, value: &f32| {
        (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3).rotate_left(17)
    };
    values.iter().fold(0xcbf2_9ce4_8422_2325, mix).to_le_bytes()
}

fn gathers(member: &mut Member, group: &Group) {
    for len in LENGTHS {
        let whole = values(99, 2, len);
        let share = group.share(len, group.me());
        for is_in_place in [true, false] {
            let view = member.filled(&vec![-1.0; len]);
            let apart = member.memory.view(MEMORY / 2, share.elems(), DType::F32);
            let own = if is_in_place { view.slice(share.start, share.elems()) } else { apart };
            own.write_host(&whole[share.start..share.end]);
            let part = GatherPart { own, whole: view };
            member.comm.all_gather(group, 5, &[part]).unwrap();
            assert_eq!(bits(&read(view)), bits(&whole), "all-gather of {len}");
        }
    }
    // bf16 moves as it is.
    let whole = member.memory.view(0, 1024, DType::BF16);
    let share = group.share(1024, group.me());
    // SAFETY: only this test accesses the memory.
    unsafe { whole.slice(share.start, share.elems()).as_bytes_mut() }.fill(group.me() as u8 + 1);
    let own = whole.slice(share.start, share.elems());
    member.comm.all_gather(group, 6, &[GatherPart { own, whole }]).unwrap();
    for m in 0..group.len() {
        let share = group.share(1024, m);
        // SAFETY: as above.
        let bytes = unsafe { whole.slice(share.start, share.elems()).as_bytes() };
        assert!(bytes.iter().all(|byte| *byte == m as u8 + 1));
    }
}

fn broadcasts(member: &mut Member, group: &Group) {
    for root in group.members() {
        for len in [1, 1000, 40_000] {
            let part = member.filled(&values(member.rank.0, 1, len));
            member.comm.broadcast(group, 7, *root, &[part]).unwrap();
            assert_eq!(bits(&read(part)), bits(&values(root.0, 1, len)));
        }
        // To one member, with lengths that the others do not know.
        let len = |rank: Rank| 5 + 3000 * rank.0 as usize;
        let mine = member.filled(&values(member.rank.0, 8, len(member.rank)));
        let at = |m: usize| MEMORY / 2 + m * (1 << 16);
        let view = |m: usize, rank: Rank| member.memory.view(at(m), len(rank), DType::F32);
        let into: Vec<View<'_>> = match member.rank == *root {
            true => group.members().iter().enumerate().map(|(m, rank)| view(m, *rank)).collect(),
            false => Vec::new(),
        };
        member.comm.gather(group, 8, *root, mine, &into).unwrap();
        for (rank, view) in group.members().iter().zip(&into) {
            assert_eq!(bits(&read(*view)), bits(&values(rank.0, 8, len(*rank))));
        }
    }
}

fn byte_strings(member: &mut Member, group: &Group) {
    for base in [0, 13, BYTES_PER_ROUND + 1, 3 * BYTES_PER_ROUND] {
        let text = |m: usize| -> Vec<u8> {
            let len = if m == 1 { 0 } else { base + m * 3 };
            (0..len).map(|i| (i * 7 + m) as u8).collect()
        };
        let mut all = vec![None; group.len()];
        let each = &mut |m: usize, bytes: &[u8]| {
            all[m].get_or_insert_with(Vec::new).extend_from_slice(bytes);
        };
        member.comm.all_gather_bytes(group, Call::HOST, &text(group.me()), each).unwrap();
        for (m, bytes) in all.iter().enumerate() {
            assert_eq!(bytes.as_ref(), Some(&text(m)), "member {m}, base {base}");
        }
    }
}

/// Passes a message along the ranks.
fn messages(member: &mut Member) {
    let (me, world) = (member.rank.0, member.comm.world());
    for len in [10, 70_000] {
        let part = member.filled(&values(0, 1, len));
        if me > 0 {
            part.write_host(&vec![0.0f32; len]);
            member.comm.recv(Rank(me - 1), 4, &[part]).unwrap();
        }
        if me + 1 < world {
            member.comm.send(Rank(me + 1), 4, &[part]).unwrap();
        }
        assert_eq!(bits(&read(part)), bits(&values(0, 1, len)));
    }
}

// ---- failures ------------------------------------------------------------------------------------------------

/// A rank that never arrives: the others name the collective at their deadline.
#[test]
fn a_late_rank_is_reported_at_the_deadline() {
    if role().is_some() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    if let Err(why) = run_ranks("late", 2, folder.path()) {
        return println!("skipped: {why}");
    }
    {
        let error = String::from_utf8(wait_for_file(&folder.path().join("error"))).unwrap();
        let expected =
            "rank 0 timed out: all-reduce of 1000 f32, operation 7 among 2 ranks did not complete by MPI";
        assert!(error.starts_with(expected), "{error}");
    }
}

fn late(member: &mut Member, folder: &Path) {
    let group = Group::along(&Mesh::on_one_node(1, 2), Axis::World, member.rank);
    member.comm.barrier(&group, 1).unwrap();
    if member.rank == Rank(1) {
        wait_for_file(&folder.join("error"));
        // The other rank does not finalise MPI.
        member.abort.raise("the other rank has failed");
        return;
    }
    member.comm.set_deadline(Duration::from_secs(2));
    let start = Instant::now();
    let part = member.filled(&vec![1.0; 1000]);
    let error = member.comm.all_reduce(&group, 7, &[part], View::empty()).unwrap_err();
    assert!(matches!(error, CommError::MpiTimedOut { .. }), "{error}");
    assert!(start.elapsed() >= Duration::from_secs(2));
    // Nothing calls MPI any more.
    let second = member.comm.barrier(&group, 8).unwrap_err();
    assert!(second.to_string().contains("after an earlier failure"), "{second}");
    publish(folder, &error.to_string());
}

/// Writes a file at once, for a process that waits for it.
fn publish(folder: &Path, text: &str) {
    std::fs::write(folder.join("partial"), text).unwrap();
    std::fs::rename(folder.join("partial"), folder.join("error")).unwrap();
}

/// A wait ends when the run is aborted.
#[test]
fn an_abort_ends_a_wait() {
    if role().is_some() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    if let Err(why) = run_ranks("aborted", 2, folder.path()) {
        return println!("skipped: {why}");
    }
    let error = wait_for_file(&folder.path().join("error"));
    assert_eq!(String::from_utf8(error).unwrap(), "the run was aborted: another rank has failed");
}

fn aborted(member: &mut Member, folder: &Path) {
    let group = Group::along(&Mesh::on_one_node(1, 2), Axis::World, member.rank);
    member.comm.barrier(&group, 1).unwrap();
    if member.rank == Rank(1) {
        wait_for_file(&folder.join("error"));
        member.abort.raise("the other rank has failed");
        return;
    }
    let abort = member.abort.clone();
    let raise = std::thread::spawn(move || abort.raise("another rank has failed"));
    let error = member.comm.barrier(&group, 2).unwrap_err();
    raise.join().unwrap();
    publish(folder, &error.to_string());
}

/// A library whose launcher did not start this process takes it for the only rank.
#[test]
fn ranks_of_another_launcher_are_refused() {
    if role().is_some() || std::env::var_os("PMI_RANK").is_some() {
        return;
    }
    let mpi = match Mpi::open(&search()) {
        Ok(mpi) => mpi,
        Err(why) => {
            return println!("skipped: {why}");
        }
    };
    let spec = MpiSpec { mpi, rank: Rank(1), world: 2, deadline: DEADLINE, abort: Abort::default() };
    let error = MpiWorld::start(spec).unwrap_err().to_string();
    let expected =
        "for rank 0 of 1, but its launcher started it as rank 1 of 2; start ranks with the mpiexec";
    assert!(error.contains(expected), "{error}");
    let spec = MpiSpec { mpi, rank: Rank(0), world: 1, deadline: DEADLINE, abort: Abort::default() };
    let second = MpiWorld::start(spec).unwrap_err().to_string();
    assert_eq!(second, "could not set up MPI: a process can initialise it only once");
}
