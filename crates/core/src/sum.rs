//! The fixed order of summation of the gradient norm.
//!
//! A model's elements are divided into blocks of 256; the sum of squares of each block, in f64, is a leaf. Leaves are
//! summed in a binary tree over their indices: node (level, i) is the sum of nodes (level-1, 2i) and (level-1, 2i+1),
//! where a missing right child counts as zero. A rank that holds a contiguous range of leaves folds it into the complete
//! subtrees inside that range. Merging the subtrees of all ranks gives the same bits as folding all leaves on one rank.

/// A complete subtree: the sum of leaves `[index << level, (index + 1) << level)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SumNode {
    pub level: u32,
    pub index: u64,
    pub sum: f64,
}

/// Folds the leaves that start at index `first` into maximal complete subtrees, from left to right.
pub fn fold_range(leaves: &[f64], first: u64, out: &mut Vec<SumNode>) {
    let mut at = 0usize;
    while at < leaves.len() {
        let index = first + at as u64;
        let aligned = if index == 0 { u32::MAX } else { index.trailing_zeros() };
        let level = aligned.min((leaves.len() - at).ilog2());
        let len = 1usize << level;
        out.push(SumNode { level, index: index >> level, sum: fold_whole(&leaves[at..at + len]) });
        at += len;
    }
}

/// The sum of all leaves, from nodes that together cover `[0, num_leaves)`. Reorders the nodes.
pub fn merge(nodes: &mut [SumNode]) -> f64 {
    nodes.sort_unstable_by_key(|n| n.index << n.level);
    // Like a binary counter: siblings are merged as soon as both are on the stack, so its depth is that of the tree.
    let mut stack = [SumNode { level: 0, index: 0, sum: 0.0 }; 65];
    let mut depth = 0;
    for node in nodes {
        stack[depth] = *node;
        depth += 1;
        while depth >= 2 {
            let (left, right) = (stack[depth - 2], stack[depth - 1]);
            if left.level != right.level || !left.index.is_multiple_of(2) {
                break;
            }
            debug_assert_eq!(left.index + 1, right.index, "nodes must cover all leaves");
            depth -= 1;
            stack[depth - 1] =
                SumNode { level: left.level + 1, index: left.index / 2, sum: left.sum + right.sum };
        }
    }
    // At the right edge of the tree a left child without sibling takes its parent's place, so fold from the right.
    stack[..depth].iter().rev().map(|n| n.sum).reduce(|right, left| left + right).unwrap_or(0.0)
}

fn fold_whole(leaves: &[f64]) -> f64 {
    match leaves {
        [one] => *one,
        _ => {
            let (left, right) = leaves.split_at(leaves.len() / 2);
            fold_whole(left) + fold_whole(right)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn root(leaves: &[f64], cuts: &[usize]) -> f64 {
        let mut nodes = Vec::new();
        let mut edges = vec![0];
        edges.extend(cuts.iter().map(|c| c % (leaves.len() + 1)));
        edges.push(leaves.len());
        edges.sort_unstable();
        for pair in edges.windows(2) {
            fold_range(&leaves[pair[0]..pair[1]], pair[0] as u64, &mut nodes);
        }
        merge(&mut nodes)
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_bits(
            leaves in prop::collection::vec(0.0f64..1e6, 1..700),
            cuts in prop::collection::vec(0usize..700, 0..9),
        ) {
            let whole = root(&leaves, &[]);
            prop_assert_eq!(whole.to_bits(), root(&leaves, &cuts).to_bits());
            let plain: f64 = leaves.iter().sum();
            prop_assert!((whole - plain).abs() <= 1e-9 * plain.abs());
        }
    }
}
