//! The TCP carrier on a fake network with a fake clock: thousands of seeds, each a world, a list of
//! collectives and some weather. Never a hang, never a wrong result: the right bits, or an error that says
//! what happened.
//!
//! A failing seed is printed. `LOCKSTEP_NET_SEED=<seed>` runs that one alone; `LOCKSTEP_NET_SEEDS=<n>` runs
//! n.

mod fake_net;
mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fake_net::{Dice, FakeNet, Fault, Turn, Weather, fake_world};
use lockstep_comm::{Abort, Comm, CommError, Gathered, Group, TcpCarrier, TcpSpec};
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
    weather: Weather,
    /// A rank that leaves before this step; before the first, it never comes.
    leaves: Option<(usize, usize)>,
}

fn case(seed: u64) -> Case {
    let dice = &mut Dice(seed ^ 0x5eed);
    let world = 2 + dice.below(MAX_WORLD - 1);
    let mesh = if world == 4 && dice.one_in(2) {
        Mesh { replicate: 2, shard: 2, per_node: 2 }
    } else {
        Mesh::on_one_node(1, world as u32)
    };
    let elems = |dice: &mut Dice| match dice.below(4) {
        0 => 1 + dice.below(5),
        1 => 256 * (1 + dice.below(8)),
        2 => 1 + dice.below(3000),
        _ => 1 + dice.below(MAX_ELEMS),
    };
    let steps = (0..1 + dice.below(5))
        .map(|_| match dice.below(6) {
            0 => Step::AllReduce(elems(dice)),
            1 => Step::AllGather(elems(dice)),
            2 => Step::ReduceScatter(elems(dice)),
            3 => Step::Broadcast(elems(dice), dice.below(world) as u32),
            4 => Step::Bytes(dice.below(2000)),
            _ => Step::Barrier,
        })
        .collect::<Vec<_>>();
    let links = world * (world - 1) / 2;
    // Some fall into the handshakes, some among the calls.
    let after = if dice.one_in(3) { dice.below(260) } else { dice.below(40_000) };
    let fault = match dice.below(4) {
        0 => Some((dice.below(links), Fault::Cut { after })),
        1 => Some((dice.below(links), Fault::Stall { after })),
        _ => None,
    };
    let strangers = (0..dice.below(4)).map(|_| stranger(dice, world)).collect();
    let window = [80, 300, 4000, 60_000][dice.below(4)];
    let longest_delay = Duration::from_micros([1, 200, 20_000][dice.below(3)]);
    let leaves = dice.one_in(8).then(|| (dice.below(world), dice.below(steps.len())));
    Case { mesh, steps, weather: Weather { window, longest_delay, fault, strangers }, leaves }
}

/// Garbage, or a hello that is cut short or wrong.
fn stranger(dice: &mut Dice, world: usize) -> (usize, Vec<u8>, bool) {
    let mut bytes: Vec<u8> = (0..dice.below(300)).map(|_| dice.next() as u8).collect();
    if dice.one_in(2) {
        let hello = [&b"lockstep\x01\x00\x00\x00"[..], &[1, 0, 0, 0, 0, 0, 0, 0, world as u8]].concat();
        let len = bytes.len().min(hello.len());
        bytes[..len].copy_from_slice(&hello[..len]);
    }
    (dice.below(world), bytes, dice.one_in(2))
}

/// One rank's run. `Ok(true)` if it went to the end.
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

/// One collective, and whether its result is right.
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
            comm.all_gather(group, tag, &[Gathered { own, whole }])?;
            let wanted: Vec<f32> = group
                .members()
                .iter()
                .enumerate()
                .flat_map(|(m, rank)| {
                    let share = group.share(len, m);
                    values(rank.0, i, len)[share.start..share.end].to_vec()
                })
                .collect();
            assert_eq!(bits(&read(whole)), bits(&wanted), "step {i}: {step:?}");
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

/// Runs one seed and judges it. Returns what the ranks came to, and when.
fn run_seed(seed: u64, memories: &[Memory]) -> (Vec<Result<bool, CommError>>, Duration) {
    let case = case(seed);
    let nets = fake_world(case.mesh.world_size() as usize, seed, case.weather.clone());
    let clock = nets[0].clock();
    let outcomes: Vec<Result<bool, CommError>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..)
            .zip(nets.into_iter().zip(memories))
            .map(|(rank, (net, memory))| {
                let case = &case;
                scope.spawn(move || {
                    let _turn = Turn::begin(&net);
                    run_rank(net, rank, case, memory)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("a right result")).collect()
    });
    // Handshakes and every step may each wait once for somebody in trouble, and once more for its neighbour.
    let limit = DEADLINE * (2 * case.mesh.world_size() + 2);
    assert!(clock() < limit, "it took {:?} of fake time", clock());
    let calm = case.weather.fault.is_none() && case.leaves.is_none();
    for (rank, outcome) in outcomes.iter().enumerate() {
        match outcome {
            Ok(_) => {}
            Err(e) if calm => panic!("rank {rank} failed in calm weather: {e}"),
            Err(
                CommError::Lost { .. }
                | CommError::TimedOut { .. }
                | CommError::Setup { .. }
                | CommError::NotAuthorised { .. },
            ) => {}
            Err(e) => panic!("rank {rank} failed in a way that the weather does not explain: {e}"),
        }
    }
    // Nobody is left alone with a call that others have given up: if a rank fails, it says whom it missed.
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
fn a_seed_repeats() {
    let memories = memories();
    for seed in 0..40 {
        assert_eq!(run_seed(seed, &memories), run_seed(seed, &memories), "seed {seed}");
    }
}

/// The weather is bad enough to be worth the trouble, and not so bad that nothing ever works.
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
fn no_hang_and_no_wrong_result() {
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
