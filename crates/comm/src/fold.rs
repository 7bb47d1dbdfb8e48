//! Summing members' contributions, a chunk at a time.

use lockstep_core::fold::{FOLD_CHUNK, FoldStep, fold_steps};
use lockstep_device::View;

use crate::carrier::Carrier;
use crate::error::CommError;
use crate::group::Group;

/// Replaces `chunk`, this rank's contribution, by the sum of all members'. The others' come next in what
/// they offered. Their order of arrival does not matter, the order of summation is fixed.
pub(crate) fn fold_into(
    carrier: &mut dyn Carrier,
    group: &Group,
    chunk: View<'_>,
    scratch: View<'_>,
) -> Result<(), CommError> {
    let level = |depth: usize| scratch.slice(depth * FOLD_CHUNK, chunk.len());
    let mut depth = 0;
    let mut outcome = Ok(());
    fold_steps(group.nodes(), &mut |step| {
        if outcome.is_err() {
            return;
        }
        match step {
            FoldStep::Push(member) if member == group.me() => {
                level(depth).copy_from(&chunk);
                depth += 1;
            }
            FoldStep::Push(member) => {
                outcome = carrier.pull(group.members()[member], level(depth));
                depth += 1;
            }
            FoldStep::Add => {
                depth -= 1;
                add(level(depth - 1), level(depth));
            }
        }
    });
    outcome?;
    chunk.copy_from(&level(0));
    Ok(())
}

fn add(to: View<'_>, from: View<'_>) {
    to.assert_apart(&from);
    // SAFETY: both are f32 chunks of this rank's scratch, apart, and nobody else's.
    let (to, from) = unsafe { (to.as_mut::<f32>(), from.as_slice::<f32>()) };
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}
