//! The decisions of a rank about its connection to the rendezvous. Pure, like `server`.

use std::time::Duration;

use lockstep_core::proof::Secret;

use crate::abort::{Abort, Member};
use crate::error::LaunchError;
use crate::seal::{FROM_RANK, FROM_SERVER, Opener, Sealer};
use crate::server::{HEARTBEAT, HEARTBEAT_TIMEOUT, OWN_STALL};
use crate::wire::{
    Hello, REPLY_BYTES, Reply, ReplyStatus, ToRank, ToServer, Transcript, VERSION, from_hex, has_magic,
    max_frame_to_rank,
};

/// The server times out first and reports which ranks are missing. A rank waits this much longer for that report.
const GRACE: Duration = Duration::from_secs(2);
/// How long to wait for an answer from a server that has accepted the connection.
const HANDSHAKE: Duration = Duration::from_secs(5);
const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_MOST: Duration = Duration::from_millis(200);
/// How long to wait for the confirmation that this rank may leave.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub(crate) struct ClientConfig {
    pub(crate) secret: Secret,
    /// The address of the rendezvous, for messages.
    pub(crate) addr: String,
    pub(crate) member: Member,
    pub(crate) world_size: u32,
    pub(crate) local_world_size: u32,
    pub(crate) attempt: u32,
    /// The version of the program.
    pub(crate) version: String,
    pub(crate) join_timeout: Duration,
}

#[derive(Debug)]
pub(crate) enum Event<'a> {
    /// `nonce` is fresh.
    Connected {
        nonce: [u8; 32],
    },
    ConnectFailed(String),
    Bytes(&'a [u8]),
    Closed(String),
    Put {
        name: String,
        hex: String,
        timeout: Duration,
    },
    Fail {
        text: String,
        code: u8,
    },
    Leave,
    Tick,
}

#[derive(Debug)]
pub(crate) enum Action {
    Connect,
    Send(Vec<u8>),
    /// No further events for this connection are expected.
    Close,
    Joined {
        members: Vec<Member>,
        run: Vec<u8>,
    },
    All {
        name: String,
        values: Vec<Vec<u8>>,
    },
    /// The last action. `Ok` if this rank has left.
    Ended(Result<(), LaunchError>),
}

enum State {
    /// Waits for the next attempt to connect.
    Waiting {
        until: Duration,
    },
    Connecting,
    /// The hello was sent.
    Greeted {
        hello: Hello,
        since: Duration,
        got: Vec<u8>,
    },
    /// The proof was sent.
    Proved {
        transcript: Transcript,
        since: Duration,
        got: Vec<u8>,
    },
    Channel(Channel),
    Over,
}

struct Channel {
    sealer: Sealer,
    opener: Opener,
    last_seen: Duration,
    next_heartbeat: Duration,
    joined: bool,
    leaving: Option<Duration>,
}

pub(crate) struct Client {
    config: ClientConfig,
    state: State,
    started: Option<Duration>,
    last_event: Duration,
    retry: Duration,
    /// Why the last attempt failed.
    last_error: String,
    out: Vec<Action>,
}

impl Client {
    pub(crate) fn new(config: ClientConfig) -> Client {
        Client {
            config,
            state: State::Waiting { until: Duration::ZERO },
            started: None,
            last_event: Duration::ZERO,
            retry: RETRY_FIRST,
            last_error: "no attempt was made".into(),
            out: Vec::new(),
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    pub(crate) fn handle(&mut self, now: Duration, event: Event<'_>) -> Vec<Action> {
        let started = *self.started.get_or_insert(now);
        self.forgive_own_stall(now);
        match event {
            Event::Connected { nonce } => self.connected(now, nonce),
            Event::ConnectFailed(why) => self.retry_later(now, why),
            Event::Bytes(bytes) => self.bytes(now, bytes),
            Event::Closed(why) => self.closed(now, why),
            Event::Put { name, hex, timeout } => {
                let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                self.send(&ToServer::Put { name, hex, timeout_ms });
            }
            Event::Fail { text, code } => self.leave_with(now, &ToServer::Failed { text, code }),
            Event::Leave => self.leave_with(now, &ToServer::Leave),
            Event::Tick => {}
        }
        self.tick(now, started);
        std::mem::take(&mut self.out)
    }

    fn connected(&mut self, now: Duration, nonce: [u8; 32]) {
        if !matches!(self.state, State::Connecting) {
            return;
        }
        let (rank, attempt) = (self.config.member.rank, self.config.attempt);
        let hello = Hello { version: VERSION, rank, attempt, nonce };
        self.out.push(Action::Send(hello.to_bytes().to_vec()));
        self.state = State::Greeted { hello, since: now, got: Vec::new() };
    }

    fn bytes(&mut self, now: Duration, mut bytes: &[u8]) {
        if let State::Greeted { hello, got, .. } = &mut self.state {
            let hello = *hello;
            let Some(reply) = read_reply(got, &mut bytes) else { return };
            let Some(reply) = self.check(now, reply) else { return };
            let transcript = Transcript { hello, server_nonce: reply.value };
            self.out.push(Action::Send(transcript.rank_proof(&self.config.secret).to_vec()));
            self.state = State::Proved { transcript, since: now, got: Vec::new() };
        }
        if let State::Proved { transcript, got, .. } = &mut self.state {
            let transcript = *transcript;
            let Some(reply) = read_reply(got, &mut bytes) else { return };
            let Some(reply) = self.check(now, reply) else { return };
            if !transcript.server_proved(&self.config.secret, &reply.value) {
                return self.end(LaunchError::WrongToken { addr: self.config.addr.clone() });
            }
            let key = transcript.key(&self.config.secret);
            let mut sealer = Sealer::new(key.clone(), FROM_RANK);
            self.out.push(Action::Send(sealer.seal(&ToServer::Join {
                member: self.config.member.clone(),
                world_size: self.config.world_size,
                local_world_size: self.config.local_world_size,
                version: self.config.version.clone(),
            })));
            self.state = State::Channel(Channel {
                sealer,
                opener: Opener::new(key, FROM_SERVER, max_frame_to_rank(self.config.world_size)),
                last_seen: now,
                next_heartbeat: now + HEARTBEAT,
                joined: false,
                leaving: None,
            });
        }
        if let State::Channel(channel) = &mut self.state {
            channel.last_seen = now;
            channel.opener.push(bytes);
            self.messages();
        }
    }

    /// Returns the reply if it allows this rank to continue.
    fn check(&mut self, now: Duration, reply: Option<Reply>) -> Option<Reply> {
        let addr = self.config.addr.clone();
        let Some(reply) = reply else {
            self.end(LaunchError::NotLockstep { addr });
            return None;
        };
        if reply.version != VERSION {
            self.end(LaunchError::OtherProtocol { addr, theirs: reply.version, ours: VERSION });
            return None;
        }
        let (theirs, ours) = (reply.attempt, self.config.attempt);
        match reply.status {
            ReplyStatus::Continue => return Some(reply),
            ReplyStatus::WrongProof => self.end(LaunchError::WrongToken { addr }),
            ReplyStatus::OtherVersion => {
                self.end(LaunchError::OtherProtocol { addr, theirs: reply.version, ours: VERSION });
            }
            // The other nodes have not noticed yet that the ranks are being restarted.
            ReplyStatus::OtherAttempt if theirs < ours => {
                self.out.push(Action::Close);
                self.retry_later(now, "the previous attempt has not ended yet".into());
            }
            ReplyStatus::OtherAttempt | ReplyStatus::Over => {
                self.end(LaunchError::OtherAttempt { addr, theirs, ours })
            }
        }
        None
    }

    fn messages(&mut self) {
        loop {
            let State::Channel(channel) = &mut self.state else { return };
            let message = match channel.opener.next::<ToRank>() {
                Ok(None) => return,
                Ok(Some(message)) => message,
                Err(fault) => return self.lost(fault.to_string()),
            };
            match message {
                ToRank::Beat => {}
                ToRank::Start { members, run } => {
                    channel.joined = true;
                    match from_hex(&run) {
                        Some(run) => self.out.push(Action::Joined { members, run }),
                        None => return self.lost("its start message is invalid".into()),
                    }
                }
                ToRank::All { name, hex } => {
                    match hex.iter().map(|text| from_hex(text)).collect::<Option<Vec<_>>>() {
                        Some(values) => self.out.push(Action::All { name, values }),
                        None => return self.lost("the result of an exchange is invalid".into()),
                    }
                }
                // A rank that is already leaving does not care why the run ends.
                ToRank::Abort(_) | ToRank::Bye if channel.leaving.is_some() => return self.left(),
                ToRank::Abort(abort) => return self.aborted(abort),
                ToRank::Bye => return self.lost("it ended the session".into()),
            }
        }
    }

    fn closed(&mut self, now: Duration, why: String) {
        match &self.state {
            State::Greeted { .. } | State::Proved { .. } => self.retry_later(now, why),
            State::Channel(Channel { leaving: Some(_), .. }) => self.left(),
            State::Channel(_) => self.lost(why),
            State::Waiting { .. } | State::Connecting | State::Over => {}
        }
    }

    fn tick(&mut self, now: Duration, started: Duration) {
        let late = now.saturating_sub(started) >= self.config.join_timeout + GRACE;
        match &mut self.state {
            State::Over => {}
            State::Channel(channel) => {
                if channel.leaving.is_some_and(|since| now.saturating_sub(since) >= LEAVE_TIMEOUT) {
                    return self.left();
                }
                if now.saturating_sub(channel.last_seen) >= HEARTBEAT_TIMEOUT {
                    return self.lost(format!("no heartbeat for {} s", HEARTBEAT_TIMEOUT.as_secs()));
                }
                if !channel.joined && late {
                    return self.lost("it did not report which ranks are missing".into());
                }
                if now >= channel.next_heartbeat {
                    channel.next_heartbeat = now + HEARTBEAT;
                    self.send(&ToServer::Beat);
                }
            }
            _ if late => {
                let (rank, addr) = (self.config.member.rank, self.config.addr.clone());
                let last = std::mem::take(&mut self.last_error);
                let waited = self.config.join_timeout;
                self.end(LaunchError::NoServer { rank, addr, waited, last });
            }
            State::Waiting { until } if *until <= now => {
                self.state = State::Connecting;
                self.out.push(Action::Connect);
            }
            State::Greeted { since, .. } | State::Proved { since, .. }
                if now.saturating_sub(*since) >= HANDSHAKE =>
            {
                self.out.push(Action::Close);
                self.retry_later(now, "it accepts connections but does not answer".into());
            }
            State::Waiting { .. } | State::Connecting | State::Greeted { .. } | State::Proved { .. } => {}
        }
    }

    fn retry_later(&mut self, now: Duration, why: String) {
        if !self.is_over() {
            self.last_error = why;
            self.state = State::Waiting { until: now + self.retry };
            self.retry = (self.retry * 2).min(RETRY_MOST);
        }
    }

    fn send(&mut self, message: &ToServer) {
        if let State::Channel(channel) = &mut self.state
            // Send nothing after `Leave` or `Failed`.
            && channel.leaving.is_none()
        {
            self.out.push(Action::Send(channel.sealer.seal(message)));
        }
    }

    fn leave_with(&mut self, now: Duration, message: &ToServer) {
        self.send(message);
        match &mut self.state {
            State::Channel(channel) => _ = channel.leaving.get_or_insert(now),
            State::Over => {}
            _ => self.left(),
        }
    }

    fn left(&mut self) {
        self.finish(Ok(()));
    }

    fn aborted(&mut self, abort: Abort) {
        self.end(LaunchError::Aborted(abort));
    }

    fn lost(&mut self, why: String) {
        self.end(LaunchError::ServerLost { addr: self.config.addr.clone(), why });
    }

    fn end(&mut self, error: LaunchError) {
        self.finish(Err(error));
    }

    fn finish(&mut self, result: Result<(), LaunchError>) {
        if !self.is_over() {
            self.state = State::Over;
            self.out.push(Action::Close);
            self.out.push(Action::Ended(result));
        }
    }

    fn forgive_own_stall(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.last_event);
        self.last_event = now;
        if gap >= OWN_STALL
            && let State::Channel(channel) = &mut self.state
        {
            channel.last_seen += gap;
        }
    }
}

/// Reads a reply and removes its bytes from `bytes`. `None` if it has not arrived completely, `Some(None)` if the
/// bytes are not a reply.
fn read_reply(got: &mut Vec<u8>, bytes: &mut &[u8]) -> Option<Option<Reply>> {
    let (head, rest) = bytes.split_at((REPLY_BYTES - got.len()).min(bytes.len()));
    got.extend_from_slice(head);
    *bytes = rest;
    if !has_magic(got) {
        return Some(None);
    }
    <&[u8; REPLY_BYTES]>::try_from(&got[..]).ok().map(Reply::from_bytes)
}
