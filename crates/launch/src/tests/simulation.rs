//! Simulates the rendezvous under faults: ranks that join late, twice, never or with the wrong token, that die, stall
//! or fail at any point; links that break; intruders that send garbage, recordings or nothing. Each of thousands of
//! worlds is generated from a seed. `LOCKSTEP_SIM_SEED=n` replays one seed, `LOCKSTEP_SIM_SEEDS=n` runs n seeds.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lockstep_core::proof::Secret;

use super::fake_net::{Delivery, End, LinkId, Net};
use crate::abort::{Abort, Member};
use crate::client::{self, Client, ClientConfig};
use crate::error::LaunchError;
use crate::server::{self, Server, ServerConfig};
use crate::wire::to_hex;

const TICK: Duration = Duration::from_millis(50);
const SEEDS: u64 = 4000;

/// The fault that a rank suffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SimFault {
    None,
    NeverJoins,
    WrongToken,
    /// A second process with the same rank joins too.
    Twice,
    OtherWorld,
    /// Its process dies at this time.
    Dies(Duration),
    /// It stays connected, but does nothing from this time on.
    Stalls(Duration),
    /// It fails in this exchange, and reports it.
    Fails(usize),
    /// It makes another exchange than the other ranks.
    Diverges(usize),
    /// Its link breaks at this time.
    LosesLink(Duration),
}

/// A simulated rank.
struct SimRank {
    rank: u32,
    pid: u32,
    fault: SimFault,
    client: Client,
    start: Duration,
    link: Option<LinkId>,
    /// Its process has ended.
    dead: bool,
    view: Option<Vec<Member>>,
    exchanged: usize,
    result: Option<(Duration, Result<(), LaunchError>)>,
}

struct World {
    net: Net,
    server: Server,
    server_over: Option<Result<(), Abort>>,
    ranks: Vec<SimRank>,
    /// The rank that owns each link. Links of intruders have no owner.
    owners: BTreeMap<LinkId, usize>,
    exchanges: usize,
    world_size: u32,
    /// No rendezvous is running.
    no_server: bool,
    trace: bool,
}

fn pick_fault(net: &mut Net, no_faults: bool, join: Duration) -> SimFault {
    if no_faults || !net.rng.one_in(4) {
        return SimFault::None;
    }
    let at = net.rng.ms(join.as_millis() as u64 + 3000);
    match net.rng.below(9) {
        0 => SimFault::NeverJoins,
        1 => SimFault::WrongToken,
        2 => SimFault::Twice,
        3 => SimFault::Dies(at),
        4 => SimFault::Stalls(at),
        5 => SimFault::Fails(net.rng.below(4) as usize),
        6 => SimFault::Diverges(net.rng.below(4) as usize),
        7 => SimFault::OtherWorld,
        _ => SimFault::LosesLink(at),
    }
}

impl World {
    fn new(seed: u64, trace: bool) -> (World, Duration) {
        let mut net = Net::new(seed, 1);
        let delay = [1, 20, 80][net.rng.below(3) as usize];
        let mut net = Net::new(net.rng.next(), delay);
        let no_faults = net.rng.one_in(3);
        let world_size = 2 + net.rng.below(4) as u32;
        let join = Duration::from_millis(1500 + net.rng.below(6000));
        let secret = Secret::from_text("the token of this run");
        let server = Server::new(ServerConfig {
            secret: secret.clone(),
            world_size,
            local_world_size: 1,
            attempt: 1,
            version: "1".into(),
            run: net.rng.nonce(),
            join_timeout: join,
        });
        let mut ranks = Vec::new();
        for rank in 0..world_size {
            let fault = pick_fault(&mut net, no_faults, join);
            let copies = if fault == SimFault::Twice { 2 } else { 1 };
            for copy in 0..copies {
                let pid = 100 * (rank + 1) + copy;
                let wrong = fault == SimFault::WrongToken;
                let secret = if wrong { Secret::from_text("another token") } else { secret.clone() };
                let other = fault == SimFault::OtherWorld;
                let config = ClientConfig {
                    secret,
                    addr: "alpha:29500".into(),
                    member: Member { rank, node: rank, local_rank: 0, host: "alpha".into(), pid },
                    world_size: world_size + u32::from(other),
                    local_world_size: 1,
                    attempt: 1,
                    version: "1".into(),
                    join_timeout: join,
                };
                // If there are faults, some ranks also join after the deadline.
                let start = net.rng.ms(if no_faults { 1000 } else { join.as_millis() as u64 + 500 });
                ranks.push(SimRank {
                    rank,
                    pid,
                    fault,
                    client: Client::new(config),
                    start,
                    link: None,
                    dead: fault == SimFault::NeverJoins,
                    view: None,
                    exchanged: 0,
                    result: None,
                });
            }
        }
        let no_server = net.rng.one_in(25);
        let exchanges = 4;
        let server_over = None;
        let mut world = World {
            net,
            server,
            server_over,
            ranks,
            owners: BTreeMap::new(),
            exchanges,
            world_size,
            no_server,
            trace,
        };
        // Timer 0 is the server's, timers from 1 on are the ranks', and `usize::MAX` starts an intruder.
        world.net.timer(Duration::ZERO, 0);
        for idx in 0..world.ranks.len() {
            world.net.timer(world.ranks[idx].start, 1 + idx);
        }
        let intruders = world.net.rng.below(12);
        for _ in 0..intruders {
            let at = world.net.rng.ms(4000);
            world.net.timer(at, usize::MAX);
        }
        (world, join)
    }

    fn run(&mut self, until: Duration) {
        while let Some(delivery) = self.net.next() {
            if self.net.now > until {
                return;
            }
            match delivery {
                Delivery::Timer(0) => {
                    self.server_event(server::Event::Tick);
                    self.net.timer(self.net.now + TICK, 0);
                }
                Delivery::Timer(usize::MAX) => self.intruder(),
                Delivery::Timer(id) => self.rank_timer(id - 1),
                Delivery::Opened { link } => {
                    let nonce = self.net.rng.nonce();
                    self.server_event(server::Event::Opened {
                        conn: link,
                        from: format!("link {link}"),
                        nonce,
                    });
                    if let Some(&idx) = self.owners.get(&link) {
                        let nonce = self.net.rng.nonce();
                        self.rank_event(idx, client::Event::Connected { nonce });
                    }
                }
                Delivery::Bytes { link, to: End::Server, bytes } => {
                    self.server_event(server::Event::Bytes { conn: link, bytes: &bytes });
                }
                Delivery::Closed { link, to: End::Server } => {
                    self.server_event(server::Event::Closed { conn: link });
                }
                Delivery::Bytes { link, to: End::Caller, bytes } => {
                    if let Some(&idx) = self.owners.get(&link) {
                        self.rank_event(idx, client::Event::Bytes(&bytes));
                    }
                }
                Delivery::Closed { link, to: End::Caller } => {
                    if let Some(&idx) = self.owners.get(&link) {
                        self.ranks[idx].link = None;
                        self.rank_event(idx, client::Event::Closed("the link is gone".into()));
                    }
                }
            }
        }
    }

    fn server_event(&mut self, event: server::Event<'_>) {
        for action in self.server.handle(self.net.now, event) {
            self.trace_line(|| format!("server: {}", brief(&action)));
            match action {
                server::Action::Send { conn, bytes } => self.net.send(conn, End::Caller, &bytes),
                server::Action::Close { conn } => self.net.close(conn, End::Server),
                server::Action::Log(_) => {}
                server::Action::Over(result) => {
                    assert!(self.server_over.is_none(), "the end is reported once");
                    self.server_over = Some(result);
                }
            }
        }
    }

    fn rank_timer(&mut self, idx: usize) {
        let (now, rank_state) = (self.net.now, &mut self.ranks[idx]);
        match rank_state.fault {
            SimFault::Dies(at) if now >= at && !rank_state.dead => {
                rank_state.dead = true;
                if let Some(link) = rank_state.link.take() {
                    self.net.close(link, End::Caller);
                }
            }
            SimFault::LosesLink(at) if now >= at => {
                rank_state.fault = SimFault::LosesLink(Duration::MAX);
                if let Some(link) = rank_state.link {
                    self.net.cut(link);
                }
            }
            _ => {}
        }
        self.rank_event(idx, client::Event::Tick);
        if !self.ranks[idx].dead {
            self.net.timer(now + TICK, 1 + idx);
        }
    }

    fn rank_event(&mut self, idx: usize, event: client::Event<'_>) {
        let now = self.net.now;
        let rank_state = &mut self.ranks[idx];
        if rank_state.dead
            || matches!(rank_state.fault, SimFault::Stalls(at) if now >= at)
            || rank_state.client.is_over()
        {
            return;
        }
        let mut actions: std::collections::VecDeque<_> = rank_state.client.handle(now, event).into();
        while let Some(action) = actions.pop_front() {
            let rank = self.ranks[idx].rank;
            self.trace_line(|| format!("rank {rank}: {action:?}"));
            match action {
                client::Action::Connect => {
                    if self.no_server || self.net.rng.one_in(10) {
                        let failed = client::Event::ConnectFailed("refused".into());
                        actions.extend(self.ranks[idx].client.handle(now, failed));
                        continue;
                    }
                    let link = self.net.connect();
                    self.owners.retain(|_, owner| *owner != idx);
                    self.owners.insert(link, idx);
                    self.ranks[idx].link = Some(link);
                }
                client::Action::Send(bytes) => {
                    if let Some(link) = self.ranks[idx].link {
                        self.net.send(link, End::Server, &bytes);
                    }
                }
                client::Action::Close => {
                    self.owners.retain(|_, owner| *owner != idx);
                    if let Some(link) = self.ranks[idx].link.take() {
                        self.net.close(link, End::Caller);
                    }
                }
                client::Action::Joined { members, .. } => {
                    assert!(self.ranks[idx].view.is_none(), "joined once");
                    self.ranks[idx].view = Some(members);
                    actions.extend(self.next_exchange(idx));
                }
                client::Action::All { name, values } => {
                    let number = self.ranks[idx].exchanged;
                    // All ranks may have diverged together.
                    let other =
                        if self.ranks[idx].fault == SimFault::Diverges(number) { "another " } else { "" };
                    assert_eq!(name, format!("{other}exchange {number}"));
                    let expected: Vec<Vec<u8>> =
                        (0..self.world_size).map(|rank| vec![number as u8, rank as u8]).collect();
                    assert_eq!(values, expected, "the values of all ranks, indexed by rank");
                    self.ranks[idx].exchanged += 1;
                    actions.extend(self.next_exchange(idx));
                }
                client::Action::Ended(result) => {
                    assert!(self.ranks[idx].result.is_none(), "ended once");
                    self.ranks[idx].result = Some((now, result));
                }
            }
        }
    }

    fn next_exchange(&mut self, idx: usize) -> Vec<client::Action> {
        let rank_state = &mut self.ranks[idx];
        let number = rank_state.exchanged;
        let event = if rank_state.fault == SimFault::Fails(number) {
            client::Event::Fail { text: "out of memory".into(), code: 70 }
        } else if number == self.exchanges {
            client::Event::Leave
        } else {
            let other = if rank_state.fault == SimFault::Diverges(number) { "another " } else { "" };
            client::Event::Put {
                name: format!("{other}exchange {number}"),
                hex: to_hex(&[number as u8, rank_state.rank as u8]),
                timeout: Duration::from_secs(60),
            }
        };
        rank_state.client.handle(self.net.now, event)
    }

    /// An intruder connects and sends garbage, half a hello, a recording or nothing.
    fn intruder(&mut self) {
        let link = self.net.connect();
        let bytes = match self.net.rng.below(4) {
            0 => Vec::new(),
            1 => (0..1 + self.net.rng.below(300)).map(|_| self.net.rng.next() as u8).collect(),
            2 => self.net.recorded.first().map_or_else(Vec::new, |hello| hello[..hello.len() / 2].to_vec()),
            _ => self.net.recorded.iter().take(3).flatten().copied().collect(),
        };
        self.net.send(link, End::Server, &bytes);
        if self.net.rng.one_in(2) {
            self.net.close(link, End::Caller);
        }
    }

    fn trace_line(&self, text: impl FnOnce() -> String) {
        if self.trace {
            println!("{:>9.3} {}", self.net.now.as_secs_f64(), text());
        }
    }

    fn check(&self, join: Duration, limit: Duration) {
        let is_alive = |p: &&SimRank| !p.dead && !matches!(p.fault, SimFault::Stalls(at) if at <= limit);
        for rank_state in self.ranks.iter().filter(is_alive) {
            assert!(
                rank_state.result.is_some(),
                "rank {} (pid {}, {:?}) hangs",
                rank_state.rank,
                rank_state.pid,
                rank_state.fault
            );
        }
        let views: Vec<&Vec<Member>> = self.ranks.iter().filter_map(|p| p.view.as_ref()).collect();
        assert!(views.windows(2).all(|pair| pair[0] == pair[1]), "all ranks see the same members");
        for view in &views {
            assert_eq!(view.len(), self.world_size as usize);
            for (member, rank) in view.iter().zip(0..) {
                assert_eq!(member.rank, rank);
                let rank_state =
                    self.ranks.iter().find(|p| p.pid == member.pid).expect("a process that exists");
                assert!(rank_state.rank == rank, "members are indexed by rank");
                assert!(!matches!(
                    rank_state.fault,
                    SimFault::NeverJoins | SimFault::WrongToken | SimFault::OtherWorld
                ));
            }
        }
        for rank_state in self.ranks.iter() {
            let Some((at, Err(error))) = &rank_state.result else { continue };
            let text = error.to_string();
            let named = ["rank", "node", "alpha:29500"].iter().any(|word| text.contains(word));
            assert!(named, "an error names a rank, a node or an address: {text}");
            assert!(
                *at <= rank_state.start + join + Duration::from_secs(9),
                "rank {} waited long",
                rank_state.rank
            );
            assert!(!text.contains("token of this run"));
        }
        let fault_free =
            self.ranks.iter().all(|p| p.fault == SimFault::None && p.start <= Duration::from_secs(1));
        if self.no_server {
            assert!(
                !self.ranks.iter().any(|p| matches!(p.result, Some((_, Ok(()))))),
                "no rank can join without a server"
            );
            return;
        }
        let finished = self.ranks.iter().filter(|p| matches!(p.result, Some((_, Ok(())))));
        if fault_free {
            assert_eq!(self.server_over, Some(Ok(())), "a run without faults succeeds");
            assert_eq!(finished.count(), self.ranks.len());
            return;
        }
        // A rank that reports success has seen all ranks through every exchange, or has failed itself.
        for rank_state in finished.filter(|p| !matches!(p.fault, SimFault::Fails(_))) {
            let done = |p: &SimRank| p.exchanged + 1 >= self.exchanges;
            assert!(rank_state.exchanged == self.exchanges, "rank {} left early", rank_state.rank);
            let peers = self.ranks.iter().filter(|p| p.view.is_some());
            assert!(
                peers.clone().count() >= 1 && peers.clone().all(done),
                "all ranks were at the last exchange"
            );
        }
    }
}

fn brief(action: &server::Action) -> String {
    match action {
        server::Action::Send { conn, bytes } => format!("{} bytes to {conn}", bytes.len()),
        other => format!("{other:?}"),
    }
}

fn simulate(seed: u64, trace: bool) {
    let (mut world, join) = World::new(seed, trace);
    let limit = 2 * join + Duration::from_secs(20);
    if trace {
        let fates: Vec<_> = world.ranks.iter().map(|p| (p.rank, p.fault, p.start)).collect();
        println!("seed {seed}, join {join:?}: {fates:?}");
    }
    world.run(limit);
    world.check(join, limit);
}

#[test]
fn no_world_hangs_or_disagrees() {
    if let Some(seed) = std::env::var("LOCKSTEP_SIM_SEED").ok().and_then(|text| text.parse().ok()) {
        return simulate(seed, true);
    }
    let seeds = std::env::var("LOCKSTEP_SIM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SEEDS);
    let start = Instant::now();
    for seed in 0..seeds {
        if std::panic::catch_unwind(|| simulate(seed, false)).is_err() {
            panic!("seed {seed} failed; LOCKSTEP_SIM_SEED={seed} replays it");
        }
    }
    println!("{seeds} worlds in {:?}", start.elapsed());
}
