//! Worlds of ranks in one process, over every carrier, and plain folds to compare their results with.
#![allow(dead_code, unreachable_pub)]

pub mod children;

use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use lockstep_comm::{Abort, CarrierChoice, Comm, CommError, ConnectSpec, Exchange, connect, thread_world};
use lockstep_core::fold::{FoldStep, fold_scratch_elems, fold_steps};
use lockstep_core::proof::Secret;
use lockstep_core::{Bytes, DType, Rank};
use lockstep_device::{Memory, Pool, View};

/// The carrier under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestCarrier {
    Threads,
    Shm,
    Tcp,
    /// Shared memory within simulated hosts of this many ranks, TCP between them.
    Mixed(u32),
}

pub const ALL_CARRIERS: [TestCarrier; 5] =
    [TestCarrier::Threads, TestCarrier::Shm, TestCarrier::Tcp, TestCarrier::Mixed(2), TestCarrier::Mixed(3)];

/// One rank of a test, with memory that peers can read.
pub struct Member {
    pub rank: Rank,
    pub comm: Comm,
    pub memory: Arc<Memory>,
    pub abort: Abort,
    taken: usize,
}

impl Member {
    /// Allocates the next `len` elements of the memory.
    pub fn take(&mut self, len: usize, dtype: DType) -> View<'static> {
        let view = self.memory.view(self.taken, len, dtype);
        self.taken += (len * dtype.size()).next_multiple_of(64);
        // SAFETY: a member outlives every use of its views in a test.
        unsafe { std::mem::transmute::<View<'_>, View<'static>>(view) }
    }

    pub fn take_f32(&mut self, values: &[f32]) -> View<'static> {
        let view = self.take(values.len(), DType::F32);
        view.write(values).unwrap();
        view
    }

    /// The current allocation mark, for [`Member::reset_mark`].
    pub fn taken_mark(&self) -> usize {
        self.taken
    }

    pub fn reset_mark(&mut self, mark: usize) {
        self.taken = mark;
    }

    pub fn scratch(&mut self) -> View<'static> {
        let world = self.comm.world();
        self.take(fold_scratch_elems(world), DType::F32)
    }
}

/// Runs `body` on every rank of a world, each in its own thread, and returns the results.
pub fn run_world<T: Send>(
    carrier: TestCarrier,
    world: u32,
    deadline: Duration,
    bytes: usize,
    body: impl Fn(&mut Member) -> T + Sync,
) -> Vec<T> {
    let threads: Vec<_> = thread_world(world, deadline).into_iter().map(|c| Mutex::new(Some(c))).collect();
    let rendezvous = Rendezvous::new(world);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|r| {
                let (body, threads, rendezvous) = (&body, &threads, &rendezvous);
                scope.spawn(move || {
                    let memory = Memory::allocate_shared(Bytes(bytes as u64), &Pool::new(1)).unwrap();
                    let (memory, abort) = (Arc::new(memory), Abort::default());
                    let comm = match carrier {
                        TestCarrier::Threads => {
                            let carrier = threads[r as usize].lock().unwrap().take().unwrap();
                            Comm::new(Box::new(carrier.with_abort(abort.clone())))
                        }
                        _ => connect_by(carrier, r, world, deadline, &memory, &abort, &mut |mine| {
                            Ok(rendezvous.gather(r, mine))
                        })
                        .unwrap(),
                    };
                    body(&mut Member { rank: Rank(r), comm, memory, abort, taken: 0 })
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

pub fn connect_by(
    carrier: TestCarrier,
    rank: u32,
    world: u32,
    deadline: Duration,
    memory: &Arc<Memory>,
    abort: &Abort,
    exchange: &mut Exchange<'_>,
) -> Result<Comm, CommError> {
    let session = Secret::from_text("a test");
    let spec = ConnectSpec {
        rank: Rank(rank),
        world,
        host: match carrier {
            TestCarrier::Mixed(per_host) => Some(format!("host {}", rank / per_host)),
            _ => Some("host".into()),
        },
        regions: vec![memory.clone()],
        bind: "127.0.0.1:0".parse().unwrap(),
        advertise: None,
        session: &session,
        run_id: "run",
        deadline,
        abort: abort.clone(),
        carrier: match carrier {
            TestCarrier::Tcp => CarrierChoice::Tcp,
            TestCarrier::Shm => CarrierChoice::Shm,
            _ => CarrierChoice::Auto,
        },
        spin: None,
    };
    connect(&spec, exchange)
}

/// An all-gather between threads, used to connect.
pub struct Rendezvous {
    messages: Mutex<Vec<Vec<u8>>>,
    barrier: Barrier,
}

impl Rendezvous {
    pub fn new(world: u32) -> Rendezvous {
        let messages = Mutex::new(vec![Vec::new(); world as usize]);
        Rendezvous { messages, barrier: Barrier::new(world as usize) }
    }

    pub fn gather(&self, rank: u32, mine: &[u8]) -> Vec<Vec<u8>> {
        self.messages.lock().unwrap()[rank as usize] = mine.to_vec();
        self.barrier.wait();
        let all = self.messages.lock().unwrap().clone();
        self.barrier.wait();
        all
    }
}

/// Values whose sums round, so that another order of summation gives other bits.
pub fn values(rank: u32, salt: u32, len: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9u32 ^ rank.wrapping_mul(0x85eb_ca6b) ^ salt.wrapping_mul(0xc2b2_ae35);
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state as f32 / u32::MAX as f32 - 0.5) * 2f32.powi((state % 9) as i32)
        })
        .collect()
}

/// The sum of the members' contributions along the tree over their nodes.
pub fn plain_fold(nodes: &[u32], contributions: &[Vec<f32>]) -> Vec<f32> {
    let mut stack: Vec<Vec<f32>> = Vec::new();
    fold_steps(nodes, &mut |step| match step {
        FoldStep::Push(m) => stack.push(contributions[m].clone()),
        FoldStep::Add => {
            let right = stack.pop().unwrap();
            let left = stack.last_mut().unwrap();
            left.iter_mut().zip(&right).for_each(|(l, r)| *l += r);
        }
    });
    stack.pop().unwrap()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

pub fn read(view: View<'_>) -> Vec<f32> {
    let mut out = vec![0.0; view.len()];
    view.read_host(&mut out);
    out
}
