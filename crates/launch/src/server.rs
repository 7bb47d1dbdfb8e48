//! The decisions of the rendezvous: which connections may join, when all ranks have joined, and when one is lost.
//! Pure: it turns events with their time into actions. It parses bytes, but sockets are in `serve`.

use std::collections::BTreeMap;
use std::time::Duration;

use lockstep_core::proof::Secret;

use crate::abort::{Abort, AbortKind, Member, ranks};
use crate::exchanges::{Contribution, ExchangeState, Exchanges};
use crate::seal::{FROM_RANK, FROM_SERVER, Opener, Sealer};
use crate::wire::{
    HELLO_BYTES, Hello, MAX_FRAME_TO_SERVER, PROOF_BYTES, Reply, ReplyStatus, ToRank, ToServer, Transcript,
    VERSION, has_magic, to_hex,
};

/// The interval at which both sides send heartbeats.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(500);
/// A peer that sends nothing for six heartbeats is considered lost.
pub(crate) const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(3);
/// After a gap of this length between its own events, a process was suspended itself and cannot tell whether its
/// peers were silent.
pub(crate) const OWN_STALL: Duration = Duration::from_secs(1);
/// The limit from connecting to having joined.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// The largest number of unauthenticated connections; beyond it the oldest is closed.
const MAX_UNAUTHENTICATED: usize = 64;
/// A rank that fails because of another may report first. This is the time for the cause to arrive.
const CAUSE_DELAY: Duration = Duration::from_millis(100);
/// The limit on messages about rejected connections per second.
const MAX_LOG_LINES: u32 = 10;

/// Why a connection without our magic bytes is rejected.
const NOT_A_RANK: &str = "it is not a lockstep rank";

pub(crate) type ConnId = u64;

#[derive(Clone, Debug)]
pub(crate) struct ServerConfig {
    pub(crate) secret: Secret,
    pub(crate) world_size: u32,
    pub(crate) local_world_size: u32,
    pub(crate) attempt: u32,
    /// The version of the program.
    pub(crate) version: String,
    /// Random bytes that identify this run.
    pub(crate) run: [u8; 32],
    /// The limit for all ranks to join, from the first event on.
    pub(crate) join_timeout: Duration,
}

#[derive(Debug)]
pub(crate) enum Event<'a> {
    /// A new connection. `nonce` is fresh.
    Opened {
        conn: ConnId,
        from: String,
        nonce: [u8; 32],
    },
    Bytes {
        conn: ConnId,
        bytes: &'a [u8],
    },
    Closed {
        conn: ConnId,
    },
    Tick,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Send {
        conn: ConnId,
        bytes: Vec<u8>,
    },
    /// Close the connection once everything has been sent. No further events for it are expected.
    Close {
        conn: ConnId,
    },
    Log(String),
    /// The run is over. Returned once.
    Over(Result<(), Abort>),
}

struct Conn {
    from: String,
    opened: Duration,
    stage: Stage,
}

enum Stage {
    Hello {
        nonce: [u8; 32],
        got: Vec<u8>,
    },
    Proof {
        transcript: Transcript,
        got: Vec<u8>,
    },
    /// Authenticated; `member` is set once the rank has joined.
    Channel {
        hello: Hello,
        sealer: Sealer,
        opener: Opener,
        last_seen: Duration,
        member: Option<u32>,
    },
}

/// A rank that has joined.
struct Seat {
    member: Member,
    left: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    Joining,
    Running,
    /// With the reason for an abort, which is sent to ranks that connect late.
    Over(Option<Abort>),
}

pub(crate) struct Server {
    config: ServerConfig,
    phase: Phase,
    seats: Vec<Option<Seat>>,
    conns: BTreeMap<ConnId, Conn>,
    exchanges: Exchanges,
    started: Option<Duration>,
    last_event: Duration,
    next_heartbeat: Duration,
    /// A failure that may be the consequence of another, and the time at which it is taken as the cause.
    pending_abort: Option<(Duration, Abort)>,
    log: LogLimit,
    out: Vec<Action>,
}

impl Server {
    pub(crate) fn new(config: ServerConfig) -> Server {
        let world = config.world_size;
        Server {
            config,
            phase: Phase::Joining,
            seats: (0..world).map(|_| None).collect(),
            conns: BTreeMap::new(),
            exchanges: Exchanges::new(world),
            started: None,
            last_event: Duration::ZERO,
            next_heartbeat: Duration::ZERO,
            pending_abort: None,
            log: LogLimit::default(),
            out: Vec::new(),
        }
    }

    fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over(_))
    }

    /// Whether no connection is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.conns.is_empty()
    }

    pub(crate) fn handle(&mut self, now: Duration, event: Event<'_>) -> Vec<Action> {
        self.started.get_or_insert(now);
        self.forgive_own_stall(now);
        match event {
            Event::Opened { conn, from, nonce } => self.opened(now, conn, from, nonce),
            Event::Bytes { conn, bytes } => self.bytes(now, conn, bytes),
            Event::Closed { conn } => self.closed(now, conn),
            Event::Tick => {}
        }
        self.tick(now);
        std::mem::take(&mut self.out)
    }

    fn opened(&mut self, now: Duration, conn: ConnId, from: String, nonce: [u8; 32]) {
        let unauthenticated: Vec<ConnId> = self
            .conns
            .iter()
            .filter(|(_, c)| !matches!(c.stage, Stage::Channel { .. }))
            .map(|(id, _)| *id)
            .collect();
        if let (true, Some(&oldest)) = (unauthenticated.len() >= MAX_UNAUTHENTICATED, unauthenticated.first())
        {
            self.reject(now, oldest, "too many connections are waiting to authenticate");
        }
        let stage = Stage::Hello { nonce, got: Vec::new() };
        self.conns.insert(conn, Conn { from, opened: now, stage });
    }

    fn bytes(&mut self, now: Duration, conn: ConnId, bytes: &[u8]) {
        let Some(state) = self.conns.get_mut(&conn) else { return };
        match &mut state.stage {
            Stage::Hello { nonce, got } => {
                got.extend_from_slice(&bytes[..bytes.len().min(HELLO_BYTES + 1)]);
                if !has_magic(got) || got.len() > HELLO_BYTES {
                    return self.reject(now, conn, NOT_A_RANK);
                }
                if let Ok(whole) = <&[u8; HELLO_BYTES]>::try_from(&got[..]) {
                    let (hello, nonce) = (Hello::from_bytes(whole), *nonce);
                    self.hello(now, conn, hello, nonce);
                }
            }
            Stage::Proof { transcript, got } => {
                got.extend_from_slice(&bytes[..bytes.len().min(PROOF_BYTES + 1)]);
                if got.len() < PROOF_BYTES {
                    return;
                }
                let transcript = *transcript;
                if !transcript.rank_proved(&self.config.secret, got) {
                    self.reply(conn, ReplyStatus::WrongProof, [0; 32]);
                    return self.reject(now, conn, "wrong token");
                }
                self.proved(now, conn, transcript);
            }
            Stage::Channel { opener, last_seen, .. } => {
                *last_seen = now;
                opener.push(bytes);
                self.messages(now, conn);
            }
        }
    }

    fn hello(&mut self, now: Duration, conn: ConnId, hello: Option<Hello>, nonce: [u8; 32]) {
        let Some(hello) = hello else { return self.reject(now, conn, NOT_A_RANK) };
        let (status, why) = if hello.version != VERSION {
            let theirs = hello.version;
            (ReplyStatus::OtherVersion, format!("it uses protocol version {theirs}, this run uses {VERSION}"))
        } else if hello.attempt != self.config.attempt {
            let (theirs, ours) = (hello.attempt, self.config.attempt);
            (
                ReplyStatus::OtherAttempt,
                format!("it belongs to attempt {theirs}, this run is at attempt {ours}"),
            )
        } else if self.phase == Phase::Over(None) {
            (ReplyStatus::Over, "the run is over".into())
        } else {
            let transcript = Transcript { hello, server_nonce: nonce };
            self.reply(conn, ReplyStatus::Continue, nonce);
            if let Some(state) = self.conns.get_mut(&conn) {
                state.stage = Stage::Proof { transcript, got: Vec::new() };
            }
            return;
        };
        self.reply(conn, status, [0; 32]);
        self.reject(now, conn, &why);
    }

    fn proved(&mut self, now: Duration, conn: ConnId, transcript: Transcript) {
        let secret = &self.config.secret;
        let (tag, key) = (transcript.server_proof(secret), transcript.key(secret));
        self.reply(conn, ReplyStatus::Continue, tag);
        if let Some(state) = self.conns.get_mut(&conn) {
            state.stage = Stage::Channel {
                hello: transcript.hello,
                sealer: Sealer::new(key.clone(), FROM_SERVER),
                opener: Opener::new(key, FROM_RANK, MAX_FRAME_TO_SERVER),
                last_seen: now,
                member: None,
            };
        }
    }

    /// Handles every message that has arrived completely.
    fn messages(&mut self, now: Duration, conn: ConnId) {
        loop {
            let Some(Conn { stage: Stage::Channel { hello, opener, member, .. }, .. }) =
                self.conns.get_mut(&conn)
            else {
                return;
            };
            let (hello, member) = (*hello, *member);
            match (opener.next::<ToServer>(), member) {
                (Ok(None), _) => return,
                (Ok(Some(ToServer::Join { member, world_size, local_world_size, version })), None) => {
                    self.join(conn, hello, member, [world_size, local_world_size], version);
                }
                (Ok(Some(ToServer::Beat)), Some(_)) => {}
                (Ok(Some(ToServer::Put { name, hex, timeout_ms })), Some(rank)) => {
                    self.put(
                        now,
                        rank,
                        Contribution { name, hex, timeout: Duration::from_millis(timeout_ms) },
                    );
                }
                (Ok(Some(ToServer::Failed { text, code })), Some(rank)) => {
                    self.failed(now, conn, rank, &text, code)
                }
                (Ok(Some(ToServer::Leave)), Some(rank)) => self.leave(conn, rank),
                (Ok(Some(_)), _) => return self.protocol_error(now, conn, "unexpected message"),
                (Err(fault), _) => return self.protocol_error(now, conn, &fault.to_string()),
            }
        }
    }

    fn join(&mut self, conn: ConnId, hello: Hello, mut member: Member, world: [u32; 2], version: String) {
        member.host = clean(&member.host, 64);
        if let Phase::Over(Some(abort)) = &self.phase {
            let abort = abort.clone();
            return self.refuse(conn, abort);
        }
        let own = [self.config.world_size, self.config.local_world_size];
        let per_node = own[1].max(1);
        let placed = member.rank == hello.rank
            && member.node == member.rank / per_node
            && member.local_rank == member.rank % per_node;
        if version != self.config.version {
            let text = format!(
                "{member} runs lockstep {}, but the rendezvous runs {}",
                clean(&version, 32),
                self.config.version
            );
            return self.abort(AbortKind::Version, Some(member), text);
        }
        if world != own {
            let [theirs, ours] = [world, own]
                .map(|[all, local]| format!("--nnodes {} --nproc-per-node {local}", all / local.max(1)));
            let text = format!(
                "nodes were started with different world sizes: node {} ({}) with {theirs}, node 0 with {ours}",
                member.node, member.host
            );
            return self.abort(AbortKind::World, Some(member), text);
        }
        let Some(seat) = self.seats.get_mut(member.rank as usize).filter(|_| placed) else {
            let text = format!(
                "{member} claims to be local rank {} on node {}, which does not match its rank",
                member.local_rank, member.node
            );
            return self.refuse(conn, Abort::new(AbortKind::Protocol, Some(member), text));
        };
        if let Some(taken) = seat {
            let first = &taken.member;
            let text = format!(
                "rank {} was started twice: first as pid {} on {}, then as pid {} on {}",
                member.rank, first.pid, first.host, member.pid, member.host
            );
            self.out.push(Action::Log(text.clone()));
            return self.refuse(conn, Abort::new(AbortKind::Twice, Some(member), text));
        }
        let rank = member.rank;
        *seat = Some(Seat { member, left: false });
        if let Some(Conn { stage: Stage::Channel { member, .. }, .. }) = self.conns.get_mut(&conn) {
            *member = Some(rank);
        }
        if self.phase == Phase::Joining && self.seats.iter().all(Option::is_some) {
            self.phase = Phase::Running;
            let members = self.seats.iter().flatten().map(|seat| seat.member.clone()).collect();
            self.broadcast(&ToRank::Start { members, run: to_hex(&self.config.run) });
        }
    }

    fn put(&mut self, now: Duration, rank: u32, contribution: Contribution) {
        if self.phase != Phase::Running {
            return;
        }
        match self.exchanges.put(now, rank, contribution) {
            ExchangeState::Waiting => {}
            ExchangeState::Complete { name, hex } => self.broadcast(&ToRank::All { name, hex }),
            ExchangeState::Desync(text) => self.abort(AbortKind::Desync, self.member(rank), text),
        }
    }

    fn failed(&mut self, now: Duration, conn: ConnId, rank: u32, text: &str, code: u8) {
        self.send(conn, &ToRank::Bye);
        self.mark_left(rank);
        let Some(by) = self.member(rank) else { return };
        let text = format!("{by} failed with exit code {code}: {}", clean(text, 16 << 10));
        let abort = Abort { kind: AbortKind::Failed, by: Some(by), code: Some(code), text };
        let consequence = [71, 72].contains(&code);
        if consequence && !self.is_over() {
            self.pending_abort.get_or_insert((now + CAUSE_DELAY, abort));
        } else {
            self.end(abort);
        }
    }

    fn leave(&mut self, conn: ConnId, rank: u32) {
        self.send(conn, &ToRank::Bye);
        self.mark_left(rank);
        if self.is_over() {
            return;
        }
        if let Some(text) = self.exchanges.left(rank) {
            return self.abort(AbortKind::Desync, self.member(rank), text);
        }
        let done = self.seats.iter().all(|seat| seat.as_ref().is_some_and(|seat| seat.left));
        if done {
            self.phase = Phase::Over(None);
            self.out.push(Action::Over(Ok(())));
        }
    }

    fn closed(&mut self, now: Duration, conn: ConnId) {
        let Some(state) = self.conns.remove(&conn) else { return };
        match state.stage {
            // A rank that was still in its handshake when the run ended has ended with it.
            Stage::Hello { .. } | Stage::Proof { .. } if matches!(self.phase, Phase::Over(_)) => {}
            Stage::Hello { got, .. } if got.is_empty() => {
                self.log_rejection(now, &state.from, "it closed the connection without sending anything");
            }
            Stage::Hello { .. } | Stage::Proof { .. } => {
                self.log_rejection(now, &state.from, "it closed the connection during the handshake")
            }
            Stage::Channel { member: Some(rank), .. } if !self.has_left(rank) => {
                let Some(by) = self.member(rank) else { return };
                let text = format!("lost {by}: its connection closed unexpectedly");
                self.abort(AbortKind::Lost, Some(by), text);
            }
            Stage::Channel { .. } => {}
        }
    }

    /// An authenticated connection sent an invalid message.
    fn protocol_error(&mut self, now: Duration, conn: ConnId, why: &str) {
        let Some(state) = self.conns.remove(&conn) else { return };
        self.out.push(Action::Close { conn });
        match state.stage {
            Stage::Channel { member: Some(rank), .. } if !self.has_left(rank) => {
                let by = self.member(rank);
                let text = format!("rank {rank} sent an invalid message: {why}");
                self.abort(AbortKind::Protocol, by, text);
            }
            _ => self.log_rejection(now, &state.from, why),
        }
    }

    fn tick(&mut self, now: Duration) {
        let late: Vec<ConnId> = self
            .conns
            .iter()
            .filter(|(_, c)| !matches!(c.stage, Stage::Channel { member: Some(_), .. }))
            .filter(|(_, c)| now.saturating_sub(c.opened) >= HANDSHAKE)
            .map(|(id, _)| *id)
            .collect();
        for conn in late {
            self.reject(now, conn, "it did not finish the handshake within 5 s");
        }
        if self.is_over() {
            return;
        }
        if let Some((_, abort)) = self.pending_abort.take_if(|(at, _)| *at <= now) {
            return self.end(abort);
        }
        let joined_late = now.saturating_sub(self.started.unwrap_or(now)) >= self.config.join_timeout;
        if self.phase == Phase::Joining && joined_late {
            let text = self.missing_text();
            return self.abort(AbortKind::Missing, None, text);
        }
        if let Some(text) = self.exchanges.overdue(now) {
            return self.abort(AbortKind::Overdue, None, text);
        }
        let silent = self.conns.values().find_map(|c| match &c.stage {
            Stage::Channel { member: Some(rank), last_seen, .. }
                if now.saturating_sub(*last_seen) >= HEARTBEAT_TIMEOUT =>
            {
                Some(*rank)
            }
            _ => None,
        });
        if let Some(by) = silent.filter(|rank| !self.has_left(*rank)).and_then(|rank| self.member(rank)) {
            let text = format!("{by} has sent no heartbeat for {} s", HEARTBEAT_TIMEOUT.as_secs());
            return self.abort(AbortKind::Silent, Some(by), text);
        }
        if now >= self.next_heartbeat {
            self.next_heartbeat = now + HEARTBEAT;
            self.broadcast(&ToRank::Beat);
        }
    }

    fn missing_text(&self) -> String {
        let joined: Vec<u32> = self.seats.iter().flatten().map(|seat| seat.member.rank).collect();
        let absent: Vec<u32> = (0..self.config.world_size).filter(|rank| !joined.contains(rank)).collect();
        let mut nodes: Vec<u32> =
            absent.iter().map(|rank| rank / self.config.local_world_size.max(1)).collect();
        nodes.dedup();
        let nodes: Vec<String> = nodes.iter().map(u32::to_string).collect();
        let noun = if nodes.len() == 1 { "node" } else { "nodes" };
        let joined = if joined.is_empty() { "no rank".into() } else { ranks(joined) };
        format!(
            "{} ({noun} {}) did not join within {} s; {joined} did",
            ranks(absent),
            nodes.join(", "),
            self.config.join_timeout.as_secs_f64()
        )
    }

    fn abort(&mut self, kind: AbortKind, by: Option<Member>, text: String) {
        self.end(Abort::new(kind, by, text));
    }

    /// Ends the run for all ranks. The first reason wins; later ones are ignored.
    fn end(&mut self, abort: Abort) {
        if self.is_over() {
            return;
        }
        self.phase = Phase::Over(Some(abort.clone()));
        let all: Vec<ConnId> = self.conns.keys().copied().collect();
        for conn in all {
            self.send(conn, &ToRank::Abort(abort.clone()));
        }
        self.out.push(Action::Over(Err(abort)));
    }

    /// Closes one connection with a reason. The run continues.
    fn refuse(&mut self, conn: ConnId, abort: Abort) {
        self.send(conn, &ToRank::Abort(abort));
        self.conns.remove(&conn);
        self.out.push(Action::Close { conn });
    }

    fn reject(&mut self, now: Duration, conn: ConnId, why: &str) {
        let Some(state) = self.conns.remove(&conn) else { return };
        self.out.push(Action::Close { conn });
        self.log_rejection(now, &state.from, why);
    }

    fn log_rejection(&mut self, now: Duration, from: &str, why: &str) {
        self.out.extend(
            self.log
                .line(now, format!("rendezvous: rejected a connection from {from}: {why}"))
                .map(Action::Log),
        );
    }

    fn reply(&mut self, conn: ConnId, status: ReplyStatus, value: [u8; 32]) {
        let reply = Reply { version: VERSION, status, attempt: self.config.attempt, value };
        self.out.push(Action::Send { conn, bytes: reply.to_bytes().to_vec() });
    }

    fn send(&mut self, conn: ConnId, message: &ToRank) {
        if let Some(Conn { stage: Stage::Channel { sealer, .. }, .. }) = self.conns.get_mut(&conn) {
            self.out.push(Action::Send { conn, bytes: sealer.seal(message) });
        }
    }

    fn broadcast(&mut self, message: &ToRank) {
        for (conn, state) in &mut self.conns {
            if let Stage::Channel { sealer, member: Some(_), .. } = &mut state.stage {
                self.out.push(Action::Send { conn: *conn, bytes: sealer.seal(message) });
            }
        }
    }

    fn member(&self, rank: u32) -> Option<Member> {
        self.seats.get(rank as usize)?.as_ref().map(|seat| seat.member.clone())
    }

    fn has_left(&self, rank: u32) -> bool {
        self.seats[rank as usize].as_ref().is_some_and(|seat| seat.left)
    }

    fn mark_left(&mut self, rank: u32) {
        if let Some(seat) = &mut self.seats[rank as usize] {
            seat.left = true;
        }
    }

    fn forgive_own_stall(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.last_event);
        self.last_event = now;
        if gap >= OWN_STALL {
            for state in self.conns.values_mut() {
                if let Stage::Channel { last_seen, .. } = &mut state.stage {
                    *last_seen += gap;
                }
            }
        }
    }
}

/// Removes control characters from a peer's text and shortens it, so that it is safe to print.
fn clean(text: &str, max_chars: usize) -> String {
    text.chars().filter(|c| *c == '\n' || !c.is_control()).take(max_chars).collect()
}

/// Limits the rate of log lines, so that a flood of connections does not flood the log.
#[derive(Default)]
struct LogLimit {
    window: Duration,
    lines: u32,
    dropped: u64,
}

impl LogLimit {
    fn line(&mut self, now: Duration, line: String) -> Option<String> {
        let mut line = line;
        if now.saturating_sub(self.window) >= Duration::from_secs(1) {
            if self.dropped > 0 {
                line = format!("{line} (and {} more like this)", self.dropped);
            }
            *self = LogLimit { window: now, lines: 0, dropped: 0 };
        }
        self.lines += 1;
        if self.lines > MAX_LOG_LINES {
            self.dropped += 1;
            return None;
        }
        Some(line)
    }
}
