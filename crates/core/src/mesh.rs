//! Ranks and the mesh they form: named axes `replicate`, `shard` and `tensor`.

use std::fmt;

/// The index of a process in the world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank(pub u32);

/// A named axis of the mesh. `dim` is reserved for tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Ranks that hold the same shard.
    Replicate,
    /// Ranks that together hold one copy.
    Shard,
    /// Ranks that split one tensor's computation; always 1 today.
    Tensor,
    /// Every rank.
    World,
}

/// How the world's ranks are arranged. Rank = replica * shard + shard index: the ranks of one shard
/// group are neighbours, so a shard group lies inside a node and replicas lie across nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    pub replicate: u32,
    pub shard: u32,
}

impl Mesh {
    /// One rank.
    pub const SINGLE: Mesh = Mesh { replicate: 1, shard: 1 };

    pub const fn world(&self) -> u32 {
        self.replicate * self.shard
    }

    /// The number of ranks along `axis`.
    pub const fn size(&self, axis: Axis) -> u32 {
        match axis {
            Axis::Replicate => self.replicate,
            Axis::Shard => self.shard,
            Axis::Tensor => 1,
            Axis::World => self.world(),
        }
    }

    /// Where `rank` stands along the shard axis: which slice of each unit it owns.
    pub const fn shard_idx(&self, rank: Rank) -> u32 {
        rank.0 % self.shard
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Axis::Replicate => "replicate",
            Axis::Shard => "shard",
            Axis::Tensor => "tensor",
            Axis::World => "world",
        })
    }
}
