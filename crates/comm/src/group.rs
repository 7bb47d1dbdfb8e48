//! The ranks of one collective.

use lockstep_core::{Axis, Mesh, Rank};

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
        let members = mesh.along(axis, rank);
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

    /// A group always has its own rank.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// This rank's place among the members.
    pub fn me(&self) -> usize {
        self.me
    }

    /// Tells groups with the same members from others, on every rank alike.
    pub fn hash(&self) -> u32 {
        // FNV-1a over the ranks.
        self.members.iter().fold(0x811c_9dc5, |hash, m| (hash ^ m.0).wrapping_mul(0x0100_0193))
    }

    /// The node of each member.
    pub fn nodes(&self) -> &[u32] {
        &self.nodes
    }
}
