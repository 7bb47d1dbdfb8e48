//! How parts are divided among members. NCCL's collectives need equal shares.

use crate::group::Group;

/// The elements of each member's share if all shares are equal, so that one NCCL call moves them all. `None` if the
/// last shares are shorter, so that each share needs its own call.
pub(crate) fn equal_share(group: &Group, elems: usize) -> Option<usize> {
    // Only the last shares can be shorter than the first.
    let last = group.share(elems, group.len() - 1).elems();
    (group.share(elems, 0).elems() == last).then_some(last)
}

#[cfg(test)]
mod tests {
    use lockstep_core::{Axis, Mesh, Rank};

    use super::*;

    #[test]
    fn equal_share_is_none_unless_all_shares_are_equal() {
        let group = |n| Group::along(&Mesh::on_one_node(1, n), Axis::World, Rank(0));
        assert_eq!(equal_share(&group(1), 1000), Some(1000));
        assert_eq!(equal_share(&group(4), 4 * 512), Some(512));
        // A number of blocks that members do not divide, a short last block, fewer blocks than members.
        for (n, elems) in [(4, 5 * 256), (2, 1000), (4, 256), (3, 1)] {
            assert_eq!(equal_share(&group(n), elems), None, "{elems} among {n}");
        }
        for (n, elems) in [(1, 7), (2, 512), (3, 70_001), (4, 256), (8, 8 * 256)] {
            let group = group(n);
            let shares: Vec<usize> = (0..n as usize).map(|m| group.share(elems, m).elems()).collect();
            assert_eq!(shares.iter().sum::<usize>(), elems);
            assert_eq!(equal_share(&group, elems).is_some(), shares.iter().all(|s| *s == shares[0]));
        }
    }
}
