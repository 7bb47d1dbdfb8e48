//! What the rendezvous decides: who may join, when all are there, when one is gone. Pure: events with
//! their time come in, actions go out; bytes are parsed here, sockets are elsewhere (`serve`).

use std::collections::BTreeMap;
use std::time::Duration;

use lockstep_core::proof::Secret;

use crate::abort::{Abort, AbortKind, Member, ranks};
use crate::rounds::{Put, Rounds, Settled};
use crate::seal::{FROM_RANK, FROM_SERVER, Opener, Sealer};
use crate::wire::{
    HELLO_BYTES, Hello, MAX_FRAME_TO_SERVER, PROOF_BYTES, Reply, ToRank, ToServer, Transcript, VERSION,
    Verdict, greets, to_hex,
};

/// How often both sides give a sign of life.
pub(crate) const BEAT: Duration = Duration::from_millis(500);
/// Six beats.
pub(crate) const SILENCE: Duration = Duration::from_secs(3);
/// A side that has not run for so long knows nothing of the others' silence: it was stopped itself.
pub(crate) const OWN_STALL: Duration = Duration::from_secs(1);
/// From connecting to having joined.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections that have proved nothing yet; the oldest goes when there are more.
const MAX_STRANGERS: usize = 64;
/// A rank that fails because another one did may be heard first. So long the cause may come.
const SECOND_THOUGHTS: Duration = Duration::from_millis(100);
/// Lines about strangers, each second.
const MAX_LOG_LINES: u32 = 10;

pub(crate) type ConnId = u64;

#[derive(Clone, Debug)]
pub(crate) struct ServerConfig {
    pub(crate) secret: Secret,
    pub(crate) world_size: u32,
    pub(crate) local_world_size: u32,
    pub(crate) attempt: u32,
    /// Of the program.
    pub(crate) version: String,
    /// Never used before; tells this run from all others.
    pub(crate) run: [u8; 32],
    /// From the first event on.
    pub(crate) join_timeout: Duration,
}

#[derive(Debug)]
pub(crate) enum Event<'a> {
    /// `nonce` was never used before.
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
    /// After what is still to be sent. The connection is forgotten; no event of it is expected.
    Close {
        conn: ConnId,
    },
    Log(String),
    /// Told once.
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
    /// Proved; `member` once it has joined.
    Channel {
        hello: Hello,
        sealer: Sealer,
        opener: Opener,
        heard: Duration,
        member: Option<u32>,
    },
}

struct Seat {
    member: Member,
    left: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    Joining,
    Running,
    /// With the reason, for those who come late.
    Over(Option<Abort>),
}

pub(crate) struct Server {
    config: ServerConfig,
    phase: Phase,
    seats: Vec<Option<Seat>>,
    conns: BTreeMap<ConnId, Conn>,
    rounds: Rounds,
    started: Option<Duration>,
    last_run: Duration,
    next_beat: Duration,
    /// A failure that may be the consequence of another, and when it counts.
    suspect: Option<(Duration, Abort)>,
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
            rounds: Rounds::new(world),
            started: None,
            last_run: Duration::ZERO,
            next_beat: Duration::ZERO,
            suspect: None,
            log: LogLimit::default(),
            out: Vec::new(),
        }
    }

    fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over(_))
    }

    /// No connection is left to serve.
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
        let strangers: Vec<ConnId> = self
            .conns
            .iter()
            .filter(|(_, c)| !matches!(c.stage, Stage::Channel { .. }))
            .map(|(id, _)| *id)
            .collect();
        if let (true, Some(&oldest)) = (strangers.len() >= MAX_STRANGERS, strangers.first()) {
            self.turn_away(now, oldest, "too many others are greeting");
        }
        let stage = Stage::Hello { nonce, got: Vec::new() };
        self.conns.insert(conn, Conn { from, opened: now, stage });
    }

    fn bytes(&mut self, now: Duration, conn: ConnId, bytes: &[u8]) {
        let Some(state) = self.conns.get_mut(&conn) else { return };
        match &mut state.stage {
            Stage::Hello { nonce, got } => {
                got.extend_from_slice(&bytes[..bytes.len().min(HELLO_BYTES + 1)]);
                if !greets(got) || got.len() > HELLO_BYTES {
                    return self.turn_away(now, conn, "this is no greeting of a rank");
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
                    self.reply(conn, Verdict::WrongProof, [0; 32]);
                    return self.turn_away(now, conn, "wrong token");
                }
                self.proved(now, conn, transcript);
            }
            Stage::Channel { opener, heard, .. } => {
                *heard = now;
                opener.push(bytes);
                self.messages(now, conn);
            }
        }
    }

    fn hello(&mut self, now: Duration, conn: ConnId, hello: Option<Hello>, nonce: [u8; 32]) {
        let Some(hello) = hello else { return self.turn_away(now, conn, "this is no greeting of a rank") };
        let (verdict, why) = if hello.version != VERSION {
            (Verdict::OtherVersion, format!("it speaks protocol {}, this run {VERSION}", hello.version))
        } else if hello.attempt != self.config.attempt {
            let (theirs, ours) = (hello.attempt, self.config.attempt);
            (Verdict::OtherAttempt, format!("it is of attempt {theirs}, this run of {ours}"))
        } else if self.phase == Phase::Over(None) {
            (Verdict::Over, "the run is over".into())
        } else {
            let transcript = Transcript { hello, server_nonce: nonce };
            self.reply(conn, Verdict::GoOn, nonce);
            if let Some(state) = self.conns.get_mut(&conn) {
                state.stage = Stage::Proof { transcript, got: Vec::new() };
            }
            return;
        };
        self.reply(conn, verdict, [0; 32]);
        self.turn_away(now, conn, &why);
    }

    fn proved(&mut self, now: Duration, conn: ConnId, transcript: Transcript) {
        let secret = &self.config.secret;
        let (tag, key) = (transcript.server_proof(secret), transcript.key(secret));
        self.reply(conn, Verdict::GoOn, tag);
        if let Some(state) = self.conns.get_mut(&conn) {
            state.stage = Stage::Channel {
                hello: transcript.hello,
                sealer: Sealer::new(key.clone(), FROM_SERVER),
                opener: Opener::new(key, FROM_RANK, MAX_FRAME_TO_SERVER),
                heard: now,
                member: None,
            };
        }
    }

    /// Every whole message that has come.
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
                    self.put(now, rank, Put { name, hex, timeout: Duration::from_millis(timeout_ms) });
                }
                (Ok(Some(ToServer::Failed { text, code })), Some(rank)) => {
                    self.failed(now, conn, rank, &text, code)
                }
                (Ok(Some(ToServer::Leave)), Some(rank)) => self.leave(conn, rank),
                (Ok(Some(_)), _) => return self.broken(now, conn, "a message came out of turn"),
                (Err(fault), _) => return self.broken(now, conn, &fault.to_string()),
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
                "{member} runs lockstep {}, the rendezvous is of {}",
                clean(&version, 32),
                self.config.version
            );
            return self.abort(AbortKind::Version, Some(member), text);
        }
        if world != own {
            let [theirs, ours] = [world, own]
                .map(|[all, local]| format!("--nnodes {} --nproc-per-node {local}", all / local.max(1)));
            let text = format!(
                "nodes were started for different worlds: node {} ({}) with {theirs}, node 0 with {ours}",
                member.node, member.host
            );
            return self.abort(AbortKind::World, Some(member), text);
        }
        let Some(seat) = self.seats.get_mut(member.rank as usize).filter(|_| placed) else {
            let text =
                format!("{member} says that it is number {} on node {}", member.local_rank, member.node);
            return self.refuse(conn, Abort::new(AbortKind::Protocol, Some(member), text));
        };
        if let Some(there) = seat {
            let (first, second) = (&there.member, format!("pid {} on {}", member.pid, member.host));
            let text = format!(
                "rank {} was started twice: pid {} on {} has it, {second} came later",
                member.rank, first.pid, first.host
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
            self.tell_members(&ToRank::Start { members, run: to_hex(&self.config.run) });
        }
    }

    fn put(&mut self, now: Duration, rank: u32, put: Put) {
        if self.phase != Phase::Running {
            return;
        }
        match self.rounds.put(now, rank, put) {
            Settled::Waiting => {}
            Settled::All { name, hex } => self.tell_members(&ToRank::All { name, hex }),
            Settled::Desync(text) => self.abort(AbortKind::Desync, self.member(rank), text),
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
            self.suspect.get_or_insert((now + SECOND_THOUGHTS, abort));
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
        if let Some(text) = self.rounds.left(rank) {
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
            // A rank that was still greeting when the run ended has gone with it.
            Stage::Hello { .. } | Stage::Proof { .. } if matches!(self.phase, Phase::Over(_)) => {}
            Stage::Hello { got, .. } if got.is_empty() => {
                self.note(now, &state.from, "it closed without a word");
            }
            Stage::Hello { .. } | Stage::Proof { .. } => {
                self.note(now, &state.from, "it closed while greeting")
            }
            Stage::Channel { member: Some(rank), .. } if !self.has_left(rank) => {
                let Some(by) = self.member(rank) else { return };
                let text = format!("{by} is gone: its connection closed without a word");
                self.abort(AbortKind::Lost, Some(by), text);
            }
            Stage::Channel { .. } => {}
        }
    }

    /// A proved connection that sends nonsense.
    fn broken(&mut self, now: Duration, conn: ConnId, why: &str) {
        let Some(state) = self.conns.remove(&conn) else { return };
        self.out.push(Action::Close { conn });
        match state.stage {
            Stage::Channel { member: Some(rank), .. } if !self.has_left(rank) => {
                let by = self.member(rank);
                let text = format!("rank {rank} cannot be understood: {why}");
                self.abort(AbortKind::Protocol, by, text);
            }
            _ => self.note(now, &state.from, why),
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
            self.turn_away(now, conn, "it did not finish its greeting in 5 s");
        }
        if self.is_over() {
            return;
        }
        if let Some((_, abort)) = self.suspect.take_if(|(at, _)| *at <= now) {
            return self.end(abort);
        }
        let joined_late = now.saturating_sub(self.started.unwrap_or(now)) >= self.config.join_timeout;
        if self.phase == Phase::Joining && joined_late {
            let text = self.missing_text();
            return self.abort(AbortKind::Missing, None, text);
        }
        if let Some(text) = self.rounds.overdue(now) {
            return self.abort(AbortKind::Overdue, None, text);
        }
        let silent = self.conns.values().find_map(|c| match &c.stage {
            Stage::Channel { member: Some(rank), heard, .. } if now.saturating_sub(*heard) >= SILENCE => {
                Some(*rank)
            }
            _ => None,
        });
        if let Some(by) = silent.filter(|rank| !self.has_left(*rank)).and_then(|rank| self.member(rank)) {
            let text = format!("{by} has given no sign of life for {} s", SILENCE.as_secs());
            return self.abort(AbortKind::Silent, Some(by), text);
        }
        if now >= self.next_beat {
            self.next_beat = now + BEAT;
            self.tell_members(&ToRank::Beat);
        }
    }

    fn missing_text(&self) -> String {
        let here: Vec<u32> = self.seats.iter().flatten().map(|seat| seat.member.rank).collect();
        let absent: Vec<u32> = (0..self.config.world_size).filter(|rank| !here.contains(rank)).collect();
        let mut nodes: Vec<u32> =
            absent.iter().map(|rank| rank / self.config.local_world_size.max(1)).collect();
        nodes.dedup();
        let nodes: Vec<String> = nodes.iter().map(u32::to_string).collect();
        let place = if nodes.len() == 1 { "node" } else { "nodes" };
        let came = if here.is_empty() { "nobody".into() } else { ranks(here) };
        format!(
            "{} ({place} {}) did not come within {} s; {came} did",
            ranks(absent),
            nodes.join(", "),
            self.config.join_timeout.as_secs_f64()
        )
    }

    fn abort(&mut self, kind: AbortKind, by: Option<Member>, text: String) {
        self.end(Abort::new(kind, by, text));
    }

    /// Ends the run for all; the first cause counts.
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

    /// Sends one connection away with a reason; the run goes on.
    fn refuse(&mut self, conn: ConnId, abort: Abort) {
        self.send(conn, &ToRank::Abort(abort));
        self.conns.remove(&conn);
        self.out.push(Action::Close { conn });
    }

    fn turn_away(&mut self, now: Duration, conn: ConnId, why: &str) {
        let Some(state) = self.conns.remove(&conn) else { return };
        self.out.push(Action::Close { conn });
        self.note(now, &state.from, why);
    }

    fn note(&mut self, now: Duration, from: &str, why: &str) {
        self.out.extend(self.log.line(now, format!("rendezvous: refused {from}: {why}")).map(Action::Log));
    }

    fn reply(&mut self, conn: ConnId, verdict: Verdict, value: [u8; 32]) {
        let reply = Reply { version: VERSION, verdict, attempt: self.config.attempt, value };
        self.out.push(Action::Send { conn, bytes: reply.to_bytes().to_vec() });
    }

    fn send(&mut self, conn: ConnId, message: &ToRank) {
        if let Some(Conn { stage: Stage::Channel { sealer, .. }, .. }) = self.conns.get_mut(&conn) {
            self.out.push(Action::Send { conn, bytes: sealer.seal(message) });
        }
    }

    fn tell_members(&mut self, message: &ToRank) {
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
        let gap = now.saturating_sub(self.last_run);
        self.last_run = now;
        if gap >= OWN_STALL {
            for state in self.conns.values_mut() {
                if let Stage::Channel { heard, .. } = &mut state.stage {
                    *heard += gap;
                }
            }
        }
    }
}

/// Text of a peer, fit to be printed.
fn clean(text: &str, max_chars: usize) -> String {
    text.chars().filter(|c| *c == '\n' || !c.is_control()).take(max_chars).collect()
}

/// A flood of strangers does not become a flood of lines.
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
