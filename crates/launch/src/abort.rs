//! Who is in a run, and why it was ended.

use std::fmt;

use lockstep_core::FaultClass;
use serde::{Deserialize, Serialize};

/// A rank that has joined.
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

/// Why all ranks stop, as the rendezvous tells each of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abort {
    pub kind: AbortKind,
    /// The rank at fault, where there is one.
    pub by: Option<Member>,
    /// What that rank ends with, where it said so.
    pub code: Option<u8>,
    /// What happened, in words; names the rank.
    pub text: String,
}

impl Abort {
    pub(crate) fn new(kind: AbortKind, by: Option<Member>, text: String) -> Abort {
        Abort { kind, by, code: None, text }
    }

    /// What the run as a whole ends with.
    pub fn exit_code(&self) -> u8 {
        self.code.unwrap_or(self.kind.class().exit_code())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AbortKind {
    /// A rank failed and said why.
    Failed,
    /// A rank's connection closed without a word.
    Lost,
    /// A rank's connection is open, but nothing comes.
    Silent,
    /// Ranks that never came.
    Missing,
    /// Ranks that were started for another world.
    World,
    /// Ranks of another version.
    Version,
    /// A rank that is there already.
    Twice,
    /// Ranks that wait for each other in different places.
    Desync,
    /// Ranks that did not come to a common point in time.
    Overdue,
    /// What an authenticated rank sent makes no sense.
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
                 --master-port; --join-timeout gives slow nodes more time.",
            ),
            AbortKind::World => Some("Start every node with the same --nnodes and --nproc-per-node."),
            AbortKind::Version => Some("Use the same build of lockstep on every node."),
            AbortKind::Twice => {
                Some("Give every node its own --node-rank; started by hand, every process its own RANK.")
            }
            AbortKind::Lost => Some(
                "The system may have ended the process for want of memory: see the kernel's log on that host \
                 (dmesg).",
            ),
            AbortKind::Silent => {
                Some("The process may be stopped, or its host overloaded, down or cut off from the network.")
            }
            _ => None,
        }
    }
}

impl fmt::Display for Abort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// `rank 3`, `ranks 1, 2`, `ranks 0-3, 7`.
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
