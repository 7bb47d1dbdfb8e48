//! What a rank decides about its connection to the rendezvous. Pure, like `server`.

use std::time::Duration;

use lockstep_core::proof::Secret;

use crate::abort::{Abort, Member};
use crate::error::LaunchError;
use crate::seal::{FROM_RANK, FROM_SERVER, Opener, Sealer};
use crate::server::{BEAT, OWN_STALL, SILENCE};
use crate::wire::{
    Hello, REPLY_BYTES, Reply, ToRank, ToServer, Transcript, VERSION, Verdict, from_hex, greets,
    max_frame_to_rank,
};

/// The server gives up first, and says who is missing; a rank waits so much longer for its word.
const GRACE: Duration = Duration::from_secs(2);
/// A server that has accepted and says nothing.
const HANDSHAKE: Duration = Duration::from_secs(5);
const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_MOST: Duration = Duration::from_millis(200);
/// For the word that a farewell has arrived.
const FAREWELL: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub(crate) struct ClientConfig {
    pub(crate) secret: Secret,
    /// Where the rendezvous is, for people.
    pub(crate) addr: String,
    pub(crate) member: Member,
    pub(crate) world_size: u32,
    pub(crate) local_world_size: u32,
    pub(crate) attempt: u32,
    /// Of the program.
    pub(crate) version: String,
    pub(crate) join_timeout: Duration,
}

#[derive(Debug)]
pub(crate) enum Event<'a> {
    /// `nonce` was never used before.
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
    /// No event of this connection is expected any more.
    Close,
    Joined {
        members: Vec<Member>,
        run: Vec<u8>,
    },
    All {
        name: String,
        values: Vec<Vec<u8>>,
    },
    /// The last action of all. `Ok`: this rank has left.
    Ended(Result<(), LaunchError>),
}

enum State {
    /// Until the next attempt to connect.
    Waiting {
        until: Duration,
    },
    Connecting,
    /// The hello is out.
    Greeted {
        hello: Hello,
        since: Duration,
        got: Vec<u8>,
    },
    /// The proof is out.
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
    heard: Duration,
    next_beat: Duration,
    joined: bool,
    leaving: Option<Duration>,
}

pub(crate) struct Client {
    config: ClientConfig,
    state: State,
    started: Option<Duration>,
    last_run: Duration,
    retry: Duration,
    /// Why the last attempt failed.
    trouble: String,
    out: Vec<Action>,
}

impl Client {
    pub(crate) fn new(config: ClientConfig) -> Client {
        Client {
            config,
            state: State::Waiting { until: Duration::ZERO },
            started: None,
            last_run: Duration::ZERO,
            retry: RETRY_FIRST,
            trouble: "it was not tried".into(),
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
            Event::ConnectFailed(why) => self.again(now, why),
            Event::Bytes(bytes) => self.bytes(now, bytes),
            Event::Closed(why) => self.closed(now, why),
            Event::Put { name, hex, timeout } => {
                let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                self.say(&ToServer::Put { name, hex, timeout_ms });
            }
            Event::Fail { text, code } => self.farewell(now, &ToServer::Failed { text, code }),
            Event::Leave => self.farewell(now, &ToServer::Leave),
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
                heard: now,
                next_beat: now + BEAT,
                joined: false,
                leaving: None,
            });
        }
        if let State::Channel(channel) = &mut self.state {
            channel.heard = now;
            channel.opener.push(bytes);
            self.messages();
        }
    }

    /// Goes on with a favourable reply.
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
        match reply.verdict {
            Verdict::GoOn => return Some(reply),
            Verdict::WrongProof => self.end(LaunchError::WrongToken { addr }),
            Verdict::OtherVersion => {
                self.end(LaunchError::OtherProtocol { addr, theirs: reply.version, ours: VERSION });
            }
            // The other nodes have not noticed yet that the ranks start anew.
            Verdict::OtherAttempt if theirs < ours => {
                self.out.push(Action::Close);
                self.again(now, "the ranks before have not ended yet".into());
            }
            Verdict::OtherAttempt | Verdict::Over => {
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
                        None => return self.lost("its first word was garbled".into()),
                    }
                }
                ToRank::All { name, hex } => {
                    match hex.iter().map(|text| from_hex(text)).collect::<Option<Vec<_>>>() {
                        Some(values) => self.out.push(Action::All { name, values }),
                        None => return self.lost("an exchange came back garbled".into()),
                    }
                }
                // What ends a rank that is leaving anyway is no news to it.
                ToRank::Abort(_) | ToRank::Bye if channel.leaving.is_some() => return self.left(),
                ToRank::Abort(abort) => return self.aborted(abort),
                ToRank::Bye => return self.lost("it said goodbye".into()),
            }
        }
    }

    fn closed(&mut self, now: Duration, why: String) {
        match &self.state {
            State::Greeted { .. } | State::Proved { .. } => self.again(now, why),
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
                if channel.leaving.is_some_and(|since| now.saturating_sub(since) >= FAREWELL) {
                    return self.left();
                }
                if now.saturating_sub(channel.heard) >= SILENCE {
                    return self.lost(format!("no sign of life for {} s", SILENCE.as_secs()));
                }
                if !channel.joined && late {
                    return self.lost("it did not say who is missing".into());
                }
                if now >= channel.next_beat {
                    channel.next_beat = now + BEAT;
                    self.say(&ToServer::Beat);
                }
            }
            _ if late => {
                let (rank, addr) = (self.config.member.rank, self.config.addr.clone());
                let last = std::mem::take(&mut self.trouble);
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
                self.again(now, "it accepts connections, but says nothing".into());
            }
            State::Waiting { .. } | State::Connecting | State::Greeted { .. } | State::Proved { .. } => {}
        }
    }

    fn again(&mut self, now: Duration, why: String) {
        if !self.is_over() {
            self.trouble = why;
            self.state = State::Waiting { until: now + self.retry };
            self.retry = (self.retry * 2).min(RETRY_MOST);
        }
    }

    fn say(&mut self, message: &ToServer) {
        if let State::Channel(channel) = &mut self.state
            // After the farewell nothing more is to be said.
            && channel.leaving.is_none()
        {
            self.out.push(Action::Send(channel.sealer.seal(message)));
        }
    }

    fn farewell(&mut self, now: Duration, message: &ToServer) {
        self.say(message);
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
        let gap = now.saturating_sub(self.last_run);
        self.last_run = now;
        if gap >= OWN_STALL
            && let State::Channel(channel) = &mut self.state
        {
            channel.heard += gap;
        }
    }
}

/// A reply, when all of it is here; `Some(None)` where it is none. Takes what it needs off `bytes`.
fn read_reply(got: &mut Vec<u8>, bytes: &mut &[u8]) -> Option<Option<Reply>> {
    let (now, rest) = bytes.split_at((REPLY_BYTES - got.len()).min(bytes.len()));
    got.extend_from_slice(now);
    *bytes = rest;
    if !greets(got) {
        return Some(None);
    }
    <&[u8; REPLY_BYTES]>::try_from(&got[..]).ok().map(Reply::from_bytes)
}
