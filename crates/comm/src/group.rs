//! The ranks that take part in a collective, and how they divide its elements.

use lockstep_core::{ALIGN_ELEMS, Axis, Mesh, Rank, ShardRange, padded_elems, shard_range};

use crate::call::{FNV_START, fnv};

/// The ranks that take part in a collective, in order, and the node each is on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    members: Vec<Rank>,
    nodes: Vec<u32>,
    me: usize,
}

impl Group {
    /// The ranks along `axis` through `rank`.
    pub fn along(mesh: &Mesh, axis: Axis, rank: Rank) -> Group {
        let members = mesh.ranks_along(axis, rank);
        let me = members.iter().position(|m| *m == rank).expect("a rank lies on its own axes");
        let nodes = members.iter().map(|m| mesh.node(*m)).collect();
        Group { members, nodes, me }
    }

    pub fn members(&self) -> &[Rank] {
        &self.members
    }

    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Always `false`: a group contains at least its own rank.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// This rank's index among the members.
    pub fn me(&self) -> usize {
        self.me
    }

    /// The index of `rank` among the members.
    pub fn member_idx(&self, rank: Rank) -> Option<usize> {
        self.members.iter().position(|m| *m == rank)
    }

    /// A hash of the members, the same on every rank.
    pub fn hash(&self) -> u32 {
        self.members.iter().fold(FNV_START, |hash, m| fnv(hash, u64::from(m.0)))
    }

    /// The node of each member.
    pub fn nodes(&self) -> &[u32] {
        &self.nodes
    }

    /// Member `m`'s shard of a part of `elems` elements: its [`shard_range`], except that the last block of
    /// [`ALIGN_ELEMS`] may be short.
    pub fn share(&self, elems: usize, m: usize) -> ShardRange {
        let padded = shard_range(padded_elems(elems), self.members.len() as u32, m as u32);
        debug_assert!(padded.start.is_multiple_of(ALIGN_ELEMS));
        ShardRange { start: padded.start.min(elems), end: padded.end.min(elems) }
    }
}
