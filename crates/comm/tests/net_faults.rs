//! The TCP carrier on a simulated network with a simulated clock. Each of thousands of seeds decides a world, a list
//! of collectives and the network's faults. A run must never hang and never return a wrong result: it gives the right
//! bits, or an error that says what happened.
//!
//! A failing seed is printed. `LOCKSTEP_NET_SEED=<seed>` runs only that seed; `LOCKSTEP_NET_SEEDS=<n>` runs n seeds.

mod fake_net;
mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fake_net::{FakeNet, Fault, NetConditions, SeededRng, TurnGuard, fake_world};
use lockstep_comm::{Abort, Comm, CommError, GatherPart, Group, TcpCarrier, TcpSpec};
use lockstep_core::fold::fold_scratch_elems;
use lockstep_core::proof::Secret;
use lockstep_core::{Axis, Bytes, DType, Mesh, Rank};
use lockstep_device::{Memory, Pool};
use support::{bits, plain_fold, read, values};

const DEADLINE: Duration = Duration::from_secs(10);
const NUM_SEEDS: u64 = 2000;
const MAX_WORLD: usize = 4;
const MAX_ELEMS: usize = 20_000;

#[derive(Clone, Copy, Debug)]
enum Step {
    AllReduce(usize),
    AllGather(usize),
    ReduceScatter(usize),
    Broadcast(usize, u32),
    Bytes(usize),
    Barrier,
}

/// Everything a seed decides.
#[derive(Debug)]
struct Case {
    mesh: Mesh,
    steps: Vec<Step>,
    conditions: NetConditions,
    /// A rank, and the step before which it leaves. At step 0 it never connects.
    leaves: Option<(usize, usize)>,
}

fn case(seed: u64) -> Case {
    let rng = &mut SeededRng(seed ^ 0x5eed);
    let world = 2 + rng.below(MAX_WORLD - 1);
    let mesh = if world == 4 && rng.one_in(2) {
        Mesh { replicate: 2, shard: 2, per_node: 2 }
    } else {
        Mesh::on_one_node(1, world as u32)
    };
    let elems = |rng: &mut SeededRng| match rng.below(4) {
        0 => 1 + rng.below(5),
        1 => 256 * (1 + rng.below(8)),
        2 => 1 + rng.below(3000),
        _ => 1 + rng.below(MAX_ELEMS),
    };
    let steps = (0..1 + rng.below(5))
        .map(|_| match rng.below(6) {
            0 => Step::AllReduce(elems(rng)),
            1 => Step::AllGather(elems(rng)),
            2 => Step::ReduceScatter(elems(rng)),
            3 => Step::Broadcast(elems(rng), rng.below(world) as u32),
            4 => Step::Bytes(rng.below(2000)),
            _ => Step::Barrier,
        })
        .collect::<Vec<_>>();
    let links = world * (world - 1) / 2;
    // Some faults hit the handshakes, others the calls.
    let after = if rng.one_in(3) { rng.below(260) } else { rng.below(40_000) };
    let fault = match rng.below(4) {
        0 => Some((rng.below(links), Fault::Cut { after })),
        1 => Some((rng.below(links), Fault::Stall { after })),
        _ => None,
    };
    let intruders = (0..rng.below(4)).map(|_| intruder(rng, world)).collect();
    let window = [80, 300, 4000, 60_000][rng.below(4)];
    let longest_delay = Duration::from_micros([1, 200, 20_000][rng.below(3)]);
    let leaves = rng.one_in(8).then(|| (rng.below(world), rng.below(steps.len())));
    Case { mesh, steps, conditions: NetConditions { window, longest_delay, fault, intruders }, leaves }
}

/// A client that sends garbage, or a hello that is truncated or wrong.
fn intruder(rng: &mut SeededRng, world: usize) -> (usize, Vec<u8>, bool) {
    let mut bytes: Vec<u8> = (0..rng.below(300)).map(|_| rng.next() as u8).collect();
    if rng.one_in(2) {
        let hello = [&b"lockstep\x01\x00\x00\x00"[..], &[1, 0, 0, 0, 0, 0, 0, 0, world as u8]].concat();
        let len = bytes.len().min(hello.len());
        bytes[..len].copy_from_slice(&hello[..len]);
    }
    (rng.below(world), bytes, rng.one_in(2))
}

/// Runs one rank. `Ok(true)` if it completed all steps.
fn run_rank(net: FakeNet, rank: u32, case: &Case, memory: &Memory) -> Result<bool, CommError> {
    let world = case.mesh.world_size();
    if case.leaves == Some((rank as usize, 0)) {
        return Ok(false);
    }
    let peers: Vec<bool> = (0..world).map(|r| r != rank).collect();
    let carrier = TcpCarrier::establish(
        net,
        &TcpSpec {
            rank: Rank(rank),
            peers: &peers,
            session: &Secret::from_bytes([5; 32]),
            run_id: "run",
            deadline: DEADLINE,
            spin: Duration::ZERO,
            abort: Abort::default(),
        },
    )?;
    let mut comm = Comm::new(Box::new(carrier));
    let group = Group::along(&case.mesh, Axis::World, Rank(rank));
    let scratch = memory.view(MAX_ELEMS.next_multiple_of(64) * 4, fold_scratch_elems(world), DType::F32);
    for (i, step) in case.steps.iter().enumerate() {
        if case.leaves == Some((rank as usize, i)) {
            return Ok(false);
        }
        run_step(&mut comm, &group, i as u32, *step, memory, scratch)?;
    }
    Ok(true)
}

/// Runs one collective and checks its result.
fn run_step(
    comm: &mut Comm,
    group: &Group,
    i: u32,
    step: Step,
    memory: &Memory,
    scratch: lockstep_device::View<'_>,
) -> Result<(), CommError> {
    let me = comm.rank().0;
    let tag = u64::from(i);
    let sum = |len: usize| {
        let all: Vec<_> = group.members().iter().map(|m| values(m.0, i, len)).collect();
        plain_fold(group.nodes(), &all)
    };
    let filled = |len: usize| {
        let view = memory.view(0, len, DType::F32);
        view.write_host(&values(me, i, len));
        view
    };
    match step {
        Step::Barrier => comm.barrier(group, tag)?,
        Step::AllReduce(len) => {
            let view = filled(len);
            comm.all_reduce(group, tag, &[view], scratch)?;
            assert_eq!(bits(&read(view)), bits(&sum(len)), "step {i}: {step:?}");
        }
        Step::ReduceScatter(len) => {
            let view = filled(len);
            comm.reduce_scatter(group, tag, &[view], scratch)?;
            let own = group.share(len, group.me());
            assert_eq!(
                bits(&read(view)[own.start..own.end]),
                bits(&sum(len)[own.start..own.end]),
                "step {i}: {step:?}"
            );
        }
        Step::Broadcast(len, root) => {
            let view = filled(len);
            comm.broadcast(group, tag, Rank(root), &[view])?;
            assert_eq!(bits(&read(view)), bits(&values(root, i, len)), "step {i}: {step:?}");
        }
        Step::AllGather(len) => {
            let whole = filled(len);
            let own = group.share(len, group.me());
            let own = whole.slice(own.start, own.elems());
            comm.all_gather(group, tag, &[GatherPart { own, whole }])?;
            let expected: Vec<f32> = group
                .members()
                .iter()
                .enumerate()
                .flat_map(|(m, rank)| {
                    let share = group.share(len, m);
                    values(rank.0, i, len)[share.start..share.end].to_vec()
                })
                .collect();
            assert_eq!(bits(&read(whole)), bits(&expected), "step {i}: {step:?}");
        }
        Step::Bytes(len) => {
            let text = |r: u32| vec![r as u8 + 1; len * r as usize / 2 + 1];
            comm.all_gather_bytes(group, tag, &text(me), &mut |m, bytes| {
                assert_eq!(bytes, text(group.members()[m].0), "step {i}: {step:?}");
            })?;
        }
    }
    Ok(())
}

/// Runs one seed and checks the outcome. Returns the result of every rank, and the simulated time.
fn run_seed(seed: u64, memories: &[Memory]) -> (Vec<Result<bool, CommError>>, Duration) {
    let case = case(seed);
    let nets = fake_world(case.mesh.world_size() as usize, seed, case.conditions.clone());
    let clock = nets[0].clock();
    let outcomes: Vec<Result<bool, CommError>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..)
            .zip(nets.into_iter().zip(memories))
            .map(|(rank, (net, memory))| {
                let case = &case;
                scope.spawn(move || {
                    let _turn = TurnGuard::begin(&net);
                    run_rank(net, rank, case, memory)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("results are correct")).collect()
    });
    // Handshakes and steps may each wait once for a rank that is in trouble, and once more for its neighbour.
    let limit = DEADLINE * (2 * case.mesh.world_size() + 2);
    assert!(clock() < limit, "the run took {:?} of simulated time", clock());
    let no_faults = case.conditions.fault.is_none() && case.leaves.is_none();
    for (rank, outcome) in outcomes.iter().enumerate() {
        match outcome {
            Ok(_) => {}
            Err(e) if no_faults => panic!("rank {rank} failed without a fault: {e}"),
            Err(
                CommError::Lost { .. }
                | CommError::TimedOut { .. }
                | CommError::Setup { .. }
                | CommError::NotAuthorised { .. },
            ) => {}
            Err(e) => panic!("rank {rank} failed with an error that the faults do not explain: {e}"),
        }
    }
    // Every error names the rank it concerns.
    for error in outcomes.iter().filter_map(|o| o.as_ref().err()) {
        assert!(error.to_string().contains("rank "), "{error}");
    }
    (outcomes, clock())
}

fn memories() -> Vec<Memory> {
    let bytes = MAX_ELEMS.next_multiple_of(64) * 4 + fold_scratch_elems(MAX_WORLD as u32) * 4;
    (0..MAX_WORLD).map(|_| Memory::allocate(Bytes(bytes as u64), &Pool::new(1)).unwrap()).collect()
}

#[test]
fn a_seed_gives_the_same_run_twice() {
    let memories = memories();
    for seed in 0..40 {
        assert_eq!(run_seed(seed, &memories), run_seed(seed, &memories), "seed {seed}");
    }
}

/// The faults are frequent enough to test every failure, and rare enough that most runs succeed.
#[test]
fn seeds_cover_success_and_every_failure() {
    let memories = memories();
    let outcomes: Vec<_> = (0..300).flat_map(|seed| run_seed(seed, &memories).0).collect();
    let count = |is: fn(&Result<bool, CommError>) -> bool| outcomes.iter().filter(|o| is(o)).count();
    assert!(count(|o| matches!(o, Ok(true))) > 300);
    assert!(count(|o| matches!(o, Err(CommError::Lost { .. }))) > 50);
    assert!(count(|o| matches!(o, Err(CommError::TimedOut { .. }))) > 20);
    assert!(count(|o| matches!(o, Err(CommError::Setup { .. }))) > 5);
}

#[test]
fn no_seed_hangs_or_gives_a_wrong_result() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let (first, count) = match number("LOCKSTEP_NET_SEED") {
        Some(seed) => (seed, 1),
        None => (0, number("LOCKSTEP_NET_SEEDS").unwrap_or(NUM_SEEDS)),
    };
    let next = AtomicU64::new(first);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let memories = memories();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        return;
                    }
                    let run = std::panic::AssertUnwindSafe(|| run_seed(seed, &memories));
                    if let Err(panic) = std::panic::catch_unwind(run) {
                        println!("LOCKSTEP_NET_SEED={seed} fails: {:?}", case(seed));
                        std::panic::resume_unwind(panic);
                    }
                }
            });
        }
    });
}
