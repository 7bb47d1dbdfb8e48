//! Sums the contributions of a group's members, one chunk at a time.

use lockstep_core::fold::{FOLD_CHUNK, FoldStep, fold_steps};
use lockstep_device::{Isa, View};

use crate::carrier::Carrier;
use crate::error::CommError;
use crate::group::Group;

/// The largest number of partial sums held at once: twice the levels of a tree over 2^32 members.
const MAX_DEPTH: usize = 64;

/// Where the sum is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Over this rank's contribution, which no peer may be reading.
    InPlace,
    /// At element `at` of the scratch buffer; `at` plus the length of the sum must not exceed one chunk.
    Scratch { at: usize },
}

/// Sums `mine`, this rank's contribution, and those of the other members, of which there is at least one. Theirs are
/// pulled from the current position of their offers. The order of summation is fixed, whatever the order of arrival.
pub(crate) fn fold(
    carrier: &mut dyn Carrier,
    isa: Isa,
    group: &Group,
    mine: View<'_>,
    scratch: View<'_>,
    target: Target,
) -> Result<(), CommError> {
    let at = if let Target::Scratch { at } = target { at } else { 0 };
    assert!(at + mine.len() <= FOLD_CHUNK, "a fold must fit into one chunk");
    let level = |depth: usize| scratch.slice(depth * FOLD_CHUNK + at, mine.len());
    // Contributions and partial sums. Each lies in the scratch chunk of its depth, unless it is `mine`.
    let mut stack = [View::empty(); MAX_DEPTH];
    let mut depth = 0;
    let mut outcome = Ok(());
    fold_steps(group.nodes(), &mut |step| {
        if outcome.is_err() {
            return;
        }
        match step {
            FoldStep::Push(member) if member == group.me() => {
                stack[depth] = mine;
                depth += 1;
            }
            FoldStep::Push(member) => {
                stack[depth] = level(depth);
                outcome = carrier.pull(group.members()[member], stack[depth]);
                depth += 1;
            }
            FoldStep::Add => {
                depth -= 1;
                let (left, right) = (stack[depth - 1], stack[depth]);
                let has_mine = same(&left, &mine) || same(&right, &mine);
                // In place, every partial sum that includes `mine` overwrites it, so the final sum ends up there.
                stack[depth - 1] =
                    if has_mine && target == Target::InPlace { mine } else { level(depth - 1) };
                add(isa, stack[depth - 1], left, right);
            }
        }
    });
    outcome
}

fn same(a: &View<'_>, b: &View<'_>) -> bool {
    a.as_ptr::<u8>() == b.as_ptr::<u8>()
}

/// `to = left + right`, element by element. `to` may be one of the two.
fn add(isa: Isa, to: View<'_>, left: View<'_>, right: View<'_>) {
    // Floating-point addition is commutative, so swapping the operands does not change a bit.
    let (left, right) = if same(&to, &right) { (right, left) } else { (left, right) };
    assert_eq!((to.len(), to.len()), (left.len(), right.len()), "operands must have equal lengths");
    to.assert_disjoint(&right);
    if same(&to, &left) {
        // SAFETY: `to` and `right` are f32, do not overlap (just checked), and only this rank accesses them.
        let (to, right) = unsafe { (to.as_mut::<f32>(), right.as_slice::<f32>()) };
        return isa.run(
            #[inline(always)]
            || {
                for (to, right) in to.iter_mut().zip(right) {
                    *to += right;
                }
            },
        );
    }
    to.assert_disjoint(&left);
    // SAFETY: as above; `to` overlaps neither operand, and `left` and `right` are only read.
    let (to, left, right) = unsafe { (to.as_mut::<f32>(), left.as_slice::<f32>(), right.as_slice::<f32>()) };
    isa.run(
        #[inline(always)]
        || {
            for ((to, left), right) in to.iter_mut().zip(left).zip(right) {
                *to = left + right;
            }
        },
    );
}
