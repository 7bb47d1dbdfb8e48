//! What ranks must agree on before data moves.

use std::fmt;

use lockstep_core::DType;

/// The kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum CallKind {
    Barrier = 1,
    AllGather,
    ReduceScatter,
    Broadcast,
    Gather,
    /// A message from one rank to another.
    Message,
}

/// One collective as a rank sees it. Every member's must be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub kind: CallKind,
    pub dtype: DType,
    /// Elements of the whole, all members together.
    pub elems: u64,
    /// The caller's name for it: the operation's place in its schedule, or [`Call::HOST`] between steps.
    pub tag: u64,
    /// A hash of the members, so that two groups that share ranks are told apart.
    pub group: u32,
}

impl Call {
    /// Tags from here on are calls of the host between steps.
    pub const HOST: u64 = 1 << 32;
}

impl fmt::Display for CallKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CallKind::Barrier => "barrier",
            CallKind::AllGather => "all-gather",
            CallKind::ReduceScatter => "reduce-scatter",
            CallKind::Broadcast => "broadcast",
            CallKind::Gather => "gather",
            CallKind::Message => "message",
        })
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} {}", self.kind, self.elems, self.dtype)?;
        match self.tag.checked_sub(Call::HOST) {
            None => write!(f, ", operation {}", self.tag),
            Some(n) => write!(f, ", host call {n}"),
        }
    }
}
