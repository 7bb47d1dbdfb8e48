//! The fixed order in which the contributions of ranks are summed: a binary tree over the ranks of each node, then one
//! over the nodes. Reducing along one mesh axis after the other and reducing over all ranks at once give the same tree.

/// Elements that are summed at a time: few enough that all partial sums of a chunk stay in a core's cache.
pub const FOLD_CHUNK: usize = 1 << 15;

/// Elements of scratch that summing `members` contributions needs at most: one chunk for every partial sum that exists at
/// the same time.
pub const fn fold_scratch_elems(members: u32) -> usize {
    (members.next_power_of_two().trailing_zeros() as usize + 3) * FOLD_CHUNK
}

/// One step of a fold over members in rank order, on a stack of partial sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoldStep {
    /// Pushes a member's contribution onto the stack.
    Push(usize),
    /// Replaces the two topmost sums by their sum, lower plus upper.
    Add,
}

/// Calls `each` with the steps that fold members on these nodes (equal neighbours are on one node).
pub fn fold_steps(nodes: &[u32], each: &mut dyn FnMut(FoldStep)) {
    fn tree(range: std::ops::Range<usize>, leaf: &mut dyn FnMut(usize), add: &mut dyn FnMut()) {
        if range.len() == 1 {
            return leaf(range.start);
        }
        // The left part is the largest power of two below the length, so that neighbours are paired level by level.
        let half = range.len().next_power_of_two() / 2;
        tree(range.start..range.start + half, leaf, add);
        tree(range.start + half..range.end, leaf, add);
        add();
    }
    // Both closures need `each`, so they borrow it through a cell.
    let each = std::cell::RefCell::new(each);
    let emit = |step| (each.borrow_mut())(step);
    let starts = || (0..nodes.len()).filter(|i| *i == 0 || nodes[*i] != nodes[*i - 1]);
    let num_nodes = starts().count();
    if num_nodes == 0 {
        return;
    }
    let node_range = |n: usize| {
        let start = starts().nth(n).expect("a node");
        start..starts().nth(n + 1).unwrap_or(nodes.len())
    };
    let mut in_node =
        |n: usize| tree(node_range(n), &mut |i| emit(FoldStep::Push(i)), &mut || emit(FoldStep::Add));
    tree(0..num_nodes, &mut in_node, &mut || emit(FoldStep::Add));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(nodes: &[u32]) -> String {
        let mut stack: Vec<String> = Vec::new();
        let mut deepest = 0;
        fold_steps(nodes, &mut |step| match step {
            FoldStep::Push(i) => {
                stack.push(i.to_string());
                deepest = deepest.max(stack.len());
            }
            FoldStep::Add => {
                let (right, left) = (stack.pop().unwrap(), stack.pop().unwrap());
                stack.push(format!("({left}+{right})"));
            }
        });
        assert_eq!(stack.len(), 1);
        assert!(deepest * FOLD_CHUNK <= fold_scratch_elems(nodes.len() as u32), "{nodes:?}: {deepest}");
        stack.pop().unwrap()
    }

    #[test]
    fn ranks_of_a_node_are_summed_first() {
        assert_eq!(text(&[0]), "0");
        assert_eq!(text(&[0, 0]), "(0+1)");
        assert_eq!(text(&[0, 0, 0]), "((0+1)+2)");
        assert_eq!(text(&[0, 0, 0, 0, 0]), "(((0+1)+(2+3))+4)");
        assert_eq!(text(&[0, 0, 0, 1, 1, 1]), "(((0+1)+2)+((3+4)+5))");
        assert_eq!(text(&[0, 1, 2]), "((0+1)+2)");
    }

    #[test]
    fn scratch_suffices_for_many_shapes() {
        for nodes in 1..9u32 {
            for per_node in 1..18u32 {
                let all: Vec<u32> = (0..nodes).flat_map(|n| (0..per_node).map(move |_| n)).collect();
                text(&all);
            }
        }
    }
}
