//! The members of a run, and the reason why it was aborted.

use std::fmt;

use lockstep_core::FaultClass;
use serde::{Deserialize, Serialize};

/// A rank that has joined the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub rank: u32,
    pub node: u32,
    pub local_rank: u32,
    pub host: String,
    pub pid: u32,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (pid {} on {})", self.rank, self.pid, self.host)
    }
}

/// Why the run was aborted. The rendezvous sends it to every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abort {
    pub kind: AbortKind,
    /// The rank at fault, if it is known.
    pub by: Option<Member>,
    /// The exit code of that rank, if it reported one.
    pub code: Option<u8>,
    /// The message for users, which names the rank.
    pub text: String,
}

impl Abort {
    pub(crate) fn new(kind: AbortKind, by: Option<Member>, text: String) -> Abort {
        Abort { kind, by, code: None, text }
    }

    /// The exit code of the whole run.
    pub fn exit_code(&self) -> u8 {
        self.code.unwrap_or(self.kind.class().exit_code())
    }
}

/// The kinds of [`Abort`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AbortKind {
    /// A rank failed and reported why.
    Failed,
    /// A rank's connection closed unexpectedly.
    Lost,
    /// A rank's connection is open, but its heartbeats have stopped.
    Silent,
    /// Some ranks did not join in time.
    Missing,
    /// A rank was started with another world size.
    World,
    /// A rank runs another version of lockstep.
    Version,
    /// A rank with this number has already joined.
    Twice,
    /// Ranks are at different exchanges.
    Desync,
    /// Some ranks did not reach an exchange in time.
    Overdue,
    /// An authenticated rank sent an invalid message.
    Protocol,
}

impl AbortKind {
    pub fn class(self) -> FaultClass {
        match self {
            AbortKind::Failed | AbortKind::Lost | AbortKind::Silent => FaultClass::PeerFailed,
            AbortKind::World | AbortKind::Version | AbortKind::Twice => FaultClass::BadConfig,
            AbortKind::Missing | AbortKind::Desync | AbortKind::Overdue => FaultClass::Desync,
            AbortKind::Protocol => FaultClass::Internal,
        }
    }

    pub fn hint(self) -> Option<&'static str> {
        match self {
            AbortKind::Missing => Some(
                "Start the launcher on every node with the same --nnodes, --nproc-per-node, --master-addr and \
                 --master-port. Raise --join-timeout if some nodes start slowly.",
            ),
            AbortKind::World => Some("Start every node with the same --nnodes and --nproc-per-node."),
            AbortKind::Version => Some("Use the same build of lockstep on every node."),
            AbortKind::Twice => Some(
                "Give every node its own --node-rank. Without a launcher, give every process its own RANK.",
            ),
            AbortKind::Lost => Some(
                "The kernel may have killed the process because the host ran out of memory: check the kernel log \
                 on that host (dmesg).",
            ),
            AbortKind::Silent => Some(
                "The process may be stopped, or its host may be overloaded, down or cut off from the network.",
            ),
            AbortKind::Desync => Some(
                "All ranks must run the same binary with the same configuration. If they do, this is a bug in \
                 lockstep: please report it.",
            ),
            AbortKind::Overdue => Some(
                "Look at the last lines of the missing ranks in the log: they may be stuck, or slow to prepare their \
                 data.",
            ),
            AbortKind::Protocol => Some("Use the same build of lockstep on every node."),
            // The message holds the rank's own error.
            AbortKind::Failed => None,
        }
    }
}

impl fmt::Display for Abort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Formats a list of ranks: `rank 3`, `ranks 1, 2` or `ranks 0-3, 7`.
pub(crate) fn ranks(list: impl IntoIterator<Item = u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    let mut count = 0;
    for rank in list {
        count += 1;
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let parts: Vec<String> = runs
        .iter()
        .map(|&(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first}-{last}"),
        })
        .collect();
    format!("{} {}", if count == 1 { "rank" } else { "ranks" }, parts.join(", "))
}
