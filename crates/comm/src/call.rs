//! The description of a collective that ranks compare before data moves.

use std::fmt;

use lockstep_core::DType;
use lockstep_device::View;

use crate::group::Group;

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
    /// A sum small enough that every member reduces all of it.
    AllReduce,
    /// One round of a gather of byte strings.
    Bytes,
}

/// One collective as a rank sees it. It must be equal on every member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub kind: CallKind,
    pub dtype: DType,
    /// Elements over all members together. For [`CallKind::Bytes`], the number of the round instead.
    pub elems: u64,
    /// The caller's identifier: the operation's index in its schedule, or [`Call::HOST`] and above between steps.
    pub tag: u64,
    /// A hash of the members, which distinguishes groups that share ranks.
    pub group: u32,
    /// A hash of the parts' lengths and types: the same number of elements can be split into different parts.
    pub shape: u32,
}

/// A call as four words, the form in which it is exchanged between processes.
pub(crate) type CallWords = [u64; 4];

impl Call {
    /// The first tag of calls made by the host between steps; all tags below it belong to schedules.
    pub const HOST: u64 = 1 << 32;

    /// A call with all members of a group. Its type is that of the first part.
    pub(crate) fn new<'v>(
        kind: CallKind,
        group: &Group,
        tag: u64,
        parts: impl Iterator<Item = View<'v>> + Clone,
    ) -> Call {
        let dtype = parts.clone().next().map_or(DType::U32, |part| part.dtype());
        let elems = parts.clone().map(|part| part.len() as u64).sum();
        Call { kind, dtype, elems, tag, group: group.hash(), shape: shape_of(parts) }
    }

    pub(crate) fn to_words(self) -> CallWords {
        let first = self.kind as u64 | (dtype_code(self.dtype) << 8) | (u64::from(self.shape) << 32);
        [first, self.elems, self.tag, u64::from(self.group)]
    }

    /// `None` if the words do not encode a call.
    pub(crate) fn from_words(words: CallWords) -> Option<Call> {
        let [first, elems, tag, group] = words;
        let kind = KINDS.iter().copied().find(|k| *k as u64 == first & 0xff)?;
        let dtype = dtype_from_code((first >> 8) & 0xff)?;
        if first & 0xffff_0000 != 0 {
            return None;
        }
        Some(Call { kind, dtype, elems, tag, group: u32::try_from(group).ok()?, shape: (first >> 32) as u32 })
    }
}

/// A hash of the parts' lengths and types, the same on every rank.
pub(crate) fn shape_of<'v>(parts: impl Iterator<Item = View<'v>>) -> u32 {
    parts.fold(FNV_START, |hash, part| fnv(fnv(hash, part.len() as u64), dtype_code(part.dtype())))
}

pub(crate) const FNV_START: u32 = 0x811c_9dc5;

/// FNV-1a over the bytes of a word.
pub(crate) fn fnv(hash: u32, word: u64) -> u32 {
    word.to_le_bytes().iter().fold(hash, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

const KINDS: [CallKind; 8] = [
    CallKind::Barrier,
    CallKind::AllGather,
    CallKind::ReduceScatter,
    CallKind::Broadcast,
    CallKind::Gather,
    CallKind::Message,
    CallKind::AllReduce,
    CallKind::Bytes,
];

pub(crate) fn dtype_code(dtype: DType) -> u64 {
    match dtype {
        DType::F32 => 1,
        DType::BF16 => 2,
        DType::F16 => 3,
        DType::F64 => 4,
        DType::U32 => 5,
        DType::I16 => 6,
        DType::U8 => 7,
    }
}

pub(crate) fn dtype_from_code(code: u64) -> Option<DType> {
    [DType::F32, DType::BF16, DType::F16, DType::F64, DType::U32, DType::I16, DType::U8]
        .into_iter()
        .find(|dtype| dtype_code(*dtype) == code)
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
            CallKind::AllReduce => "all-reduce",
            CallKind::Bytes => "byte gather",
        })
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            CallKind::Barrier => write!(f, "barrier")?,
            CallKind::Bytes => write!(f, "byte gather, round {}", self.elems)?,
            kind => write!(f, "{kind} of {} {}", self.elems, self.dtype)?,
        }
        match self.tag.checked_sub(Call::HOST) {
            None => write!(f, ", operation {}", self.tag),
            Some(n) => write!(f, ", host call {n}"),
        }
    }
}

/// Describes two calls that differ, so that the descriptions differ too.
pub(crate) fn describe_mismatch(mine: &Call, theirs: &Call) -> (String, String) {
    let (mut a, mut b) = (mine.to_string(), theirs.to_string());
    if a == b && mine.group != theirs.group {
        a += &format!(" (group {:08x})", mine.group);
        b += &format!(" (group {:08x})", theirs.group);
    } else if a == b {
        a += &format!(" (shape {:08x})", mine.shape);
        b += &format!(" (shape {:08x})", theirs.shape);
    }
    (a, b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_survive_encoding_and_invalid_words_are_rejected() {
        for kind in KINDS {
            for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64, DType::U32, DType::I16, DType::U8]
            {
                let call =
                    Call { kind, dtype, elems: u64::MAX, tag: Call::HOST + 3, group: 7, shape: 0xdead_beef };
                assert_eq!(Call::from_words(call.to_words()), Some(call));
            }
        }
        assert_eq!(Call::from_words([0; 4]), None);
        assert_eq!(Call::from_words([1 | 1 << 8 | 1 << 16, 0, 0, 0]), None);
        assert_eq!(Call::from_words([1 | 1 << 8, 0, 0, 1 << 32]), None);
    }
}
