//! Ranks and the device mesh they form, with the axes `replicate` and `shard`.

use std::fmt;

/// The index of a process among all processes of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank(pub u32);

/// An axis of the mesh. (`dim` is used for tensors only.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Ranks that hold the same shard.
    Replicate,
    /// Ranks that together hold one copy of the sharded states.
    Shard,
    /// Every rank.
    World,
}

/// The arrangement of ranks: rank = replica * shard + shard index. The ranks of a shard group are consecutive, so that a
/// shard group can be inside one node and replicas on different nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    pub replicate: u32,
    pub shard: u32,
    /// The number of ranks per node; they are consecutive too. Reductions sum inside nodes first.
    pub per_node: u32,
}

impl Mesh {
    /// One rank.
    pub const SINGLE: Mesh = Mesh { replicate: 1, shard: 1, per_node: 1 };

    /// A mesh on one node.
    pub const fn on_one_node(replicate: u32, shard: u32) -> Mesh {
        Mesh { replicate, shard, per_node: replicate * shard }
    }

    /// The number of all ranks.
    pub const fn world_size(&self) -> u32 {
        self.replicate * self.shard
    }

    /// The number of ranks along `axis`.
    pub const fn size(&self, axis: Axis) -> u32 {
        match axis {
            Axis::Replicate => self.replicate,
            Axis::Shard => self.shard,
            Axis::World => self.world_size(),
        }
    }

    /// The number of ranks along several axes together; 1 for no axes.
    pub fn size_of(&self, axes: &[Axis]) -> u32 {
        axes.iter().map(|axis| self.size(*axis)).product()
    }

    /// The index of `rank` among the ranks along several axes together; the first axis varies fastest.
    pub fn index_along(&self, axes: &[Axis], rank: Rank) -> u32 {
        let mut stride = 1;
        let mut index = 0;
        for axis in axes {
            index += stride * self.index(*axis, rank);
            stride *= self.size(*axis);
        }
        index
    }

    const fn index(&self, axis: Axis, rank: Rank) -> u32 {
        match axis {
            Axis::Replicate => self.replica(rank),
            Axis::Shard => self.shard_idx(rank),
            Axis::World => rank.0,
        }
    }

    /// The index of `rank` along the shard axis: which shard it owns.
    pub const fn shard_idx(&self, rank: Rank) -> u32 {
        rank.0 % self.shard
    }

    /// The index of `rank` along the replicate axis.
    pub const fn replica(&self, rank: Rank) -> u32 {
        rank.0 / self.shard
    }

    /// The node that `rank` is on.
    pub const fn node(&self, rank: Rank) -> u32 {
        rank.0 / self.per_node
    }

    /// The ranks of `rank`'s group along `axis`, in order.
    pub fn ranks_along(&self, axis: Axis, rank: Rank) -> Vec<Rank> {
        let (first, stride) = match axis {
            Axis::Replicate => (self.shard_idx(rank), self.shard),
            Axis::Shard => (self.replica(rank) * self.shard, 1),
            Axis::World => (0, 1),
        };
        (0..self.size(axis)).map(|i| Rank(first + i * stride)).collect()
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
            Axis::World => "world",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_a_two_by_three_mesh() {
        let mesh = Mesh { replicate: 2, shard: 3, per_node: 3 };
        let ranks_along =
            |axis, rank| mesh.ranks_along(axis, Rank(rank)).iter().map(|r| r.0).collect::<Vec<_>>();
        assert_eq!(ranks_along(Axis::Shard, 4), [3, 4, 5]);
        assert_eq!(ranks_along(Axis::Replicate, 4), [1, 4]);
        assert_eq!(ranks_along(Axis::World, 4), [0, 1, 2, 3, 4, 5]);
        assert_eq!((mesh.node(Rank(2)), mesh.node(Rank(3))), (0, 1));
    }

    #[test]
    fn several_axes_index_all_ranks_once() {
        let mesh = Mesh { replicate: 2, shard: 3, per_node: 3 };
        let axes = [Axis::Shard, Axis::Replicate];
        assert_eq!((mesh.size_of(&axes), mesh.size_of(&[Axis::Shard]), mesh.size_of(&[])), (6, 3, 1));
        let all: Vec<u32> = (0..6).map(|rank| mesh.index_along(&axes, Rank(rank))).collect();
        assert_eq!(all, [0, 1, 2, 3, 4, 5]);
        assert_eq!(mesh.index_along(&[Axis::Replicate], Rank(4)), 1);
        assert_eq!(mesh.index_along(&[], Rank(4)), 0);
    }
}
